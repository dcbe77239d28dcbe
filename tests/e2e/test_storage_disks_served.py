"""Disks on the real block daemon, without machines: an NBD client plays the guest."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentenv.errors import InsufficientStorageError
from agentenv.storage import images
from agentenv.storage.daemon import BlockDaemonProcess
from agentenv.storage.disks import DiskEvent, DiskStore
from agentenv.storage.layers import LayerStore, StoredLayer
from harness.nbd import ENOSPC, NbdClient, NbdError
from harness.storage import daemons_of

ROOT = Path(__file__).parents[2]
BLOCKD = Path(os.environ.get("TEST_BLOCKD", ROOT / "build" / "aenv-blockd"))
MIB = 1024 * 1024
SIZE = 32 * MIB


@dataclass
class Node:
    """A node's storage, and what its disks must read as."""

    home: Path
    daemon: BlockDaemonProcess
    layers: LayerStore
    disks: DiskStore
    base: StoredLayer
    image: bytes
    events: list[DiskEvent] = field(default_factory=list)

    def socket(self, disk_id: str) -> Path:
        return self.home / "sandboxes" / disk_id / "disk.sock"

    async def create(self, disk_id: str, layers: tuple[str, ...] | None = None) -> None:
        directory = self.home / "sandboxes" / disk_id
        directory.mkdir(parents=True)
        await self.disks.create(disk_id, layers or (self.base.digest,), SIZE, directory)

    async def daemon_pid(self) -> int:
        """Of the daemon that runs, or of the next one when the last was killed just now."""
        await self.daemon.client.list()
        assert self.daemon.pid is not None
        return self.daemon.pid

    async def read(self, disk_id: str) -> bytes:
        """All of a disk."""
        return await asyncio.to_thread(read_all, self.socket(disk_id))

    def disk_files(self) -> set[str]:
        return {str(path.relative_to(self.home)) for path in (self.home / "disks").rglob("*")}


def read_all(socket: Path) -> bytes:
    client = NbdClient(socket)
    try:
        return b"".join(client.read(offset, MIB) for offset in range(0, client.size, MIB))
    finally:
        client.close()


@asynccontextmanager
async def running(home: Path, image: bytes, *, program: Path = BLOCKD, keep: bool = False) -> AsyncIterator[Node]:
    """Storage of a server from its start to its end. With `keep` its disks outlive it."""
    daemon = BlockDaemonProcess(
        program, state=home / "blockd", socket=home / "run" / "blockd.sock", log_file=home / "run" / "blockd.log"
    )
    await daemon.start()
    layers = LayerStore(home / "layers")
    owned = layers.references("template:base")
    base = layers.get(owned[0]) if owned else await asyncio.to_thread(make_base, layers, image)
    disks = DiskStore(daemon, layers, home / "disks", max_chain_depth=6)
    node = Node(home, daemon, layers, disks, base, image)
    disks.on_event(node.events.append)
    await disks.start()
    try:
        yield node
    finally:
        if not keep:
            await disks.reconcile([])
        await disks.close()
        await daemon.close()
        layers.close()


def make_base(layers: LayerStore, image: bytes) -> StoredLayer:
    with tempfile.NamedTemporaryFile(prefix="aenv-") as raw, layers.draft() as draft:
        raw.write(image)
        raw.flush()
        images.create_layer_from_raw(Path(raw.name), draft)
        return layers.import_file(draft, owner="template:base")


@pytest.fixture(scope="module")
def image() -> bytes:
    """A template's disk: some data, many zeros."""
    dice = random.Random(1)
    content = bytearray(SIZE)
    for offset in range(0, SIZE, MIB):
        content[offset : offset + 128 * 1024] = dice.randbytes(128 * 1024)
    return bytes(content)


@pytest.fixture
def home() -> Iterator[Path]:
    if not BLOCKD.is_file():
        pytest.fail(f"the block daemon is missing ({BLOCKD}), run `make setup`")
    path = Path(tempfile.mkdtemp(prefix="aenv-", dir="/tmp"))
    yield path
    for pid in daemons_of(path):  # of a test that failed
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(path)


@pytest.fixture
async def node(home: Path, image: bytes) -> AsyncIterator[Node]:
    async with running(home, image) as made:
        await made.disks.reconcile([])
        yield made


