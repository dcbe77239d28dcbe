"""The DNS forwarder on loopback sockets, with resolvers that answer, refuse, lie or keep silent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import ConfigurationError
from agentenv.network.dns import DnsForwarder
from agentenv.network.resolvers import (
    HostResolvers,
    MalformedMessageError,
    check_query,
    is_answer,
    parse_resolv_conf,
    parse_server,
    servfail,
)

QUERY = bytes.fromhex("beef01000001000000000000") + b"\x05agent\x03env\x00\x00\x01\x00\x01"
ANSWER = bytes.fromhex("beef81800001000100000000") + QUERY[12:] + bytes.fromhex("c00c00010001000000010004cb007107")
REFUSED = bytes.fromhex("beef81850001000000000000") + QUERY[12:]
TRUNCATED = bytes.fromhex("beef83800001000000000000") + QUERY[12:]


class Resolver(asyncio.DatagramProtocol):
    """Answers each question with whatever `answers` says, on one UDP and TCP port."""

    def __init__(self, answers: Callable[[bytes], list[bytes]]) -> None:
        self.answers = answers
        self.questions: list[bytes] = []
        self.asked = asyncio.Event()

    async def start(self) -> Resolver:
        loop = asyncio.get_running_loop()
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = self.server.sockets[0].getsockname()
        self.transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=self.address)
        return self

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._note(data)
        for answer in self.answers(data):
            self.transport.sendto(answer, addr)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
        self._note(data)
        for answer in self.answers(data):
            writer.write(len(answer).to_bytes(2, "big") + answer)
        if not self.answers(data):
            await reader.read()
        writer.close()

    def _note(self, data: bytes) -> None:
        self.questions.append(data)
        self.asked.set()

    def close(self) -> None:
        self.transport.close()
        self.server.close()


class Setup:
    def __init__(self) -> None:
        self.resolvers: list[Resolver] = []
        self.forwarder: DnsForwarder | None = None

    async def resolver(self, answers: Callable[[bytes], list[bytes]]) -> Resolver:
        made = await Resolver(answers).start()
        self.resolvers.append(made)
        return made

    async def forward(self, *to: Resolver | tuple[str, int], timeout_s: float = 10, **limits: int) -> None:
        udp = socket.socket(type=socket.SOCK_DGRAM)
        tcp = socket.socket()
        udp.bind(("127.0.0.1", 0))
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        for one in (udp, tcp):
            one.setblocking(False)
        self.udp, self.tcp = udp.getsockname(), tcp.getsockname()
        places = [one.address if isinstance(one, Resolver) else one for one in to]
        servers = [f"{host}:{port}" for host, port in places]
        self.forwarder = DnsForwarder(udp, tcp, HostResolvers(servers, timeout_s=timeout_s), **limits)
        await self.forwarder.start()

    async def ask(self, *queries: bytes) -> bytes:
        """Send datagrams and return the first answer."""
        loop = asyncio.get_running_loop()
        with socket.socket(type=socket.SOCK_DGRAM) as one:
            one.setblocking(False)
            one.connect(self.udp)
            for query in queries:
                one.send(query)
            return await asyncio.wait_for(loop.sock_recv(one, 65535), 15)

    async def ask_tcp(self, *queries: bytes) -> list[bytes]:
        reader, writer = await asyncio.open_connection(*self.tcp)
        for query in queries:
            writer.write(len(query).to_bytes(2, "big") + query)
        answers = []
        for _ in queries:
            size = int.from_bytes(await asyncio.wait_for(reader.readexactly(2), 15), "big")
            answers.append(await reader.readexactly(size))
        writer.close()
        return answers

    async def close(self) -> None:
        if self.forwarder is not None:
            await self.forwarder.close()
            await self.forwarder.close()
        for resolver in self.resolvers:
            resolver.close()


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    made = Setup()
    yield made
    await made.close()


def closed_port() -> tuple[str, int]:
    with socket.socket(type=socket.SOCK_DGRAM) as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()


async def test_relays_both_ways_unchanged(setup: Setup) -> None:
    resolver = await setup.resolver(lambda _: [ANSWER])
    await setup.forward(resolver)
    assert await setup.ask(QUERY) == ANSWER
    other = b"\x12\x34" + QUERY[2:]
    resolver.answers = lambda query: [query[:2] + ANSWER[2:]]
    assert await setup.ask_tcp(QUERY, other) == [ANSWER, other[:2] + ANSWER[2:]]
    assert resolver.questions == [QUERY, QUERY, other]


async def test_truncated_answers_are_relayed_so_that_the_guest_asks_by_tcp(setup: Setup) -> None:
    await setup.forward(await setup.resolver(lambda _: [TRUNCATED]))
    assert await setup.ask(QUERY) == TRUNCATED


async def test_a_closed_port_and_a_refusal_lead_to_the_next_server(setup: Setup) -> None:
    refusing = await setup.resolver(lambda _: [REFUSED])
    good = await setup.resolver(lambda _: [ANSWER])
    await setup.forward(closed_port(), refusing, good)
    assert await setup.ask(QUERY) == ANSWER
    assert await setup.ask_tcp(QUERY) == [ANSWER]
    assert len(refusing.questions) == 2


async def test_a_silent_server_is_passed_over(setup: Setup) -> None:
    silent = await setup.resolver(lambda _: [])
    good = await setup.resolver(lambda _: [ANSWER])
    await setup.forward(silent, good, timeout_s=0.05)
    assert await setup.ask(QUERY) == ANSWER
    assert silent.questions == [QUERY]


async def test_when_all_refuse_the_refusal_is_the_answer(setup: Setup) -> None:
    await setup.forward(await setup.resolver(lambda _: [REFUSED]), closed_port())
    assert await setup.ask(QUERY) == REFUSED


async def test_when_nobody_answers_it_is_servfail(setup: Setup) -> None:
    await setup.forward(closed_port())
    expected = bytes.fromhex("beef81020001000000000000") + QUERY[12:]
    assert await setup.ask(QUERY) == expected
    assert await setup.ask_tcp(QUERY) == [expected]


async def test_forged_answers_are_not_believed(setup: Setup) -> None:
    wrong_id = b"\x00\x01" + ANSWER[2:]
    wrong_question = ANSWER.replace(b"agent", b"agenz")
    await setup.forward(await setup.resolver(lambda query: [wrong_id, wrong_question, query, b"x", ANSWER]))
    assert await setup.ask(QUERY) == ANSWER


async def test_malformed_packets_are_ignored(setup: Setup) -> None:
    resolver = await setup.resolver(lambda _: [ANSWER])
    await setup.forward(resolver)
    assert await setup.ask(b"", b"x", QUERY[:11], QUERY[:-5], ANSWER, b"\xff" * 600, QUERY) == ANSWER
    assert resolver.questions == [QUERY]
    reader, writer = await asyncio.open_connection(*setup.tcp)
    writer.write(b"\x00\x05hello")
    assert await asyncio.wait_for(reader.read(), 15) == b""
    writer.close()


async def test_questions_in_flight_are_bounded_and_close_ends_them(setup: Setup) -> None:
    silent = await setup.resolver(lambda _: [])
    await setup.forward(silent, max_queries=3, timeout_s=60)
    for number in range(10):
        with socket.socket(type=socket.SOCK_DGRAM) as one:
            one.sendto(bytes([0, number]) + QUERY[2:], setup.udp)
    # A TCP question is not counted there; when it has arrived, the datagrams before it were taken or dropped.
    reader, writer = await asyncio.open_connection(*setup.tcp)
    writer.write(len(QUERY).to_bytes(2, "big") + QUERY)
    while QUERY not in silent.questions or len(silent.questions) < 4:
        silent.asked.clear()
        await asyncio.wait_for(silent.asked.wait(), 15)
    assert len(silent.questions) == 4
    assert setup.forwarder is not None
    await asyncio.wait_for(setup.forwarder.close(), 15)
    with contextlib.suppress(ConnectionResetError):
        assert await asyncio.wait_for(reader.read(), 15) == b""
    writer.close()


async def test_connections_are_bounded(setup: Setup) -> None:
    await setup.forward(await setup.resolver(lambda _: [ANSWER]), max_connections=2)
    held = [await asyncio.open_connection(*setup.tcp) for _ in range(2)]
    for reader, writer in held:
        writer.write(len(QUERY).to_bytes(2, "big") + QUERY)
        assert await asyncio.wait_for(reader.readexactly(2 + len(ANSWER)), 15)
    reader, writer = await asyncio.open_connection(*setup.tcp)
    with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
        await asyncio.wait_for(reader.readexactly(1), 15)
    writer.close()
    for _, one in held:
        one.close()


@pytest.mark.parametrize(
    "scenario",
    [
        test_relays_both_ways_unchanged,
        test_a_closed_port_and_a_refusal_lead_to_the_next_server,
        test_malformed_packets_are_ignored,
        test_questions_in_flight_are_bounded_and_close_ends_them,
    ],
)
def test_the_same_on_the_loop_of_the_server(scenario: Callable[[Setup], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        made = Setup()
        try:
            await scenario(made)
        finally:
            await made.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_resolv_conf_is_read_again_when_it_changes(tmp_path: Path) -> None:
    conf = tmp_path / "resolv.conf"
    resolvers = HostResolvers(resolv_conf=conf)
    assert resolvers.servers() == (("127.0.0.1", 53),)
    conf.write_text("nameserver 192.0.2.1\n")
    assert resolvers.servers() == (("192.0.2.1", 53),)
    (tmp_path / "real").write_text("nameserver fe80::1%eth0\nnameserver 192.0.2.2\n")
    conf.unlink()
    conf.symlink_to("real")
    assert resolvers.servers() == (("fe80::1%eth0", 53), ("192.0.2.2", 53))
    conf.unlink()
    assert resolvers.servers() == (("fe80::1%eth0", 53), ("192.0.2.2", 53)), "better the old ones than none"
    assert HostResolvers(["9.9.9.9"], conf).servers() == (("9.9.9.9", 53),)


def test_resolv_conf_lines() -> None:
    text = "# nameserver 1.1.1.1\n;x\nnameserver\nnameserver b\nnameserver\t127.0.0.53 # stub\nnameserver ::1\n"
    assert parse_resolv_conf(text) == (("127.0.0.53", 53), ("::1", 53))
    assert parse_resolv_conf("") == ()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("9.9.9.9", ("9.9.9.9", 53)),
        ("9.9.9.9:5353", ("9.9.9.9", 5353)),
        ("2620:fe::fe", ("2620:fe::fe", 53)),
        ("[::1]:54", ("::1", 54)),
        ("fe80::1%eth0", ("fe80::1%eth0", 53)),
    ],
)
def test_servers_in_the_settings(text: str, expected: tuple[str, int]) -> None:
    assert parse_server(text) == expected


@pytest.mark.parametrize("text", ["", "dns.example.org", "1.2.3", "1.2.3.4:x", "1.2.3.4:99999", "[::1", "1.2.3.4/24"])
def test_bad_servers_in_the_settings(text: str) -> None:
    with pytest.raises(ConfigurationError):
        HostResolvers([text])


@given(st.binary(max_size=600), st.binary(max_size=600))
def test_any_bytes_are_either_a_query_or_malformed(query: bytes, answer: bytes) -> None:
    try:
        check_query(query)
    except MalformedMessageError:
        return
    is_answer(query, answer)
    assert is_answer(query, servfail(query))
