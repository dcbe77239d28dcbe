"""Client of the block daemon: its protocol (docs/blockd.md) as typed calls.

One request at a time travels on a connection, several connections are used side by side, and a connection that broke
is replaced. This file must not know what devices are for, and starts no process.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentenv.errors import BlockDaemonError
from agentenv.storage.blockd_connection import Connection
from agentenv.storage.blockd_messages import (
    UNAVAILABLE,
    DaemonEvent,
    Device,
    Export,
    Greeting,
    SealedLayer,
    Statistics,
    Upper,
    parsed,
    read_device,
    read_devices,
    read_export,
    read_sealed_layer,
    read_statistics,
    words,
)

_REQUEST_TIMEOUT_S = 300.0
"""A restack waits for the disk; nothing else takes long."""
_RECOVERY_TIMEOUT_S = 60.0
_FIRST_PAUSE_S = 0.01
_MAX_PAUSE_S = 0.5
_EVENTS_PAUSE_S = 0.1
_CONNECTIONS = 8


class BlockClient:
    """Asks the daemon. Used from one event loop.

    A cancelled call has been sent: it may have been done. Every method raises `InsufficientStorageError` for a full
    file system, `LayerError` for a damaged layer, and `BlockDaemonError` for all else.

    Args:
        socket_path: where the daemon listens; may be longer than the kernel's limit for socket addresses.
        recover: called when the daemon cannot be reached; returns when trying again makes sense, raises when it does
            not. None: calls fail at once. Calls that were under way when the daemon died are repeated only where
            twice does the same as once.
    """

    def __init__(self, socket_path: Path, *, recover: Callable[[], Awaitable[None]] | None = None) -> None:
        self._path = socket_path
        self._recover = recover
        self._idle: list[Connection] = []
        self._slots = asyncio.Semaphore(_CONNECTIONS)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def greeting(self) -> Greeting:
        """Connect anew and return what the daemon says of itself, whatever its protocol version. Waits for nothing."""
        connection = await Connection.open(self._path)
        await connection.close()
        return connection.greeting

    async def open(
        self, device: str, lowers: Sequence[Path], upper: Upper | None = None, *, virtual_size: int = 0
    ) -> Device:
        """Open a stack, bottom first. Opening again with the same parts is fine.

        Args:
            device: its name.
            lowers: sealed layers.
            upper: None for a read-only device.
            virtual_size: bytes, for an upper that is made; 0 takes that of the lowers.
        """
        params: dict[str, object] = {"device": device, "lowers": [str(path) for path in lowers]}
        if upper is not None:
            params["upper"] = {"directory": str(upper.directory), "mode": upper.mode, "virtual_size": virtual_size}
        # A read-only device counts its opens, so a second one is not the same as one.
        return parsed(read_device, await self._call("open", params, repeat=upper is not None))

    async def export_nbd(self, device: str, path: Path) -> Export:
        """Serve a device on a unix socket. Repeating it is fine."""
        return await self._export({"device": device, "kind": "nbd", "path": str(path)})

    async def export_ublk(self, device: str, *, queues: int = 1, depth: int = 64) -> Export:
        """Serve a device as `/dev/ublkb*`. Repeating it is fine."""
        return await self._export({"device": device, "kind": "ublk", "queues": queues, "depth": depth})

    async def export_kernel_nbd(self, device: str, *, connections: int = 1) -> Export:
        """Serve a device as `/dev/nbd*`. Repeating it is fine."""
        return await self._export({"device": device, "kind": "kernel-nbd", "connections": connections})

    async def unexport(self, device: str, path: Path) -> None:
        """Disconnect the clients of an export and end it."""
        await self._call("unexport", {"device": device, "path": str(path)}, repeat=True)

    async def flush(self, device: str) -> None:
        """Bring all that was written before to stable storage."""
        await self._call("flush", {"device": device}, repeat=True)

    async def restack(self, device: str, layer: Path, *, uuid: str | None = None) -> SealedLayer:
        """Seal the upper, move it to `layer` (same file system), and go on with a fresh one on top of it."""
        return await self._seal("restack", device, layer, uuid)

    async def seal(self, device: str, layer: Path) -> SealedLayer:
        """Seal the upper and move it to `layer`; the device is read-only afterwards."""
        return await self._seal("seal", device, layer, None)

    async def replace(self, device: str, *, first: int, count: int, layer: Path) -> None:
        """Put one layer in the place of `count` lowers that it was merged from; `first` counts from the bottom."""
        await self._call(
            "replace", {"device": device, "first": first, "count": count, "layer": str(layer)}, repeat=False
        )

    async def resize(self, device: str, virtual_size: int) -> None:
        """Let a device grow to so many bytes."""
        await self._call("resize", {"device": device, "virtual_size": virtual_size}, repeat=True)

    async def close_device(self, device: str, *, remove_upper: bool = False) -> bool:
        """End a device's exports and forget it.

        Args:
            device: its name.
            remove_upper: delete the upper's files instead of flushing them.

        Returns:
            Whether there was such a device.
        """
        try:
            await self._call("close", {"device": device, "remove_upper": remove_upper}, repeat=remove_upper)
        except BlockDaemonError as error:
            if error.code == "not_found":
                return False
            raise
        return True

    async def list(self) -> tuple[Device, ...]:
        """All devices that are open."""
        return parsed(read_devices, await self._call("list", {}, repeat=True))

    async def statistics(self, device: str | None = None) -> Statistics:
        """Counters, of one device or of all."""
        params = {} if device is None else {"device": device}
        return parsed(read_statistics, await self._call("stats", params, repeat=True))

    async def shutdown(self) -> None:
        """Have the daemon flush all and end. Returns when it said so or has gone."""
        try:
            await self._call("shutdown", {}, repeat=False)
        except BlockDaemonError as error:
            if error.code != UNAVAILABLE:
                raise

    async def events(self) -> AsyncGenerator[DaemonEvent, None]:
        """Events from now on, without end: after the daemon was started again, those of the new one.

        What happens while no connection stands is not told.
        """
        while not self._closed:
            try:
                async with contextlib.aclosing(await Connection.open(self._path)) as connection:
                    connection.check_protocol()
                    await connection.request("subscribe", {})
                    async for event in connection.events():
                        yield event
            except BlockDaemonError:
                if self._recover is None:
                    raise
            with contextlib.suppress(BlockDaemonError):
                await self._wait_for_recovery(_EVENTS_PAUSE_S)

    async def close(self) -> None:
        """Close all connections; calls under way fail. Idempotent."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.close()

    async def _export(self, params: Mapping[str, object]) -> Export:
        result = await self._call("export", params, repeat=True)
        return parsed(lambda content: read_export(content["export"]), result)

    async def _seal(self, method: str, device: str, layer: Path, uuid: str | None) -> SealedLayer:
        params: dict[str, object] = {"device": device, "layer": str(layer)}
        if uuid is not None:
            params["uuid"] = uuid
        return parsed(read_sealed_layer, await self._call(method, params, repeat=False))

    async def _call(self, method: str, params: Mapping[str, object], *, repeat: bool) -> Mapping[str, Any]:
        if self._closed:
            raise BlockDaemonError(UNAVAILABLE, f"{words(method, params)}: the client of the block daemon is closed")
        # The answer is read even when nobody waits any more: the connection's next answer belongs to another request.
        task = asyncio.get_running_loop().create_task(
            self._perform(method, params, repeat=repeat), name=f"blockd-{method}"
        )
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled() and self._closed:
                raise BlockDaemonError(
                    UNAVAILABLE, f"{words(method, params)}: the client of the block daemon was closed"
                ) from None
            raise

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: a cancelled caller does not ask for it

    async def _perform(self, method: str, params: Mapping[str, object], *, repeat: bool) -> Mapping[str, Any]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + _RECOVERY_TIMEOUT_S
        pause = _FIRST_PAUSE_S
        async with self._slots:
            while True:
                sent = False
                try:
                    connection = await self._take()
                    sent = True
                    return await self._ask(connection, method, params)
                except BlockDaemonError as error:
                    final = self._recover is None or loop.time() > deadline
                    if error.code != UNAVAILABLE or final or (sent and not repeat):
                        raise
                await self._wait_for_recovery(pause)
                pause = min(pause * 2, _MAX_PAUSE_S)

    async def _wait_for_recovery(self, pause_s: float) -> None:
        # The daemon's sockets close a moment before its process is seen to have ended, hence the pause.
        await asyncio.sleep(pause_s)
        if self._recover is not None:
            await self._recover()

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            await connection.close()
        connection = await Connection.open(self._path)
        try:
            connection.check_protocol()
        except BlockDaemonError:
            await connection.close()
            raise
        return connection

    async def _ask(self, connection: Connection, method: str, params: Mapping[str, object]) -> Mapping[str, Any]:
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                result = await connection.request(method, params)
        except TimeoutError as error:
            await connection.close()
            raise BlockDaemonError(
                UNAVAILABLE, f"{words(method, params)}: the block daemon did not answer in {_REQUEST_TIMEOUT_S:.0f} s"
            ) from error
        except BaseException:
            if connection.usable and not connection.waiting:
                self._idle.append(connection)
            else:
                await connection.close()
            raise
        self._idle.append(connection)
        return result
