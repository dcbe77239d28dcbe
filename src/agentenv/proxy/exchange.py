"""One HTTP request through to a guest and its answer back, both as streams at the same time.

It holds the rules of reuse, `Expect`, early answers, broken answers and departing clients. Where a request goes was
decided before; connections come from `pool`.

A guest may close an idle connection at the moment when a request is sent on it. Nobody can tell then whether the
request was read, so sending it again might do it twice, and not sending it again might lose it. Hence an idle
connection carries only what may be done twice: a request with a safe method (RFC 9110 §9.2.1) that is here as a whole.
It is sent once more, on a fresh connection, if no byte of an answer came. Every other request gets a connection of its
own and is sent once; what a fresh connection says is the truth.
"""

from __future__ import annotations

import asyncio
from typing import Any

import structlog

from agentenv.orchestrator.routes import Route
from agentenv.proxy import replies
from agentenv.proxy.headers import head_bytes, request_headers, response_headers
from agentenv.proxy.pool import LifePool, PortNotOpenError, RouteGoneError, Stream
from agentenv.proxy.replies import Reply
from agentenv.proxy.target import Target, header
from agentenv.proxy.upstream import ResponseHead, UpstreamConnection, UpstreamLostError

log = structlog.get_logger(__name__)

GO_AHEAD_S = 1.0
"""How long a guest may keep a client that sent `Expect: 100-continue` waiting (RFC 9110 §10.1.1: not without end)."""

CUT_EXTENSION = "agentenv.cut"
"""ASGI extension: `scope["extensions"][CUT_EXTENSION]["cut"]()` ends the connection below an incomplete answer, after
what was sent. It is how an application says that the end is meant; uvicorn reports a plain return as an error."""

_SAFE = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})


