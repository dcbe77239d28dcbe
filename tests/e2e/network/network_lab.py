"""A machine in miniature for network tests: a private host, a world beyond its uplink, and guests without a VM.

The host is a network and mount namespace that the test's main thread enters, so that nothing of the real machine is
touched and runs may go on in parallel. A guest is a namespace whose `eth0` is pumped frame by frame to the slot's own
tap: the rules under test are exactly those of a VM. Nothing here knows how the pool works.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import selectors
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from pyroute2 import IPRoute

from agentenv.config import NetworkSettings
from agentenv.network import namespaces
from agentenv.network.base import GATEWAY_ADDRESS, GUEST_ADDRESS, GUEST_MAC, GUEST_PREFIX, TAP_NAME, EgressPolicy, Slot
from agentenv.network.pool import SlotPool
from agentenv.network.slots import TAP_MAC

HOST_ADDRESS = "198.51.100.1"
WORLD_ADDRESS = "198.51.100.2"
PUBLIC = "203.0.113.7"
PUBLIC_2 = "203.0.113.8"
PRIVATE = "10.99.0.2"
PRIVATE_2 = "172.16.9.9"
METADATA = "169.254.169.254"
METADATA_2 = "100.100.100.200"

GATEWAY = str(GATEWAY_ADDRESS)
EVERYTHING = IPv4Network("0.0.0.0/0")
QUERY = bytes.fromhex("beef01000001000000000000") + b"\x05agent\x03env\x00\x00\x01\x00\x01"
ANSWER = bytes.fromhex("beef81800001000100000000") + QUERY[12:] + bytes.fromhex("c00c00010001000000010004cb007107")
_CLONE_FS = 0x00000200
_CLONE_NEWNS = 0x00020000
_CLONE_NEWNET = 0x40000000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@contextlib.contextmanager
def private_host() -> Iterator[None]:
    """Give the calling (main) thread a network and a `/run` of its own, and its old ones back at the end."""
    directory = Path.cwd()
    old = [os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("mnt", "net")]
    _check(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWNET))
    try:
        _check(_libc.mount(b"", b"/", None, _MS_REC_PRIVATE, None))
        _check(_libc.mount(b"tmpfs", b"/run", b"tmpfs", 0, None))
        _change_host(lambda route: route.link("set", index=1, state="up"))
        # A new namespace inherits what the real host has; these tests begin with forwarding off.
        namespaces.write_sysctl("ipv4/ip_forward", "0")
        yield
    finally:
        # Threads made meanwhile share this thread's root directory, and one that is shared cannot change namespace.
        _check(_libc.unshare(_CLONE_FS))
        for descriptor, kind in zip(old, (_CLONE_NEWNS, _CLONE_NEWNET), strict=True):
            _check(_libc.setns(descriptor, kind))
            os.close(descriptor)
        os.chdir(directory)


def _change_host(change: Callable[[IPRoute], object]) -> None:
    # In a thread: pyroute2's blocking interface does not work where an event loop runs.
    def apply() -> None:
        with namespaces.netlink() as route:
            change(route)

    namespaces.in_throwaway_thread(apply)


def add_host_address(address: str) -> None:
    """Give the host one more address."""
    _change_host(lambda route: route.addr("add", index=1, address=address, prefixlen=32))


def add_host_bridge(name: str) -> None:
    """Make a device that no slot made."""
    _change_host(lambda route: route.link("add", ifname=name, kind="bridge"))


class Namespace:
    """A namespace in which the test makes sockets; they are then used in the test's own loop."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.path = namespaces.NETNS_DIR / name
        self._open: list[socket.socket] = []

    def socket(
        self, kind: int = socket.SOCK_STREAM, *, bind: tuple[str, int] | None = None, family: int = socket.AF_INET
    ) -> socket.socket:
        """Make a non-blocking socket inside; a bound stream socket listens."""

        def make() -> socket.socket:
            one = socket.socket(family, kind)
            one.setblocking(False)
            if bind is not None:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.bind(bind)
                if kind == socket.SOCK_STREAM:
                    one.listen(16)
            return one

        made = namespaces.run_in(self.path, make)
        self._open.append(made)
        return made

    async def connect(self, host: str, port: int) -> socket.socket:
        """Open a TCP connection from inside; raises what the kernel says."""
        one = self.socket()
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(one, (host, port)), 15)
        return one

    async def ask(self, host: str, port: int, text: bytes = b"hello") -> bytes:
        """Send a datagram from inside and return the answer; raises what the kernel says (ICMP errors too)."""
        loop = asyncio.get_running_loop()
        one = self.socket(socket.SOCK_DGRAM)
        one.connect((host, port))
        await loop.sock_sendall(one, text)
        return await asyncio.wait_for(loop.sock_recv(one, 4096), 15)

    def close(self) -> None:
        for one in self._open:
            one.close()
        namespaces.remove(self.name)

    def add_route(self, network: str, gateway: str) -> None:
        """Add an IPv4 route inside."""

        def add() -> None:
            with namespaces.netlink() as inner:
                inner.route("add", dst=network, gateway=gateway)

        namespaces.run_in(self.path, add)


