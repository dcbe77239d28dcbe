"""What real guests of a real server reach: in a private host with a world behind its uplink, so that nothing outside of
the test is touched. How rules behave packet by packet is tried without VMs, in `network/`.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Network

import pytest
import pytest_asyncio
from e2b import CommandResult, Sandbox

from agentenv.network.base import Slot
from agentenv.network.slots import TAP_MAC, slot_at
from e2e.network.network_lab import (
    GATEWAY,
    HOST_ADDRESS,
    METADATA,
    METADATA_2,
    PRIVATE,
    PRIVATE_2,
    PUBLIC,
    PUBLIC_2,
    FakeResolver,
    World,
    private_host,
)
from harness.leftovers import leftovers_of
from harness.server import RunningServer

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

RESOLVER_PORT = 5353
CONFIG = f"""
[network]
warm_slots = 1
dns_servers = ["127.0.0.1:{RESOLVER_PORT}"]
"""
SLOTS = IPv4Network("10.200.0.0/16")
HOST_SERVICE = 7070
AGENT_PORT = 49983
NAME = "agent.env"
SPOOFED = "198.51.100.77"

TALK = r"""
import errno, json, socket, struct, sys
from concurrent.futures import ThreadPoolExecutor

def tcp(address, port, patience):
    with socket.create_connection((address, port), patience) as one:
        one.sendall(b"tcp")
        return one.recv(16) == b"tcp"

def udp(address, port, patience, text=b"udp"):
    with socket.socket(type=socket.SOCK_DGRAM) as one:
        one.settimeout(patience)
        one.connect((address, port))
        one.send(text)
        return one.recv(512) == text

def ping(address, _, patience):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP) as one:
        one.settimeout(patience)
        one.connect((address, 0))
        one.send(struct.pack("!BBHHH", 8, 0, 0, 1, 1) + b"ping")
        return one.recv(512)[0] == 0

def six(address, port, patience):
    with socket.create_connection((address, port), patience):
        return True

def name(text, _, patience):
    return socket.gethostbyname(text)

def dns(kind, question, patience):
    message = bytes.fromhex(question)
    with socket.socket(type=getattr(socket, kind)) as one:
        one.settimeout(patience)
        one.connect(("169.254.0.22", 53))
        one.sendall(message if kind == "SOCK_DGRAM" else struct.pack("!H", len(message)) + message)
        return message[12:].hex() in one.recv(512).hex()

def outcome(check):
    kind, *words = check
    try:
        return globals()[kind](*words)
    except TimeoutError:
        return "timeout"
    except socket.gaierror as error:
        return "unresolved"
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))
"""
CHECK = (
    TALK
    + r"""
checks = json.load(open("/tmp/checks.json"))
with ThreadPoolExecutor(16) as pool:
    print(json.dumps(list(pool.map(outcome, checks))))
"""
)
RAW = r"""
import socket, struct, sys
gateway, own = bytes.fromhex(sys.argv[1].replace(":", "")), None
public, spoofed = (socket.inet_aton(text) for text in sys.argv[2:4])
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as card:
    card.bind(("eth0", 0))
    own = card.getsockname()[4]
    def datagram(text):
        return struct.pack("!HHHH", 1000, 80, 8 + len(text), 0) + text
    def four(source, text):
        body = datagram(text)
        head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 1, 0, 64, 17, 0, source, public)
        total = sum(struct.unpack("!10H", head))
        while total >> 16:
            total = (total & 0xFFFF) + (total >> 16)
        return head[:10] + struct.pack("!H", total ^ 0xFFFF) + head[12:] + body
    def six(text):
        body = datagram(text)
        ends = socket.inet_pton(socket.AF_INET6, "2001:db8::1") + socket.inet_pton(socket.AF_INET6, "2001:db8::9")
        return struct.pack("!IHBB", 6 << 28, len(body), 17, 64) + ends + body
    for kind, packet in ((0x0800, four(spoofed, b"raw-spoofed")), (0x86DD, six(b"raw-six")),
                         (0x0800, four(socket.inet_aton("169.254.0.21"), b"raw-four"))):
        card.send(gateway + own + struct.pack("!H", kind) + packet)
"""
STEADY = (
    TALK
    + r"""
import os
rounds = 0
while not os.path.exists("/tmp/stop"):
    for address in sys.argv[2:]:
        try:
            udp(address, 80, 1, sys.argv[1].encode() + address.encode())
        except OSError:
            pass
    rounds += 1
