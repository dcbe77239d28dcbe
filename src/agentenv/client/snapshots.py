"""Snapshots and their tree, as the server tells them. Data only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot of a sandbox. Sizes in MiB."""

    snapshot_id: str
    """What `AsyncSandbox.create` and `rollback` take."""
    names: tuple[str, ...]
    """`alias:tag`, as long as no later snapshot took it."""
    build_id: str
    """Names this one snapshot for ever."""
    sandbox_id: str
    """Where it was taken."""
    parent_id: str | None
    """`build_id` of the snapshot that the sandbox had gone on from; it may be gone."""
    created_at: datetime
    mode: Literal["full", "filesystem"]
    vcpus: int
    memory_mib: int
    disk_mib: int


@dataclass(frozen=True, slots=True)
class SnapshotNode:
    """A place in the tree of snapshots."""

    build_id: str
    snapshot: Snapshot | None
    """None where it was deleted."""
    exclusive_bytes: int
    """What deleting it would give back."""
    shared_bytes: int
    """What it shares with others."""
    children: list[SnapshotNode] = field(default_factory=list)

    def walk(self) -> Iterator[tuple[int, SnapshotNode]]:
        """This place and all below it with their depths; parents come before their children."""
        waiting = [(0, self)]
        while waiting:
            depth, node = waiting.pop()
            yield depth, node
            waiting.extend((depth + 1, child) for child in reversed(node.children))


def snapshot_from(content: Mapping[str, Any]) -> Snapshot:
    """Read a snapshot as the API writes it."""
    return Snapshot(
        snapshot_id=content["snapshotID"],
        names=tuple(content["names"]),
        build_id=content["buildID"],
        sandbox_id=content["sandboxID"],
        parent_id=content.get("parentID"),
        created_at=datetime.fromisoformat(content["createdAt"].replace("Z", "+00:00")),
        mode=content["mode"],
        vcpus=content["cpuCount"],
        memory_mib=content["memoryMB"],
        disk_mib=content["diskSizeMB"],
    )


def trees_from(nodes: Sequence[Mapping[str, Any]]) -> list[SnapshotNode]:
    """Build trees of the API's list, in which parents come before their children. Returns the roots."""
    roots: list[SnapshotNode] = []
    known: dict[str, SnapshotNode] = {}
    for content in nodes:
        snapshot = content.get("snapshot")
        node = SnapshotNode(
            build_id=content["buildID"],
            snapshot=None if snapshot is None else snapshot_from(snapshot),
            exclusive_bytes=content["exclusiveBytes"],
            shared_bytes=content["sharedBytes"],
        )
        known[node.build_id] = node
        parent_id = content.get("parentID")
        (roots if parent_id is None else known[parent_id].children).append(node)
    return roots
