"""One WebSocket through to a guest: handshake, messages both ways, close codes both ways.

Messages keep their kind and order; pings are answered on each side by its own hop, and no timer cuts a quiet socket.
A refusal by the guest passes through with its status and body. RFC 6455; ASGI `websocket.http.response` extension.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import secrets
from typing import Any

import structlog
from wsproto.connection import Connection, ConnectionState, ConnectionType
from wsproto.events import BytesMessage, CloseConnection, Ping, TextMessage
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from agentenv.orchestrator.routes import Route
from agentenv.proxy import replies
from agentenv.proxy.headers import Headers, head_bytes, request_headers, response_headers
from agentenv.proxy.pool import LifePool, PortNotOpenError, RouteGoneError, Stream
from agentenv.proxy.replies import Reply
from agentenv.proxy.target import Target, header
from agentenv.proxy.upstream import ResponseHead, UpstreamConnection, UpstreamLostError

log = structlog.get_logger(__name__)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest WebSocket message in either direction: ASGI hands messages over whole, so this bounds memory."""
FRAGMENT = 1024 * 1024
"""Larger messages go to the guest in fragments of this many bytes or characters, with a pause for back-pressure."""
CLOSE_GRACE_S = 2.0
"""How long a guest may take to answer a close frame."""

_ACCEPT_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_NO_STATUS, _ABNORMAL, _TOO_BIG, _GOING_AWAY = 1005, 1006, 1009, 1001
_HANDSHAKE = frozenset(
    {b"sec-websocket-key", b"sec-websocket-version", b"sec-websocket-extensions", b"sec-websocket-accept"}
)