print(rounds)
"""
)
QUESTION = "beef01000001000000000000" + b"\x05agent\x03env\x00\x00\x01\x00\x01".hex()

Check = tuple[str, str | int, str | int | None, float]


def tcp(address: str, port: int = 80) -> Check:
    return ("tcp", address, port, 15)


def udp(address: str, port: int = 80) -> Check:
    # A refusal by ICMP is rate-limited, so what is closed may also look silent; that nothing passed is seen outside.
    return ("udp", address, port, 3)


def ping(address: str) -> Check:
    return ("ping", address, None, 3)


DNS: tuple[Check, ...] = (
    ("name", NAME, None, 15),
    ("dns", "SOCK_DGRAM", QUESTION, 15),
    ("dns", "SOCK_STREAM", QUESTION, 15),
)


class Capture:
    """Every frame that slots send to the host, from now on."""

    def __init__(self) -> None:
        everything = socket.htons(3)
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, everything)
        self._socket.setblocking(False)
        force_receive_buffer = 33
        self._socket.setsockopt(socket.SOL_SOCKET, force_receive_buffer, 64 << 20)
        self._frames: list[tuple[str, bytes]] = []

    def frames(self) -> list[tuple[str, bytes]]:
        """All so far, each with the name of the slot's link."""
        outgoing = 4
        while True:
            try:
                frame, (link, _, direction, *_) = self._socket.recvfrom(1 << 17)
            except BlockingIOError:
                break
            if link.startswith("aenv") and direction != outgoing:
                self._frames.append((link, frame))
        packet_level, statistics = 263, 6
        _, dropped = struct.unpack("II", self._socket.getsockopt(packet_level, statistics, 8))
        assert dropped == 0, "the capture is not complete"
        return self._frames

    def close(self) -> None:
        self._socket.close()


def is_answer_of_the_agent(slot: Slot, frame: bytes) -> bool:
    """Whether this is TCP from the agent's port to the host's end of the slot's own link."""
    ends = frame[26:30], frame[30:34], frame[34:36]
    ours = slot.address.packed, slot.host_address.packed, AGENT_PORT.to_bytes(2, "big")
    return frame[12:14] == b"\x08\x00" and frame[14] == 0x45 and frame[23] == socket.IPPROTO_TCP and ends == ours


@dataclass
class Lab:
    """A server in a private host, and what surrounds it."""

    server: RunningServer
    world: World
    resolver: FakeResolver

    @property
    def sdk(self) -> dict[str, str]:
        return {"api_url": self.server.url, "sandbox_url": self.server.url, "api_key": self.server.api_key}

    async def create(self, **options: object) -> Sandbox:
        made = await asyncio.to_thread(lambda: Sandbox.create(timeout=1200, **self.sdk, **options))  # type: ignore[arg-type]
        for path, text in (("/tmp/check.py", CHECK), ("/tmp/raw.py", RAW), ("/tmp/steady.py", STEADY)):
            await asyncio.to_thread(made.files.write, path, text)
        return made

    async def connect(self, sandbox: Sandbox) -> Sandbox:
        """The same sandbox at the address that the server has now."""
        return await asyncio.to_thread(lambda: Sandbox.connect(sandbox.sandbox_id, **self.sdk))  # type: ignore[arg-type]

    async def outcomes(self, sandbox: Sandbox, *checks: Check) -> dict[Check, bool | str]:
        """What happens to each attempt, made by an ordinary user of the guest."""
        await asyncio.to_thread(sandbox.files.write, "/tmp/checks.json", json.dumps(checks))
        done = await asyncio.to_thread(sandbox.commands.run, "python3 /tmp/check.py", timeout=120)
        return dict(zip(checks, json.loads(done.stdout), strict=True))

    async def assert_open(self, sandbox: Sandbox, *checks: Check) -> None:
        found = await self.outcomes(sandbox, *checks)
        assert [item for item in found.items() if item[1] is not True] == []

    async def assert_closed(self, sandbox: Sandbox, *checks: Check) -> None:
        """TCP is refused at once; the rest gets no answer. And the world saw nothing of it."""
        self.world.peers.clear()
        while not self.world.datagrams.empty():
            self.world.datagrams.get_nowait()
        asked = len(self.resolver.questions)
        found = await self.outcomes(sandbox, *checks)
        for check, result in found.items():
            allowed = {"tcp": {"ECONNREFUSED"}, "name": {"unresolved"}, "six": {"ENETUNREACH"}}.get(
                check[0], {"EHOSTUNREACH", "ECONNREFUSED", "timeout"}
            )
            assert result in allowed, f"{check}: {result}"
        assert self.world.peers == []
        assert self.world.datagrams.empty()
        assert len(self.resolver.questions) == asked

    async def send_raw(self, sandbox: Sandbox) -> None:
        command = f"python3 /tmp/raw.py {TAP_MAC} {PUBLIC} {SPOOFED}"
        await asyncio.to_thread(sandbox.commands.run, command, user="root", timeout=60)