async def send_reply(reply: Reply, scope: Any, send: Any) -> None:
    """Answer an HTTP request ourselves."""
    headers, body = reply.render(scope["headers"])
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class HttpExchange:
    """One request and its answer. Use once: `await HttpExchange(…).run()`."""

    def __init__(
        self, scope: Any, receive: Any, send: Any, target: Target, route: Route, pool: LifePool, agent_port: int
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._target = target
        self._pool = pool
        self._method: str = scope["method"]
        incoming = scope["headers"]
        headers = request_headers(scope, target, route, agent_port=agent_port)
        coding = header(incoming, b"transfer-encoding")
        self._chunked = coding is not None
        if coding is not None:
            headers = [item for item in headers if item[0] != b"content-length"]
            headers.append((b"transfer-encoding", coding))
        self._has_body = self._chunked or (header(incoming, b"content-length") or b"0").strip(b"0") != b""
        self._expects = self._has_body and (header(incoming, b"expect") or b"").lower() == b"100-continue"
        self._safe = self._method in _SAFE
        if not self._safe:
            headers.append((b"connection", b"close"))
        self._head = head_bytes(self._method, target.request_target, headers)
        self._started = False
        self._ended = False
        self._start_sent = asyncio.Event()
        self._first = b""
        self._more = True

    async def run(self) -> None:
        """Carry the exchange to its end. An answer that was begun and cannot be completed is cut visibly."""
        try:
            await self._run_to_the_end()
        finally:
            if self._started and not self._ended:
                self._cut()

    async def _run_to_the_end(self) -> None:
        failure: Reply | None = None
        stream: Stream | None = None
        try:
            async with asyncio.timeout(None) as scope:
                with self._pool.stream(scope) as stream:
                    failure = await self._run(stream)
        except TimeoutError:
            if stream is None or not stream.withdrawn:
                return
            failure = replies.sandbox_not_found(self._target.sandbox_id)
        if failure is not None and not self._started:
            await send_reply(failure, self._scope, self._send)

    def _cut(self) -> None:
        # Without this offer of our own server in front, it cuts when we return, but reports it as an error of ours.
        cut = (self._scope.get("extensions") or {}).get(CUT_EXTENSION)
        if cut is not None:
            cut["cut"]()

    async def _run(self, stream: Stream) -> Reply | None:
        connection: UpstreamConnection | None = None
        async with asyncio.TaskGroup() as tasks:
            first: asyncio.Task[Any] | None = None
            inbound: asyncio.Task[None] | None = None
            try:
                if not self._expects:
                    first = tasks.create_task(self._receive())
                    # One turn of the loop: a body that is already here travels with the head. It is never waited for.
                    await asyncio.sleep(0)
                if first is not None and first.done():
                    if not self._take_first(first.result()):
                        return None
                    first = None
                connection, reused = await self._connection()
                if first is not None and first.done():
                    if not self._take_first(first.result()):
                        return None
                    first = None
                self._begin(connection)
                inbound = tasks.create_task(self._inbound(connection, stream, first))
                try:
                    head = await connection.head()
                except UpstreamLostError as lost:
                    if not reused or lost.answered:
                        raise
                    connection = await self._pool.connect(self._target.port)
                    self._begin(connection)
                    head = await connection.head()
                return await self._answer(connection, head)
            except (PortNotOpenError, RouteGoneError, UpstreamLostError) as error:
                return self._failure(error)
            finally:
                for task in (first, inbound):
                    if task is not None:
                        task.cancel()
                if connection is not None:
                    self._pool.give_back(connection, self._target.port, reuse=self._safe)

    async def _connection(self) -> tuple[UpstreamConnection, bool]:
        if self._safe and not self._more:
            connection = self._pool.take_idle(self._target.port)
            if connection is not None:
                return connection, True
        return await self._pool.connect(self._target.port), False

    def _failure(self, error: Exception) -> Reply:
        sandbox_id, port = self._target.sandbox_id, self._target.port
        if self._pool.closed or isinstance(error, RouteGoneError):
            return replies.sandbox_not_found(sandbox_id)
        if isinstance(error, PortNotOpenError):
            return replies.port_not_open(sandbox_id, port)
        what = error.what if isinstance(error, UpstreamLostError) else str(error)
        log.info("guest_answer_lost", sandbox_id=sandbox_id, port=port, what=what, answer_begun=self._started)
        return replies.bad_upstream(sandbox_id, port, what)

    def _begin(self, connection: UpstreamConnection) -> None:
        connection.begin(head_request=self._method == "HEAD")
        connection.write(self._head, *self._framed(self._first, last=not self._more))
        connection.request_complete = not self._more

    def _framed(self, body: bytes, *, last: bool) -> tuple[bytes, ...]:
        if not self._chunked:
            return (body,) if body else ()
        parts = (b"%x\r\n" % len(body), body, b"\r\n") if body else ()
        return (*parts, b"0\r\n\r\n") if last else parts

    def _take_first(self, message: Any) -> bool:
        if message["type"] == "http.disconnect":
            return False
        self._first, self._more = message.get("body", b""), message.get("more_body", False)
        return True

    async def _inbound(self, connection: UpstreamConnection, stream: Stream, first: asyncio.Task[Any] | None) -> None:
        """Send what is left of the body, then watch for the client's departure. `first` is a receive under way."""
        wanted = not self._expects or await self._go_ahead(connection)
        if not wanted:
            # Receiving earlier would make the server in front tell the client to go ahead.
            await self._start_sent.wait()
        while True:
            message = await (self._receive() if first is None else first)
            first = None
            if message["type"] == "http.disconnect":
                stream.client_left()
                return
            if not self._more or not wanted:
                continue
            self._more = message.get("more_body", False)
            connection.write(*self._framed(message.get("body", b""), last=not self._more) or (b"",))
            connection.request_complete = not self._more
            try:
                await connection.drain()
            except UpstreamLostError:
                # The reader of the answer sees the same end, and knows whether the answer was complete.
                self._more = False

    async def _go_ahead(self, connection: UpstreamConnection) -> bool:
        """Whether the guest wants the body that the client announced with `Expect: 100-continue`."""
        try:
            async with asyncio.timeout(GO_AHEAD_S):
                return await connection.go_ahead()
        except TimeoutError:
            # A guest that knows nothing of `Expect` just waits for the body.
            return True

    async def _answer(self, connection: UpstreamConnection, head: ResponseHead) -> Reply | None:
        if not 200 <= head.status <= 599:
            raise UpstreamLostError(f"answered with status {head.status}", answered=True)
        headers = response_headers(head.headers, head.status)
        await self._send_start(head.status, headers)
        finished = connection.finished
        if finished:
            await self._send({"type": "http.response.body", "body": b""})
        while not finished:
            data = await connection.read()
            finished = connection.finished
            await self._send({"type": "http.response.body", "body": data, "more_body": not finished})
        self._ended = True
        return None

    async def _send_start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._started = True
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
        self._start_sent.set()