class World(Namespace):
    """What lies beyond the host's uplink. It knows no way back to slots: it answers only to the host's address."""

    def __init__(self) -> None:
        super().__init__("world")

        def build() -> None:
            outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            with namespaces.netlink() as host:
                namespaces.create_and_enter(self.name)
                with namespaces.netlink() as inner:
                    inner.link(
                        "add", ifname="up", kind="veth", peer={"ifname": "world0", "net_ns_fd": outside}, mtu=1500
                    )
                    up = socket.if_nametoindex("up")
                    inner.link("set", index=1, state="up")
                    inner.link("set", index=up, state="up")
                    inner.addr("add", index=up, address=WORLD_ADDRESS, prefixlen=24)
                    for address in (PUBLIC, PUBLIC_2, PRIVATE, PRIVATE_2, METADATA, METADATA_2):
                        inner.addr("add", index=1, address=address, prefixlen=32)
                link = host.link("get", ifname="world0")[0]["index"]
                host.link("set", index=link, state="up")
                host.addr("add", index=link, address=HOST_ADDRESS, prefixlen=24)
                host.route("add", dst="default", gateway=WORLD_ADDRESS)
            os.close(outside)

        namespaces.in_throwaway_thread(build)
        self._servers: list[asyncio.AbstractServer] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._transports: list[asyncio.DatagramTransport] = []
        self.datagrams: asyncio.Queue[tuple[bytes, str]] = asyncio.Queue()
        """Every datagram that arrived, with its source address."""
        self.peers: list[str] = []
        """Source addresses of TCP connections."""

    async def serve(self, port: int = 80) -> None:
        """Echo on TCP and UDP at every address."""
        loop = asyncio.get_running_loop()

        async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._writers.add(writer)
            self.peers.append(writer.get_extra_info("peername")[0])
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(4096):
                    writer.write(data)
                    await writer.drain()
            self._writers.discard(writer)
            writer.close()

        self._servers.append(await asyncio.start_server(echo, sock=self.socket(bind=("0.0.0.0", port))))
        for address in (WORLD_ADDRESS, PUBLIC, PUBLIC_2, PRIVATE, PRIVATE_2, METADATA, METADATA_2):
            # One socket per address, so that the answer comes from the address that was asked.
            bound = self.socket(socket.SOCK_DGRAM, bind=(address, port))
            transport, _ = await loop.create_datagram_endpoint(lambda: _Echo(self.datagrams), sock=bound)
            self._transports.append(transport)

    def close(self) -> None:
        for server in self._servers:
            server.close()
        for transport in self._transports:
            transport.abort()
        for writer in self._writers:
            writer.transport.abort()
        super().close()


