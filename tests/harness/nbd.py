"""A small NBD client over a unix socket: what a virtual machine's disk does, without one.

Fixed newstyle handshake and simple replies (the NBD protocol document), one request at a time. Blocking.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from pathlib import Path

_NBDMAGIC = 0x4E42444D41474943
_IHAVEOPT = 0x49484156454F5054
_REQUEST_MAGIC = 0x25609513
_REPLY_MAGIC = 0x67446698
_OPTION_EXPORT_NAME = 1
_READ, _WRITE, _DISCONNECT, _FLUSH, _TRIM, _WRITE_ZEROES = 0, 1, 2, 3, 4, 6
ENOSPC = 28


class NbdError(OSError):
    """The server refused a request; `errno` says why."""


class NbdClient:
    """One connection, made anew when it breaks: a request is repeated until it is answered.

    Args:
        path: the socket.
        patience_s: how long to try to reach the server again.
    """

    def __init__(self, path: Path, patience_s: float = 60.0) -> None:
        self._path = path
        self._patience_s = patience_s
        self._stream: socket.socket | None = None
        self._handle = 0
        self.reconnects = -1
        self.size = 0
        self._connect()

    def read(self, offset: int, length: int) -> bytes:
        return self._request(_READ, offset, length)

    def write(self, offset: int, data: bytes) -> None:
        self._request(_WRITE, offset, len(data), data)

    def flush(self) -> None:
        self._request(_FLUSH, 0, 0)

    def trim(self, offset: int, length: int) -> None:
        self._request(_TRIM, offset, length)

    def write_zeroes(self, offset: int, length: int) -> None:
        self._request(_WRITE_ZEROES, offset, length)

    def close(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):  # the server has gone before
                self._stream.sendall(struct.pack(">IHHQQI", _REQUEST_MAGIC, 0, _DISCONNECT, 0, 0, 0))
            self._stream.close()
            self._stream = None

    def _request(self, command: int, offset: int, length: int, data: bytes = b"") -> bytes:
        self._handle += 1
        while True:
            try:
                return self._attempt(command, offset, length, data)
            except NbdError:
                raise
            except OSError:
                self._connect()

    def _attempt(self, command: int, offset: int, length: int, data: bytes) -> bytes:
        if self._stream is None:
            raise ConnectionResetError
        self._stream.sendall(struct.pack(">IHHQQI", _REQUEST_MAGIC, 0, command, self._handle, offset, length) + data)
        magic, error, handle = struct.unpack(">IIQ", self._receive(16))
        assert (magic, handle) == (_REPLY_MAGIC, self._handle)
        if error:
            raise NbdError(error, f"command {command} at {offset}")
        return self._receive(length) if command == _READ else b""

    def _receive(self, length: int) -> bytes:
        assert self._stream is not None
        parts = []
        while length:
            part = self._stream.recv(min(length, 1 << 20))
            if not part:
                raise ConnectionResetError
            parts.append(part)
            length -= len(part)
        return b"".join(parts)

    def _connect(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        deadline = time.monotonic() + self._patience_s
        while True:
            stream = socket.socket(socket.AF_UNIX)
            try:
                stream.connect(str(self._path))
                self._stream = stream
                self._greet(stream)
            except OSError:
                stream.close()
                self._stream = None
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)  # a server that was killed tells nobody when it is back
            else:
                self.reconnects += 1
                return

    def _greet(self, stream: socket.socket) -> None:
        magic, option_magic, flags = struct.unpack(">QQH", self._receive(18))
        assert (magic, option_magic) == (_NBDMAGIC, _IHAVEOPT)
        assert flags & 1, "no fixed newstyle"
        stream.sendall(struct.pack(">I", flags & 3))
        stream.sendall(struct.pack(">QII", _IHAVEOPT, _OPTION_EXPORT_NAME, 0))
        self.size, _ = struct.unpack(">QH", self._receive(10))
        if not flags & 2:
            self._receive(124)
