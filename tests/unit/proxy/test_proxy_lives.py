"""Connections to guests: reuse within one life only, retries, the tunnel to guest loopback, TLS."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
from proxy_world import SANDBOX, TOKEN, Guest, Peer, World, ok, request, serve_echo
from test_proxy_websocket import app_guest, connected
from test_proxy_websocket import echo as websocket_echo

from agentenv.proxy.upstream import UpstreamConnection


async def test_one_connection_serves_many_requests_of_one_life(world: World) -> None:
    world.publish()
    async with Guest(serve_echo).listening() as guest:
        for _ in range(5):
            assert (await world.ask(request(guest.port))).get("x-connection") == "0"
        assert guest.connections == 1


@pytest.mark.parametrize(("method", "body"), [("POST", b"x"), ("POST", None), ("PUT", b"x"), ("DELETE", None)])
async def test_what_must_not_happen_twice_has_a_connection_of_its_own(
    world: World, method: str, body: bytes | None
) -> None:
    ends = asyncio.Queue[int]()

    async def serve(peer: Peer, number: int) -> None:
        await serve_echo(peer, number) if number == 0 else await answer_once(peer)
        assert await peer.reader.read() == b""
        ends.put_nowait(number)

    async def answer_once(peer: Peer) -> None:
        head, _ = await peer.read_request()
        assert head.all("connection") == ["close"]
        await peer.write(ok(b"", b"Connection: close\r\n"))

    world.publish()
    async with Guest(serve).listening() as guest:
        assert (await world.ask(request(guest.port))).get("x-connection") == "0"
        for number in (1, 2):
            assert (await world.ask(request(guest.port, method=method, body=body))).status == 200
            assert await ends.get() == number, "the proxy closes it, also when the guest does not"
        assert (await world.ask(request(guest.port))).get("x-connection") == "0"
        assert guest.connections == 3


async def test_a_guest_that_refuses_early_and_closes_loses_no_request(world: World, agent_port: int) -> None:
    """It answers before it has read the body and closes a moment later, when the next command is on its way."""
    seen: list[bytes] = []
    answered, next_one = asyncio.Event(), asyncio.Event()

    async def serve(peer: Peer, number: int) -> None:
        if number == 0:
            await peer.read_head()
            await peer.write(ok(b"no such user"))
            answered.set()
            await next_one.wait()
            peer.abort_with_reset()
            return
        _, body = await peer.read_request()
        seen.append(body)
        next_one.set()
        await peer.write(ok(b"done"))

    world.publish()
    async with Guest(serve).listening(port=agent_port):
        start = request(agent_port, method="POST", path="/process.Process/Start", body=b"command")
        first = await world.ask(start)
        await answered.wait()
        second = await world.ask(start)
        assert (first.body, second.status, second.body) == (b"no such user", 200, b"done")
        assert seen == [b"command"]


async def test_an_early_answer_to_a_safe_request_ends_its_connection(world: World) -> None:
    async def serve(peer: Peer, number: int) -> None:
        await peer.read_head()
        await peer.write(ok(b"early", b"X-Connection: %d\r\n" % number))
        await peer.reader.read()

    world.publish()
    async with Guest(serve).listening() as guest:
        for number in range(2):
            async with world.client() as client:
                await client.write(request(guest.port, headers=[("Content-Length", "4")]))
                assert (await client.read_answer()).get("x-connection") == str(number)


async def test_the_next_life_never_gets_a_connection_of_the_former(world: World) -> None:
    ends = asyncio.Queue[int]()

    async def serve(peer: Peer, number: int) -> None:
        try:
            await serve_echo(peer, number)
        finally:
            ends.put_nowait(number)

    async with Guest(serve).listening() as guest:
        for life in range(3):
            world.publish(life)
            for _ in range(2):
                assert (await world.ask(request(guest.port))).get("x-connection") == str(life)
        world.routes.withdraw(SANDBOX)
        async with asyncio.timeout(5):
            assert sorted([await ends.get() for _ in range(3)]) == [0, 1, 2]
        assert (await world.ask(request(guest.port))).status == 502
        assert guest.connections == 3


async def test_two_sandboxes_at_one_address_share_nothing(world: World) -> None:
    world.publish(sandbox_id="one")
    world.publish(sandbox_id="two")
    async with Guest(serve_echo).listening() as guest:
        assert (await world.ask(request(guest.port, sandbox="one"))).get("x-connection") == "0"
        assert (await world.ask(request(guest.port, sandbox="two"))).get("x-connection") == "1"
        assert (await world.ask(request(guest.port, sandbox="one"))).get("x-connection") == "0"


async def serve_once_then_vanish(peer: Peer, number: int) -> None:
    """The first connection answers one request as if it stayed open, and dies as soon as the second one comes."""
    if number:
        await serve_echo(peer, number)
        return
    await peer.read_request()
    await peer.write(ok())
    await peer.reader.readexactly(1)
    peer.abort_with_reset()


@pytest.mark.parametrize(
    ("method", "body"),
    [("GET", None), ("GET", b"all"), ("OPTIONS", None), ("POST", None), ("PUT", b"all"), ("POST", b"all")],
)
async def test_no_request_is_lost_on_a_stale_connection(world: World, method: str, body: bytes | None) -> None:
    world.publish()
    async with Guest(serve_once_then_vanish).listening() as guest:
        assert (await world.ask(request(guest.port))).status == 200
        answer = await world.ask(request(guest.port, method=method, body=body))
        assert answer.status == 200
        assert guest.connections == 2
        if body:
            assert answer.body.endswith(b"\n\n" + body)


async def test_a_fresh_connection_that_breaks_is_not_tried_again(world: World) -> None:
    async def serve(peer: Peer, _: int) -> None:
        await peer.read_request()

    world.publish()
    async with Guest(serve).listening() as guest:
        assert (await world.ask(request(guest.port))).status == 502
        assert guest.connections == 1


async def test_a_body_that_is_not_here_as_a_whole_goes_to_a_fresh_connection(world: World) -> None:
    world.publish()
    async with Guest(serve_once_then_vanish).listening() as guest, world.client() as client:
        assert (await world.ask(request(guest.port))).status == 200
        await client.write(request(guest.port, headers=[("Content-Length", "8")]), b"half")
        await client.write(b"half")
        answer = await client.read_answer()
        assert answer.status == 200
        assert answer.body.endswith(b"\n\nhalfhalf")
        assert guest.connections == 2


async def test_a_connection_the_guest_closed_or_spoke_on_is_not_used(world: World) -> None:
    async def serve(peer: Peer, number: int) -> None:
        await peer.read_request()
        await peer.write(ok(b"x") + (b"HTTP/1.1 408 Timeout\r\nContent-Length: 0\r\n\r\n" if number == 0 else b""))

    world.publish()
    async with Guest(serve).listening() as guest:
        for _ in range(4):
            answer = await world.ask(request(guest.port))
            assert (answer.status, answer.body) == (200, b"x")
        assert guest.connections == 4


@pytest.mark.parametrize("what", ["end", "bytes"])
async def test_an_idle_connection_is_asked_of_the_kernel_before_use(what: str) -> None:
    """The loop has not seen the end yet: no await stands between it and the question."""
    near, far = socket.socketpair()
    with far:
        connection = UpstreamConnection(lambda _: None)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=near)
        assert connection.still_idle()
        if what == "end":
            far.close()
        else:
            far.send(b"x")
        assert not connection.still_idle()
        connection.abort()


async def test_a_head_without_end_is_given_up(world: World) -> None:
    async def serve(peer: Peer, _: int) -> None:
        await peer.read_request()
        await peer.write(b"HTTP/1.1 200 OK\r\n")
        while True:
            await peer.write(b"X-More: %s\r\n" % (b"y" * 1000))

    world.publish()
    async with Guest(serve).listening() as guest:
        answer = await world.ask(request(guest.port))
        assert (answer.status, b"head without end" in answer.body) == (502, True)


class Agent:
    """A pretended agent: opens tunnels to ports of 127.0.0.1, as the real one does inside the guest."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str | None]] = []

    async def __call__(self, peer: Peer, _: int) -> None:
        head = await peer.read_head()
        self.requests.append((head.first_line, head.get("x-access-token")))
        assert (head.get("connection"), head.get("upgrade")) == ("Upgrade", "aenv-tunnel")
        port = int(head.first_line.split("port=")[1].split(" ")[0])
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await peer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 2\r\n\r\n{}")
            return
        await peer.write(b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: aenv-tunnel\r\n\r\n")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._copy(peer.reader, writer))
                tasks.create_task(self._copy(reader, peer.writer))
        finally:
            writer.close()

    @staticmethod
    async def _copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
        sink.close()


async def test_services_on_guest_loopback_are_reached_through_the_agent(world: World, agent_port: int) -> None:
    world.publish()
    agent = Agent()
    async with Guest(agent).listening(port=agent_port), Guest(serve_echo).listening("127.0.0.1") as service:
        for _ in range(2):
            answer = await world.ask(request(service.port, path="/in", body=b"side"))
            assert answer.status == 200
            assert answer.body.startswith(b"GET /in HTTP/1.1\n") and answer.body.endswith(b"\n\nside")
        assert service.connections == 1
        assert agent.requests == [(f"GET /tunnel?port={service.port} HTTP/1.1", TOKEN)]


async def test_a_tunnel_to_a_closed_port_says_so(world: World, agent_port: int) -> None:
    world.publish()
    async with Guest(Agent()).listening(port=agent_port):
        answer = await world.ask(request(1))
        assert json.loads(answer.body) == {
            "sandboxId": SANDBOX,
            "message": "The sandbox is running but port is not open",
            "port": 1,
            "code": 502,
        }


async def test_an_agent_without_tunnel_is_not_a_closed_port(world: World, agent_port: int) -> None:
    async def serve(peer: Peer, _: int) -> None:
        await peer.read_head()
        await peer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")

    world.publish()
    async with Guest(serve).listening(port=agent_port):
        answer = await world.ask(request(1))
        assert answer.status == 502
        assert b"its agent answered 404" in answer.body


async def test_websockets_go_through_the_tunnel(world: World, agent_port: int) -> None:
    world.publish()
    async with (
        Guest(Agent()).listening(port=agent_port),
        app_guest(websocket_echo, host="127.0.0.1") as port,
        connected(world, port) as socket,
    ):
        await socket.receive_str()
        await socket.send_str("through")
        assert await socket.receive_str() == "through"


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> ssl.SSLContext:
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command, to make a certificate")
    folder: Path = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:prime256v1",
            "-nodes",
            "-subj",
            "/CN=wrong.example",
            "-keyout",
            str(folder / "key"),
            "-out",
            str(folder / "cert"),
            "-days",
            "2",
        ],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert", folder / "key")
    return context


@pytest.mark.parametrize("host", ["127.0.0.2", "127.0.0.1"])
async def test_tls_ports_directly_and_through_the_tunnel(
    world: World, agent_port: int, tls: ssl.SSLContext, host: str
) -> None:
    async with Guest(Agent()).listening(port=agent_port), Guest(serve_echo).listening(host, ssl=tls) as guest:
        world.publish(https_ports=frozenset({guest.port}))
        for method, number in (("GET", "0"), ("GET", "0"), ("POST", "1"), ("POST", "2")):
            answer = await world.ask(request(guest.port, method=method, body=b"z" * 50_000))
            assert (answer.status, answer.get("x-connection")) == (200, number)
            assert answer.body.endswith(b"z" * 50_000)


async def test_a_plain_service_on_a_tls_port_is_not_a_closed_port(world: World) -> None:
    async def serve(peer: Peer, _: int) -> None:
        await peer.reader.read(10)
        await peer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    async with Guest(serve).listening() as guest:
        world.publish(https_ports=frozenset({guest.port}))
        answer = await world.ask(request(guest.port))
        assert answer.status == 502
        assert b"does not speak TLS" in answer.body
