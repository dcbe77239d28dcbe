"""Disks: made whole or not at all, captured and compacted without a change of what they read, settled after crashes."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agentenv.errors import (
    BlockDaemonError,
    InsufficientStorageError,
    InvalidRequestError,
    LayerError,
    StorageError,
)
from agentenv.storage.daemon import BlockDaemonProcess
from agentenv.storage.disks import DiskEvent, DiskStore
from agentenv.storage.layers import LayerStore, StoredLayer
from agentenv.vmm.base import DiskFormat
from unit.storage.storage_fakes import ToyTools, ask, eventually, files_below, make_layer, read_blocks

SIZE = 1 << 20


@dataclass
class World:
    """A node's storage."""

    home: Path
    daemon: BlockDaemonProcess
    layers: LayerStore
    disks: DiskStore
    base: StoredLayer
    events: list[DiskEvent] = field(default_factory=list)

    @property
    def socket(self) -> Path:
        return self.home / "run" / "blockd.sock"

    def sandbox(self, disk_id: str) -> Path:
        directory = self.home / "sandboxes" / disk_id
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    async def create(self, disk_id: str) -> None:
        await self.disks.create(disk_id, [self.base.digest], SIZE, self.sandbox(disk_id))

    async def write(self, disk_id: str, block: int, text: str) -> None:
        await ask(self.socket, "fake_write", device=disk_id, block=block, text=text)

    async def read(self, disk_id: str) -> dict[str, str]:
        return await ask(self.socket, "fake_read", device=disk_id)

    def files(self) -> set[str]:
        """All files but those that a node always has."""
        names = files_below(self.home) - {"fake-blockd", "run/blockd.log", "run/blockd.sock"}
        names -= {"blockd/lock", "blockd/process.lock", f"layers/sha256/{self.base.path.name}"}
        return {name for name in names if not name.startswith("layers/index.db")}

    async def check(self, disk_id: str, expected: dict[str, str]) -> None:
        """The disk reads so, and references, files and the daemon agree about it."""
        assert await self.read(disk_id) == expected
        (device,) = [device for device in await self.daemon.client.list() if device.name == disk_id]
        chain = await self.disks.chain(disk_id)
        assert device.lowers == tuple(layer.path for layer in chain)
        assert device.exports[0].path == self.sandbox(disk_id) / "disk.sock"
        assert files_below(self.home / "disks" / disk_id) == {"disk.json", "upper.data", "upper.index"}
        await self.disks.collected()
        used = {digest for owner in self.layers.owners_with_prefix("") for digest in self.layers.references(owner)}
        assert {layer.digest for layer in self.layers.list()} == used
        assert self.layers.owners_with_prefix("merge:") == ()


@pytest.fixture
async def world(home: Path, daemon: BlockDaemonProcess) -> AsyncIterator[World]:
    layers = LayerStore(home / "layers", ToyTools())
    base = layers.import_file(make_layer(home / "base", {0: "base", 1: "base"}), owner="template:base")
    disks = DiskStore(daemon, layers, home / "disks", max_chain_depth=4)
    made = World(home, daemon, layers, disks, base)
    disks.on_event(made.events.append)
    await disks.start()
    await disks.reconcile([])
    yield made
    await disks.close()
    for device in await daemon.client.list():
        await daemon.client.close_device(device.name, remove_upper=True)
    layers.close()


async def restarted(world: World) -> World:
    """The same node after a restart of its server."""
    await world.disks.close()
    disks = DiskStore(world.daemon, world.layers, world.home / "disks", max_chain_depth=4)
    again = World(world.home, world.daemon, world.layers, disks, world.base)
    disks.on_event(again.events.append)
    await disks.start()
    return again


async def kill_daemon(world: World) -> None:
    pid = world.daemon.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: world.daemon.pid not in (None, pid))
    await world.daemon.client.list()


