"""The stack of a disk in its three places: references in the layer store, files in `disks/<id>/`, the daemon's device.

The daemon's list of lowers is the truth of an open disk: it changes first, and references follow. So after a crash at
any step `settle` only has to read the list again. Callers make sure that one call at a time works on a disk, and let it
come to its end. Which disks there should be is not known here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import structlog

from agentenv.errors import AgentEnvError, BlockDaemonError, StorageError
from agentenv.storage.blockd import BlockClient
from agentenv.storage.blockd_messages import UNAVAILABLE, Device, Upper
from agentenv.storage.compaction import Chain, Run, merge_owner
from agentenv.storage.disk_records import DiskRecord, DiskRecords
from agentenv.storage.layer_files import worded
from agentenv.storage.layers import LayerStore, StoredLayer

log = structlog.get_logger(__name__)

SOCKET_NAME = "disk.sock"
OWNER_PREFIX = "disk:"


def owner_of(disk_id: str) -> str:
    """Who references a disk's layers."""
    return OWNER_PREFIX + disk_id


class DiskStacks:
    """Opens, captures, changes and removes stacks.

    Args:
        client: of the block daemon.
        layers: the store.
        records: the disks' directories.
    """

    def __init__(self, client: BlockClient, layers: LayerStore, records: DiskRecords) -> None:
        self._client = client
        self._layers = layers
        self._records = records

    async def devices(self) -> dict[str, Device]:
        """Disks that are open in the daemon."""
        devices = await self._client.list()
        return {
            device.name: device for device in devices if device.upper and self._records.owns(device.upper.directory)
        }

    async def create(self, disk_id: str, digests: Sequence[str], record: DiskRecord) -> None:
        """Note a new disk, reference its layers, open and export it. What a failed call made is left to `remove`.

        Raises:
            StorageError: the disk exists; then nothing was made.
        """

        def prepare() -> list[Path]:
            # The directory is there first: a crash leaves what the next `reconcile` can see.
            self._records.make(disk_id, record)
            self._layers.set_references(owner_of(disk_id), digests, durable=False)
            return [self._layers.get(digest).path for digest in digests]

        await self._open(disk_id, record, await asyncio.to_thread(prepare))

    async def remove(self, disk_id: str) -> bool:
        """Close a disk and remove all of it. Idempotent.

        Returns:
            Whether there was anything.
        """
        was_open = await self._client.close_device(disk_id, remove_upper=True)

        def clear() -> bool:
            known = disk_id in self._records.ids()
            try:
                socket = Path(self._records.read(disk_id).directory) / SOCKET_NAME
                socket.unlink(missing_ok=True)
            except StorageError:  # no note, or a damaged one: the socket goes with the sandbox's directory
                pass
            except NotADirectoryError:
                pass
            except OSError as error:
                raise worded(error, f"cannot remove the socket of disk {disk_id}") from error
            self._records.remove(disk_id)
            referenced = bool(self._layers.references(owner_of(disk_id)))
            self._layers.drop(owner_of(disk_id))
            self._layers.drop(merge_owner(disk_id))
            return known or referenced

        return await asyncio.to_thread(clear) or was_open

    async def settle(self, disk_id: str, device: Device | None, *, merging: bool) -> bool:
        """Bring the three places together after anything went wrong in the middle.

        Args:
            disk_id: a disk that exists.
            device: as the daemon lists it now; None when it does not have it.
            merging: a compaction of this disk is under way in this process: its layer stays referenced.

        Returns:
            Whether the disk had to be opened again.
        """
        record = await asyncio.to_thread(self._records.read, disk_id)
        if device is None:
            paths = await asyncio.to_thread(self._take_in_lost, disk_id)
            await self._open_lost(disk_id, record, paths)
            await asyncio.to_thread(self._remove_captured, disk_id)
            return True
        failed = device.error is not None
        if failed:
            device = await self._open(disk_id, record, device.lowers)
        digests, captured = await asyncio.to_thread(self._take_in, disk_id, device)
        await asyncio.to_thread(self._follow, disk_id, digests, merging=merging)
        for position in captured:
            layer = await asyncio.to_thread(self._layers.get, digests[position])
            await self._client.replace(disk_id, first=position, count=1, layer=layer.path)
        await asyncio.to_thread(self._remove_captured, disk_id)
        if not device.exports:
            await self._export(disk_id, record)
        return failed

    async def capture(self, disk_id: str, sealed: Callable[[], None] | None = None) -> StoredLayer:
        """Seal the upper into a layer, call `sealed`, and bring the layer into the store.

        When this fails after the seal, `settle` completes it.
        """
        path = await asyncio.to_thread(self._records.next_captured, disk_id)
        parent: str | None = None
        expected = True
        try:
            parent = (await self._client.restack(disk_id, path)).parent_uuid
        except BlockDaemonError as error:
            done = await self._has_lower(disk_id, path) if error.code == UNAVAILABLE else None
            if done is None:
                raise
            if done:
                expected = False
            else:  # the daemon died before it began; the next one is there
                parent = (await self._client.restack(disk_id, path)).parent_uuid
        if sealed is not None:
            sealed()
        layer, position = await asyncio.to_thread(self._link, disk_id, path, parent)
        if position is None or not expected:
            # The daemon first completed an earlier capture, which had failed: its layer lies below this one.
            await self.settle(disk_id, (await self.devices()).get(disk_id), merging=True)
            return layer
        await self._client.replace(disk_id, first=position, count=1, layer=layer.path)
        await asyncio.to_thread(path.unlink)
        return layer

    async def swap(self, disk_id: str, run: Run, digests: tuple[str, ...], merged: StoredLayer) -> bool:
        """Put a merged layer in the place of a run. When this fails midway, `settle` completes or undoes it.

        Returns:
            False when the disk's chain has not the run there.
        """
        present = await asyncio.to_thread(self._layers.references, owner_of(disk_id))
        if present[run.first : run.first + run.count] != digests:
            await asyncio.to_thread(self._layers.drop, merge_owner(disk_id))
            return False
        await self._client.replace(disk_id, first=run.first, count=run.count, layer=merged.path)
        changed = (*present[: run.first], merged.digest, *present[run.first + run.count :])
        await asyncio.to_thread(self._layers.move_references, merge_owner(disk_id), owner_of(disk_id), changed)
        return True

    async def chain(self, disk_id: str) -> Chain:
        """The layers of a disk that exists."""

        def read() -> Chain:
            record = self._records.read(disk_id)
            return Chain(self._layers.references(owner_of(disk_id)), record.base_layers)

        return await asyncio.to_thread(read)

    async def _open(self, disk_id: str, record: DiskRecord, lowers: Sequence[Path]) -> Device:
        upper = Upper(self._records.path(disk_id))
        device = await self._client.open(disk_id, lowers, upper, virtual_size=record.virtual_size)
        await self._export(disk_id, record)
        return device

    async def _export(self, disk_id: str, record: DiskRecord) -> None:
        await self._client.export_nbd(disk_id, Path(record.directory) / SOCKET_NAME)

    async def _open_lost(self, disk_id: str, record: DiskRecord, lowers: Sequence[Path]) -> None:
        try:
            await self._open(disk_id, record, lowers)
        except BlockDaemonError as error:
            if error.code != "conflict":
                raise
            # The daemon has a note of that name that it cannot read.
            log.warning("device_replaced", disk=disk_id, error=error.message)
            await self._client.close_device(disk_id)
            await self._open(disk_id, record, lowers)

    async def _has_lower(self, disk_id: str, path: Path) -> bool | None:
        """Whether a restack whose answer was lost was done; None when nobody knows."""
        try:
            device = (await self.devices()).get(disk_id)
        except AgentEnvError as error:
            log.warning("capture_outcome_unknown", disk=disk_id, error=error.message)
            return None
        return None if device is None else any(lower.name == path.name for lower in device.lowers)

    def _link(self, disk_id: str, path: Path, parent: str | None) -> tuple[StoredLayer, int | None]:
        """Take a captured layer in. Its position in the chain is None when its parent is not the disk's top layer."""
        owner = owner_of(disk_id)
        below = self._layers.references(owner)
        top = self._layers.get(below[-1]).uuid if below else None
        layer = self._layers.link_file(path, owner=owner)
        if parent != top:
            return layer, None
        if layer.digest in below:  # the very same bytes twice
            self._layers.set_references(owner, (*below, layer.digest))
        return layer, len(below)

    def _take_in(self, disk_id: str, device: Device) -> tuple[list[str], list[int]]:
        """Digests of a device's lowers, and the positions of those that still lie beside the upper."""
        digests: list[str] = []
        captured: list[int] = []
        directory = self._records.path(disk_id)
        for position, path in enumerate(device.lowers):
            digest = self._layers.digest_of(path)
            if digest is None:
                if path.parent.name != disk_id or not self._records.owns(path.parent):
                    raise StorageError(f"the disk {disk_id} has the layer {path}, which is not in the layer store")
                digest = self._layers.link_file(directory / path.name, owner=owner_of(disk_id)).digest
                captured.append(position)
            digests.append(digest)
        return digests, captured

    def _take_in_lost(self, disk_id: str) -> list[Path]:
        """Lowers of a disk that the daemon does not have, captured ones included."""
        for path in self._records.captured(disk_id):
            self._layers.link_file(path, owner=owner_of(disk_id))
        self._layers.drop(merge_owner(disk_id))
        return [self._layers.get(digest).path for digest in self._layers.references(owner_of(disk_id))]

    def _follow(self, disk_id: str, digests: Sequence[str], *, merging: bool) -> None:
        """Make the references what the daemon has."""
        owner = owner_of(disk_id)
        if self._layers.references(owner) != tuple(digests):
            log.warning("disk_references_followed", disk=disk_id, layers=len(digests))
            self._layers.set_references(owner, digests)
        if not merging:
            self._layers.drop(merge_owner(disk_id))

    def _remove_captured(self, disk_id: str) -> None:
        """Remove the second names of layers of the store. Other captured layers belong to a restack that goes on."""
        digests = self._layers.references(owner_of(disk_id))
        try:
            stored = {
                (status.st_dev, status.st_ino)
                for digest in digests
                for status in [self._layers.get(digest).path.stat()]
            }
            for path in self._records.captured(disk_id):
                status = path.stat()
                # Where the store could not link the file, it has a copy.
                if (status.st_dev, status.st_ino) in stored or self._layers.tools.inspect(path).digest in digests:
                    path.unlink()
        except OSError as error:
            raise worded(error, f"cannot remove a captured layer of disk {disk_id}") from error
