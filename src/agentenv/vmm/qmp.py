"""A small asynchronous client of QEMU's machine protocol (QMP) over a unix socket.

One connection serves one caller at a time: commands and events are read in order, without a background task, so there
is nothing to clean up but the socket. Protocol: QEMU's docs/interop/qmp-spec. Every failure is a `VmmError`.
This file must not know what the commands mean.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agentenv.errors import VmmError

DEFAULT_TIMEOUT_S = 10.0
_MAX_LINE_BYTES = 8 * 1024 * 1024
_READ_BYTES = 64 * 1024


class QmpCommandError(VmmError):
    """QEMU refused a command.

    Attributes:
        error_class: QEMU's class of the error (`GenericError`, `CommandNotFound`, …).
        description: QEMU's own words.
    """

    def __init__(self, command: str, error_class: str, description: str) -> None:
        super().__init__(f"QEMU refused {command}: {description}")
        self.error_class = error_class
        self.description = description


class QmpDisconnectedError(VmmError):
    """QEMU closed the connection, which it does when it ends."""


def socket_address(directory_fd: int, name: str) -> str:
    """Address of a socket in an open directory that fits into the 108 bytes of `sun_path`, however long the path is."""
    return f"/proc/self/fd/{directory_fd}/{name}"


def listen(directory: Path, name: str) -> socket.socket:
    """Make the listening socket that QEMU is given, so that it can be connected to before QEMU is ready.

    An existing socket of that name is replaced; the file is accessible to the owner only.

    Raises:
        VmmError: the socket cannot be made.
    """
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    directory_fd = -1
    try:
        directory_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        (directory / name).unlink(missing_ok=True)
        # Linux creates the node with the mode of the socket, so it is never open to others, not even for a moment.
        os.fchmod(server.fileno(), 0o600)
        server.bind(socket_address(directory_fd, name))
        server.listen(1)
    except OSError as error:
        server.close()
        raise VmmError(f"cannot make the control socket {directory / name}: {error.strerror}") from error
    finally:
        if directory_fd >= 0:
            os.close(directory_fd)
    return server


class QmpClient:
    """One QMP connection, as an asynchronous context manager. After a timeout or a cancellation it must be closed."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._buffer = bytearray()
        self._events: deque[dict[str, Any]] = deque()
        self._next_id = 0

    @classmethod
    async def connect(cls, directory: Path, name: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> QmpClient:
        """Connect, read the greeting and leave negotiation mode.

        Args:
            directory: directory of the socket.
            name: file name of the socket.
            timeout_s: seconds for all of it.

        Raises:
            VmmError: nobody listens, QEMU ends, or does not answer in time.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        connection.setblocking(False)
        client = cls(connection)
        directory_fd = -1
        try:
            directory_fd = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            async with asyncio.timeout(timeout_s):
                await asyncio.get_running_loop().sock_connect(connection, socket_address(directory_fd, name))
                greeting = await client._read()
                if "QMP" not in greeting:
                    raise VmmError(f"what listens on {directory / name} does not speak QMP")
                await client.execute("qmp_capabilities", timeout_s=timeout_s)
        except TimeoutError as error:
            client.close()
            raise VmmError(f"QEMU did not answer on {directory / name} within {timeout_s:g} s") from error
        except OSError as error:
            client.close()
            raise QmpDisconnectedError(f"cannot reach QEMU on {directory / name}: {error.strerror}") from error
        except BaseException:
            client.close()
            raise
        finally:
            if directory_fd >= 0:
                os.close(directory_fd)
        return client

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._socket.close()

    async def execute(
        self,
        command: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        descriptors: Sequence[int] = (),
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Any:
        """Run one command and return its result. Events that arrive meanwhile are kept for `wait_event`.

        Args:
            command: name of the command.
            arguments: its arguments.
            descriptors: file descriptors that go with it (for `getfd` and `add-fd`).
            timeout_s: seconds until the answer must be there.

        Raises:
            QmpCommandError: QEMU answered with an error.
            VmmError: QEMU ended or did not answer in time.
        """
        self._next_id += 1
        message: dict[str, Any] = {"execute": command, "id": self._next_id}
        if arguments:
            message["arguments"] = dict(arguments)
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(json.dumps(message).encode() + b"\n", descriptors)
                while True:
                    answer = await self._read()
                    if "event" in answer:
                        self._events.append(answer)
                    elif answer.get("id") == self._next_id or "error" in answer:
                        break
        except TimeoutError as error:
            raise VmmError(f"QEMU did not answer to {command} within {timeout_s:g} s") from error
        if "error" in answer:
            fault = answer["error"]
            raise QmpCommandError(command, str(fault.get("class", "GenericError")), str(fault.get("desc", "no reason")))
        return answer.get("return")

    async def wait_event(self, names: Collection[str], timeout_s: float = DEFAULT_TIMEOUT_S) -> dict[str, Any]:
        """Return the next event with one of these names, oldest first; others before it are dropped.

        Raises:
            VmmError: QEMU ended, or no such event came in time.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    event = self._events.popleft() if self._events else await self._read()
                    if event.get("event") in names:
                        return event
        except TimeoutError as error:
            raise VmmError(f"QEMU did not report {' or '.join(names)} within {timeout_s:g} s") from error

    async def _send(self, data: bytes, descriptors: Sequence[int]) -> None:
        loop = asyncio.get_running_loop()
        try:
            if descriptors:
                # The kernel attaches them to the first byte, so that one byte goes alone and the rest may block.
                while True:
                    try:
                        socket.send_fds(self._socket, [data[:1]], list(descriptors), socket.MSG_NOSIGNAL)
                        break
                    except BlockingIOError:
                        await self._wait_writable()
                data = data[1:]
            await loop.sock_sendall(self._socket, data)
        except OSError as error:
            raise QmpDisconnectedError(f"QEMU closed its control socket: {error.strerror}") from error

    async def _wait_writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()

        def writable() -> None:
            if not ready.done():
                ready.set_result(None)

        loop.add_writer(self._socket.fileno(), writable)
        try:
            await ready
        finally:
            loop.remove_writer(self._socket.fileno())

    async def _read(self) -> dict[str, Any]:
        loop = asyncio.get_running_loop()
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > _MAX_LINE_BYTES:
                raise VmmError("QEMU sent an endless line on its control socket")
            try:
                data = await loop.sock_recv(self._socket, _READ_BYTES)
            except OSError as error:
                raise QmpDisconnectedError(f"QEMU closed its control socket: {error.strerror}") from error
            if not data:
                raise QmpDisconnectedError("QEMU closed its control socket")
            self._buffer += data
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            message = json.loads(line)
        except ValueError as error:
            raise VmmError(f"QEMU sent something that is not JSON: {line[:80]!r}") from error
        if not isinstance(message, dict):
            raise VmmError(f"QEMU sent something that is not an object: {line[:80]!r}")
        return message
