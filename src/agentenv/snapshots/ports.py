"""What snapshots need of the layer store, as a protocol. `storage.layers.LayerStore` is the real one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from agentenv.storage.layers import StoredLayer

OWNER_PREFIX = "snapshot:"


def owner_of(snapshot_id: str) -> str:
    """The owner of a snapshot's layers in the layer store."""
    return OWNER_PREFIX + snapshot_id


class SnapshotLayers(Protocol):
    """Layers by digest, kept by references of owners. All of it blocks. Raises `LayerError` for unknown digests."""

    def set_references(self, owner: str, digests: Sequence[str], *, durable: bool = True) -> None: ...

    def references(self, owner: str) -> tuple[str, ...]: ...

    def owners(self, digest: str) -> tuple[str, ...]: ...

    def owners_with_prefix(self, prefix: str) -> tuple[str, ...]: ...

    def drop(self, owner: str) -> None: ...

    def lease(self, digests: Sequence[str]) -> AbstractContextManager[tuple[StoredLayer, ...]]: ...

    def verify(self, digest: str) -> StoredLayer: ...
