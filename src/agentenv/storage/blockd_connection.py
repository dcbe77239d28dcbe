"""One connection to the block daemon: lines of JSON over a unix socket. What they say is in `blockd_messages.py`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import struct
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from agentenv.errors import BlockDaemonError
from agentenv.storage.blockd_messages import PROTOCOL, UNAVAILABLE, DaemonEvent, Greeting, read_event, refused, words

MAX_REQUEST_BYTES = 1024 * 1024
MAX_ANSWER_BYTES = 256 * 1024 * 1024
"""A list of thousands of deep stacks is longer than any request."""
_CONNECT_TIMEOUT_S = 10.0
_PEER_CREDENTIALS = struct.Struct("iII")
_MAX_SOCKET_PATH = 107


class Connection:
    """One connection to the daemon, on which one request at a time is under way."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._number = 0
        self._events: list[DaemonEvent] = []
        self.greeting = Greeting(0, "", 0)
        self.waiting = False
        """Whether an answer is outstanding: then nothing else may be asked here."""

    @classmethod
    async def open(cls, path: Path) -> Connection:
        try:
            stream = await asyncio.to_thread(_connect, path)
        except OSError as error:
            raise BlockDaemonError(
                UNAVAILABLE, f"cannot connect to the block daemon at {path}: {error.strerror or error}"
            ) from error
        credentials = stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size)
        reader, writer = await asyncio.open_unix_connection(sock=stream, limit=MAX_ANSWER_BYTES)
        connection = cls(reader, writer)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                line = await connection._line()
            content = line["blockd"]
            connection.greeting = Greeting(
                int(content["protocol"]), str(content["version"]), _PEER_CREDENTIALS.unpack(credentials)[0]
            )
        except (KeyError, TypeError, ValueError) as error:
            await connection.close()
            raise BlockDaemonError("protocol", f"what listens at {path} is no block daemon") from error
        except TimeoutError as error:
            await connection.close()
            raise BlockDaemonError(UNAVAILABLE, f"the block daemon at {path} does not greet") from error
        except BaseException:
            await connection.close()
            raise
        return connection

    @property
    def usable(self) -> bool:
        """False when the daemon has closed it, also if the event loop has not noticed yet."""
        if self._reader.at_eof() or self._writer.is_closing():
            return False
        # An idle connection has nothing to read: anything there is its end.
        poll = select.poll()
        poll.register(self._writer.get_extra_info("socket").fileno(), select.POLLIN | select.POLLRDHUP)
        return not poll.poll(0)

    def check_protocol(self) -> None:
        if self.greeting.protocol != PROTOCOL:
            raise BlockDaemonError(
                "protocol",
                f"the block daemon {self.greeting.version} speaks protocol {self.greeting.protocol}, this server "
                f"{PROTOCOL}; restart the server, which replaces the daemon",
            )

    async def request(self, method: str, params: Mapping[str, object]) -> Mapping[str, Any]:
        self._number += 1
        line = json.dumps({"id": self._number, "method": method, "params": params}).encode() + b"\n"
        if len(line) > MAX_REQUEST_BYTES:
            raise BlockDaemonError("bad_request", f"{words(method, params)}: the request is larger than 1 MiB")
        self.waiting = True
        try:
            self._writer.write(line)
            await self._writer.drain()
        except OSError as error:
            raise BlockDaemonError(UNAVAILABLE, f"{words(method, params)}: the block daemon has gone") from error
        try:
            while "event" in (answer := await self._line()):
                self._events.append(read_event(answer))
        except BlockDaemonError as error:
            raise BlockDaemonError(error.code, f"{words(method, params)}: {error.message}") from error
        if answer.get("id") != self._number:
            raise BlockDaemonError("protocol", f"{words(method, params)}: the block daemon answered something else")
        self.waiting = False
        refusal = answer.get("error")
        if refusal is not None:
            raise refused(words(method, params), refusal)
        result = answer.get("result")
        return result if isinstance(result, dict) else {}

    async def events(self) -> AsyncGenerator[DaemonEvent, None]:
        while True:
            pending, self._events = self._events, []
            for event in pending:
                yield event
            line = await self._line()
            if "event" in line:
                yield read_event(line)

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    aclose = close

    async def _line(self) -> dict[str, Any]:
        try:
            line = await self._reader.readline()
            content = json.loads(line) if line.endswith(b"\n") else None
        except OSError:
            content = None
        except ValueError as error:
            raise BlockDaemonError("protocol", f"the block daemon sent a line that is not JSON: {error}") from error
        if content is None:
            raise BlockDaemonError(UNAVAILABLE, "the block daemon has gone")
        if not isinstance(content, dict):
            raise BlockDaemonError("protocol", "the block daemon sent a line that is not an object")
        return content


def _connect(path: Path) -> socket.socket:
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        stream.settimeout(_CONNECT_TIMEOUT_S)
        if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
            stream.connect(str(path))
        else:
            directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                stream.connect(f"/proc/self/fd/{directory}/{path.name}")
            finally:
                os.close(directory)
        stream.setblocking(False)
    except BaseException:
        stream.close()
        raise
    return stream