async def test_fifty_disks_of_one_template(node: Node) -> None:
    names = [f"d{number}" for number in range(50)]
    before = node.layers.usage()
    await asyncio.gather(*(node.create(name) for name in names))
    statistics = await node.daemon.client.statistics()
    assert statistics.open_layers == 1
    assert [(use.path, use.devices) for use in statistics.layers] == [(node.base.path, 50)]
    empty = await node.disks.usage("d0")
    assert empty < 64 * 1024

    def write(name: str, offset: int) -> None:
        client = NbdClient(node.socket(name))
        assert client.size == SIZE
        client.write(offset, b"\x5a" * MIB)
        assert client.read(offset, MIB) == b"\x5a" * MIB
        client.close()

    await asyncio.to_thread(write, "d7", 3 * MIB)
    assert MIB <= await node.disks.usage("d7") < MIB + 64 * 1024
    assert await node.disks.usage("d8") == empty
    assert await node.read("d8") == node.image
    assert node.layers.usage() == before
    await asyncio.gather(*(node.disks.remove(name) for name in names))
    assert node.disk_files() == set()
    assert await node.daemon.client.list() == ()
    assert not any(node.socket(name).exists() for name in names)
    assert list((node.home / "blockd" / "devices").iterdir()) == []


def write_at_random(client: NbdClient, model: bytearray, dice: random.Random, count: int) -> None:
    """Writes, discards and zeroes of a guest, on the disk and on its model."""
    for _ in range(count):
        length = dice.choice([512, 4096, 4096, 65536, 300 * 512])
        offset = dice.randrange(0, SIZE - length, 512)
        kind = dice.random()
        if kind < 0.7:
            data = dice.randbytes(length)
            client.write(offset, data)
            model[offset : offset + length] = data
        elif kind < 0.85:
            client.write_zeroes(offset, length)
            model[offset : offset + length] = bytes(length)
        else:
            client.trim(offset, length)
            model[offset : offset + length] = bytes(length)


async def test_a_long_chain_of_captures_reads_right_and_stays_short(node: Node) -> None:
    await node.create("one")
    model = bytearray(node.image)
    dice = random.Random(2)
    client = await asyncio.to_thread(NbdClient, node.socket("one"))
    middle: tuple[tuple[str, ...], bytes] | None = None
    for number in range(20):
        await asyncio.to_thread(write_at_random, client, model, dice, 40)
        # The guest goes on while the upper is sealed.
        captured, _ = await asyncio.gather(
            node.disks.capture("one"), asyncio.to_thread(write_at_random, client, model, dice, 10)
        )
        assert captured.virtual_size == SIZE
        if number == 9:
            chain = await node.disks.chain("one")
            node.layers.set_references("snapshot:s", [layer.digest for layer in chain])
            fixed = await asyncio.to_thread(images.read_stack, [layer.path for layer in chain], 0, SIZE)
            middle = node.layers.references("snapshot:s"), fixed
    await node.disks.compacted()
    assert client.reconnects == 0
    assert len(await node.disks.chain("one")) <= 6
    assert await node.read("one") == model
    (statistics,) = (await node.daemon.client.statistics("one")).devices.values()
    assert statistics.depth == len(await node.disks.chain("one")) + 1, "the upper counts, too"
    await node.disks.capture("one")
    chain = await node.disks.chain("one")
    read = await asyncio.to_thread(images.read_stack, [layer.path for layer in chain], 0, SIZE)
    assert read == model, "the layers alone do not read as the disk did"
    client.close()
    # What a snapshot references stays, whatever was merged, and whoever is removed.
    await node.disks.compacted()
    await node.disks.remove("one")
    await node.disks.collected()
    assert middle is not None
    assert {layer.digest for layer in node.layers.list()} == set(middle[0])
    await node.create("clone", middle[0])
    assert await node.read("clone") == middle[1]
    for digest in middle[0]:
        node.layers.verify(digest)


async def test_a_daemon_that_is_killed_while_a_guest_writes(node: Node) -> None:
    await node.create("one")
    model = bytearray(node.image)
    dice = random.Random(3)
    client = await asyncio.to_thread(NbdClient, node.socket("one"))
    for turn in range(4):
        pid = await node.daemon_pid()
        writing = asyncio.create_task(asyncio.to_thread(write_at_random, client, model, dice, 300))
        await asyncio.sleep(dice.random() * 0.3)  # any moment
        os.kill(pid, signal.SIGKILL)
        await writing
        await asyncio.to_thread(client.flush)
        assert client.reconnects <= turn + 1
        if turn == 2:
            await node.disks.capture("one")
    assert client.reconnects >= 1
    assert await node.read("one") == model
    assert node.events == []
    client.close()


