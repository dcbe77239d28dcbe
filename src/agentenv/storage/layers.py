"""The layer store: immutable layers by the sha256 of their bytes, with references that keep them.

The index and its rules are in `layer_index.py`. Everything here blocks: call it in a thread. Several processes may use
one store at the same time, and any of them may be killed at any moment. This file must not know what a layer is for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A layer of the store."""

    digest: str
    """`sha256:` and 64 hex digits, of the file as it lies there."""
    size: int
    """Bytes of the file."""
    uuid: str | None
    """Lowercase; None when the layer carries none."""
    parent_uuid: str | None
    virtual_size: int
    """Bytes of the device that it is a layer of."""
    path: Path
    """Absolute, mode 0444. Never write to it."""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What the store holds."""

    layers: int
    size_bytes: int
    unreferenced_layers: int
    unreferenced_bytes: int
    """What `collect_garbage` would remove now."""


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """What a collection removed."""

    removed: tuple[str, ...]
    """Digests."""
    freed_bytes: int
    leftovers: int
    """Drafts of imports whose process has ended, and files that no import finished."""


class LayerStore:
    """Layers below one directory: `sha256/<64 hex>`, `index.db`, `incoming/`, `trash/`.

    A reference is (owner, digest). Owners are words like `template:base` or `disk:<id>`; a layer without a reference
    is removed by the next `collect_garbage`.

    Args:
        directory: made when it is missing.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def close(self) -> None:
        """Close the index. Idempotent."""
        raise NotImplementedError

    def import_file(self, path: Path, *, owner: str, digest: str | None = None, move: bool = True) -> StoredLayer:
        """Verify a layer file and put it into the store, referenced by `owner` (after its other references) at once.

        Args:
            path: the file, plain or wrapped.
            owner: who keeps it.
            digest: what the file must have; None takes what it has.
            move: the file is given away: linked, then removed. Otherwise it stays and is copied (a reflink where the
                file system can), so that later changes of it do not reach the store.

        Raises:
            LayerError: it is no sealed layer, is damaged, or has another digest.
            InsufficientStorageError: the file system is full; nothing is left of it.
            StorageError: it cannot be read or written.
        """
        raise NotImplementedError

    def link_from(self, other: LayerStore, digest: str, *, owner: str) -> StoredLayer:
        """Take over a layer of another store: a hard link on the same file system, else a verified copy.

        Raises:
            LayerError: the other store does not have it, or it is damaged.
            InsufficientStorageError: the file system is full.
            StorageError: it cannot be read or written.
        """
        raise NotImplementedError

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """A path in the store's file system to write a layer to, for `import_file(…, move=True)`.

        The file is removed at the end of the context, or once this process has ended. It does not exist yet.
        """
        raise NotImplementedError
        yield

    @contextmanager
    def lease(self, digests: Sequence[str]) -> Iterator[tuple[StoredLayer, ...]]:
        """Keep layers while the context lasts (or this process lives), with no owner.

        Raises:
            LayerError: one is not in the store, or its file is missing.
        """
        raise NotImplementedError
        yield

    def get(self, digest: str) -> StoredLayer:
        """Find a layer. A look at its file is part of it, reading the bytes is not: see `verify`.

        Raises:
            LayerError: it is not in the store, or its file was removed or changed its size (named in the message).
        """
        raise NotImplementedError

    def list(self) -> tuple[StoredLayer, ...]:
        """All layers, by digest."""
        raise NotImplementedError

    def set_references(self, owner: str, digests: Sequence[str], *, durable: bool = True) -> None:
        """Replace all references of an owner, atomically. An empty sequence drops them.

        Args:
            owner: whose.
            digests: in the owner's order (bottom first for stacks).
            durable: on stable storage when this returns. Otherwise a power cut may undo it, a killed process not.

        Raises:
            LayerError: a digest is not in the store; nothing was changed.
        """
        raise NotImplementedError

    def move_references(self, source: str, target: str, digests: Sequence[str]) -> None:
        """Make `digests` the references of `target` and drop those of `source`, in one step.

        Raises:
            LayerError: a digest is not in the store; nothing was changed.
        """
        raise NotImplementedError

    def references(self, owner: str) -> tuple[str, ...]:
        """What an owner references, in its order; empty for an unknown one."""
        raise NotImplementedError

    def owners(self, digest: str) -> tuple[str, ...]:
        """Who references a layer, sorted."""
        raise NotImplementedError

    def owners_with_prefix(self, prefix: str) -> tuple[str, ...]:
        """All owners whose name begins with `prefix`, sorted."""
        raise NotImplementedError

    def drop(self, owner: str) -> None:
        """Drop all references of an owner. Idempotent."""
        raise NotImplementedError

    def usage(self) -> StoreUsage:
        """How much the store holds."""
        raise NotImplementedError

    def collect_garbage(self) -> GarbageReport:
        """Remove what nobody references or leases, and what killed processes left. Safe at any time."""
        raise NotImplementedError

    def verify(self, digest: str) -> StoredLayer:
        """Read a layer's bytes again.

        Raises:
            LayerError: its digest or its structure is not right any more; the message names the file and its owners.
        """
        raise NotImplementedError

    def recover(self) -> GarbageReport:
        """Remove what killed imports and collections left; layers stay. For the start of a server."""
        raise NotImplementedError
