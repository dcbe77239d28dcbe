"""What a guest reaches and who reaches a guest: real namespaces, taps and rules, no VM."""

from __future__ import annotations

import asyncio
import socket
import struct
import subprocess
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from network_lab import (
    EVERYTHING,
    GATEWAY,
    HOST_ADDRESS,
    METADATA,
    METADATA_2,
    PRIVATE,
    PRIVATE_2,
    PUBLIC,
    PUBLIC_2,
    FakeGuest,
    FakeResolver,
    World,
    add_host_address,
    assert_closed,
    assert_open,
    connect_from_host,
    guest_of,
    net,
    pool_of,
    seen_after,
    seen_until,
)

from agentenv.config import NetworkSettings
from agentenv.errors import NetworkError
from agentenv.network import slots as slots_module
from agentenv.network.base import EgressPolicy
from agentenv.network.checks import HostCheck, check_host

pytestmark = pytest.mark.root


async def test_default_policy_opens_the_internet_and_closes_private_ranges(home: Path, world: World) -> None:
    async with guest_of(home) as (_, _, guest):
        await assert_open(guest, PUBLIC, PUBLIC_2)
        await assert_closed(guest, PRIVATE, PRIVATE_2, METADATA, METADATA_2)
        assert set(world.peers) == {HOST_ADDRESS}, "the world must see the host's address only"
        assert not [item for item in await seen_after(guest, world) if item[0] == b"closed"]


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
            frames: list[bytes] = []
            while not (frames and b"marker" in frames[-1]):
                receiving = asyncio.get_running_loop().sock_recvfrom(capture, 4096)
                frame, (_, _, direction, *_) = await asyncio.wait_for(receiving, 15)
                if direction != socket.PACKET_OUTGOING:  # the host announces its own end of the pair by itself
                    frames.append(frame)
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
                with pytest.raises(OSError) as refused:
                    await guest.ask(PUBLIC_2, 80, b"leak")
                # The kernel limits the rate of its refusals; silence is as closed.
                assert isinstance(refused.value, TimeoutError) or "No route to host" in str(refused.value)
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


def finding(name: str, settings: NetworkSettings | None = None) -> HostCheck:
    return next(check for check in check_host(settings or NetworkSettings()) if check.name == name)


def test_a_capable_host_passes_all_checks() -> None:
    assert [check for check in check_host(NetworkSettings()) if not check.ok] == []


def test_another_firewall_that_drops_is_found_with_its_mend() -> None:
    rules = "add table ip filter\nadd chain ip filter FORWARD { type filter hook forward priority 0; policy drop; }\n"
    subprocess.run(["nft", "-f", "-"], input=rules + "add chain ip filter DOCKER-USER\n", text=True, check=True)
    check = finding("other firewalls")
    assert not check.ok
    assert "iptables -I DOCKER-USER -i aenv+ -j ACCEPT" in check.mend


async def test_a_slot_range_in_use_is_found(home: Path, world: World) -> None:
    check = finding("slot addresses", NetworkSettings(slot_cidr=IPv4Network("198.51.100.0/24")))
    assert not check.ok
    assert "world0" in check.detail
    async with guest_of(home):
        assert finding("slot addresses").ok, "the server's own slots are no conflict"


def test_missing_nft_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert finding("nft").mend == "apt-get install nftables"
