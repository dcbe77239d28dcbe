"""What the proxy's tests stand on: a real uvicorn with the proxy, guests on loopback addresses, a plain-spoken client.

Guests and clients write and read raw bytes, so that a test sees exactly what went over the wire.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import uvicorn

from agentenv.config import ApiSettings, Settings
from agentenv.orchestrator.routes import Route, RouteTable
from agentenv.proxy import UVICORN_OPTIONS, SandboxProxy

GUEST_HOST = "127.0.0.2"
SANDBOX = "i0123456789abcdefghi"
TOKEN = "t" * 64
DOMAIN = "box.localhost"

Headers = list[tuple[str, str]]
Handler = Callable[["Peer", int], Awaitable[None]]


@dataclass
class Message:
    """One HTTP message head as it was on the wire."""

    first_line: str
    headers: Headers

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]

    def get(self, name: str) -> str | None:
        values = self.all(name)
        return values[0] if values else None

    @property
    def status(self) -> int:
        return int(self.first_line.split(" ")[1])


@dataclass
class Answer(Message):
    body: bytes = b""


@dataclass
class Peer:
    """One end of a TCP connection, with HTTP reading helpers."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def read_head(self) -> Message:
        raw = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = raw[:-4].split("\r\n")
        pairs = [line.split(":", 1) for line in lines]
        return Message(first, [(key, value.strip()) for key, value in pairs])

    async def read_chunk(self) -> bytes:
        """One chunk of a chunked body; b"" is the last one."""
        size = int((await self.reader.readuntil(b"\r\n")).strip(), 16)
        data = await self.reader.readexactly(size)
        assert await self.reader.readexactly(2) == b"\r\n"
        return data

    async def read_body(self, head: Message) -> bytes:
        if head.get("transfer-encoding"):
            parts = []
            while part := await self.read_chunk():
                parts.append(part)
            return b"".join(parts)
        return await self.reader.readexactly(int(head.get("content-length") or 0))

    async def read_request(self) -> tuple[Message, bytes]:
        head = await self.read_head()
        return head, await self.read_body(head)

    async def read_answer(self, *, has_body: bool = True) -> Answer:
        head = await self.read_head()
        body = await self.read_body(head) if has_body and head.status not in (204, 304) else b""
        return Answer(head.first_line, head.headers, body)

    async def write(self, *parts: bytes) -> None:
        self.writer.write(b"".join(parts))
        await self.writer.drain()

    async def write_chunk(self, data: bytes) -> None:
        await self.write(b"%x\r\n%s\r\n" % (len(data), data))

    def close(self) -> None:
        self.writer.close()

    def abort(self) -> None:
        self.writer.transport.abort()

    def abort_with_reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


def ok(body: bytes = b"ok", extra: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n%s\r\n%s" % (len(body), extra, body)


class Guest:
    """A service in a pretended guest. `handler(peer, n)` runs for the n-th connection (from 0)."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0
        self.port = 0
        self.errors: list[BaseException] = []

    @asynccontextmanager
    async def listening(self, host: str = GUEST_HOST, port: int = 0, ssl: object = None) -> AsyncIterator[Guest]:
        server = await asyncio.start_server(self._serve, host, port, ssl=ssl, limit=1 << 20)  # type: ignore[arg-type]
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            assert not self.errors, self.errors

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        number, self.connections = self.connections, self.connections + 1
        try:
            await self._handler(Peer(reader, writer), number)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        except BaseException as error:
            self.errors.append(error)
        finally:
            writer.close()


async def serve_echo(peer: Peer, number: int) -> None:
    """Answers every request with its own head, as text, and its body."""
    while True:
        head, body = await peer.read_request()
        lines = [head.first_line, *(f"{key}: {value}" for key, value in head.headers)]
        text = "\n".join(lines).encode("latin-1") + b"\n\n" + body
        await peer.write(ok(text, b"X-Connection: %d\r\n" % number))


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()


@dataclass
class World:
    """The proxy behind uvicorn, its route table, and a record of wake calls."""

    agent_port: int
    routes: RouteTable = field(default_factory=RouteTable)
    woken: list[str] = field(default_factory=list)
    wakes: dict[str, Route] = field(default_factory=dict)
    port: int = 0
    wake_error: Exception | None = None

    async def _wake(self, sandbox_id: str) -> Route | None:
        self.woken.append(sandbox_id)
        if self.wake_error is not None:
            raise self.wake_error
        route = self.wakes.get(sandbox_id)
        if route is not None:
            self.routes.publish(route)
        return route

    @asynccontextmanager
    async def running(self) -> AsyncIterator[World]:
        settings = Settings(api=ApiSettings(domain=DOMAIN, advertise_domain="public.example:8443"))
        self.proxy = SandboxProxy(self.routes, settings, self._wake, agent_port=self.agent_port)

        async def app(scope, receive, send):  # type: ignore[no-untyped-def]
            if self.proxy.claims(scope):
                await self.proxy(scope, receive, send)
            elif scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close"})
            else:
                await send({"type": "http.response.start", "status": 418, "headers": [(b"content-length", b"0")]})
                await send({"type": "http.response.body", "body": b""})

        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(app, lifespan="off", log_level="critical", **UVICORN_OPTIONS)
        self.server = _Server(config)
        await self.proxy.start()
        serving = asyncio.create_task(self.server.serve(sockets=[listener]))
        try:
            await self.server.up.wait()
            yield self
        finally:
            await self.proxy.close()
            self.server.should_exit = True
            self.server.force_exit = True
            await serving

    def publish(self, life: int = 1, sandbox_id: str = SANDBOX, **options: object) -> Route:
        values = {"host": GUEST_HOST, "envd_access_token": TOKEN, **options}
        route = Route(sandbox_id=sandbox_id, life=life, **values)  # type: ignore[arg-type]
        self.routes.publish(route)
        return route

    @asynccontextmanager
    async def client(self, *, buffer: int | None = None) -> AsyncIterator[Peer]:
        sock = socket.socket()
        if buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=sock)
        try:
            yield Peer(reader, writer)
        finally:
            writer.transport.abort()

    async def ask(self, raw: bytes, *, has_body: bool = True) -> Answer:
        """Send one request on a connection of its own."""
        async with self.client() as client:
            await client.write(raw)
            return await client.read_answer(has_body=has_body)


def request(
    port: int,
    *,
    method: str = "GET",
    path: str = "/",
    sandbox: str = SANDBOX,
    headers: Headers | None = None,
    body: bytes | None = None,
) -> bytes:
    """A header-routed request."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"E2b-Sandbox-Id: {sandbox}", f"E2b-Sandbox-Port: {port}"]
    lines += [f"{key}: {value}" for key, value in headers or []]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + (body or b"")
