"""Root disks of sandboxes: a stack of stored layers with an upper of its own, served by the block daemon over NBD.

A disk's layers are the references of `disk:<id>` in the layer store; `disks/<id>/disk.json` says the rest; the daemon
remembers what is open. Any of them may be ahead of the others after a crash, and `reconcile` brings them together.
This file must not know templates or sandboxes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args

import structlog

from agentenv.errors import AgentEnvError, StorageError
from agentenv.storage.blockd_messages import Device
from agentenv.storage.compaction import Compactor, Run, merge_owner
from agentenv.storage.daemon import BlockDaemonProcess
from agentenv.storage.disk_records import DiskRecord, DiskRecords
from agentenv.storage.disk_stacks import OWNER_PREFIX, SOCKET_NAME, DiskStacks
from agentenv.storage.layers import LayerStore, StoredLayer
from agentenv.vmm.base import Disk, DiskFormat
from agentenv.vmm.process import finish_in_thread

log = structlog.get_logger(__name__)

DEFAULT_MAX_CHAIN_DEPTH = 16
EventKind = Literal["no_space", "io_error", "failed"]
T = TypeVar("T")
_TOGETHER = 8
"""So many disks are looked after at the same time after a restart."""
_EVENT_WORDS = {
    "no_space": "a write of the guest failed: the file system of this node is full",
    "io_error": "the storage of this node refused a request of the guest",
    "failed": "the disk could not be opened again",
}


@dataclass(frozen=True, slots=True)
class DiskEvent:
    """Something that happened to a disk while it was in use."""

    disk_id: str
    kind: EventKind
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
        self._daemon = daemon
        self._layers = layers
        self._records = DiskRecords(disks_directory)
        self._stacks = DiskStacks(daemon.client, layers, self._records)
        self._compactor = Compactor(layers, max_chain_depth, chain=self._stacks.chain, swap=self._swap)
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}
        self._known: set[str] = set()
        """Disks that exist, as far as this process knows."""
        self._unsettled: set[str] = set()
        """Disks that an operation left in the middle."""
        self._changes = 0
        """Counts changes of chains: a list of devices is old once it grew."""
        self._callback: Callable[[DiskEvent], None] | None = None
        self._garbage = asyncio.Event()
        self._collected = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._works: set[asyncio.Task[Any]] = set()
        daemon.on_start(self._after_restart)

    def on_event(self, callback: Callable[[DiskEvent], None]) -> None:
        """Have `callback` called for each event of a disk, in the event loop. One callback; the last one wins."""
        self._callback = callback

    async def start(self) -> None:
        """Begin to listen for events and to do background work. Call `reconcile` next.

        Raises:
            StorageError: the store of layers or the directory of disks is not usable.
        """
        if self._tasks:
            return
        await asyncio.to_thread(self._records.prepare)
        await asyncio.to_thread(self._layers.recover)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._listen(), name="disk-events"),
            loop.create_task(self._collect(), name="layer-garbage"),
        ]
        self._compactor.start()

    async def close(self) -> None:
        """End background work. Disks stay open in the daemon. Idempotent."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._compactor.close()
        if self._works:
            await asyncio.wait(self._works)

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
        record = DiskRecord(str(directory.absolute()), virtual_size, len(layers))
        making = self._work(self._create(disk_id, layers, record), f"disk-create-{disk_id}")
        try:
            await asyncio.shield(making)
        except asyncio.CancelledError:
            await _ended(making)
            if not making.cancelled() and making.exception() is None:
                await _ended(self._work(self._undo(disk_id), f"disk-undo-{disk_id}"))
            raise
        return Disk(Path(SOCKET_NAME), DiskFormat.NBD)

    async def remove(self, disk_id: str) -> None:
        """Close a disk and remove all that it has. Idempotent, also for what a crash left of one.

        Raises:
            StorageError: it cannot be removed.
        """
        await self._to_the_end(self._remove(disk_id), f"disk-remove-{disk_id}")

    async def reconcile(self, keep: Collection[str]) -> Sequence[str]:
        """Remove every disk that is not in `keep`, and open those in it that the daemon lost.

        Returns:
            What was removed or opened again, in words for the log.

        Raises:
            StorageError: a disk cannot be removed; all else was done. A disk in `keep` that does not open is no error,
                but an event (`failed`).
        """
        devices = await self._stacks.devices()
        ids = await asyncio.to_thread(self._records.ids)
        owners: set[str] = set()
        for prefix in (OWNER_PREFIX, merge_owner("")):
            found = await asyncio.to_thread(self._layers.owners_with_prefix, prefix)
            owners.update(owner.removeprefix(prefix) for owner in found)
        self._known = set(keep)
        done: list[str] = []
        failures: list[str] = []
        for disk_id in sorted((devices.keys() | ids | owners) - self._known):
            try:
                await self.remove(disk_id)
                done.append(f"removed disk {disk_id}")
            except AgentEnvError as error:
                failures.append(f"{disk_id}: {error.message}")
        opened = await self._settle_all(sorted(self._known))
        for disk_id in sorted(self._known):
            self._compactor.consider(disk_id)
        self.collect_soon()
        if failures:
            raise StorageError(f"{len(failures)} disks that nobody needs cannot be removed; {failures[0]}")
        return [*done, *(f"opened disk {disk_id} again" for disk_id in opened)]

    async def usage(self, disk_id: str) -> int:
        """Bytes that the disk itself takes up on the host: its upper and the layers captured from it.

        Raises:
            StorageError: there is no such disk.
        """
        chain = await self._stacks.chain(disk_id)

        def measure() -> int:
            own = chain.digests[chain.base_layers :]
            return self._records.upper_bytes(disk_id) + sum(self._layers.get(digest).size for digest in own)

        return await asyncio.to_thread(measure)

    async def capture(self, disk_id: str, *, sealed: Callable[[], None] | None = None) -> StoredLayer:
        """Seal what was written since the last capture into a layer of the store, while the disk goes on.

        The layer is referenced by the disk; whoever wants to keep it longer adds a reference before the disk goes.

        Args:
            disk_id: which.
            sealed: called at the moment from which on writes are not part of the layer any more. Then the layer is
                brought into the store, which takes the longer the larger it is.

        Raises:
            InsufficientStorageError: the file system is full.
            StorageError: there is no such disk, or the daemon refuses.
        """
        layer = await self._to_the_end(self._capture(disk_id, sealed), f"disk-capture-{disk_id}")
        self._compactor.consider(disk_id)
        return layer

    async def chain(self, disk_id: str) -> tuple[StoredLayer, ...]:
        """The layers of a disk below its upper, bottom first.

        Raises:
            StorageError: there is no such disk.
        """
        chain = await self._stacks.chain(disk_id)
        return await asyncio.to_thread(lambda: tuple(self._layers.get(digest) for digest in chain.digests))

    async def compacted(self) -> None:
        """Return when no compaction is due or under way."""
        await self._compactor.settled()

    def collect_soon(self) -> None:
        """Have layers that nobody references removed in the background. Many calls at once make one collection."""
        self._garbage.set()

    async def collected(self) -> None:
        """Return when a collection of garbage that begins now has ended."""
        self._collected.clear()
        self.collect_soon()
        await self._collected.wait()

    async def _create(self, disk_id: str, layers: Sequence[str], record: DiskRecord) -> None:
        async with self._locked(disk_id):
            if await asyncio.to_thread(self._records.exists, disk_id):
                raise StorageError(f"the disk {disk_id} exists already")
            try:
                await self._stacks.create(disk_id, layers, record)
            except BaseException:
                await self._clear(disk_id)
                raise
            self._known.add(disk_id)

    async def _undo(self, disk_id: str) -> None:
        async with self._locked(disk_id):
            await self._clear(disk_id)

    async def _clear(self, disk_id: str) -> None:
        """Remove what a failed call made. What cannot be removed now is left to the next `remove` or `reconcile`."""
        self._known.discard(disk_id)
        try:
            await self._stacks.remove(disk_id)
        except AgentEnvError as error:
            log.warning("disk_not_cleared", disk=disk_id, error=error.message)

    async def _remove(self, disk_id: str) -> None:
        self._records.path(disk_id)  # refuses what is no id
        async with self._locked(disk_id):
            if await self._stacks.remove(disk_id):
                self.collect_soon()
            self._known.discard(disk_id)
            self._unsettled.discard(disk_id)

    async def _capture(self, disk_id: str, sealed: Callable[[], None] | None) -> StoredLayer:
        await asyncio.to_thread(self._records.read, disk_id)
        async with self._changing(disk_id):
            return await self._stacks.capture(disk_id, sealed)

    async def _swap(self, disk_id: str, run: Run, digests: tuple[str, ...], merged: StoredLayer) -> bool:
        async def swap() -> bool:
            async with self._changing(disk_id):
                return await self._stacks.swap(disk_id, run, digests, merged)

        swapped = await self._to_the_end(swap(), f"disk-swap-{disk_id}")
        self.collect_soon()
        return swapped

    @asynccontextmanager
    async def _changing(self, disk_id: str) -> AsyncIterator[None]:
        """Hold a disk whose chain is changed; what an earlier change left in the middle is settled before."""
        async with self._locked(disk_id), self._counted():
            if disk_id in self._unsettled:
                await self._settle(disk_id)
            self._unsettled.add(disk_id)
            try:
                yield
            except AgentEnvError:
                try:
                    await self._settle(disk_id, merging=False)
                except AgentEnvError as error:  # the next change tries again
                    log.warning("disk_not_settled", disk=disk_id, error=error.message)
                raise
            self._unsettled.discard(disk_id)

    @asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        self._changes += 1
        try:
            yield
        finally:  # a list that was made meanwhile is old, too
            self._changes += 1

    async def _settle(
        self, disk_id: str, devices: Mapping[str, Device] | None = None, *, merging: bool | None = None
    ) -> bool:
        """Settle a disk that is held. `devices` is given when nothing changed since it was listed."""
        if devices is None:
            devices = await self._stacks.devices()
        if merging is None:
            merging = self._compactor.active == disk_id
        opened = await self._stacks.settle(disk_id, devices.get(disk_id), merging=merging)
        self._unsettled.discard(disk_id)
        return opened

    async def _settle_all(self, disk_ids: Sequence[str]) -> list[str]:
        """Settle disks; those that cannot be are events. Returns those that had to be opened again."""
        changes = self._changes
        devices = await self._stacks.devices()
        room = asyncio.Semaphore(_TOGETHER)
        opened: list[str] = []

        async def one(disk_id: str) -> None:
            try:
                async with room, self._locked(disk_id):
                    if disk_id not in self._known:  # removed meanwhile
                        return
                    if await self._settle(disk_id, devices if self._changes == changes else None):
                        opened.append(disk_id)
            except AgentEnvError as error:
                self._tell(DiskEvent(disk_id, "failed", error.message))

        async with asyncio.TaskGroup() as group:
            for disk_id in disk_ids:
                group.create_task(one(disk_id))
        return sorted(opened)

    async def _after_restart(self) -> None:
        opened = await self._settle_all(sorted(self._known))
        log.info("disks_checked", disks=len(self._known), opened=opened)

    async def _listen(self) -> None:
        async with contextlib.aclosing(self._daemon.client.events()) as events:
            async for event in events:
                if event.device in self._known and event.kind in get_args(EventKind):
                    message = event.message or _EVENT_WORDS[event.kind]
                    if event.kind == "no_space":
                        self.collect_soon()
                    self._tell(DiskEvent(event.device, cast(EventKind, event.kind), message))

    def _tell(self, event: DiskEvent) -> None:
        log.warning("disk_event", disk=event.disk_id, kind=event.kind, message=event.message)
        if self._callback is None:
            return
        try:
            self._callback(event)
        except Exception:
            log.exception("disk_event_callback_crashed", disk=event.disk_id)

    async def _collect(self) -> None:
        while True:
            await self._garbage.wait()
            self._garbage.clear()
            try:
                # `close` returns when it is over: the store is closed after that.
                report = await finish_in_thread(self._layers.collect_garbage, lambda _: None)
            except AgentEnvError as error:
                log.warning("garbage_not_collected", error=error.message)
            else:
                if report.removed or report.leftovers:
                    log.info("garbage_collected", layers=len(report.removed), freed_bytes=report.freed_bytes)
            if not self._garbage.is_set():
                self._collected.set()

    def _work(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._works.add(task)
        task.add_done_callback(self._works.discard)
        return task

    async def _to_the_end(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Run something that must not stop in the middle, whatever happens to the caller."""
        task = self._work(work, name)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await _ended(task)
            if not task.cancelled():
                task.exception()  # seen
            raise

    @asynccontextmanager
    async def _locked(self, disk_id: str) -> AsyncIterator[None]:
        """One operation at a time works on a disk."""
        lock, users = self._locks.get(disk_id, (asyncio.Lock(), 0))
        self._locks[disk_id] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[disk_id]
            if users == 1:
                del self._locks[disk_id]
            else:
                self._locks[disk_id] = (lock, users - 1)


async def _ended(task: asyncio.Task[Any]) -> None:
    """Wait for a task's end, through cancellations of the caller."""
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([task])
