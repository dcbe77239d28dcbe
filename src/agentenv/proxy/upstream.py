"""One HTTP/1.1 connection to a guest: parses answers, keeps back-pressure, knows whether it may be used again.

It decides nothing about routes, retries or headers, and it never buffers more than a fixed amount in either direction.
After a `101` answer the connection carries raw bytes through the same `read` and `write`.
"""

from __future__ import annotations

import asyncio
import select
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import httptools

READ_HIGH_WATER = 256 * 1024
"""Bytes kept for a slow client before reading from the guest stops."""
MAX_HEAD_BYTES = 1024 * 1024
"""Largest answer head, interim answers included, that is taken from a guest."""


class UpstreamLostError(Exception):
    """The connection ended, or its peer spoke no HTTP, before the answer was complete. Stays inside the proxy."""

    def __init__(self, what: str, *, answered: bool) -> None:
        super().__init__(what)
        self.what = what
        self.answered = answered
        """Whether any byte of the answer had arrived."""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """Status and header lines of an answer, names as the guest wrote them."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


class UpstreamConnection(asyncio.Protocol):
    """A connection that carries one exchange at a time: `begin`, `write`…, `head`, `read` until it gives b""."""

    def __init__(self, on_closed: Callable[[UpstreamConnection], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._poll = select.poll()
        self._lost: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._write_paused = False
        self._read_paused = False
        self._tainted = False
        self._active = False
        self.exchanges = 0
        self._parser: httptools.HttpResponseParser | None = None
        self._reset(head_request=False)

    def _reset(self, *, head_request: bool) -> None:
        self._head_request = head_request
        self._head: ResponseHead | None = None
        self._status = 0
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_size = 0
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._until_close = False
        self._keep_alive = False
        self._upgraded = False
        self._interim = False
        self._answered = False
        self._complete = False
        self._early = False
        self.request_complete = False

    # What an exchange uses

    def begin(self, *, head_request: bool) -> None:
        """Start an exchange. `head_request`: the answer has no body whatever its headers say."""
        self._reset(head_request=head_request)
        self._parser = httptools.HttpResponseParser(self)
        self._active = True
        self.exchanges += 1

    def write(self, *parts: bytes) -> None:
        """Send bytes; call `drain` after it when more follow. Bytes for a lost connection are dropped."""
        if self._transport is not None and self._lost is None:
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    async def drain(self) -> None:
        """Wait until the peer took enough of what was written.

        Raises:
            UpstreamLostError: it is gone.
        """
        if self._lost is not None:
            raise UpstreamLostError(self._lost, answered=self._answered)
        if self._write_paused:
            self._writable = self._loop.create_future()
            try:
                await self._writable
            finally:
                self._writable = None
            if self._lost is not None:
                raise UpstreamLostError(self._lost, answered=self._answered)

    async def head(self) -> ResponseHead:
        """The head of the final answer; interim (1xx) answers are consumed.

        Raises:
            UpstreamLostError: none came.
        """
        while self._head is None:
            await self._wait()
        return self._head

    async def go_ahead(self) -> bool:
        """Wait for `100 Continue` (True) or the final answer or the end of the connection (False)."""
        while self._head is None and not self._interim:
            try:
                await self._wait()
            except UpstreamLostError:
                return False
        return self._head is None

    async def read(self) -> bytes:
        """What has arrived of the body, at least one byte; b"" at its end.

        Raises:
            UpstreamLostError: the body broke off.
        """
        while not self._chunks:
            if self._complete:
                return b""
            await self._wait()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._buffered = 0
        if self._read_paused and self._transport is not None:
            self._read_paused = False
            self._transport.resume_reading()
        return data

    @property
    def finished(self) -> bool:
        """Whether the answer is complete and all of it was read."""
        return self._complete and not self._chunks

    @property
    def upgraded(self) -> bool:
        """Whether the peer switched protocols, so that bytes are raw from here on."""
        return self._upgraded

    @property
    def reusable(self) -> bool:
        """Whether the exchange ended cleanly and the peer keeps the connection open.

        One that answered before it had the whole request does not count: many servers close then, without saying so.
        """
        return self.settled and self._keep_alive and not self._early

    @property
    def settled(self) -> bool:
        """Whether both directions of the exchange ended cleanly, so that nothing is lost by waiting for a close."""
        return (
            self._complete
            and not self._chunks
            and self.request_complete
            and not self._tainted
            and not self._upgraded
            and self._lost is None
            and not self._write_paused
        )

    def park(self) -> None:
        """Go idle. Anything that arrives from now on makes the connection unusable."""
        self._active = False
        self._parser = None

    def still_idle(self) -> bool:
        """Whether an idle connection is usable: the kernel holds neither bytes nor an end for it."""
        return self._lost is None and not self._tainted and not self._poll.poll(0)

    def abort(self) -> None:
        """Drop the connection at once. An answer that was to end with the connection counts as broken off."""
        if self._lost is None:
            self._lost = "was cut off before its answer was complete"
        if self._transport is not None:
            self._transport.abort()

    # What the event loop calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        socket = transport.get_extra_info("socket")
        if socket is not None:
            self._poll.register(socket.fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        if self._upgraded:
            self._store(data)
        elif not self._active or self._parser is None or self._complete:
            self._tainted = True
            if not self._active:
                self.abort()
            return
        else:
            self._answered = True
            self._parse(self._parser, data)
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._until_close and exc is None and self._lost is None:
            self._complete = True
        if self._lost is None:
            how = "closed" if exc is None else "broke"
            self._lost = f"{how} the connection without a complete answer"
        self._wake()
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._transport = None
        self._on_closed(self)

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)

    # What the parser calls

    def on_message_begin(self) -> None:
        if self._complete:
            self._tainted = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is None:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._tainted or self._parser is None:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            self._interim = True
            self._headers = []
            return
        self._head = ResponseHead(status, tuple(self._headers))
        self._early = not self.request_complete
        self._keep_alive = self._parser.should_keep_alive()
        if self._head_request:
            # The parser would wait for the body that Content-Length announces. Without the body its judgement of
            # keep-alive is not ours: it takes a missing length for a body that ends with the connection.
            self._keep_alive = self._parser.get_http_version() == "1.1" and not any(
                name.lower() == b"connection" and b"close" in value.lower() for name, value in self._headers
            )
            self._complete = True
        elif status not in (101, 204, 304):
            names = {name.lower() for name, _ in self._headers}
            self._until_close = b"content-length" not in names and not any(
                name.lower() == b"transfer-encoding" and value.lower().rstrip().endswith(b"chunked")
                for name, value in self._headers
            )

    def on_body(self, body: bytes) -> None:
        if self._complete:
            self._tainted = True
        else:
            self._store(body)

    def on_message_complete(self) -> None:
        if self._head is not None and self._head.status != 101:
            self._complete = True

    # Inside

    def _parse(self, parser: httptools.HttpResponseParser, data: bytes) -> None:
        if self._head is None:
            self._head_size += len(data)
            if self._head_size > MAX_HEAD_BYTES + READ_HIGH_WATER:
                self._fail("sent a head without end")
                return
        try:
            parser.feed_data(data)
        except httptools.HttpParserUpgrade as switch:
            self._upgraded = True
            rest = data[switch.args[0] :]
            if rest:
                self._store(rest)
        except httptools.HttpParserError:
            if self._complete:
                self._tainted = True
            else:
                self._fail("did not answer in HTTP")

    def _fail(self, what: str) -> None:
        self._head = None
        self._lost = what
        self.abort()

    def _store(self, data: bytes) -> None:
        self._chunks.append(data)
        self._buffered += len(data)
        if self._buffered > READ_HIGH_WATER and not self._read_paused and self._transport is not None:
            self._read_paused = True
            self._transport.pause_reading()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        if self._lost is not None:
            raise UpstreamLostError(self._lost, answered=self._answered)
        if self._waiter is None or self._waiter.done():
            self._waiter = self._loop.create_future()
        # Shielded, because the body's reader and a wait for `100 Continue` may share it.
        await asyncio.shield(self._waiter)
