"""Snapshots and layers to test with: real files and the real layer store, whose layers are any bytes."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from agentenv.snapshots.manifest import (
    Environment,
    LayerReference,
    MachineShape,
    SnapshotKind,
    SnapshotManifest,
    StateFile,
)
from agentenv.snapshots.repository import LocalSnapshots
from agentenv.storage.layer_tools import LayerFacts
from agentenv.storage.layers import LayerStore

BEGINNING = datetime(2026, 1, 2, 3, 4, 5, 678901, UTC)


def digest_of(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


class AnyBytes:
    """Takes every file for a layer."""

    def inspect(self, path: Path) -> LayerFacts:
        content = path.read_bytes()
        return LayerFacts(digest_of(content), len(content), None, None, 4096)

    def verify(self, path: Path) -> str:
        return digest_of(path.read_bytes())

    def merge(self, layers: Sequence[Path], out: Path, *, uuid: str | None) -> None:
        raise NotImplementedError


def environment(**changes: Any) -> Environment:
    values: dict[str, Any] = {
        "vmm": "qemu",
        "vmm_version": "7.2.22",
        "acceleration": "kvm",
        "boot_mode": "microvm,acpi=on",
        "cpu_model": "Some CPU",
        "cpu_features": digest_of(b"features"),
        "tsc_khz": 2_000_000,
        "kernel_version": "6.12.1",
        "kernel_digest": digest_of(b"kernel"),
        "initramfs_digest": digest_of(b"initramfs"),
    }
    return Environment(**{**values, **changes})


def manifest(snapshot_id: str = "one", **changes: Any) -> SnapshotManifest:
    """A full snapshot, or one of the file system with `kind=SnapshotKind.FILESYSTEM`."""
    values: dict[str, Any] = {
        "snapshot_id": snapshot_id,
        "created_at": BEGINNING,
        "kind": SnapshotKind.FULL,
        "architecture": "x86_64",
        "sandbox_id": "i123",
        "template_id": "base",
        "machine": MachineShape(2, 512, 1 << 30),
        "agent_version": "0.6.7",
        "disk_layers": (reference(b"base"),),
        "default_user": "user",
        "environment": environment(),
        "memory_layers": (reference(b"memory"),),
        "state": StateFile("state", 5, digest_of(b"state")),
        "agent_token": "secret",
    }
    if changes.get("kind") is SnapshotKind.FILESYSTEM:
        values |= {"memory_layers": (), "state": None, "agent_token": None}
    return SnapshotManifest(**{**values, **changes})


def reference(content: bytes) -> LayerReference:
    return LayerReference(digest_of(content), len(content))


class Node:
    """A layer store and a repository below one directory."""

    def __init__(self, home: Path, budget_mib: int | None = None) -> None:
        self.home = home
        self.layers = LayerStore(home / "layers", AnyBytes())
        self.directory = home / "snapshots"
        self.snapshots = LocalSnapshots(self.directory, self.layers, budget_mib=budget_mib)

    def add_layer(self, content: bytes, owner: str) -> LayerReference:
        path = self.home / secrets.token_hex(8)
        path.write_bytes(content)
        stored = self.layers.import_file(path, owner=owner)
        return LayerReference(stored.digest, stored.size)

    def capture(
        self,
        snapshot_id: str,
        *,
        memory: Sequence[bytes] = (b"memory",),
        disk: Sequence[bytes] = (b"base",),
        state: bytes = b"state",
        parent: str | None = None,
        age_s: int = 0,
    ) -> SnapshotManifest:
        source = self.home / f"state-of-{snapshot_id}"
        source.write_bytes(state)
        with self.snapshots.draft(snapshot_id) as draft:
            taken = manifest(
                snapshot_id,
                memory_layers=tuple(self.add_layer(content, draft.owner) for content in memory),
                disk_layers=tuple(self.add_layer(content, draft.owner) for content in disk),
                state=draft.take_state(source),
                parent_id=parent,
                created_at=BEGINNING + timedelta(seconds=age_s),
            )
            draft.commit(taken)
        return taken

    def stored(self) -> set[str]:
        return {layer.digest for layer in self.layers.list()}
