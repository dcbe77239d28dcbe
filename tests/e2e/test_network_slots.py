"""Network slots with real namespaces, taps and rules, no VM: what a guest can reach, and what stays behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from network_lab import (
    HOST_ADDRESS,
    METADATA,
    METADATA_2,
    PRIVATE,
    PRIVATE_2,
    PUBLIC,
    PUBLIC_2,
    FakeGuest,
    World,
    add_host_address,
    add_host_bridge,
    private_host,
)

from agentenv.config import NetworkSettings
from agentenv.errors import CapacityError, NetworkError
from agentenv.network import slots as slots_module
from agentenv.network.base import GATEWAY_ADDRESS, READY_PORT, EgressPolicy, Slot
from agentenv.network.namespaces import NETNS_DIR
from agentenv.network.pool import SlotPool

pytestmark = pytest.mark.root

GATEWAY = str(GATEWAY_ADDRESS)
EVERYTHING = IPv4Network("0.0.0.0/0")
CLAIMS = Path("/run/aenv/slots")
FORWARD = Path("/proc/sys/net/ipv4/ip_forward")
QUERY = bytes.fromhex("beef01000001000000000000") + b"\x05agent\x03env\x00\x00\x01\x00\x01"
ANSWER = bytes.fromhex("beef81800001000100000000") + QUERY[12:] + bytes.fromhex("c00c00010001000000010004cb007107")


def net(*texts: str) -> tuple[IPv4Network, ...]:
    return tuple(IPv4Network(text) for text in texts)


@pytest.fixture(autouse=True)
def host() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    with private_host():
        yield


@pytest.fixture
async def world(host: None) -> AsyncIterator[World]:
    made = World()
    await made.serve()
    yield made
    made.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir()
    return path


@contextlib.asynccontextmanager
async def pool_of(home: Path, keep: tuple[int, ...] = (), **settings: object) -> AsyncIterator[SlotPool]:
    pool = SlotPool(NetworkSettings.model_validate({"warm_slots": 1, **settings}), home)
    await pool.start(keep)
    try:
        yield pool
    finally:
        await pool.close()


@contextlib.asynccontextmanager
async def guest_of(
    home: Path, policy: EgressPolicy | None = None, **settings: object
) -> AsyncIterator[tuple[SlotPool, Slot, FakeGuest]]:
    async with pool_of(home, **settings) as pool:
        slot = await pool.acquire()
        if policy is not None:
            await pool.apply_policy(slot, policy)
        guest = FakeGuest(slot)
        try:
            yield pool, slot, guest
        finally:
            guest.close()
            await pool.release(slot)


async def assert_open(guest: FakeGuest, *addresses: str) -> None:
    for address in addresses:
        (await guest.connect(address, 80)).close()
        assert await guest.ask(address, 80, address.encode()) == address.encode()


async def assert_closed(guest: FakeGuest, *addresses: str, port: int = 80) -> None:
    """TCP and UDP are refused at once (a time-out would mean that a packet went astray)."""
    for address in addresses:
        with pytest.raises(ConnectionRefusedError):
            await guest.connect(address, port)
        with pytest.raises(OSError, match="No route to host"):
            await guest.ask(address, port, b"closed")


async def seen_until(world: World, marker: bytes) -> list[tuple[bytes, str]]:
    """All datagrams that arrived before the marker."""
    found = []
    while True:
        data, source = await asyncio.wait_for(world.datagrams.get(), 15)
        if data == marker:
            return found
        found.append((data, source))


async def test_default_policy_opens_the_internet_and_closes_private_ranges(home: Path, world: World) -> None:
    async with guest_of(home) as (_, _, guest):
        await assert_open(guest, PUBLIC, PUBLIC_2)
        await assert_closed(guest, PRIVATE, PRIVATE_2, METADATA, METADATA_2)
        assert set(world.peers) == {HOST_ADDRESS}, "the world must see the host's address only"
        assert not [item for item in await seen_after(guest, world) if item[0] == b"closed"]


async def seen_after(guest: FakeGuest, world: World) -> list[tuple[bytes, str]]:
    await guest.ask(PUBLIC, 80, b"marker")
    return await seen_until(world, b"marker")


async def test_deny_all_closes_every_way_out(home: Path, world: World) -> None:
    resolver = await FakeResolver.start(("127.0.0.1", 53))
    async with guest_of(home, EgressPolicy(internet=False), dns_servers=["127.0.0.1"]) as (_, slot, guest):
        await assert_closed(guest, PUBLIC, PRIVATE, METADATA, HOST_ADDRESS)
        await assert_closed(guest, GATEWAY, port=53)
        assert await icmp_reply_types(guest, PUBLIC) == [3], "an echo request must come back as 'unreachable'"
        assert resolver.questions == []
        assert world.datagrams.empty()
        assert world.peers == []
        # The ways in stay open: the host reaches the guest, the guest can say that it is ready.
        listener = guest.socket(bind=("0.0.0.0", 49983))
        reached = await connect_from_host(slot, 49983)
        peer, _ = await asyncio.get_running_loop().sock_accept(listener)
        peer.close()
        reached.close()
    await resolver.close()


async def icmp_reply_types(guest: FakeGuest, address: str) -> list[int]:
    raw = guest.raw_icmp()
    loop = asyncio.get_running_loop()
    body = struct.pack("!BBHHH", 8, 0, 0xF7FC, 1, 2)
    await loop.sock_sendto(raw, body, (address, 0))
    packet = await asyncio.wait_for(loop.sock_recv(raw, 2048), 15)
    return [packet[(packet[0] & 15) * 4]]


async def test_ping_passes_under_the_default_policy(home: Path, world: World) -> None:
    async with guest_of(home) as (_, _, guest):
        assert await icmp_reply_types(guest, PUBLIC) == [0]
        assert await icmp_reply_types(guest, PRIVATE) == [3]


async def test_ipv6_and_foreign_sources_never_leave(home: Path, world: World) -> None:
    async with guest_of(home) as (_, slot, guest):
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as capture:
            capture.bind((slot.veth, 3))
            capture.setblocking(False)
            guest.add_ipv6_route()
            sender = guest.socket(socket.SOCK_DGRAM, family=socket.AF_INET6)
            sender.sendto(b"six", ("2001:db8::9", 80))
            spoofed = guest.socket_from("198.51.100.77")
            spoofed.sendto(b"spoofed", (PUBLIC, 80))
            assert await guest.ask(PUBLIC, 80, b"marker") == b"marker"
            assert await seen_until(world, b"marker") == []
            frames = []
            while not (frames and b"marker" in frames[-1]):
                frames.append(await asyncio.wait_for(asyncio.get_running_loop().sock_recv(capture, 4096), 15))
        assert not [frame for frame in frames if frame[12:14] == b"\x86\xdd" or b"spoofed" in frame]


async def test_allow_list_beats_deny_all(home: Path, world: World) -> None:
    policy = EgressPolicy(allow=net(f"{PUBLIC}/32"), deny=(EVERYTHING,))
    async with guest_of(home, policy) as (_, _, guest):
        await assert_open(guest, PUBLIC)
        await assert_closed(guest, PUBLIC_2, PRIVATE)
        await assert_closed(guest, GATEWAY, port=53)


async def test_deny_list_closes_single_destinations(home: Path, world: World) -> None:
    async with guest_of(home, EgressPolicy(deny=net("203.0.113.8/31"))) as (_, _, guest):
        await assert_open(guest, PUBLIC)
        await assert_closed(guest, PUBLIC_2)


async def test_allow_opens_named_private_destinations_but_never_metadata(home: Path, world: World) -> None:
    policy = EgressPolicy(allow=net(f"{PRIVATE}/32", f"{METADATA}/32", f"{METADATA_2}/32"))
    async with guest_of(home, policy) as (_, _, guest):
        await assert_open(guest, PRIVATE, PUBLIC)
        await assert_closed(guest, PRIVATE_2, METADATA, METADATA_2)


async def test_allowing_everything_means_the_internet(home: Path, world: World) -> None:
    policy = EgressPolicy(internet=False, allow=(EVERYTHING,))
    async with guest_of(home, policy) as (_, _, guest):
        await assert_open(guest, PUBLIC)
        await assert_closed(guest, PRIVATE, METADATA)


async def test_operator_opens_private_and_even_reserved_addresses(home: Path, world: World) -> None:
    async with guest_of(home, allow_private=["10.99.0.0/24", f"{METADATA}/32"]) as (pool, slot, guest):
        await assert_open(guest, PRIVATE, METADATA, PUBLIC)
        await assert_closed(guest, PRIVATE_2)
        await pool.apply_policy(slot, EgressPolicy(deny=net(f"{PRIVATE}/32")))
        await assert_closed(guest, PRIVATE)
        await pool.apply_policy(slot, EgressPolicy(internet=False))
        await assert_closed(guest, METADATA)


async def test_policy_is_replaced_without_a_gap(home: Path, world: World) -> None:
    async with guest_of(home) as (pool, slot, guest):
        loop = asyncio.get_running_loop()
        policies = [EgressPolicy(deny=net(f"{PUBLIC_2}/32", f"192.0.2.{i}/32")) for i in range(12)]
        await pool.apply_policy(slot, policies[0])
        done = asyncio.Event()

        async def talk() -> int:
            connection = await guest.connect(PUBLIC, 80)
            rounds = 0
            while not done.is_set():
                await loop.sock_sendall(connection, b"ping")
                assert await asyncio.wait_for(loop.sock_recv(connection, 16), 15) == b"ping"
                rounds += 1
            return rounds

        async def probe() -> int:
            rounds = 0
            while not done.is_set():
                with pytest.raises(OSError, match="No route to host"):
                    await guest.ask(PUBLIC_2, 80, b"leak")
                rounds += 1
            return rounds

        async with asyncio.TaskGroup() as group:
            talking, probing = group.create_task(talk()), group.create_task(probe())
            for policy in policies[1:]:
                await pool.apply_policy(slot, policy)
            done.set()
        assert talking.result() > 0
        assert probing.result() > 0
        assert b"leak" not in [data for data, _ in await seen_after(guest, world)]


async def test_a_tighter_policy_cuts_open_connections(home: Path, world: World) -> None:
    async with guest_of(home) as (pool, slot, guest):
        loop = asyncio.get_running_loop()
        connection = await guest.connect(PUBLIC, 80)
        await loop.sock_sendall(connection, b"before")
        assert await loop.sock_recv(connection, 16) == b"before"
        await pool.apply_policy(slot, EgressPolicy(internet=False))
        await loop.sock_sendall(connection, b"after")
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(loop.sock_recv(connection, 16), 15)
        await pool.apply_policy(slot, EgressPolicy())
        await assert_open(guest, PUBLIC)


async def test_a_refused_ruleset_leaves_the_former_policy(home: Path, world: World) -> None:
    async with guest_of(home, EgressPolicy(internet=False)) as (pool, slot, guest):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                slots_module, "render_policy", lambda *_: "flush chain inet aenv policy_egress\nadd rule nonsense\n"
            )
            with pytest.raises(NetworkError):
                await pool.apply_policy(slot, EgressPolicy())
        await assert_closed(guest, PUBLIC)
        await pool.apply_policy(slot, EgressPolicy())
        await assert_open(guest, PUBLIC)


async def test_services_of_the_host_are_out_of_reach(home: Path, world: World) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "0.0.0.0", 7070)
    wide = EgressPolicy(allow=net("10.0.0.0/8"))
    async with guest_of(home, wide) as (_, slot, guest), server:
        await assert_closed(guest, str(slot.host_address), HOST_ADDRESS, str(slot.address), port=7070)
        for address in ("127.0.0.1", "169.254.0.22"):
            with pytest.raises(OSError, match=r"Connect call failed"):
                await guest.connect(address, 7070)


async def test_an_operator_can_open_one_address_of_the_host(home: Path, world: World) -> None:
    add_host_address("10.77.0.1")
    add_host_address("10.78.0.1")
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "0.0.0.0", 7070)
    # A single address opens a service of the host; a range opens what lies beyond it only.
    async with guest_of(home, allow_private=["10.77.0.1/32", "10.78.0.0/16"]) as (_, _, guest), server:
        (await guest.connect("10.77.0.1", 7070)).close()
        await assert_closed(guest, "10.78.0.1", port=7070)


async def test_slots_do_not_reach_each_other(home: Path, world: World) -> None:
    async with pool_of(home, allow_private=["10.200.0.0/16"]) as pool:
        one, two = await pool.acquire(), await pool.acquire()
        first, second = FakeGuest(one), FakeGuest(two)
        listener = second.socket(bind=("0.0.0.0", 80))
        second.socket(socket.SOCK_DGRAM, bind=("0.0.0.0", 80))
        (await connect_from_host(two, 80)).close()
        (await asyncio.get_running_loop().sock_accept(listener))[0].close()
        await assert_closed(first, str(two.address), str(two.host_address))
        with pytest.raises(BlockingIOError):
            listener.accept()
        first.close()
        second.close()
        await pool.release(one)
        await pool.release(two)


async def connect_from_host(slot: Slot, port: int) -> socket.socket:
    one = socket.socket()
    one.setblocking(False)
    await asyncio.wait_for(asyncio.get_running_loop().sock_connect(one, (str(slot.address), port)), 15)
    return one


@pytest.mark.parametrize("port", [1, 22, 53, 49980, 49983, 65535])
async def test_the_host_reaches_every_port_of_the_guest(home: Path, port: int) -> None:
    async with guest_of(home, EgressPolicy(internet=False)) as (_, slot, guest):
        loop = asyncio.get_running_loop()
        listener = guest.socket(bind=("0.0.0.0", port))
        connection = await connect_from_host(slot, port)
        accepted, peer = await loop.sock_accept(listener)
        assert peer[0] == GATEWAY
        await loop.sock_sendall(connection, b"x" * 100_000)
        connection.shutdown(socket.SHUT_WR)
        received = 0
        while data := await asyncio.wait_for(loop.sock_recv(accepted, 65536), 15):
            received += len(data)
        assert received == 100_000
        accepted.close()
        connection.close()
        datagrams = guest.socket(socket.SOCK_DGRAM, bind=("0.0.0.0", port))
        with socket.socket(type=socket.SOCK_DGRAM) as asking:
            asking.setblocking(False)
            asking.sendto(b"hi", (str(slot.address), port))
            data, peer = await asyncio.wait_for(loop.sock_recvfrom(datagrams, 16), 15)
            assert (data, peer[0]) == (b"hi", GATEWAY)
            datagrams.sendto(b"yes", peer)
            assert await asyncio.wait_for(loop.sock_recv(asking, 16), 15) == b"yes"


async def test_others_do_not_reach_the_guest_through_the_host(home: Path, world: World) -> None:
    async with guest_of(home) as (_, slot, guest):
        guest.socket(bind=("0.0.0.0", 80))
        received = guest.socket(socket.SOCK_DGRAM, bind=("0.0.0.0", 81))
        world.add_route("10.200.0.0/16", HOST_ADDRESS)
        outside = world.socket(socket.SOCK_DGRAM)
        outside.sendto(b"intruder", (str(slot.address), 81))
        with socket.socket(type=socket.SOCK_DGRAM) as marker:
            # Behind the intruder's datagram on the same links; only this one may arrive.
            assert await guest.ask(PUBLIC, 80, b"flush") == b"flush"
            marker.sendto(b"marker", (str(slot.address), 81))
        loop = asyncio.get_running_loop()
        assert await asyncio.wait_for(loop.sock_recv(received, 64), 15) == b"marker"


async def test_ready_signal_is_kept_for_whoever_waits_later(home: Path) -> None:
    async with guest_of(home, EgressPolicy(internet=False)) as (pool, slot, guest):
        waiting = asyncio.ensure_future(pool.wait_ready(slot))
        other = guest.socket(socket.SOCK_DGRAM)
        other.sendto(b"noise", (GATEWAY, READY_PORT))
        other.sendto(b"ready", (GATEWAY, READY_PORT))
        await asyncio.wait_for(waiting, 15)
        await asyncio.wait_for(pool.wait_ready(slot), 15)
        pool.clear_ready(slot)
        waiting = asyncio.ensure_future(pool.wait_ready(slot))
        other.sendto(b"ready", (GATEWAY, READY_PORT))
        await asyncio.wait_for(waiting, 15)
        assert await pool.acquire() != slot


async def test_noise_is_no_ready_signal(home: Path) -> None:
    async with guest_of(home) as (pool, slot, guest):
        sender = guest.socket(socket.SOCK_DGRAM)
        sender.sendto(b"noise", (GATEWAY, READY_PORT))
        # A DNS round through the same tap and loop: the noise was read before its answer came back.
        await guest.ask(GATEWAY, 53, QUERY)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.wait_ready(slot), 0)


class FakeResolver:
    """A resolver on the host that knows one answer."""

    def __init__(self) -> None:
        self.questions: list[bytes] = []

    @classmethod
    async def start(cls, address: tuple[str, int]) -> FakeResolver:
        made = cls()
        loop = asyncio.get_running_loop()

        class Udp(asyncio.DatagramProtocol):
            def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
                self.transport = transport

            def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
                made.questions.append(data)
                self.transport.sendto(data[:2] + ANSWER[2:], addr)

        async def tcp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            size = int.from_bytes(await reader.readexactly(2), "big")
            data = await reader.readexactly(size)
            made.questions.append(data)
            writer.write(len(ANSWER).to_bytes(2, "big") + data[:2] + ANSWER[2:])
            writer.close()

        made._udp, _ = await loop.create_datagram_endpoint(Udp, local_addr=address)
        made._tcp = await asyncio.start_server(tcp, *address)
        return made

    async def close(self) -> None:
        self._udp.abort()
        self._tcp.close()


async def ask_tcp(guest: FakeGuest, query: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    connection = await guest.connect(GATEWAY, 53)
    await loop.sock_sendall(connection, len(query).to_bytes(2, "big") + query)
    received = b""
    while len(received) < 2 or len(received) < 2 + int.from_bytes(received[:2], "big"):
        data = await asyncio.wait_for(loop.sock_recv(connection, 4096), 15)
        assert data, "closed without an answer"
        received += data
    connection.close()
    return received[2:]


async def test_dns_reaches_the_resolver_on_the_hosts_loopback(home: Path, tmp_path: Path) -> None:
    resolver = await FakeResolver.start(("127.0.0.53", 53))
    conf = tmp_path / "resolv.conf"
    conf.write_text("search example.org\nnameserver 127.0.0.53\noptions edns0 trust-ad\n")
    pool = SlotPool(NetworkSettings(warm_slots=0), home, resolv_conf=conf)
    await pool.start(())
    slot = await pool.acquire()
    guest = FakeGuest(slot)
    assert await guest.ask(GATEWAY, 53, QUERY) == ANSWER
    assert await ask_tcp(guest, QUERY) == ANSWER
    assert resolver.questions == [QUERY, QUERY]
    await resolver.close()
    # Nobody answers there any more: SERVFAIL, with the question in it.
    failure = await guest.ask(GATEWAY, 53, QUERY)
    assert failure[:2] == QUERY[:2] and failure[3] & 15 == 2 and failure[12:] == QUERY[12:]
    # The host moved to an IPv6 resolver.
    six = await FakeResolver.start(("::1", 53))
    conf.with_suffix(".new").write_text("nameserver ::1\n")
    conf.with_suffix(".new").replace(conf)
    assert await guest.ask(GATEWAY, 53, QUERY) == ANSWER
    assert await ask_tcp(guest, QUERY) == ANSWER
    await six.close()
    guest.close()
    await pool.release(slot)
    await pool.close()


OWNER = """
import asyncio, sys
from pathlib import Path
from agentenv.config import NetworkSettings
from agentenv.network.base import EgressPolicy
from agentenv.network.pool import SlotPool