async def test_a_disk_is_a_stack_with_an_upper_of_its_own(world: World) -> None:
    disk = await world.disks.create("one", [world.base.digest], SIZE, world.sandbox("one"))
    assert (disk.path, disk.format, disk.read_only) == (Path("disk.sock"), DiskFormat.NBD, False)
    await world.create("two")
    await world.write("one", 0, "one's")
    await world.check("one", {"0": "one's", "1": "base"})
    await world.check("two", {"0": "base", "1": "base"})
    assert (world.home / "disks").stat().st_mode & 0o777 == 0o700
    assert (world.home / "disks" / "one").stat().st_mode & 0o777 == 0o700
    statistics = await world.daemon.client.statistics()
    assert [(use.path, use.devices) for use in statistics.layers] == [(world.base.path, 2)]
    assert 0 < await world.disks.usage("one") < SIZE
    assert world.layers.owners(world.base.digest) == ("disk:one", "disk:two", "template:base")
    for _ in range(2):
        await world.disks.remove("one")
        await world.disks.remove("two")
    assert world.files() == set()
    assert world.layers.owners(world.base.digest) == ("template:base",)
    with pytest.raises(StorageError, match="there is no disk one"):
        await world.disks.usage("one")


async def test_a_layer_in_use_outlives_its_template(world: World) -> None:
    await world.create("one")
    world.layers.drop("template:base")
    await world.disks.collected()
    await world.check("one", {"0": "base", "1": "base"})
    await world.disks.remove("one")
    await world.disks.collected()
    assert world.layers.list() == ()


@pytest.mark.parametrize("step", ["open", "export"])
@pytest.mark.parametrize("code", ["no_space", "io"])
async def test_a_failed_create_leaves_nothing(world: World, step: str, code: str) -> None:
    await ask(world.socket, "fake_refuse", method=step, code=code)
    with pytest.raises(InsufficientStorageError if code == "no_space" else BlockDaemonError):
        await world.create("one")
    assert world.files() == set()
    assert world.layers.owners(world.base.digest) == ("template:base",)
    await world.create("one")
    with pytest.raises(StorageError, match="exists already"):
        await world.create("one")
    await world.check("one", {"0": "base", "1": "base"})


async def test_a_create_of_a_missing_layer_leaves_nothing(world: World) -> None:
    with pytest.raises(LayerError, match="is not in the store"):
        await world.disks.create("one", ["sha256:" + "0" * 64], SIZE, world.sandbox("one"))
    world.base.path.unlink()
    with pytest.raises(LayerError, match="the file is missing"):
        await world.create("one")
    assert world.files() == set()


@pytest.mark.parametrize("disk_id", ["", "..", "a/b", ".hidden", "x" * 65, "a b"])
async def test_an_id_is_never_a_path(world: World, disk_id: str) -> None:
    for call in (world.create(disk_id), world.disks.remove(disk_id), world.disks.usage(disk_id)):
        with pytest.raises(InvalidRequestError, match="cannot be the id of a disk"):
            await call


@pytest.mark.parametrize("step", ["open", "export"])
async def test_a_cancelled_create_leaves_nothing(world: World, step: str) -> None:
    await ask(world.socket, "fake_hold", method=step)
    creating = asyncio.create_task(world.create("one"))
    await eventually(lambda: bool(world.daemon.client._tasks))
    creating.cancel()
    await asyncio.sleep(0)
    creating.cancel()
    await ask(world.socket, "fake_release", method=step)
    with pytest.raises(asyncio.CancelledError):
        await creating
    assert world.files() == set()
    assert await world.daemon.client.list() == ()
    assert world.layers.owners(world.base.digest) == ("template:base",)


async def test_fifty_at_once(world: World) -> None:
    names = [f"d{number}" for number in range(50)]
    await asyncio.gather(*(world.create(name) for name in names))
    assert len(await world.daemon.client.list()) == 50
    await asyncio.gather(*(world.disks.remove(name) for name in names))
    assert world.files() == set()


