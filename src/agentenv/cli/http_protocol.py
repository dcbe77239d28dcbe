"""One client connection of the HTTP listener: uvicorn's protocol with bounds on what comes before a request is known.

Anybody may connect, with a key or without one; so a head has a largest size and a longest time, framing around bodies
a largest overhead, and every refusal is JSON. It knows no routes, and no timer runs once a head is complete.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import json
from email.utils import formatdate
from http import HTTPStatus
from typing import Any

import structlog
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from agentenv.proxy.exchange import CUT_EXTENSION

MAX_HEAD_BYTES = 64 * 1024
"""Largest request line with all header lines. A head that never ends is held for this and two reads of the socket."""
HEAD_TIMEOUT_S = 60.0
"""How long a head may take from its first byte, while no earlier answer on the connection is under way."""
MAX_FRAMING_BYTES = 64 * 1024
"""Largest overhead of a chunked body (chunk extensions, trailers) beyond what ordinary chunks need."""
MAX_PIPELINED = 64
"""How many requests may wait behind the one that is being answered; parsed, each takes far more than on the wire."""
LINGER_S = 2.0
"""How long bytes of a refused client are read and dropped, so that the refusal is not lost in a reset."""

_CHUNK_ALLOWANCE = 16
_BODY_ALLOWANCE = 2

log = structlog.get_logger(__name__)


class _Phase(enum.Enum):
    IDLE = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


class _RefusedError(Exception):
    """Stops the parser, which wraps it; never leaves this module."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """A client connection. Made by uvicorn."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = _Phase.IDLE
        self._begun = 0
        self._head_parsed = 0
        self._head_raw = 0
        self._current: RequestResponseCycle | None = None
        self._fed_body = 0
        self._fed_chunks = 0
        self._framing = 0
        self._why = (400, "the request is not valid HTTP/1.1")
        self._refusal: bytes | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None

    # What the event loop calls

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        phase, begun = self._phase, self._begun
        self._fed_body = self._fed_chunks = 0
        super().data_received(data)
        if self._refusal is None and not self.transport.is_closing():
            self._account(len(data), phase, self._begun - begun)
            self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_watching()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        super().connection_lost(exc)

    # What the parser calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase = _Phase.HEAD
        self._begun += 1
        self._head_parsed = self._head_raw = 0

    def on_url(self, url: bytes) -> None:
        self._take_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is _Phase.BODY:
            # A trailer. It must not pass for a header (RFC 9110 §6.5.1), and nothing here asks for it.
            return
        self._take_head(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_watching()
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(429, f"more than {MAX_PIPELINED} requests were sent ahead on one connection")
        before = self.cycle
        super().on_headers_complete()
        self._phase = _Phase.BODY
        self._framing = 0
        self._current = self.cycle if self.cycle is not before else None
        if self._current is not None:
            cut = functools.partial(self._cut, self._current)
            self._current.scope["extensions"] = {CUT_EXTENSION: {"cut": cut}}

    def on_chunk_header(self) -> None:
        self._fed_chunks += 1

    def on_body(self, body: bytes) -> None:
        self._fed_body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._phase = _Phase.IDLE

    # What uvicorn's own code calls

    def send_400_response(self, msg: str) -> None:
        self._refuse(*self._why)

    def on_response_complete(self) -> None:
        last = not self.pipeline
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._refusal is None:
            self._watch_head()
        elif last:
            self._say_refusal(self._refusal)

    def _unsupported_upgrade_warning(self) -> None:
        # The request is answered as if it had not asked. The parser takes nothing after it, so the connection ends.
        if self._current is not None:
            self._current.keep_alive = False

    # Inside

    def _take_head(self, size: int) -> None:
        self._head_parsed += size
        if self._head_parsed > MAX_HEAD_BYTES:
            self._stop(*_head_too_large())

    def _stop(self, status: int, message: str) -> None:
        self._why = (status, message)
        raise _RefusedError

    def _account(self, size: int, before: _Phase, begun: int) -> None:
        """Count what the parser keeps to itself until it is complete. `begun`: heads that began in this piece."""
        if self._phase is _Phase.HEAD:
            if (before, begun) in ((_Phase.HEAD, 0), (_Phase.IDLE, 1)):
                self._head_raw += size
            if self._head_raw > MAX_HEAD_BYTES:
                self._refuse(*_head_too_large())
        elif self._phase is _Phase.BODY and before is _Phase.BODY and not begun:
            allowed = self._fed_body * (1 + _BODY_ALLOWANCE) + self._fed_chunks * _CHUNK_ALLOWANCE
            self._framing = max(0, self._framing + size - allowed)
            if self._framing > MAX_FRAMING_BYTES:
                self._refuse(400, f"chunk extensions or trailers of more than {MAX_FRAMING_BYTES} bytes")

    def _is_answering(self) -> bool:
        return bool(self.pipeline) or (self.cycle is not None and not self.cycle.response_complete)

    def _watch_head(self) -> None:
        # While an answer is under way reading may be paused, and then a slow head is not the client's fault.
        if self._phase is _Phase.HEAD and self._head_timer is None and not self._is_answering():
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _stop_watching(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(408, f"the request's head was not complete after {HEAD_TIMEOUT_S:g} seconds")

    def _refuse(self, status: int, message: str) -> None:
        """Take nothing more from this client. It is told after the answers that it still has to get."""
        self._refusal = _answer(status, message)
        self._stop_watching()
        log.debug("request_refused", status=status, message=message)
        if self._phase is _Phase.BODY and self._current is not None:
            self._drop(self._current, self._refusal)
        elif not self._is_answering():
            self._say_refusal(self._refusal)

    def _drop(self, current: RequestResponseCycle, refusal: bytes) -> None:
        """End the request whose body is bad. The refusal takes the place of its answer, unless that has begun."""
        queued = next((entry for entry in self.pipeline if entry[0] is current), None)
        if queued is not None:
            self.pipeline.remove(queued)
            return
        current.disconnected = True
        current.message_event.set()
        if current.response_started:
            self.transport.close()
        else:
            self._say_refusal(refusal)

    def _say_refusal(self, refusal: bytes) -> None:
        self._unset_keepalive_if_required()
        self.transport.write(refusal)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.close)

    def _cut(self, cycle: RequestResponseCycle) -> None:
        if not cycle.response_complete and not cycle.disconnected:
            cycle.disconnected = True
            self.transport.close()


def _head_too_large() -> tuple[int, str]:
    return 431, f"the request line and headers are larger than {MAX_HEAD_BYTES} bytes"


def _answer(status: int, message: str) -> bytes:
    body = json.dumps({"code": status, "message": message}).encode()
    head = (
        f"date: {formatdate(usegmt=True)}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        "connection: close\r\n\r\n"
    )
    return STATUS_LINE[HTTPStatus(status)] + head.encode() + body