class _Echo(asyncio.DatagramProtocol):
    def __init__(self, seen: asyncio.Queue[tuple[bytes, str]]) -> None:
        self._seen = seen
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._seen.put_nowait((data, addr[0]))
        assert self._transport is not None
        self._transport.sendto(data, addr)


class FakeGuest(Namespace):
    """A guest on a slot: `eth0` with the guest's addresses, its frames copied to and from the slot's tap."""

    def __init__(self, slot: Slot) -> None:
        super().__init__(f"guest-{slot.index}")
        self.slot = slot

        def build() -> int:
            namespaces.create_and_enter(self.name)
            descriptor = namespaces.open_tap("eth0", vnet_header=False)
            with namespaces.netlink() as inner:
                eth0 = socket.if_nametoindex("eth0")
                inner.link("set", index=1, state="up")
                inner.link("set", index=eth0, address=GUEST_MAC, mtu=1400, state="up")
                inner.addr("add", index=eth0, address=str(GUEST_ADDRESS), prefixlen=GUEST_PREFIX)
                inner.route("add", dst="default", gateway=str(GATEWAY_ADDRESS))
            return descriptor

        self._ends = [
            namespaces.in_throwaway_thread(build),
            namespaces.run_in(slot.namespace_path, lambda: namespaces.open_tap(TAP_NAME, vnet_header=False)),
        ]
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._pump, name=f"pump-{slot.index}")
        self._thread.start()

    def _pump(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake_read, selectors.EVENT_READ, None)
            for here, there in (self._ends, self._ends[::-1]):
                os.set_blocking(here, False)
                selector.register(here, selectors.EVENT_READ, there)
            while True:
                for key, _ in selector.select():
                    if key.data is None:
                        return
                    # EBADFD or EIO: the other tap is down or gone, as a cable that was pulled.
                    with contextlib.suppress(OSError):
                        os.write(key.data, os.read(key.fd, 65536))

    def raw_icmp(self) -> socket.socket:
        """A raw ICMP socket inside."""

        def make() -> socket.socket:
            one = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
            one.setblocking(False)
            return one

        made = namespaces.run_in(self.path, make)
        self._open.append(made)
        return made

    def socket_from(self, address: str) -> socket.socket:
        """A datagram socket whose packets carry a foreign source address."""

        def add() -> None:
            with namespaces.netlink() as inner:
                inner.addr("add", index=socket.if_nametoindex("eth0"), address=address, prefixlen=32)

        namespaces.run_in(self.path, add)
        return self.socket(socket.SOCK_DGRAM, bind=(address, 0))

    def add_ipv6_route(self) -> None:
        """Give the guest an IPv6 address and a default route by the gateway's MAC, as a guest that wants out would."""

        def add() -> None:
            with namespaces.netlink() as inner:
                eth0 = socket.if_nametoindex("eth0")
                inner.addr("add", index=eth0, address="2001:db8::1", prefixlen=64, family=socket.AF_INET6, flags=0x02)
                inner.neigh("add", dst="2001:db8::9", lladdr=TAP_MAC, ifindex=eth0, state=0x80, family=socket.AF_INET6)

        namespaces.run_in(self.path, add)

    def close(self) -> None:
        os.write(self._wake_write, b"x")
        self._thread.join()
        for descriptor in (*self._ends, self._wake_read, self._wake_write):
            os.close(descriptor)
        super().close()


def net(*texts: str) -> tuple[IPv4Network, ...]:
    return tuple(IPv4Network(text) for text in texts)


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


async def seen_after(guest: FakeGuest, world: World) -> list[tuple[bytes, str]]:
    await guest.ask(PUBLIC, 80, b"marker")
    return await seen_until(world, b"marker")


async def connect_from_host(slot: Slot, port: int) -> socket.socket:
    one = socket.socket()
    one.setblocking(False)
    await asyncio.wait_for(asyncio.get_running_loop().sock_connect(one, (str(slot.address), port)), 15)
    return one


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