@pytest.fixture(scope="module")
def host() -> Iterator[None]:
    with private_host():
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(host: None) -> AsyncIterator[Lab]:
    world = World()
    await world.serve()
    resolver = await FakeResolver.start(("127.0.0.1", RESOLVER_PORT))
    service = await asyncio.start_server(lambda reader, writer: writer.close(), "0.0.0.0", HOST_SERVICE)
    server = RunningServer(config=CONFIG)
    try:
        await asyncio.to_thread(server.start)
        yield Lab(server, world, resolver)
    finally:
        await asyncio.to_thread(server.destroy)
        service.close()
        await resolver.close()
        world.close()
    assert leftovers_of(server.home) == []


@dataclass
class Closed:
    """A sandbox without internet access, and every frame that slots sent since before it was made."""

    sandbox: Sandbox
    slot: Slot
    capture: Capture


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def closed(lab: Lab) -> AsyncIterator[Closed]:
    """Must be the first sandbox: its slot is told by the frames of its agent."""
    capture = Capture()
    sandbox = await lab.create(allow_internet_access=False)
    (link,) = {link for link, frame in capture.frames() if frame[34:36] == AGENT_PORT.to_bytes(2, "big")}
    yield Closed(sandbox, slot_at(int(link.removeprefix("aenv")), SLOTS), capture)
    capture.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ordinary(lab: Lab) -> Sandbox:
    return await lab.create()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def listed(lab: Lab) -> Sandbox:
    """A sandbox that may reach what it names and nothing else; it also names what nobody may reach."""
    allowed = ["203.0.113.0/29", "10.99.0.0/16", METADATA]
    return await lab.create(network={"allow_out": allowed, "deny_out": ["0.0.0.0/0"]})


async def test_nothing_leaves_a_closed_sandbox_from_its_first_packet_on(lab: Lab, closed: Closed) -> None:
    """Runs before any other sandbox exists, so that all frames of all slots are this one's."""
    slot = closed.slot
    everywhere = (PUBLIC, PRIVATE, METADATA, METADATA_2, HOST_ADDRESS, str(slot.host_address))
    await lab.assert_closed(
        closed.sandbox,
        *(tcp(address) for address in everywhere),
        *(udp(address) for address in everywhere),
        *(ping(address) for address in (PUBLIC, PRIVATE, METADATA)),
        ("six", "2001:db8::9", 80, 15),
        *DNS[:1],
        ("tcp", GATEWAY, 53, 15),
        ("dns", "SOCK_DGRAM", QUESTION, 3),
    )
    await lab.send_raw(closed.sandbox)
    frames = [frame for _, frame in closed.capture.frames()]
    assert frames
    arp = b"\x08\x06"
    leaked = [frame for frame in frames if frame[12:14] != arp and not is_answer_of_the_agent(slot, frame)]
    assert leaked == []
    assert lab.world.peers == []
    assert lab.world.datagrams.empty()
    assert lab.resolver.questions == []


async def test_by_default_the_internet_is_open_and_everything_near_is_closed(
    lab: Lab, closed: Closed, ordinary: Sandbox
) -> None:
    await lab.assert_open(ordinary, *(kind(address) for kind in (tcp, udp, ping) for address in (PUBLIC, PUBLIC_2)))
    assert set(lab.world.peers) == {HOST_ADDRESS}, "the world sees the host's address only"
    assert await resolved(lab, ordinary)

    slot = closed.slot
    for address, port in ((str(slot.address), AGENT_PORT), (HOST_ADDRESS, HOST_SERVICE)):
        (await asyncio.open_connection(address, port))[1].close()  # they do answer, though not to a guest
    near = (PRIVATE, PRIVATE_2, METADATA, METADATA_2)
    services = ((HOST_ADDRESS, HOST_SERVICE), (str(slot.host_address), HOST_SERVICE), (GATEWAY, HOST_SERVICE))
    await lab.assert_closed(
        ordinary,
        *(kind(address) for kind in (tcp, udp) for address in near),
        *(tcp(address, port) for address, port in services),
        tcp(HOST_ADDRESS, lab.server.port),
        tcp(str(slot.address), AGENT_PORT),
        udp(str(slot.address), AGENT_PORT),
        ("six", "2001:db8::9", 80, 15),
    )


