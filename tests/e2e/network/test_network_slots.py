"""Life of network slots: made, handed out, adopted, destroyed; what a killed server leaves; ready signal and DNS."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from network_lab import (
    ANSWER,
    GATEWAY,
    PUBLIC,
    QUERY,
    FakeGuest,
    FakeResolver,
    World,
    add_host_bridge,
    assert_closed,
    assert_open,
    guest_of,
    pool_of,
)

from agentenv.config import NetworkSettings
from agentenv.errors import CapacityError, NetworkError
from agentenv.network import slots as slots_module
from agentenv.network.base import READY_PORT, EgressPolicy
from agentenv.network.namespaces import NETNS_DIR
from agentenv.network.pool import SlotPool

pytestmark = pytest.mark.root

CLAIMS = Path("/run/aenv/slots")
FORWARD = Path("/proc/sys/net/ipv4/ip_forward")


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


async def test_noise_is_no_ready_signal(home: Path) -> None:
    async with guest_of(home) as (pool, slot, guest):
        sender = guest.socket(socket.SOCK_DGRAM)
        sender.sendto(b"noise", (GATEWAY, READY_PORT))
        # A DNS round through the same tap and loop: the noise was read before its answer came back.
        await guest.ask(GATEWAY, 53, QUERY)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.wait_ready(slot), 0)


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
