"""Root disks of sandboxes: a stack of stored layers with an upper of its own, served by the block daemon over NBD.

A disk's layers are the references of `disk:<id>` in the layer store; `disks/<id>/disk.json` says the rest; the daemon
remembers what is open. Any of them may be ahead of the others after a crash, and `reconcile` brings them together.
This file must not know templates or sandboxes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentenv.storage.daemon import BlockDaemonProcess
from agentenv.storage.layers import LayerStore, StoredLayer
from agentenv.vmm.base import Disk

SOCKET_NAME = "disk.sock"
DEFAULT_MAX_CHAIN_DEPTH = 16


@dataclass(frozen=True, slots=True)
class DiskEvent:
    """Something that happened to a disk while it was in use."""

    disk_id: str
    kind: Literal["no_space", "io_error", "failed"]
    """`no_space`: a write of the guest failed, the file system is full. `io_error`: the host's storage refused.
    `failed`: the disk could not be opened again after the daemon died."""
    message: str


class DiskStore:
    """Makes, captures and removes disks. Used from one event loop.

    Args:
        daemon: started.
        layers: where the layers are.
        disks_directory: uppers lie below it, `<id>/`; made when it is missing. On the file system of the layers.
        max_chain_depth: stacks deeper than this are merged in the background.
    """

    def __init__(
        self,
        daemon: BlockDaemonProcess,
        layers: LayerStore,
        disks_directory: Path,
        *,
        max_chain_depth: int = DEFAULT_MAX_CHAIN_DEPTH,
    ) -> None:
        raise NotImplementedError

    def on_event(self, callback: Callable[[DiskEvent], None]) -> None:
        """Have `callback` called for each event of a disk, in the event loop. One callback; the last one wins."""
        raise NotImplementedError

    async def start(self) -> None:
        """Begin to listen for events and to do background work. Call `reconcile` next.

        Raises:
            StorageError: the store of layers or the directory of disks is not usable.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """End background work. Disks stay open in the daemon. Idempotent."""
        raise NotImplementedError

    async def create(self, disk_id: str, layers: Sequence[str], virtual_size: int, directory: Path) -> Disk:
        """Open a stack with a fresh upper and export it.

        A failed or cancelled call leaves nothing.

        Args:
            disk_id: the sandbox's id.
            layers: digests, bottom first; may be empty.
            virtual_size: bytes; 0 takes that of the layers.
            directory: exists; the socket is made in it.

        Returns:
            The disk, whose path is relative to `directory`.

        Raises:
            InsufficientStorageError: the file system is full.
            LayerError: a layer is not in the store, or is damaged.
            StorageError: the disk exists, or the daemon refuses.
        """
        raise NotImplementedError

    async def remove(self, disk_id: str) -> None:
        """Close a disk and remove all that it has. Idempotent, also for what a crash left of one.

        Raises:
            StorageError: it cannot be removed.
        """
        raise NotImplementedError

    async def reconcile(self, keep: Collection[str]) -> Sequence[str]:
        """Remove every disk that is not in `keep`, and open those in it that the daemon lost.

        Returns:
            What was removed or opened again, in words for the log.

        Raises:
            StorageError: a disk cannot be removed. A disk in `keep` that does not open is an event (`failed`).
        """
        raise NotImplementedError

    async def usage(self, disk_id: str) -> int:
        """Bytes that the disk itself takes up on the host: its upper and the layers captured from it.

        Raises:
            StorageError: there is no such disk.
        """
        raise NotImplementedError

    async def capture(self, disk_id: str) -> StoredLayer:
        """Seal what was written since the last capture into a layer of the store, while the disk goes on.

        The layer is referenced by the disk; whoever wants to keep it longer adds a reference before the disk goes.

        Raises:
            InsufficientStorageError: the file system is full.
            StorageError: there is no such disk, or the daemon refuses.
        """
        raise NotImplementedError

    async def chain(self, disk_id: str) -> tuple[StoredLayer, ...]:
        """The layers of a disk below its upper, bottom first.

        Raises:
            StorageError: there is no such disk.
        """
        raise NotImplementedError
