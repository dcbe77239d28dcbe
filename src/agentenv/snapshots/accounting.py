"""The family tree of snapshots, and what each of them costs. Computes on manifests; reads no files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from agentenv.snapshots.manifest import SnapshotManifest
from agentenv.snapshots.ports import owner_of


@dataclass(frozen=True, slots=True)
class SnapshotNode:
    """A place in the tree."""

    snapshot_id: str
    manifest: SnapshotManifest | None
    """None: it is not here any more (or not yet), but children of it are."""
    children: tuple[SnapshotNode, ...]
    """By age, the oldest first."""


@dataclass(frozen=True, slots=True)
class SnapshotUsage:
    """What one snapshot costs, in bytes."""

    snapshot_id: str
    exclusive_bytes: int
    """Of what only it uses, its own files included: what deleting it gives back."""
    shared_bytes: int
    """Of layers that others (snapshots, templates, disks) use, too."""


@dataclass(frozen=True, slots=True)
class UsageReport:
    """What all snapshots cost."""

    snapshots: tuple[SnapshotUsage, ...]
    total_bytes: int
    """Each layer counted once."""
    named_bytes: int
    """Of those that are not hidden, each layer counted once."""
    hidden_bytes: int
    """Of those that paused sandboxes are kept in, each layer counted once. Some are in both sums."""
    budget_bytes: int | None
    """None: there is no limit."""


def family_tree(manifests: Iterable[SnapshotManifest]) -> tuple[SnapshotNode, ...]:
    """The roots, the oldest first. Parents that are missing are nodes without manifest, after the others."""
    known = {manifest.snapshot_id: manifest for manifest in manifests}
    children: dict[str, list[str]] = {}
    for manifest in sorted(known.values(), key=_age):
        if manifest.parent_id is not None:
            children.setdefault(manifest.parent_id, []).append(manifest.snapshot_id)
    roots = [manifest.snapshot_id for manifest in sorted(known.values(), key=_age) if manifest.parent_id is None]
    roots += sorted(parent for parent in children if parent not in known)
    order = _parents_first(roots, children)
    # Nobody vouches for manifests that were carried here by hand: a circle of them has no root. Open it at its oldest.
    while len(reached := set(order) & known.keys()) < len(known):
        oldest = min((manifest for name, manifest in known.items() if name not in reached), key=_age)
        children[oldest.parent_id or ""].remove(oldest.snapshot_id)
        roots.append(oldest.snapshot_id)
        order += _parents_first([oldest.snapshot_id], children)
    nodes: dict[str, SnapshotNode] = {}
    for name in reversed(order):
        nodes[name] = SnapshotNode(name, known.get(name), tuple(nodes[child] for child in children.get(name, ())))
    return tuple(nodes[name] for name in roots)


def _parents_first(roots: Sequence[str], children: Mapping[str, Sequence[str]]) -> list[str]:
    """All that descend from some roots. Not recursive: a line of checkpoints may be thousands long."""
    order = list(roots)
    for name in order:
        order.extend(children.get(name, ()))
    return order


def _age(manifest: SnapshotManifest) -> tuple[object, str]:
    return manifest.created_at, manifest.snapshot_id


def usage(
    manifests: Sequence[SnapshotManifest],
    owners: Callable[[str], Sequence[str]],
    file_bytes: Callable[[str], int],
    budget_bytes: int | None,
) -> UsageReport:
    """Count what snapshots cost.

    Args:
        manifests: all of them.
        owners: who references a layer, by digest; asked only for those that a single snapshot uses.
        file_bytes: what a snapshot's own files take on the disk, by its id.
        budget_bytes: is passed on.
    """
    users = Counter(layer.digest for manifest in manifests for layer in manifest.layers)
    costs = []
    files = {manifest.snapshot_id: file_bytes(manifest.snapshot_id) for manifest in manifests}
    for manifest in manifests:
        exclusive = files[manifest.snapshot_id]
        shared = 0
        only_us = {owner_of(manifest.snapshot_id)}
        for layer in manifest.layers:
            if users[layer.digest] == 1 and set(owners(layer.digest)) <= only_us:
                exclusive += layer.size
            else:
                shared += layer.size
        costs.append(SnapshotUsage(manifest.snapshot_id, exclusive, shared))

    def together(some: Iterable[SnapshotManifest]) -> int:
        chosen = tuple(some)
        layers = {layer.digest: layer.size for manifest in chosen for layer in manifest.layers}
        return sum(layers.values()) + sum(files[manifest.snapshot_id] for manifest in chosen)

    return UsageReport(
        tuple(costs),
        together(manifests),
        together(manifest for manifest in manifests if not manifest.hidden),
        together(manifest for manifest in manifests if manifest.hidden),
        budget_bytes,
    )
