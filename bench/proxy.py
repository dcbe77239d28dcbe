"""What the sandbox proxy costs: the same requests to a service directly and through the proxy, interleaved in one run.

Everything runs natively on this host: a service on 127.0.0.2, the proxy in uvicorn, and this client, each a process of
its own. A forwarder made of aiohttp's client stands beside it, for comparison only.
Writes its table to bench/RESULTS.md.

Run: .venv/bin/python bench/proxy.py [--requests N] [--mib N]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from support.report import write_section

GUEST = "127.0.0.2"
SANDBOX = "ibench"
BLOCK = os.urandom(256 * 1024)


def serve_guest(listener: socket.socket) -> None:
    """The service: answers `POST /` with its body, streams `GET /down/<bytes>`, swallows `PUT /up`."""
    import uvloop

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                method, path = head.split(b" ", 2)[:2]
                length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
                if method == b"get":
                    left = int(path.rsplit(b"/", 1)[1])
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % left)
                    while left:
                        writer.write(BLOCK[:left])
                        left -= min(left, len(BLOCK))
                        await writer.drain()
                    continue
                body = b""
                while length:
                    body = await reader.read(min(length, 256 * 1024))
                    length -= len(body)
                answer = body if method == b"post" else b""
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(answer), answer))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(handle, sock=listener, limit=1 << 20)
        await server.serve_forever()

    uvloop.run(main())


def serve_proxy(listener: socket.socket, guest_port: int) -> None:
    """The proxy, and below `/aiohttp/` the forwarder for comparison."""
    import aiohttp
    import uvicorn

    from agentenv.config import Settings
    from agentenv.orchestrator.routes import Route, RouteTable
    from agentenv.proxy import UVICORN_OPTIONS, SandboxProxy

    routes = RouteTable()

    async def wake(_: str) -> Route | None:
        return None

    proxy = SandboxProxy(routes, Settings(), wake)
    routes.publish(Route(SANDBOX, 1, GUEST, "t" * 64))
    sessions: list[aiohttp.ClientSession] = []

    async def forward_with_aiohttp(scope: Any, receive: Any, send: Any) -> None:
        if not sessions:
            sessions.append(aiohttp.ClientSession(auto_decompress=False))
        path = scope["raw_path"].decode().removeprefix("/aiohttp")
        message = await receive()

        async def body() -> Any:
            nonlocal message
            yield message["body"]
            while message["more_body"]:
                message = await receive()
                yield message["body"]

        headers = [(k.decode(), v.decode()) for k, v in scope["headers"]]
        data = body() if message["more_body"] else message["body"]
        url = f"http://{GUEST}:{guest_port}{path}"
        async with sessions[0].request(scope["method"], url, headers=headers, data=data) as answer:
            raw = [(k.lower(), v) for k, v in answer.raw_headers]
            await send({"type": "http.response.start", "status": answer.status, "headers": raw})
            async for chunk in answer.content.iter_any():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"].startswith("/aiohttp/"):
            await forward_with_aiohttp(scope, receive, send)
        else:
            await proxy(scope, receive, send)

    config = uvicorn.Config(app, lifespan="off", log_level="critical", **UVICORN_OPTIONS)
    uvicorn.Server(config).run(sockets=[listener])


class Client:
    """A blocking keep-alive client: as little of its own time as possible."""

    def __init__(self, address: tuple[str, int], prefix: str, port: int) -> None:
        self.sock = socket.create_connection(address)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.prefix = prefix
        self.routing = f"Host: localhost\r\nE2b-Sandbox-Id: {SANDBOX}\r\nE2b-Sandbox-Port: {port}\r\n"

    def send(self, method: str, path: str, length: int) -> bytes:
        return f"{method} {self.prefix}{path} HTTP/1.1\r\n{self.routing}Content-Length: {length}\r\n\r\n".encode()

    def answer(self) -> int:
        """Read an answer; returns the size of its body."""
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._receive()
        head, _, body = data.partition(b"\r\n\r\n")
        if b" 200 " not in head.split(b"\r\n")[0]:
            raise RuntimeError(head.decode())
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        got = len(body)
        while got < length:
            got += len(self._receive())
        return length

    def _receive(self) -> bytes:
        data = self.sock.recv(1 << 20)
        if not data:
            raise RuntimeError("the connection ended early")
        return data

    def small(self) -> float:
        start = time.perf_counter()
        self.sock.sendall(self.send("POST", "/", 200) + b"x" * 200)
        self.answer()
        return time.perf_counter() - start

    def down(self, size: int) -> float:
        start = time.perf_counter()
        self.sock.sendall(self.send("GET", f"/down/{size}", 0))
        self.answer()
        return size / (time.perf_counter() - start)

    def up(self, size: int) -> float:
        start = time.perf_counter()
        self.sock.sendall(self.send("PUT", "/up", size))
        for _ in range(size // len(BLOCK)):
            self.sock.sendall(BLOCK)
        self.answer()
        return size / (time.perf_counter() - start)


def start(role: str, listener: socket.socket, *more: str) -> subprocess.Popen[bytes]:
    os.set_inheritable(listener.fileno(), True)
    command = [sys.executable, __file__, "--role", role, "--fd", str(listener.fileno()), *more]
    return subprocess.Popen(command, pass_fds=[listener.fileno()])


def measure(clients: dict[str, Client], requests: int, mib: int) -> None:
    size = mib * 1024 * 1024
    times: dict[str, list[float]] = {name: [] for name in clients}
    for _ in range(200):
        for client in clients.values():
            client.small()
    for _ in range(requests):
        for name, client in clients.items():
            times[name].append(client.small())

    def rates(run: Callable[[Client], float]) -> dict[str, float]:
        return {name: statistics.median(run(client) for _ in range(3)) / 1e6 for name, client in clients.items()}

    down, up = rates(lambda client: client.down(size)), rates(lambda client: client.up(size))
    base = statistics.median(times["direct"])
    rows = []
    for name, values in times.items():
        p50, p99 = statistics.median(values), statistics.quantiles(values, n=100)[98]
        latencies = (f"{p50 * 1e3:.3f}", f"{(p50 - base) * 1e3:+.3f}", f"{p99 * 1e3:.3f}")
        rows.append([name, *latencies, f"{down[name]:.0f}", f"{up[name]:.0f}"])
    write_section(
        "proxy",
        "The proxy, native",
        f"{requests} interleaved POSTs of 200 bytes on one kept connection of the client; streams of {mib} MiB, median "
        "of 3. Behind the proxy each POST has a connection of its own, so that it is never sent twice.",
        ["way", "p50 ms", "beyond direct", "p99 ms", "down MB/s", "up MB/s"],
        rows,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--role", choices=["guest", "proxy"], help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--guest-port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "guest":
        serve_guest(socket.socket(fileno=arguments.fd))
    elif arguments.role == "proxy":
        serve_proxy(socket.socket(fileno=arguments.fd), arguments.guest_port)
    else:
        guest, front = socket.create_server((GUEST, 0)), socket.create_server(("127.0.0.1", 0))
        port, address = guest.getsockname()[1], front.getsockname()
        children = [start("guest", guest), start("proxy", front, "--guest-port", str(port))]
        try:
            measure(
                {
                    "direct": Client((GUEST, port), "", port),
                    "proxy": Client(address, "", port),
                    "aiohttp's client instead": Client(address, "/aiohttp", port),
                },
                arguments.requests,
                arguments.mib,
            )
        finally:
            for child in children:
                child.terminate()
            for child in children:
                child.wait()


if __name__ == "__main__":
    main()
