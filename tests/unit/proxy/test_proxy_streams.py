"""Streams through a real uvicorn: order, both ways at once, flat memory, slow readers, cuts, departures."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from proxy_world import SANDBOX, Guest, Peer, World, ok, request

MIB = 1024 * 1024
BLOCK = bytes(range(256)) * 1024  # 256 KiB
BIG = 300 * MIB


def status_bytes(field: str) -> int:
    """A size from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field + ":")).split()[1]) * 1024


def start_of_growth() -> int:
    """Forget the highest resident size so far and return the present one."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def peak_rss() -> int:
    """Highest resident size since `start_of_growth`; client, proxy and guest together."""
    return status_bytes("VmHWM")


async def test_events_arrive_one_by_one_as_they_are_sent(world: World) -> None:
    tick = asyncio.Queue[bytes]()

    async def serve(peer: Peer, _: int) -> None:
        await peer.read_request()
        await peer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        while event := await tick.get():
            await peer.write_chunk(event)
        await peer.write(b"0\r\n\r\n")

    world.publish()
    async with Guest(serve).listening() as guest, world.client() as client:
        await client.write(request(guest.port))
        assert (await client.read_head()).get("content-type") == "text/event-stream"
        for number in range(20):
            event = b"data: %d\n\n" % number
            tick.put_nowait(event)
            assert await client.read_chunk() == event, "each comes before the next is sent"
        tick.put_nowait(b"")
        assert await client.read_chunk() == b""


async def test_both_directions_flow_at_once(world: World) -> None:
    async def serve(peer: Peer, _: int) -> None:
        while True:
            await peer.read_head()
            await peer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while part := await peer.read_chunk():
                await peer.write_chunk(part.upper())
            await peer.write(b"0\r\n\r\n")

    world.publish()
    async with Guest(serve).listening() as guest, world.client() as client:
        for _ in range(2):
            await client.write(request(guest.port, method="POST", headers=[("Transfer-Encoding", "chunked")]))
            assert (await client.read_head()).status == 200, "the answer begins before the body"
            for number in range(20):
                await client.write_chunk(b"part %d" % number)
                assert await client.read_chunk() == b"PART %d" % number
            await client.write(b"0\r\n\r\n")
            assert await client.read_chunk() == b""
        assert guest.connections == 2


async def test_an_early_answer_ends_the_exchange(world: World) -> None:
    async def serve(peer: Peer, _: int) -> None:
        await peer.read_head()
        await peer.write(b"HTTP/1.1 413 Big\r\nContent-Length: 3\r\n\r\nbig")
        await peer.reader.read()

    world.publish()
    async with Guest(serve).listening() as guest, world.client() as client:
        await client.write(request(guest.port, method="POST", headers=[("Content-Length", str(MIB))]), b"x" * 1000)
        answer = await client.read_answer()
        assert (answer.status, answer.body) == (413, b"big")


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_300_mib_up_with_flat_memory(world: World, framing: str) -> None:
    async def serve(peer: Peer, _: int) -> None:
        head = await peer.read_head()
        digest, left = hashlib.md5(), BIG
        while left:
            data = await peer.read_chunk() if head.get("transfer-encoding") else await peer.reader.read(MIB)
            left -= len(data)
            digest.update(data)
        if head.get("transfer-encoding"):
            assert await peer.read_chunk() == b""
        await peer.write(ok(digest.hexdigest().encode()))

    world.publish()
    async with Guest(serve).listening() as guest, world.client() as client:
        before, digest = start_of_growth(), hashlib.md5()
        header = ("Content-Length", str(BIG)) if framing == "length" else ("Transfer-Encoding", "chunked")
        await client.write(request(guest.port, method="PUT", headers=[header]))
        for _ in range(BIG // len(BLOCK)):
            digest.update(BLOCK)
            await (client.write(BLOCK) if framing == "length" else client.write_chunk(BLOCK))
        if framing == "chunked":
            await client.write(b"0\r\n\r\n")
        assert (await client.read_answer()).body == digest.hexdigest().encode()
        assert peak_rss() - before < 40 * MIB


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
async def test_300_mib_down_with_flat_memory(world: World, framing: str) -> None:
    head = {"length": b"Content-Length: %d" % BIG, "chunked": b"Transfer-Encoding: chunked", "close": b"X: y"}[framing]

    async def serve(peer: Peer, _: int) -> None:
        await peer.read_request()
        await peer.write(b"HTTP/1.1 200 OK\r\n%s\r\n\r\n" % head)
        for _ in range(BIG // len(BLOCK)):
            await (peer.write_chunk(BLOCK) if framing == "chunked" else peer.write(BLOCK))
        if framing == "chunked":
            await peer.write(b"0\r\n\r\n")

    world.publish()
    async with Guest(serve).listening() as guest, world.client() as client:
        before, digest, size = start_of_growth(), hashlib.md5(), 0
        await client.write(request(guest.port))
        answer = await client.read_head()
        while True:
            if answer.get("transfer-encoding"):
                data = await client.read_chunk()
            else:
                data = await client.reader.read(min(MIB, BIG - size)) if size < BIG else b""
            if not data:
                break
            digest.update(data)
            size += len(data)
        expected = hashlib.md5()
        for _ in range(BIG // len(BLOCK)):
            expected.update(BLOCK)
        assert (size, digest.digest()) == (BIG, expected.digest())
        assert peak_rss() - before < 40 * MIB


async def fill_until_stuck(write: Callable[[bytes], None], writer: asyncio.StreamWriter) -> int:
    """Write until the peer has taken nothing for a while; returns the bytes that went off."""
    sent = 0
    while sent < 200 * MIB:
        write(BLOCK)
        sent += len(BLOCK)
        try:
            await asyncio.wait_for(writer.drain(), 0.5)
        except TimeoutError:
            return sent
    return sent


async def test_a_client_that_does_not_read_stops_the_guest_and_nobody_else(world: World) -> None:
    stuck = asyncio.get_running_loop().create_future()

    async def serve(peer: Peer, number: int) -> None:
        await peer.read_request()
        if number:
            await peer.write(ok())
            return
        await peer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (1 << 40))
        stuck.set_result(await fill_until_stuck(peer.writer.write, peer.writer))
        await peer.reader.read()

    world.publish()
    async with Guest(serve).listening() as guest, world.client(buffer=4096) as slow:
        slow.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await slow.write(request(guest.port))
        assert await stuck < 20 * MIB, "kernel buffers and our own bounded ones, no more"
        assert (await world.ask(request(guest.port))).status == 200


async def test_a_guest_that_does_not_read_stops_the_client(world: World) -> None:
    done = asyncio.Event()

    async def serve(peer: Peer, _: int) -> None:
        peer.reader._transport.pause_reading()  # type: ignore[attr-defined]
        await done.wait()

    world.publish()
    async with Guest(serve).listening() as guest, world.client() as client:
        await client.write(request(guest.port, method="POST", headers=[("Content-Length", str(1 << 40))]))
        assert await fill_until_stuck(client.writer.write, client.writer) < 20 * MIB
        done.set()


@pytest.mark.parametrize("stage", ["before the answer", "in the answer", "in the body"])
async def test_a_client_that_leaves_ends_the_guests_connection(world: World, stage: str) -> None:
    arrived, ended = asyncio.Event(), asyncio.Event()

    async def serve(peer: Peer, _: int) -> None:
        await peer.read_head()
        if stage == "in the answer":
            await peer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        arrived.set()
        try:
            while await peer.reader.read(1024):
                pass
        finally:
            ended.set()

    world.publish()
    async with Guest(serve).listening() as guest, world.client() as client:
        if stage == "in the body":
            await client.write(request(guest.port, method="POST", headers=[("Content-Length", "100")]), b"half")
        else:
            await client.write(request(guest.port))
        await arrived.wait()
        if stage == "in the answer":
            await client.read_head()
        client.abort()
        async with asyncio.timeout(5):
            await ended.wait()


@pytest.mark.parametrize("framing", ["length", "chunked", "reset"])
async def test_a_guest_that_dies_in_the_answer_breaks_the_clients_connection(world: World, framing: str) -> None:
    async def serve(peer: Peer, _: int) -> None:
        await peer.read_request()
        if framing == "length":
            await peer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhello")
        elif framing == "chunked":
            await peer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
        else:
            await peer.write(b"HTTP/1.1 200 OK\r\nX: until close\r\n\r\nhello")
            await go.wait()
            peer.abort_with_reset()

    go = asyncio.Event()
    world.publish()
    async with Guest(serve).listening() as guest, world.client() as client:
        await client.write(request(guest.port))
        head = await client.read_head()
        first = await (client.read_chunk() if head.get("transfer-encoding") else client.reader.readexactly(5))
        assert first == b"hello"
        go.set()
        assert await client.reader.read() == b""


@pytest.mark.parametrize("stage", ["waiting", "streaming", "uploading", "stuck"])
async def test_withdrawing_the_route_cuts_at_once(world: World, stage: str) -> None:
    arrived, ended = asyncio.Event(), asyncio.Event()

    async def serve(peer: Peer, _: int) -> None:
        try:
            await peer.read_head()
            if stage in ("streaming", "stuck"):
                await peer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\nx" % (1 << 40))
            if stage == "stuck":
                await fill_until_stuck(peer.writer.write, peer.writer)
            arrived.set()
            await peer.reader.read()
        finally:
            ended.set()

    world.publish()
    async with Guest(serve).listening() as guest, world.client(buffer=4096) as client:
        if stage == "stuck":
            client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        raw = request(guest.port)
        if stage == "uploading":
            raw = request(guest.port, method="POST", headers=[("Transfer-Encoding", "chunked")]) + b"1\r\nx\r\n"
        await client.write(raw)
        await arrived.wait()
        if stage == "streaming":
            assert (await client.read_head()).status == 200
            assert await client.reader.readexactly(1) == b"x"
        world.routes.withdraw(SANDBOX)
        async with asyncio.timeout(5):
            await ended.wait()
            if stage == "streaming":
                assert await client.reader.read() == b""
            elif stage != "stuck":
                answer = await client.read_answer()
                assert answer.status == 502
                assert json.loads(answer.body)["message"] == "The sandbox was not found"
            assert (await world.ask(request(guest.port))).status == 502


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock a test moves on."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead


def test_hours_of_silence_are_not_cut(agent_port: int) -> None:
    gate, arrived = asyncio.Event(), asyncio.Event()

    async def serve(peer: Peer, _: int) -> None:
        await peer.read_request()
        arrived.set()
        await gate.wait()
        await peer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\na")
        gate.clear()
        await gate.wait()
        await peer.write(b"b")

    async def move_clock(loop: ClockLoop) -> None:
        fired = asyncio.Event()
        loop.call_later(9 * 3600, fired.set)
        loop.ahead += 10 * 3600
        await fired.wait()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ClockLoop)
        async with (
            World(agent_port).running() as world,
            Guest(serve).listening() as guest,
            world.client() as client,
        ):
            world.publish()
            await client.write(request(guest.port))
            await arrived.wait()
            await move_clock(loop)
            gate.set()
            await client.read_head()
            assert await client.reader.readexactly(1) == b"a"
            await move_clock(loop)
            gate.set()
            assert await client.reader.readexactly(1) == b"b"

    with asyncio.Runner(loop_factory=ClockLoop) as runner:
        runner.run(scenario())