async def main():
    pool = SlotPool(NetworkSettings(warm_slots=2), Path(sys.argv[1]))
    await pool.start(())
    slots = [await pool.acquire() for _ in range(2)]
    await pool.apply_policy(slots[0], EgressPolicy(internet=False))
    print("slots", *(slot.index for slot in slots), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def killed_owner(home: Path) -> tuple[int, int]:
    """Run a server's pool in a process of its own and kill it with two slots in use; return their indexes."""
    with subprocess.Popen([sys.executable, "-c", OWNER, str(home)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first, second = next(line.split()[1:] for line in process.stdout if line.startswith("slots "))
        process.send_signal(signal.SIGKILL)
        process.wait()
    return int(first), int(second)


def namespaces_left() -> set[str]:
    return {path.name for path in NETNS_DIR.iterdir() if path.name.startswith("aenv-")} if NETNS_DIR.exists() else set()


def links_left() -> set[str]:
    return {name for _, name in socket.if_nameindex() if name.startswith("aenv")}


def claims_left() -> set[int]:
    return {int(path.name) for path in CLAIMS.iterdir()} if CLAIMS.exists() else set()


def host_table() -> bool:
    done = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, check=True)
    return "aenv_host" in done.stdout


async def test_leftovers_of_a_killed_server_are_removed_and_live_slots_adopted(home: Path, world: World) -> None:
    kept, lost = killed_owner(home)
    assert {kept, lost} <= claims_left()
    resolver = await FakeResolver.start(("127.0.0.1", 53))
    async with pool_of(home, keep=(kept,), warm_slots=0, dns_servers=["127.0.0.1"]) as pool:
        assert claims_left() == {kept}
        assert namespaces_left() == {f"aenv-{kept}"}
        assert links_left() == {f"aenv{kept}"}
        slot = await pool.adopt(kept)
        guest = FakeGuest(slot)
        await assert_closed(guest, PUBLIC)  # its policy outlived the server
        await pool.apply_policy(slot, EgressPolicy())
        await assert_open(guest, PUBLIC)
        assert await guest.ask(GATEWAY, 53, QUERY) == ANSWER
        guest.socket(socket.SOCK_DGRAM).sendto(b"ready", (GATEWAY, READY_PORT))
        await asyncio.wait_for(pool.wait_ready(slot), 15)
        with pytest.raises(NetworkError):
            await pool.adopt(lost)
        guest.close()
        await pool.release(slot)
    assert (claims_left(), namespaces_left(), links_left(), host_table()) == (set(), set(), set(), False)
    await resolver.close()


async def test_slots_of_a_vanished_home_are_removed_by_any_server(home: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    killed_owner(other)
    async with pool_of(home, warm_slots=0):
        assert len(claims_left()) >= 2, "the home still exists: its slots are not ours to remove"
    other.rmdir()
    async with pool_of(home, warm_slots=0):
        assert claims_left() == set()
    assert (namespaces_left(), links_left(), host_table()) == (set(), set(), False)


async def test_a_graceful_stop_keeps_slots_in_use(home: Path, world: World) -> None:
    async with pool_of(home) as pool:
        slot = await pool.acquire()
    assert claims_left() == {slot.index}
    assert host_table()
    guest = FakeGuest(slot)
    await assert_open(guest, PUBLIC)
    async with pool_of(home, keep=(slot.index,)) as pool:
        assert await pool.adopt(slot.index) == slot
        await assert_open(guest, PUBLIC)
        guest.close()
        await pool.release(slot)
    assert (claims_left(), namespaces_left(), links_left(), host_table()) == (set(), set(), set(), False)


async def test_a_kept_slot_can_be_released_without_adopting_it(home: Path) -> None:
    async with pool_of(home) as pool:
        slot = await pool.acquire()
    async with pool_of(home, keep=(slot.index,), warm_slots=0) as pool:
        await pool.release(slot)
        assert claims_left() == set()


async def test_thirty_acquires_at_once(home: Path) -> None:
    async with pool_of(home, warm_slots=2) as pool:
        slots = await asyncio.gather(*(pool.acquire() for _ in range(30)))
        assert len({slot.address for slot in slots}) == 30
        assert {slot.namespace for slot in slots} <= namespaces_left()
        await asyncio.gather(*(pool.release(slot) for slot in slots))
        await pool.release(slots[0])
        assert claims_left().isdisjoint({slot.index for slot in slots})
    assert (claims_left(), namespaces_left(), links_left()) == (set(), set(), set())
    assert not host_table()
    assert FORWARD.read_text() == "0\n"


async def test_two_servers_share_a_host_and_the_last_one_cleans_it(home: Path, tmp_path: Path, world: World) -> None:
    other = tmp_path / "other"
    other.mkdir()
    async with pool_of(home) as first:
        async with pool_of(other) as second:
            one, two = await asyncio.gather(first.acquire(), second.acquire())
            assert one.index != two.index
            await second.release(two)
        assert host_table()
        guest = FakeGuest(one)
        await assert_open(guest, PUBLIC)
        guest.close()
        await first.release(one)
    assert not host_table()
    assert FORWARD.read_text() == "0\n"


async def test_cancelled_acquires_leak_nothing(home: Path) -> None:
    async with pool_of(home, warm_slots=0) as pool:
        tasks = [asyncio.ensure_future(pool.acquire()) for _ in range(6)]
        slot = await tasks[0]
        for task in tasks[1:]:
            task.cancel()
        await asyncio.gather(*tasks[1:], return_exceptions=True)
        await pool.release(slot)
        for task in tasks[1:]:
            if not task.cancelled():
                await pool.release(task.result())
    assert (claims_left(), namespaces_left(), links_left()) == (set(), set(), set())


async def test_full_range_is_a_capacity_error_and_recovers(home: Path) -> None:
    async with pool_of(home, warm_slots=2, slot_cidr="10.200.7.0/28") as pool:
        slots = await asyncio.gather(*(pool.acquire() for _ in range(4)))
        assert len({slot.index for slot in slots}) == 4
        with pytest.raises(CapacityError):
            await pool.acquire()
        await pool.release(slots[0])
        again = await pool.acquire()
        assert again.index == slots[0].index
        for slot in (again, *slots[1:]):
            await pool.release(slot)
    assert claims_left() == set()


async def test_objects_of_others_are_left_alone(home: Path) -> None:
    add_host_bridge("aenv0")
    async with pool_of(home, warm_slots=0) as pool:
        slot = await pool.acquire()
        assert slot.index == 1
        await pool.release(slot)
    assert links_left() == {"aenv0"}
    assert (claims_left(), namespaces_left()) == (set(), set())


async def test_failed_creation_leaves_nothing(home: Path) -> None:
    async with pool_of(home, warm_slots=0) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(slots_module, "READY_PORT", 53)  # taken by the DNS socket: the last step fails
            with pytest.raises(NetworkError):
                await pool.acquire()
        assert (claims_left(), namespaces_left(), links_left()) == (set(), set(), set())
        slot = await pool.acquire()
        await pool.release(slot)


async def test_a_closed_pool_refuses(home: Path) -> None:
    async with pool_of(home) as pool:
        pass
    with pytest.raises(NetworkError):
        await pool.acquire()
    await pool.close()