async def refuse_websocket(reply: Reply, scope: Any, send: Any) -> None:
    """Answer a handshake ourselves, with the body that an HTTP request would get."""
    headers, body = reply.render(scope["headers"])
    if "websocket.http.response" not in (scope.get("extensions") or {}):
        await send({"type": "websocket.close", "code": _ABNORMAL, "reason": reply.message})
        return
    await send({"type": "websocket.http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


class WebSocketExchange:
    """One WebSocket. The client's `websocket.connect` must have been received. Use once: `await ….run()`."""

    def __init__(
        self, scope: Any, receive: Any, send: Any, target: Target, route: Route, pool: LifePool, agent_port: int
    ) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._target = target
        self._pool = pool
        self._key = base64.b64encode(secrets.token_bytes(16))
        headers: Headers = [
            item
            for item in request_headers(scope, target, route, agent_port=agent_port)
            if item[0] not in _HANDSHAKE and item[0] != b"content-length"
        ]
        if header(headers, b"sec-websocket-protocol") is None and scope.get("subprotocols"):
            headers.append((b"sec-websocket-protocol", ", ".join(scope["subprotocols"]).encode("latin-1")))
        headers += [
            (b"connection", b"Upgrade"),
            (b"upgrade", b"websocket"),
            (b"sec-websocket-version", b"13"),
            (b"sec-websocket-key", self._key),
        ]
        self._head = head_bytes("GET", target.request_target, headers)
        self._frames = Connection(ConnectionType.CLIENT)
        self._accepted = False
        self._answered = False
        self._client_closed = False

    async def run(self) -> None:
        """Carry the socket to its end. Returning without a close makes the server in front drop the client (1006)."""
        failure: Reply | None = None
        stream: Stream | None = None
        try:
            async with asyncio.timeout(None) as scope:
                with self._pool.stream(scope) as stream:
                    failure = await self._run(stream)
        except TimeoutError:
            if stream is None or not stream.withdrawn:
                return
            if self._accepted:
                await self._say_going_away()
                return
            failure = replies.sandbox_not_found(self._target.sandbox_id)
        except OSError:
            # The server in front reports a departed client so, whatever was being sent.
            return
        if failure is not None and not self._accepted and not self._answered:
            await refuse_websocket(failure, self._scope, self._send)

    async def _run(self, stream: Stream) -> Reply | None:
        sandbox_id, port = self._target.sandbox_id, self._target.port
        connection: UpstreamConnection | None = None
        try:
            connection = await self._pool.connect(port)
            head = await self._shake_hands(connection, stream)
            if head.status == 101 and connection.upgraded:
                if not self._is_accepted_by(head):
                    return replies.bad_upstream(sandbox_id, port, "answered the WebSocket handshake wrongly")
                await self._accept(head)
                await self._relay(connection, stream)
            else:
                await self._pass_refusal(connection, head)
            return None
        except PortNotOpenError:
            if self._pool.closed:
                return replies.sandbox_not_found(sandbox_id)
            return replies.port_not_open(sandbox_id, port)
        except RouteGoneError:
            return replies.sandbox_not_found(sandbox_id)
        except UpstreamLostError as lost:
            if self._pool.closed:
                return replies.sandbox_not_found(sandbox_id)
            log.info("guest_answer_lost", sandbox_id=sandbox_id, port=port, what=lost.what, answer_begun=self._answered)
            return replies.bad_upstream(sandbox_id, port, lost.what)
        finally:
            if connection is not None:
                connection.abort()

    async def _shake_hands(self, connection: UpstreamConnection, stream: Stream) -> ResponseHead:
        connection.begin(head_request=False)
        connection.write(self._head)
        async with asyncio.TaskGroup() as tasks:
            # Before the answer a client can do nothing but leave.
            watch = tasks.create_task(self._receive())
            watch.add_done_callback(lambda done: None if done.cancelled() else stream.client_left())
            lost: UpstreamLostError | None = None
            head: ResponseHead | None = None
            try:
                head = await connection.head()
            except UpstreamLostError as error:
                lost = error
            watch.cancel()
        if head is None:
            raise lost or UpstreamLostError("gave no answer", answered=False)
        return head

    def _is_accepted_by(self, head: ResponseHead) -> bool:
        expected = base64.b64encode(hashlib.sha1(self._key + _ACCEPT_GUID, usedforsecurity=False).digest())
        given = next((value for name, value in head.headers if name.lower() == b"sec-websocket-accept"), b"")
        return hmac.compare_digest(expected, given.strip())

    async def _accept(self, head: ResponseHead) -> None:
        headers = response_headers(head.headers, head.status)
        chosen = header(headers, b"sec-websocket-protocol")
        offered = self._scope.get("subprotocols") or ()
        protocol = chosen.decode("latin-1") if chosen is not None else None
        if protocol is not None and protocol not in offered:
            raise UpstreamLostError("chose a subprotocol that was not offered", answered=True)
        self._accepted = True
        await self._send(
            {
                "type": "websocket.accept",
                "subprotocol": protocol,
                "headers": [item for item in headers if not item[0].startswith(b"sec-websocket-")],
            }
        )

    async def _pass_refusal(self, connection: UpstreamConnection, head: ResponseHead) -> None:
        if not 200 <= head.status <= 599:
            raise UpstreamLostError(f"answered with status {head.status}", answered=True)
        self._answered = True
        if "websocket.http.response" not in (self._scope.get("extensions") or {}):
            await self._send({"type": "websocket.close", "code": _ABNORMAL})
            return
        headers = response_headers(head.headers, head.status)
        await self._send({"type": "websocket.http.response.start", "status": head.status, "headers": headers})
        finished = connection.finished
        if finished:
            await self._send({"type": "websocket.http.response.body", "body": b""})
        while not finished:
            data = await connection.read()
            finished = connection.finished
            await self._send({"type": "websocket.http.response.body", "body": data, "more_body": not finished})

    async def _relay(self, connection: UpstreamConnection, stream: Stream) -> None:
        async with asyncio.TaskGroup() as tasks:
            outward = tasks.create_task(self._from_client(connection, stream))
            try:
                await self._from_guest(connection)
            except UpstreamLostError:
                # No close frame came: the client shall see the same.
                return
            finally:
                outward.cancel()

    async def _from_client(self, connection: UpstreamConnection, stream: Stream) -> None:
        while True:
            message = await self._receive()
            try:
                if message["type"] == "websocket.disconnect":
                    await self._pass_close(connection, message, stream)
                    return
                text, data = message.get("text"), message.get("bytes")
                await self._write_message(connection, text if text is not None else data or b"")
            except (LocalProtocolError, UpstreamLostError):
                # The guest closed first or is gone; the reader of its frames knows which and ends the relay.
                return

    async def _write_message(self, connection: UpstreamConnection, payload: str | bytes) -> None:
        for start in range(0, max(len(payload), 1), FRAGMENT):
            piece = payload[start : start + FRAGMENT]
            last = start + FRAGMENT >= len(payload)
            if isinstance(piece, str):
                frame = self._frames.send(TextMessage(data=piece, message_finished=last))
            else:
                frame = self._frames.send(BytesMessage(data=piece, message_finished=last))
            connection.write(frame)
            await connection.drain()

    async def _pass_close(self, connection: UpstreamConnection, message: Any, stream: Stream) -> None:
        self._client_closed = True
        code = message.get("code", _NO_STATUS)
        # uvicorn words a connection that broke without a close frame as 1005 with no reason at all.
        broke = code == _ABNORMAL or (code == _NO_STATUS and "reason" not in message)
        if broke:
            stream.client_left()
            return
        connection.write(self._frames.send(CloseConnection(code=code, reason=message.get("reason") or None)))
        asyncio.get_running_loop().call_later(CLOSE_GRACE_S, connection.abort)

    async def _from_guest(self, connection: UpstreamConnection) -> None:
        pieces: list[str | bytes | bytearray] = []
        size = 0
        while True:
            self._frames.receive_data(await connection.read())
            try:
                for event in self._frames.events():
                    if isinstance(event, TextMessage | BytesMessage):
                        size += len(event.data)
                        if size > MAX_MESSAGE_BYTES:
                            await self._close_both(connection, _TOO_BIG, "message too big for the proxy")
                            return
                        pieces.append(event.data)
                        if event.message_finished:
                            await self._deliver(pieces, is_text=isinstance(event, TextMessage))
                            pieces, size = [], 0
                    elif isinstance(event, Ping):
                        if self._frames.state is ConnectionState.OPEN:
                            connection.write(self._frames.send(event.response()))
                    elif isinstance(event, CloseConnection):
                        await self._guest_closed(connection, event)
                        return
            except RemoteProtocolError:
                await self._close_both(connection, 1002, "the service broke the WebSocket protocol")
                return

    async def _deliver(self, pieces: list[Any], *, is_text: bool) -> None:
        if self._client_closed:
            return
        if is_text:
            await self._send({"type": "websocket.send", "text": "".join(pieces)})
        else:
            await self._send({"type": "websocket.send", "bytes": b"".join(pieces)})

    async def _guest_closed(self, connection: UpstreamConnection, event: CloseConnection) -> None:
        if self._frames.state is ConnectionState.REMOTE_CLOSING:
            connection.write(self._frames.send(event.response()))
            await connection.drain()
        if not self._client_closed:
            code = 1000 if event.code == _NO_STATUS else int(event.code)
            await self._send({"type": "websocket.close", "code": code, "reason": event.reason or ""})

    async def _close_both(self, connection: UpstreamConnection, code: int, reason: str) -> None:
        if self._frames.state is ConnectionState.OPEN:
            connection.write(self._frames.send(CloseConnection(code=code, reason=reason)))
            await connection.drain()
        if not self._client_closed:
            await self._send({"type": "websocket.close", "code": code, "reason": reason})

    async def _say_going_away(self) -> None:
        try:
            async with asyncio.timeout(0.5):
                await self._send({"type": "websocket.close", "code": _GOING_AWAY, "reason": "The sandbox has ended"})
        except (TimeoutError, OSError, RuntimeError):
            # The client does not read or has closed already: dropping the connection is all that is left.
            return