async def test_captures_keep_what_was_written(world: World) -> None:
    await world.create("one")
    await world.write("one", 0, "first")
    layer = await world.disks.capture("one")
    assert layer.parent_uuid == world.base.uuid
    assert read_blocks([layer.path]) == {"0": "first"}
    await world.write("one", 1, "second")
    await world.check("one", {"0": "first", "1": "second"})
    assert await world.disks.chain("one") == (world.base, layer)
    world.layers.set_references("snapshot:s", [world.base.digest, layer.digest])
    await world.disks.remove("one")
    await world.disks.collected()
    assert world.layers.references("snapshot:s") == (world.base.digest, layer.digest)
    await world.disks.create("clone", world.layers.references("snapshot:s"), 0, world.sandbox("clone"))
    await world.check("clone", {"0": "first", "1": "base"})
    with pytest.raises(StorageError, match="there is no disk one"):
        await world.disks.capture("one")


async def test_deep_chains_are_merged_in_the_background(world: World) -> None:
    await world.create("one")
    expected = {"0": "base", "1": "base"}
    for number in range(20):
        await world.write("one", number % 7, f"text {number}")
        expected[str(number % 7)] = f"text {number}"
        await world.disks.capture("one")
        await world.disks.compacted()
        chain = await world.disks.chain("one")
        assert len(chain) <= 4
        assert chain[0] == world.base, "the template's layer is nobody's to merge"
        assert [layer.parent_uuid for layer in chain[1:]] == [layer.uuid for layer in chain[:-1]]
        await world.check("one", expected)
    await world.disks.remove("one")
    await world.disks.collected()
    assert world.layers.list() == (world.base,)


async def test_captures_go_on_while_layers_are_merged(world: World) -> None:
    await world.create("one")
    expected = {"0": "base", "1": "base"}
    for number in range(15):
        await world.write("one", number, "x")
        expected[str(number)] = "x"
        await world.disks.capture("one")
    await world.disks.compacted()
    await world.check("one", expected)
    assert len(await world.disks.chain("one")) <= 4


async def test_a_disk_that_goes_while_its_layers_are_merged(world: World) -> None:
    await world.create("one")
    for number in range(4):
        await world.write("one", number, "x")
        await world.disks.capture("one")
    await world.disks.remove("one")
    await world.disks.compacted()
    await world.disks.collected()
    assert world.files() == set()
    assert world.layers.owners_with_prefix("merge:") == ()
    assert world.layers.list() == (world.base,)


@pytest.mark.parametrize("code", ["no_space", "io"])
async def test_a_refused_capture_changes_nothing(world: World, code: str) -> None:
    await world.create("one")
    await world.write("one", 0, "first")
    await ask(world.socket, "fake_refuse", method="restack", code=code)
    with pytest.raises((InsufficientStorageError, BlockDaemonError)):
        await world.disks.capture("one")
    await world.check("one", {"0": "first", "1": "base"})
    layer = await world.disks.capture("one")
    assert read_blocks([layer.path]) == {"0": "first"}


async def test_a_capture_that_found_no_room_after_the_switch_is_completed_by_the_next(world: World) -> None:
    await world.create("one")
    await world.write("one", 0, "first")
    await ask(world.socket, "fake_full_after_switch")
    with pytest.raises(InsufficientStorageError):
        await world.disks.capture("one")
    assert (world.home / "disks" / "one" / "captured-1").exists(), "it is the disk's data, and nowhere else"
    await world.write("one", 1, "second")
    layer = await world.disks.capture("one")
    assert read_blocks([layer.path]) == {"1": "second"}
    await world.check("one", {"0": "first", "1": "second"})
    base, first, second = await world.disks.chain("one")
    assert (base, second) == (world.base, layer)
    assert read_blocks([first.path]) == {"0": "first"}


