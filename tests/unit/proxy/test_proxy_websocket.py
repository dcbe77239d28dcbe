"""WebSockets through a real uvicorn: kinds, sizes, subprotocols, close codes, refusals, tokens, cuts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import WSMsgType, web
from proxy_world import GUEST_HOST, SANDBOX, TOKEN, Guest, Peer, World


@asynccontextmanager
async def app_guest(
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]], port: int = 0, host: str = GUEST_HOST
) -> AsyncIterator[int]:
    """An aiohttp server in the pretended guest; yields its port."""
    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", handler)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    try:
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def echo(request: web.Request) -> web.StreamResponse:
    socket = web.WebSocketResponse(protocols=("two",), max_msg_size=0)
    await socket.prepare(request)
    await socket.send_str(f"{request.raw_path} {request.headers.get('X-Mine')}")
    async for message in socket:
        if message.type is WSMsgType.TEXT and message.data.startswith("close "):
            await socket.close(code=int(message.data[6:]), message=b"as asked")
        elif message.type is WSMsgType.TEXT and message.data == "drop":
            assert request.transport is not None
            request.transport.abort()
        elif message.type is WSMsgType.TEXT and message.data == "ping":
            await socket.ping(b"x")
            await socket.send_str("pinged")
        elif message.type is WSMsgType.TEXT:
            await socket.send_str(message.data)
        else:
            await socket.send_bytes(message.data)
    return socket


@asynccontextmanager
async def connected(
    world: World, port: int, path: str = "/ws", headers: dict[str, str] | None = None, protocols: tuple[str, ...] = ()
) -> AsyncIterator[aiohttp.ClientWebSocketResponse]:
    routing = {"E2b-Sandbox-Id": SANDBOX, "E2b-Sandbox-Port": str(port), **(headers or {})}
    url = f"http://127.0.0.1:{world.port}{path}"
    async with (
        aiohttp.ClientSession() as session,
        session.ws_connect(url, headers=routing, protocols=protocols, max_msg_size=0) as socket,
    ):
        yield socket


async def test_both_kinds_of_messages_headers_and_subprotocol(world: World) -> None:
    world.publish()
    async with (
        app_guest(echo) as port,
        connected(world, port, "/ws?a=%20b", {"X-Mine": "yes"}, ("one", "two")) as socket,
    ):
        assert socket.protocol == "two"
        assert await socket.receive_str() == "/ws?a=%20b yes"
        for text in ("", "ä€𝄞", "x" * 70000):
            await socket.send_str(text)
            assert await socket.receive_str() == text
        for data in (b"", bytes(range(256)), b"y" * 70000):
            await socket.send_bytes(data)
            assert await socket.receive_bytes() == data
        await socket.ping()
        await socket.send_str("ping")
        assert await socket.receive_str() == "pinged"


async def test_big_messages(world: World) -> None:
    world.publish()
    async with app_guest(echo) as port, connected(world, port) as socket:
        await socket.receive_str()
        data = bytes(range(256)) * 4 * 5000  # 5 MB
        await socket.send_bytes(data)
        assert await socket.receive_bytes() == data
        text = "ä€" * 1_000_001
        await socket.send_str(text)
        assert await socket.receive_str() == text


@pytest.mark.parametrize("code", [1000, 1001, 1008, 1011, 3000, 4999])
async def test_the_guests_close_code_reaches_the_client(world: World, code: int) -> None:
    world.publish()
    async with app_guest(echo) as port, connected(world, port) as socket:
        await socket.receive_str()
        await socket.send_str(f"close {code}")
        message = await socket.receive()
        assert (message.type, message.data, message.extra) == (WSMsgType.CLOSE, code, "as asked")


@pytest.mark.parametrize("code", [1000, 1001, 4321])
async def test_the_clients_close_code_reaches_the_guest(world: World, code: int) -> None:
    seen = asyncio.get_running_loop().create_future()

    async def serve(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        message = await socket.receive()
        seen.set_result((message.type, message.data, message.extra))
        return socket

    world.publish()
    async with app_guest(serve) as port, connected(world, port) as socket:
        await socket.close(code=code, message=b"bye")
        async with asyncio.timeout(5):
            assert await seen == (WSMsgType.CLOSE, code, "bye")


async def test_a_guest_that_drops_the_socket_is_no_clean_close(world: World) -> None:
    world.publish()
    async with app_guest(echo) as port, connected(world, port) as socket:
        await socket.receive_str()
        await socket.send_str("drop")
        async with asyncio.timeout(5):
            message = await socket.receive()
        assert message.type is not WSMsgType.CLOSE
        assert socket.close_code == 1006


async def test_a_client_that_vanishes_ends_the_guests_socket(world: World) -> None:
    ended = asyncio.Event()

    async def serve(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.receive()
        ended.set()
        return socket

    world.publish()
    async with app_guest(serve) as port, connected(world, port) as socket:
        transport = socket.get_extra_info("socket")
        assert transport is not None
        socket._response.connection.transport.abort()  # type: ignore[union-attr]
        async with asyncio.timeout(5):
            await ended.wait()


async def test_withdrawing_the_route_ends_sockets(world: World) -> None:
    world.publish()
    async with app_guest(echo) as port, connected(world, port) as socket:
        await socket.receive_str()
        world.routes.withdraw(SANDBOX)
        async with asyncio.timeout(5):
            message = await socket.receive()
        assert (message.type, message.data) == (WSMsgType.CLOSE, 1001)


async def test_a_refused_upgrade_passes_through(world: World) -> None:
    async def serve(request: web.Request) -> web.StreamResponse:
        return web.Response(status=418, text="no sockets here", headers={"X-Why": "teapot"})

    world.publish()
    async with app_guest(serve) as port:
        with pytest.raises(aiohttp.WSServerHandshakeError) as refusal:
            async with connected(world, port):
                pass
        assert refusal.value.status == 418
        assert refusal.value.headers is not None and refusal.value.headers["X-Why"] == "teapot"


def handshake(port: int, path: str = "/", extra: str = "") -> bytes:
    return (
        f"GET {path} HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
        f"E2b-Sandbox-Id: {SANDBOX}\r\nE2b-Sandbox-Port: {port}\r\n{extra}\r\n"
    ).encode()


async def test_refusals_of_our_own_have_the_bodies_of_the_table(world: World, agent_port: int) -> None:
    answer = await world.ask(handshake(80))
    assert (answer.status, b"was not found" in answer.body) == (502, True)
    world.publish(traffic_access_token="secret")
    assert (await world.ask(handshake(80))).status == 403
    answer = await world.ask(handshake(1, extra="E2B-Traffic-Access-Token: secret\r\n"))
    assert (answer.status, b"port is not open" in answer.body) == (502, True)
    assert (await world.ask(handshake(0))).status == 400
    async with app_guest(echo, agent_port):
        for path in ("/tunnel?port=1", "//%74unnel", "/init"):
            assert (await world.ask(handshake(agent_port, path))).status == 403


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 101 S\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: wrong\r\n\r\n",
    ],
)
async def test_a_wrong_handshake_answer_is_a_bad_gateway(world: World, raw: bytes) -> None:
    async def serve(peer: Peer, _: int) -> None:
        head = await peer.read_head()
        assert head.get("sec-websocket-version") == "13"
        await peer.write(raw)

    world.publish()
    async with Guest(serve).listening() as guest:
        answer = await world.ask(handshake(guest.port))
        assert answer.status == 502
        assert b"not open" not in answer.body and b"not found" not in answer.body


async def test_a_client_that_leaves_during_the_handshake_is_noticed(world: World) -> None:
    arrived, ended = asyncio.Event(), asyncio.Event()

    async def serve(peer: Peer, _: int) -> None:
        await peer.read_head()
        arrived.set()
        try:
            await peer.reader.read()
        finally:
            ended.set()

    world.publish()
    async with Guest(serve).listening() as guest, world.client() as client:
        await client.write(handshake(guest.port))
        await arrived.wait()
        client.abort()
        async with asyncio.timeout(5):
            await ended.wait()


async def test_the_guests_token_header_is_kept_and_the_traffic_token_is_not(world: World) -> None:
    async def serve(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        await socket.send_str(
            f"{request.headers.get('X-Access-Token')} {request.headers.get('E2B-Traffic-Access-Token')}"
        )
        await socket.close()
        return socket

    world.publish(traffic_access_token="secret")
    headers = {"E2B-Traffic-Access-Token": "secret", "X-Access-Token": TOKEN}
    async with app_guest(serve) as port, connected(world, port, headers=headers) as socket:
        assert await socket.receive_str() == f"{TOKEN} None"