async def test_a_daemon_that_is_killed_at_any_moment_of_captures(node: Node) -> None:
    await node.create("one")
    model = bytearray(node.image)
    dice = random.Random(4)
    client = await asyncio.to_thread(NbdClient, node.socket("one"))
    for _ in range(6):
        await asyncio.to_thread(write_at_random, client, model, dice, 50)
        pid = await node.daemon_pid()
        capturing = asyncio.create_task(node.disks.capture("one"))
        await asyncio.sleep(dice.random() * 0.05)
        os.kill(pid, signal.SIGKILL)
        await asyncio.wait([capturing])
        if capturing.exception() is not None:
            await node.disks.capture("one")
        await node.disks.compacted()
        assert await node.read("one") == model
        chain = await node.disks.chain("one")
        (device,) = await node.daemon.client.list()
        assert device.lowers == tuple(layer.path for layer in chain)
    assert node.events == []
    await node.disks.collected()
    assert len(node.layers.list()) == len(await node.disks.chain("one"))
    client.close()


async def test_a_server_that_restarts_takes_over_and_reconciles(home: Path, image: bytes) -> None:
    async with running(home, image, keep=True) as first:
        for name in ("kept", "stray"):
            await first.create(name)
        client = await asyncio.to_thread(NbdClient, first.socket("kept"))
        await asyncio.to_thread(client.write, 0, b"k" * 4096)
        pid = first.daemon.pid
    await asyncio.to_thread(client.write, 4096, b"l" * 4096)  # nobody supervises, everything works
    async with running(home, image) as second:
        assert second.daemon.pid == pid
        assert await second.disks.reconcile(["kept"]) == ["removed disk stray"]
        assert not second.socket("stray").exists()
        assert client.reconnects == 0, "the guest noticed"
        assert (await second.read("kept"))[:8192] == b"k" * 4096 + b"l" * 4096
        client.close()
        await second.disks.remove("kept")
        assert second.disk_files() == set()
        last = second.daemon.pid
    assert last is not None
    assert not Path(f"/proc/{last}").exists()


async def test_an_upgrade_replaces_the_daemon_under_a_running_guest(home: Path, image: bytes) -> None:
    async with running(home, image, keep=True) as first:
        await first.create("one")
        client = await asyncio.to_thread(NbdClient, first.socket("one"))
        await asyncio.to_thread(client.write, 0, b"before".ljust(512))
        pid = first.daemon.pid
    upgraded = home / "aenv-blockd-2"
    upgraded.write_bytes(BLOCKD.read_bytes() + b"another build")
    upgraded.chmod(0o755)
    async with running(home, image, program=upgraded) as second:
        assert second.daemon.pid != pid
        assert await second.disks.reconcile(["one"]) == []
        await asyncio.to_thread(client.write, 512, b"after".ljust(512))
        assert client.reconnects == 1
        assert (await second.read("one"))[:1024] == b"before".ljust(512) + b"after".ljust(512)
        client.close()


@pytest.fixture
def small(home: Path) -> Iterator[Path]:
    """A home on a file system of 24 MiB."""
    path = home / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


@pytest.mark.root
async def test_a_full_disk_is_an_error_to_the_guest_and_an_event(small: Path) -> None:
    tiny = bytes(random.Random(5).randbytes(MIB)) + bytes(SIZE - MIB)
    async with running(small, tiny) as node:
        await node.create("one")
        await node.create("two")

        def fill(client: NbdClient) -> int:
            for offset in range(MIB, SIZE, MIB):
                try:
                    client.write(offset, os.urandom(MIB))
                except NbdError as error:
                    assert error.errno == ENOSPC
                    return offset
            raise AssertionError("the disk did not become full")

        client = await asyncio.to_thread(NbdClient, node.socket("one"))
        written = await asyncio.to_thread(fill, client)
        assert written > 8 * MIB
        async with asyncio.timeout(30):
            while not node.events:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert {(event.disk_id, event.kind) for event in node.events} == {("one", "no_space")}
        (small / "ballast").write_bytes(b"")
        with pytest.raises(OSError, match="No space left"), (small / "ballast").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        with pytest.raises(InsufficientStorageError):
            await node.create("three")
        with pytest.raises(InsufficientStorageError):
            await node.disks.capture("one")
        # Removing works without any room, and makes room for the others.
        await node.disks.remove("one")
        client.close()
        other = await asyncio.to_thread(NbdClient, node.socket("two"))
        await asyncio.to_thread(other.write, 8 * MIB, b"y" * MIB)
        await asyncio.to_thread(other.flush)
        await node.disks.capture("two")
        assert (await node.read("two"))[: 9 * MIB] == tiny[: 8 * MIB] + b"y" * MIB
        other.close()