@pytest.mark.parametrize("method", ["restack", "replace"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_daemon_that_dies_within_a_capture(world: World, method: str, when: str) -> None:
    await world.create("one")
    await world.write("one", 0, "first")
    await ask(world.socket, "fake_die", method=method, when=when)
    try:
        await world.disks.capture("one")
    except BlockDaemonError as error:
        assert method == "replace", "a restack that was not begun is asked for once more"
        assert error.code == "unavailable"
    await world.check("one", {"0": "first", "1": "base"})
    await world.write("one", 1, "second")
    layer = await world.disks.capture("one")
    assert "1" in read_blocks([layer.path])
    await world.check("one", {"0": "first", "1": "second"})


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_daemon_that_dies_within_a_compaction(world: World, when: str) -> None:
    await world.create("one")
    for number in range(3):
        await world.write("one", number, "x")
        await world.disks.capture("one")
    await world.disks.compacted()
    expected = {"0": "x", "1": "x", "2": "x"}
    await world.check("one", expected)
    await world.write("one", 3, "x")
    # The capture replaces a lower, too; only the compaction's second one shall be hit.
    capture = world.disks._stacks.capture

    async def capture_and_arm(disk_id: str, sealed: Callable[[], None] | None = None) -> StoredLayer:
        layer = await capture(disk_id, sealed)
        await ask(world.socket, "fake_die", method="replace", when=when)
        return layer

    world.disks._stacks.capture = capture_and_arm  # type: ignore[method-assign]
    pid = world.daemon.pid
    await world.disks.capture("one")
    await world.disks.compacted()
    assert world.daemon.pid != pid, "the compaction did not come to its replacement"
    world.disks._stacks.capture = capture  # type: ignore[method-assign]
    await world.check("one", expected | {"3": "x"})
    await world.write("one", 4, "x")
    await world.disks.capture("one")
    await world.disks.compacted()
    await world.check("one", expected | {"3": "x", "4": "x"})


STEPS = ["restack", "link_file", "replace", "unlink", "merge", "swap replace", "move_references"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("after", [False, True])
async def test_a_server_that_dies_at_any_step(
    world: World, step: str, after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is gone at the step: nothing of it runs any more, and the next one finds what it left."""
    await world.create("one")
    expected = {"0": "base", "1": "base"}
    for number in range(3):
        await world.write("one", number, "x")
        expected[str(number)] = "x"
        await world.disks.capture("one")
    await world.disks.compacted()
    await world.write("one", 9, "y")
    expected["9"] = "y"

    class ServerDiedError(BaseException):
        pass

    def dying(call: object) -> object:
        def run(*arguments: object, **options: object) -> object:
            if after:
                call(*arguments, **options)  # type: ignore[operator]
            raise ServerDiedError

        async def run_async(*arguments: object, **options: object) -> object:
            if after:
                await call(*arguments, **options)  # type: ignore[operator]
            raise ServerDiedError

        return run_async if asyncio.iscoroutinefunction(call) else run

    client, layers = world.daemon.client, world.layers
    target = {
        "restack": (client, "restack"),
        "link_file": (layers, "link_file"),
        "replace": (client, "replace"),
        "unlink": (Path, "unlink"),
        "merge": (layers, "import_file"),
        "swap replace": (client, "replace"),
        "move_references": (layers, "move_references"),
    }[step]
    chain = await world.disks._stacks.chain("one")
    with monkeypatch.context() as patch:
        if step in STEPS[:4]:
            patch.setattr(*target, dying(getattr(*target)))
            with pytest.raises(ServerDiedError):
                await world.disks._stacks.capture("one")
        else:
            await world.disks._stacks.capture("one")
            chain = await world.disks._stacks.chain("one")
            patch.setattr(*target, dying(getattr(*target)))
            with pytest.raises(ServerDiedError):
                run, merged = world.disks._compactor._merge("one", chain) or (None, None)
                assert run is not None
                assert merged is not None
                digests = chain.digests[run.first : run.first + run.count]
                await world.disks._stacks.swap("one", run, digests, merged)
    again = await restarted(world)
    assert await again.disks.reconcile(["one"]) == []
    assert again.events == []
    await again.disks.compacted()
    await again.check("one", expected)
    await again.write("one", 5, "z")
    await again.disks.capture("one")
    await again.disks.compacted()
    await again.check("one", expected | {"5": "z"})
    await again.disks.close()


SERVER = textwrap.dedent(
    """
    import asyncio, sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    from agentenv.storage import daemon as daemon_module
    from agentenv.storage.daemon import BlockDaemonProcess
    from agentenv.storage.disks import DiskStore
    from agentenv.storage.layers import LayerStore
    from unit.storage.storage_fakes import ToyTools, ask

    async def main(home):
        daemon_module._runs = lambda pid, binary: True
        run = home / "run"
        daemon = BlockDaemonProcess(
            home / "fake-blockd", state=home / "blockd", socket=run / "blockd.sock", log_file=run / "blockd.log"
        )
        await daemon.start()
        disks = DiskStore(daemon, LayerStore(home / "layers", ToyTools()), home / "disks", max_chain_depth=4)
        await disks.start()
        await disks.reconcile(["one"])
        for number in range(1_000_000):
            await ask(run / "blockd.sock", "fake_write", device="one", block=number, text=sys.argv[3])
            print("written", number, flush=True)
            await disks.capture("one")

    asyncio.run(main(Path(sys.argv[2])))
    """
)


async def test_a_server_that_is_killed_while_it_captures_and_merges(world: World) -> None:
    await world.create("one")
    expected = {"0": "base", "1": "base"}
    dice = random.Random(7)
    for turn in range(6):
        await world.disks.close()
        server = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", SERVER, str(Path(__file__).parents[2]), str(world.home), f"turn {turn}"),
            stdout=asyncio.subprocess.PIPE,
        )
        assert server.stdout is not None
        written = 0
        for _ in range(dice.randint(3, 9)):
            while not (line := await server.stdout.readline()).startswith(b"written"):
                assert line, "the server ended by itself"
            written = int(line.split()[1])
        await asyncio.sleep(dice.random() * 0.03)  # any moment of the capture or merge under way
        server.kill()
        rest = await server.stdout.read()
        await server.wait()
        written += rest.count(b"written")
        expected |= {str(number): f"turn {turn}" for number in range(written + 1)}
        world = await restarted(world)
        await world.disks.reconcile(["one"])
        # One block more may have been written, and not told.
        if str(written + 1) in await world.read("one"):
            expected.setdefault(str(written + 1), f"turn {turn}")
            expected[str(written + 1)] = (await world.read("one"))[str(written + 1)]
        await world.disks.compacted()
        await world.check("one", expected)
        assert world.events == []
    await world.disks.close()


async def test_reconcile_keeps_removes_and_opens_again(world: World) -> None:
    for name in ("kept", "lost", "stray", "forgotten"):
        await world.create(name)
        await world.write(name, 5, name)
        await world.disks.capture(name)
    await ask(world.socket, "fake_lose", device="lost")
    await ask(world.socket, "fake_lose", device="forgotten")
    (world.home / "disks" / "half-made").mkdir()
    world.layers.set_references("disk:only-referenced", [world.base.digest])
    world.layers.set_references("merge:kept", [world.base.digest])
    other = world.home / "other"
    other.mkdir()
    await ask(world.socket, "open", device="other", lowers=[], upper={"directory": str(other), "mode": "hybrid"})
    again = await restarted(world)
    words = await again.disks.reconcile(["kept", "lost", "never-was"])
    assert words == [
        "removed disk forgotten",
        "removed disk half-made",
        "removed disk only-referenced",
        "removed disk stray",
        "opened disk lost again",
    ]
    assert [(event.disk_id, event.kind) for event in again.events] == [("never-was", "failed")]
    assert "there is no disk never-was" in again.events[0].message
    await again.check("kept", {"0": "base", "1": "base", "5": "kept"})
    await again.check("lost", {"0": "base", "1": "base", "5": "lost"})
    assert sorted(device.name for device in await again.daemon.client.list()) == ["kept", "lost", "other"]
    assert await again.disks.reconcile([]) == ["removed disk kept", "removed disk lost"]
    await again.disks.close()


async def test_a_stray_that_cannot_be_removed_does_not_stop_the_others(world: World) -> None:
    for name in ("kept", "stray-1", "stray-2"):
        await world.create(name)
    await ask(world.socket, "fake_lose", device="kept")
    again = await restarted(world)
    await ask(world.socket, "fake_refuse", method="close", code="io")
    with pytest.raises(StorageError, match=r"1 disks .* cannot be removed; stray-1: close of block device"):
        await again.disks.reconcile(["kept"])
    await again.check("kept", {"0": "base", "1": "base"})
    assert await again.disks.reconcile(["kept"]) == ["removed disk stray-1"]
    await again.disks.close()


async def test_a_home_that_is_reached_by_another_name(world: World) -> None:
    await world.create("one")
    await world.write("one", 0, "first")
    await world.disks.close()
    other_name = world.home / "link"
    other_name.symlink_to(world.home)
    layers = LayerStore(other_name / "layers", ToyTools())
    disks = DiskStore(world.daemon, layers, other_name / "disks", max_chain_depth=4)
    await disks.start()
    assert await disks.reconcile(["one"]) == []
    await disks.capture("one")
    assert (await world.read("one"))["0"] == "first"
    assert await disks.reconcile([]) == ["removed disk one"]
    await disks.close()
    layers.close()
    other_name.unlink()


async def test_a_note_of_the_daemon_that_is_damaged_is_made_again(world: World) -> None:
    await world.create("one")
    await world.write("one", 3, "x")
    device = {"device": "one", "lowers": [], "upper": None, "virtual_size": 0, "read_only": True, "opens": 0}
    pid = world.daemon.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    note = world.home / "blockd" / "devices" / "one.json"
    note.write_text(json.dumps({**device, "exports": [], "error": "damaged"}))
    os.kill(pid, signal.SIGKILL)

    def made_again() -> bool:
        try:
            return str(world.sandbox("one") / "disk.sock") in note.read_text()
        except FileNotFoundError:
            return False

    await eventually(made_again)
    await world.check("one", {"0": "base", "1": "base", "3": "x"})


async def test_a_damaged_note_is_an_event_and_does_not_stop_the_others(world: World) -> None:
    await world.create("good")
    await world.create("bad")
    (world.home / "disks" / "bad" / "disk.json").write_text("{half")
    again = await restarted(world)
    await again.disks.reconcile(["good", "bad"])
    assert [(event.disk_id, event.kind) for event in again.events] == [("bad", "failed")]
    assert "disk.json is damaged" in again.events[0].message
    await again.disks.remove("bad")
    await again.check("good", {"0": "base", "1": "base"})
    await again.disks.close()


async def test_after_the_daemon_died_disks_are_checked(world: World) -> None:
    for name in ("one", "two"):
        await world.create(name)
        await world.write(name, 3, name)
    pid = world.daemon.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    # What it forgets while it is dead: a note that was lost.
    (world.home / "blockd" / "devices" / "two.json").unlink()
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: world.daemon.pid not in (None, pid))
    async with asyncio.timeout(20):
        while len(await world.daemon.client.list()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await world.check("one", {"0": "base", "1": "base", "3": "one"})
    await world.check("two", {"0": "base", "1": "base", "3": "two"})
    assert world.events == []


async def test_a_check_does_not_take_a_capture_under_way_for_a_change(world: World) -> None:
    await world.create("one")
    await world.write("one", 0, "first")
    await ask(world.socket, "fake_hold", method="replace")
    capturing = asyncio.create_task(world.disks.capture("one"))
    await eventually(lambda: len(world.layers.references("disk:one")) == 2)
    checking = asyncio.create_task(world.disks._after_restart())
    # Its list still has the layer beside the upper, and it waits for the capture, which will move it.
    await eventually(lambda: world.disks._locks["one"][1] == 2)
    await ask(world.socket, "fake_release", method="replace")
    await asyncio.gather(capturing, checking)
    assert world.events == []
    await world.check("one", {"0": "first", "1": "base"})


async def test_a_disk_that_does_not_come_back_is_an_event(world: World) -> None:
    await world.create("one")
    pid = world.daemon.pid
    assert pid is not None
    content = world.home / "content"
    content.write_bytes(world.base.path.read_bytes())
    world.base.path.unlink()
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: any("open of block device" in event.message for event in world.events))
    assert {(event.disk_id, event.kind) for event in world.events} == {("one", "failed")}
    assert any(str(world.base.path) in event.message for event in world.events)
    # The layer is put back, the way the message says.
    world.layers.import_file(content, owner="template:base")
    assert await world.disks.reconcile(["one"]) == ["opened disk one again"]
    await world.check("one", {"0": "base", "1": "base"})
    await world.disks.remove("one")
    assert await world.daemon.client.list() == ()


async def test_a_removal_waits_for_the_daemon(world: World) -> None:
    await world.create("one")
    await ask(world.socket, "fake_die", method="close", when="before")
    await world.disks.remove("one")
    assert world.files() == set()


async def test_events_of_disks_reach_the_callback(world: World) -> None:
    await world.create("one")

    async def send(**event: str) -> None:
        async with asyncio.timeout(20):
            while (await ask(world.socket, "fake_event", **event)).get("subscribers", 0) == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    await send(event="no_space", device="somebody-else")
    await send(event="new kind", device="one")
    await send(event="no_space", device="one")
    await send(event="io_error", device="one", message="sector 7")
    await eventually(lambda: len(world.events) == 2)
    assert world.events == [
        DiskEvent("one", "no_space", "a write of the guest failed: the file system of this node is full"),
        DiskEvent("one", "io_error", "sector 7"),
    ]

    def crash(_: DiskEvent) -> None:
        raise RuntimeError

    world.disks.on_event(crash)
    await send(event="no_space", device="one")
    world.disks.on_event(world.events.append)
    await send(event="no_space", device="one")
    await eventually(lambda: len(world.events) >= 3)


@pytest.fixture
def small(home: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    path = home / "small"
    path.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", path], check=False).returncode != 0:
        pytest.skip("cannot mount a tmpfs here")
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)


@pytest.mark.root
async def test_a_full_disk(home: Path, small: Path, daemon: BlockDaemonProcess) -> None:
    layers = LayerStore(small / "layers", ToyTools())
    base = layers.import_file(make_layer(home / "base", {0: "base"}), owner="template:base")
    disks = DiskStore(daemon, layers, small / "disks")
    await disks.start()
    sandbox = home / "sandbox"
    sandbox.mkdir()
    await disks.create("one", [base.digest], SIZE, sandbox)
    before = files_below(small)
    ballast = fill(small / "ballast")
    other = home / "other"
    other.mkdir()
    with pytest.raises(InsufficientStorageError):
        await disks.create("two", [base.digest], SIZE, other)
    ballast.unlink()
    assert files_below(small) == before
    await disks.create("two", [base.digest], SIZE, other)
    fill(ballast)
    await disks.remove("two")
    ballast.unlink()
    await disks.remove("one")
    assert files_below(small / "disks") == set()
    await disks.close()
    layers.close()


def fill(path: Path) -> Path:
    with pytest.raises(OSError, match="No space left"), path.open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    return path