async def test_neither_ipv6_nor_foreign_sources_leave_though_root_sends_them(lab: Lab, ordinary: Sandbox) -> None:
    capture = Capture()
    while not lab.world.datagrams.empty():
        lab.world.datagrams.get_nowait()
    await lab.send_raw(ordinary)
    async with asyncio.timeout(30):
        assert await lab.world.datagrams.get() == (b"raw-four", HOST_ADDRESS), "the raw frames did not go out at all"
    sent = [frame for _, frame in capture.frames()]
    capture.close()
    assert [frame for frame in sent if b"raw-four" in frame]
    assert [frame for frame in sent if frame[12:14] == b"\x86\xdd" or b"raw-s" in frame] == []
    assert lab.world.datagrams.empty()


async def test_what_is_allowed_by_name_beats_what_is_denied(lab: Lab, listed: Sandbox) -> None:
    await lab.assert_open(listed, tcp(PUBLIC), udp(PUBLIC), ping(PUBLIC), tcp(PRIVATE), udp(PRIVATE))
    await lab.assert_closed(
        listed,
        *(kind(address) for kind in (tcp, udp) for address in (PUBLIC_2, PRIVATE_2, METADATA)),
        ping(PUBLIC_2),
        *DNS[:1],
    )


async def test_policies_hold_without_a_server_and_dns_comes_back_with_it(
    lab: Lab, closed: Closed, ordinary: Sandbox, listed: Sandbox
) -> None:
    """kill -9: guests go on, so their networks must too, as they were."""
    steady = "python3 /tmp/steady.py dead- " + " ".join((PRIVATE, METADATA))
    commands = [
        await asyncio.to_thread(
            one.commands.run, f"{steady} {PUBLIC_2 if one is not ordinary else PUBLIC}", background=True, timeout=0
        )
        for one in (closed.sandbox, ordinary)
    ]
    await asyncio.to_thread(lab.server.kill)
    while not lab.world.datagrams.empty():
        lab.world.datagrams.get_nowait()
    async with asyncio.timeout(60):
        for _ in range(3):
            data, _ = await lab.world.datagrams.get()
            assert data == f"dead-{PUBLIC}".encode(), "with the server gone a guest reached what is closed"

    await asyncio.to_thread(lab.server.start)
    for sandbox, command in zip((closed.sandbox, ordinary), commands, strict=True):
        again = await lab.connect(sandbox)
        done = await asyncio.to_thread(stopped, again, command.pid)
        assert int(done.stdout) > 0
    while not lab.world.datagrams.empty():
        assert lab.world.datagrams.get_nowait()[0] == f"dead-{PUBLIC}".encode()

    one, two, three = [await lab.connect(sandbox) for sandbox in (closed.sandbox, ordinary, listed)]
    assert await resolved(lab, two)
    await lab.assert_open(two, tcp(PUBLIC), udp(PUBLIC_2))
    await lab.assert_closed(two, tcp(PRIVATE), tcp(METADATA), udp(PRIVATE), tcp(str(closed.slot.address), AGENT_PORT))
    await lab.assert_closed(one, tcp(PUBLIC), tcp(PRIVATE), tcp(METADATA), udp(PUBLIC), tcp(GATEWAY, 53), *DNS[:1])
    await lab.assert_open(three, tcp(PUBLIC), tcp(PRIVATE))
    await lab.assert_closed(three, tcp(PUBLIC_2), tcp(METADATA), *DNS[:1])


def stopped(sandbox: Sandbox, pid: int) -> CommandResult:
    """Tell the steady talker to end, listening to it already."""
    handle = sandbox.commands.connect(pid, timeout=0)
    sandbox.files.write("/tmp/stop", "")
    return handle.wait()


async def resolved(lab: Lab, sandbox: Sandbox) -> bool:
    """Whether the host's resolver answered the guest by its own library, by UDP and by TCP."""
    before = len(lab.resolver.questions)
    found = list((await lab.outcomes(sandbox, *DNS)).values())
    return found == [PUBLIC, True, True] and len(lab.resolver.questions) == before + 3
