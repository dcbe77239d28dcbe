"""What the listener bears from strangers: heads, framing and times have bounds, and every refusal is JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import pytest
from api_fakes import served

from agentenv.cli import http_protocol
from agentenv.cli.http_protocol import MAX_FRAMING_BYTES, MAX_HEAD_BYTES, MAX_PIPELINED
from agentenv.proxy.exchange import CUT_EXTENSION

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Served:
    """Raw connections to a server whose application a test controls."""

    url: str
    scopes: list[Any]
    bodies: list[bytes]
    gate: asyncio.Event

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def all_of(self, raw: bytes) -> bytes:
        """Everything that the server says to these bytes until it closes."""
        async with self.client() as (reader, writer):
            writer.write(raw)
            return await reader.read()


@contextlib.asynccontextmanager
async def open_server() -> AsyncIterator[Served]:
    scopes: list[Any] = []
    bodies: list[bytes] = []
    gate = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        if scope["path"] == "/cut":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"9")]})
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
            scope["extensions"][CUT_EXTENSION]["cut"]()
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                bodies.append(b"left")
                return
            body, more = body + message["body"], message["more_body"]
        bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        if scope["path"] == "/slow":
            await gate.wait()
        await send({"type": "http.response.body", "body": b"ok"})

    async with served(app) as url:
        yield Served(url, scopes, bodies, gate)


@pytest.fixture
async def server() -> AsyncIterator[Served]:
    async with open_server() as server:
        yield server


def refusals(raw: bytes) -> list[int]:
    """The statuses of all answers; the last one must be a refusal of the listener."""
    head, _, body = raw.rpartition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    start = max(number for number, line in enumerate(lines) if b"HTTP/1.1 " in line)
    fields = dict(line.decode().split(": ", 1) for line in lines[start + 1 :])
    value = json.loads(body)
    assert set(value) == {"code", "message"}
    assert (fields["content-type"], fields["connection"]) == ("application/json", "close")
    assert int(fields["content-length"]) == len(body)
    assert parsedate_to_datetime(fields["date"]).tzinfo is not None
    statuses = [int(part[:3]) for part in raw.split(b"HTTP/1.1 ")[1:]]
    assert statuses[-1] == value["code"]
    return statuses


@pytest.mark.parametrize("ahead", [0, 1], ids=["first", "kept alive"])
@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * MAX_HEAD_BYTES,
        b"GET /" + b"a" * MAX_HEAD_BYTES,
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * (MAX_HEAD_BYTES // 6),
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n" + b"a" * MAX_HEAD_BYTES,
    ],
    ids=["value", "target", "lines", "complete", "name"],
)
async def test_heads_have_a_largest_size(server: Served, ahead: int, head: bytes) -> None:
    async with server.client() as (reader, writer):
        for _ in range(ahead):
            writer.write(GET)
            await reader.readuntil(b"ok")
        writer.write(head)
        assert refusals(await reader.read()) == [431]
    assert len(server.scopes) == ahead


async def test_a_head_behind_another_request_has_a_bound_too(server: Served) -> None:
    head = b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * MAX_HEAD_BYTES
    assert refusals(await server.all_of(GET + head + b"\r\n\r\n")) == [200, 431]
    assert refusals(await server.all_of(GET + head + b"a" * (1 << 20))) == [200, 431]
    assert len(server.scopes) == 2


async def test_a_head_in_small_pieces_has_the_same_bound(server: Served) -> None:
    async with server.client() as (reader, writer):
        writer.write(GET)
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nX: ")
        for _ in range(17):
            writer.write(b"a" * 4096)
            await writer.drain()
            await asyncio.sleep(0)
        assert refusals(await reader.read()) == [431]
    assert len(server.scopes) == 1


async def test_a_head_just_below_the_bound_is_served(server: Served) -> None:
    value = b"a" * (MAX_HEAD_BYTES - 100)
    async with server.client() as (reader, writer):
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nX: " + value + b"\r\n\r\n")
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
    assert [dict(scope["headers"])[b"x"] for scope in server.scopes] == [value] * 2


async def test_a_flood_is_answered_and_dropped_while_others_are_served(server: Served) -> None:
    async with server.client() as (reader, writer), server.client() as (other_reader, other_writer):
        writer.write(b"GET / HTTP/1.1\r\nHost: a\r\nX: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(150):
                writer.write(b"a" * (1 << 20))
                await writer.drain()
                other_writer.write(GET)
                assert (await other_reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        assert refusals(await reader.read()) == [431]


@pytest.mark.parametrize(
    "raw",
    [
        b"FOO / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: a\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n",
        b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nX Y: z\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_told_so_in_json(server: Served, raw: bytes) -> None:
    assert refusals(await server.all_of(raw)) == [400]
    assert server.scopes == []


async def test_a_refusal_waits_for_the_answers_before_it(server: Served) -> None:
    async with server.client() as (reader, writer):
        writer.write(GET.replace(b"/ ", b"/slow ") + GET + b"no request at all\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        server.gate.set()
        answers = b"HTTP/1.1 200 OK\r\n\r\n" + await reader.read()
    assert refusals(answers) == [200, 200, 400]
    assert answers.count(b"\r\n\r\nok") == 2


async def test_requests_sent_ahead_have_a_largest_number(server: Served) -> None:
    async with server.client() as (reader, writer):
        writer.write(GET.replace(b"/ ", b"/slow ") + GET * (MAX_PIPELINED + 5))
        await reader.readuntil(b"\r\n\r\n")
        server.gate.set()
        assert refusals(b"HTTP/1.1 200 OK\r\n\r\n" + await reader.read()) == [200] * (1 + MAX_PIPELINED) + [429]


@pytest.mark.parametrize(
    "endless",
    [b"5;" + b"a" * 4096, b"5\r\nhello\r\n0\r\nX: " + b"a" * 4096],
    ids=["chunk extension", "trailer"],
)
async def test_framing_has_a_largest_overhead(server: Served, endless: bytes) -> None:
    async with server.client() as (reader, writer):
        writer.write(CHUNKED)
        await writer.drain()
        writer.write(endless)
        for _ in range(2 * MAX_FRAMING_BYTES // 4096):
            writer.write(b"a" * 4096)
            await writer.drain()
            await asyncio.sleep(0)
        assert refusals(await reader.read()) == [400]
    assert server.bodies == [b"left"]


async def test_long_bodies_in_tiny_chunks_are_ordinary(server: Served) -> None:
    async with server.client() as (reader, writer):
        writer.write(CHUNKED)
        for _ in range(500):
            writer.write(b"1;ext=1\r\nx\r\n" * 100)
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
    assert server.bodies == [b"x" * 50_000]


async def test_trailers_are_not_taken_for_headers(server: Served) -> None:
    async with server.client() as (reader, writer):
        writer.write(CHUNKED + b"5\r\nhello\r\n0\r\nX-API-Key: k\r\n\r\n" + GET)
        await reader.readuntil(b"ok")
        await reader.readuntil(b"ok")
    assert server.bodies == [b"hello", b""]
    assert all(name != b"x-api-key" for scope in server.scopes for name, _ in scope["headers"])


async def test_a_malformed_body_is_refused_and_its_request_ends(server: Served) -> None:
    assert refusals(await server.all_of(CHUNKED + b"zz\r\n")) == [400]
    assert server.bodies == [b"left"]


async def test_an_upgrade_that_is_not_offered_is_answered_and_ends_the_connection(server: Served) -> None:
    answer = await server.all_of(GET.replace(b"Host", b"Connection: Upgrade\r\nUpgrade: h2c\r\nHost") + GET)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer and answer.endswith(b"ok")


async def test_an_answer_that_is_cut_on_purpose_is_no_error_of_the_server(
    server: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        answer = await server.all_of(GET.replace(b"/ ", b"/cut "))
    assert answer.endswith(b"\r\n\r\npart")
    assert caplog.records == []


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock a test moves on."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead

    async def skip(self, seconds: float) -> None:
        fired = asyncio.Event()
        self.call_later(seconds - 0.5, fired.set)
        self.ahead += seconds
        await fired.wait()


def test_a_head_has_a_time_and_silence_elsewhere_has_none() -> None:
    day = 24 * 3600.0

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ClockLoop)
        async with open_server() as server, server.client() as idle, server.client() as slow, server.client() as late:
            slow[1].write(GET.replace(b"/ ", b"/slow ") + b"GET / HT")
            await slow[0].readuntil(b"\r\n\r\n")
            late[1].write(b"GET / HTTP/1.1\r\nHo")
            idle[1].write(b"GET / HTTP/1.1\r\nHost: a")
            idle[1].write(b"\r\n\r\n")
            await idle[0].readuntil(b"ok")
            await loop.skip(http_protocol.HEAD_TIMEOUT_S + 1)
            assert refusals(await late[0].read()) == [408]
            # Nothing was due for the others: one is between requests, the other gets its answer.
            idle[1].write(GET)
            await idle[0].readuntil(b"ok")
            await loop.skip(day)
            server.gate.set()
            assert await slow[0].readexactly(2) == b"ok"
            await loop.skip(http_protocol.HEAD_TIMEOUT_S + 1)
            assert refusals(await slow[0].read()) == [408]

    with asyncio.Runner(loop_factory=ClockLoop) as runner:
        runner.run(scenario())
