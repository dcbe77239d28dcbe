"""Captures that are held before they are kept, or never kept, and chains of captures against plain copies."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, tzinfo
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from machine_samples import MIB, MachineNode

from agentenv.errors import (
    InsufficientStorageError,
    SnapshotError,
    SnapshotMismatchError,
    SnapshotNotFoundError,
    StorageError,
)
from agentenv.snapshots import machines
from agentenv.snapshots.machines import MOST_MEMORY_LAYERS
from agentenv.snapshots.manifest import SnapshotKind
from agentenv.snapshots.repository import LocalSnapshots
from agentenv.storage.layers import StoredLayer

PAGE = 4096


@pytest.fixture
async def node(tmp_path: Path) -> MachineNode:
    node = MachineNode(tmp_path)
    await node.begin()
    return node


def _left(node: MachineNode) -> tuple[set[str], list[str], tuple[str, ...]]:
    """What is in the directory of snapshots, which layers there are but that of the disk, and who owns any."""
    node.layers.collect_garbage()
    there = {path.name for path in (node.home / "snapshots").iterdir()} - {".lock"}
    disk = node.disk.chains[0][0].digest
    layers = [layer.digest for layer in node.layers.list() if layer.digest != disk]
    return there, layers, node.layers.owners_with_prefix("snapshot:")


async def test_without_a_commit_nothing_is_left(node: MachineNode) -> None:
    node.touch(0, os.urandom(MIB))
    async with node.saved.capture(node.capture("fork-1")) as captured:
        assert (await captured.loadable()).state is not None
        assert await node.saved.hidden() == ()
        with pytest.raises(SnapshotNotFoundError):
            await node.saved.get("fork-1")
        with pytest.raises(SnapshotNotFoundError):
            async with node.saved.load("fork-1", memory=True):
                pytest.fail("loaded")
    assert _left(node) == (set(), [], ())
    with pytest.raises(SnapshotError, match="is over"):
        await captured.commit()
    assert _left(node) == (set(), [], ())


@pytest.mark.parametrize("committed", [False, True])
async def test_an_error_or_a_cancelled_caller_leaves_what_was_committed(node: MachineNode, committed: bool) -> None:
    entered = asyncio.Event()

    async def hold(snapshot_id: str, error: Exception | None) -> None:
        async with node.saved.capture(node.capture(snapshot_id)) as captured:
            if committed:
                await captured.commit()
            if error is not None:
                raise error
            entered.set()
            await asyncio.Event().wait()

    with pytest.raises(ZeroDivisionError):
        await hold("one", ZeroDivisionError())
    task = asyncio.create_task(hold("two", None))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    there, layers, owners = _left(node)
    assert there == ({"one", "two"} if committed else set())
    assert len(layers) == 2 * committed
    assert owners == (("snapshot:one", "snapshot:two") if committed else ())


async def test_the_disk_that_fails_leaves_nothing(node: MachineNode, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(_: str, *, sealed: Callable[[], None] | None = None) -> StoredLayer:
        raise InsufficientStorageError("full")

    monkeypatch.setattr(node.disk, "capture", full)
    with pytest.raises(InsufficientStorageError):
        async with node.saved.capture(node.capture("one")):
            pytest.fail("captured")
    assert _left(node) == (set(), [], ())


async def test_what_copies_start_from_is_there_while_it_is_held(node: MachineNode) -> None:
    node.touch(0, os.urandom(MIB))
    before = node.memory.read_bytes()
    capture = node.capture("fork-1")
    async with node.saved.capture(capture) as captured:
        loadable = await captured.loadable()
        disk = node.disk.chains[0][0]
        # The machine runs on: its disk gets another chain, its state file goes, and whoever owned the layer lets it go.
        node.disk.chains = [(await node.layer(b"other"),)]
        node.state.unlink()
        node.layers.drop("disk:i1")
        node.layers.collect_garbage()
        assert loadable.shape == capture.machine and loadable.disk_layers == (disk.digest,)
        assert node.layers.get(disk.digest).path.exists()
        assert loadable.memory_layers == () and loadable.memory_image == node.memory
        assert loadable.memory_image.read_bytes() == before
        assert loadable.state is not None and loadable.state.read_bytes() == b"devices"
        assert (loadable.kernel, loadable.initramfs, loadable.agent_token) == (None, None, "token")
        assert "token" not in repr(loadable) and "token" not in repr(capture)
    assert not loadable.state.exists()


async def test_a_disk_that_is_held_boots(node: MachineNode) -> None:
    async with node.saved.capture(node.capture("fork-1", memory=False)) as captured:
        loadable = await captured.loadable()
        assert (loadable.state, loadable.memory_image, loadable.memory_layers, loadable.agent_token) == (
            None,
            None,
            (),
            None,
        )
        assert loadable.disk_layers == (node.disk.chains[0][0].digest,)
        manifest = await captured.commit()
        assert manifest.kind is SnapshotKind.FILESYSTEM
    assert await node.saved.get("fork-1") == manifest


async def test_a_named_one_is_held_and_then_kept(node: MachineNode) -> None:
    capture = node.capture("one", names=("web:v1",), own_template_id="t1")
    async with node.saved.capture(capture) as captured:
        loadable = await captured.loadable()
        image, state = loadable.memory_image, loadable.state
        manifest = await captured.commit()
        assert image is not None and image.exists()
        assert state is not None and state.read_bytes() == b"devices", "copies may still start"
        with pytest.raises(SnapshotError, match="is over"):
            await captured.commit()
    assert (manifest.names, manifest.own_template_id, manifest.hidden) == (("web:v1",), "t1", False)
    assert await node.saved.get("one") == manifest
    async with node.saved.load("one", memory=True) as machine:
        assert await node.loaded(machine.memory_layers) == node.memory.read_bytes()


async def test_the_latest_of_a_name_is_the_last_that_was_taken(
    node: MachineNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the clock was set back."""

    class Clock(datetime):
        hour_of_day = 12

        @classmethod
        def now(cls, tz: tzinfo | None = None) -> Clock:
            return cls(2026, 1, 1, cls.hour_of_day, tzinfo=tz)

    monkeypatch.setattr(machines, "datetime", Clock)
    for number, hour in enumerate((12, 9, 9, 13)):
        Clock.hour_of_day = hour
        await node.saved.save(node.capture(f"web-{number}", names=("web:v1",), own_template_id="t1"))
        await node.saved.save(node.capture(f"db-{number}", names=("db:v1",), own_template_id="t2"))
        await node.saved.save(node.capture(f"unnamed-{number}", own_template_id=f"t3-{number}"))
    times = {each.snapshot_id: each.created_at for each in node.snapshots.list()}
    for name in ("web", "db"):
        assert [times[f"{name}-{number}"].hour for number in range(4)] == [12, 12, 12, 13]
        assert len({times[f"{name}-{number}"] for number in range(4)}) == 4
        assert sorted(range(4), key=lambda number: times[f"{name}-{number}"]) == [0, 1, 2, 3]
    assert [times[f"unnamed-{number}"].hour for number in range(4)] == [12, 9, 9, 13]


async def test_a_full_budget_leaves_nothing(node: MachineNode) -> None:
    node.snapshots = LocalSnapshots(node.home / "snapshots", node.layers, budget_mib=1)
    node.touch(0, os.urandom(2 * MIB))
    saved = node.machines()
    before = node.layers.usage()
    with pytest.raises(InsufficientStorageError, match="budget of 1 MiB"):
        await saved.save(node.capture("one"))
    assert node.disk.collections == 1, "its memory stays on the disk until something else is deleted"
    assert node.layers.usage() == before
    assert _left(node) == (set(), [], ())


async def test_what_is_not_kept_needs_no_budget(node: MachineNode) -> None:
    node.snapshots = LocalSnapshots(node.home / "snapshots", node.layers, budget_mib=0)
    saved = node.machines()
    with pytest.raises(InsufficientStorageError, match="budget of 0 MiB"):
        async with saved.capture(node.capture("one")):
            pytest.fail("captured")
    assert node.disk.captured == 0
    async with saved.capture(replace(node.capture("fork-1"), kept=False)) as captured:
        assert (await captured.loadable()).state is not None
        with pytest.raises(InsufficientStorageError, match="budget of 0 MiB"):
            await captured.commit()
    assert _left(node) == (set(), [], ())


PAGES = 48


@dataclass(frozen=True)
class Step:
    """One turn of a machine: what it writes, and what it is captured upon."""

    writes: tuple[tuple[int, int, int], ...]
    """First byte, length, and a seed of the content; 0 for zeroes."""
    parent: int | None
    """How many captures back; None for none."""
    delete: int | None
    """Which capture is deleted afterwards, how many back."""


_writes = st.tuples(st.integers(0, PAGES * PAGE - 1), st.integers(1, 6 * PAGE), st.integers(0, 3))
_steps = st.builds(
    Step,
    st.lists(_writes, max_size=4).map(tuple),
    st.sampled_from((1, 1, 1, 1, 2, 3, None)),
    st.sampled_from((None, None, 0, 1, 2)),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(_steps, min_size=1, max_size=12))
def test_chains_of_captures_are_what_the_memory_was(steps: list[Step]) -> None:
    """Whatever was written, whichever capture each goes upon, and whichever are deleted meanwhile."""
    with tempfile.TemporaryDirectory() as home:
        asyncio.run(_chain(MachineNode(Path(home)), steps))


async def _chain(node: MachineNode, steps: list[Step]) -> None:
    await node.begin()
    with node.memory.open("r+b") as file:
        file.truncate(PAGES * PAGE)
    plain = bytearray(PAGES * PAGE)
    copies: list[bytes] = []
    depths: list[int] = []
    gone: set[int] = set()
    for number, step in enumerate(steps):
        for first, length, seed in step.writes:
            length = min(length, len(plain) - first)
            content = random.Random(f"{seed} {first}").randbytes(length) if seed else bytes(length)
            node.touch(first, content)
            plain[first : first + length] = content
        parent = None if step.parent is None or step.parent > number else number - step.parent
        saved = await node.saved.save(node.capture(f"s{number}", None if parent is None else f"s{parent}"))
        usable = parent is not None and parent not in gone and depths[parent] < MOST_MEMORY_LAYERS
        base = copies[parent] if usable and parent is not None else bytes(len(plain))
        depth = depths[parent] + 1 if usable and parent is not None else 1
        changed = sum(plain[at : at + PAGE] != base[at : at + PAGE] for at in range(0, len(plain), PAGE))
        copies.append(bytes(plain))
        depths.append(len(saved.memory_layers))
        assert depths[number] == depth
        assert saved.memory_layers[-1].size <= 16 * 1024 + changed * PAGE, "more than what changed is stored"
        if step.delete is not None and step.delete <= number:
            gone.add(number - step.delete)
            await node.saved.delete(f"s{number - step.delete}")
    node.layers.collect_garbage()
    for number, copy in enumerate(copies):
        if number in gone:
            continue
        async with node.saved.load(f"s{number}", memory=True) as machine:
            assert await node.loaded(machine.memory_layers) == copy, number
    needed = {
        layer.digest
        for number in range(len(copies))
        if number not in gone
        for layer in node.snapshots.get(f"s{number}").layers
    }
    assert needed <= {layer.digest for layer in node.layers.list()}
    assert {layer.digest for layer in node.layers.list()} - needed <= {node.disk.chains[0][0].digest}


async def test_a_machine_is_held_before_its_sealed_disk_is_in_the_store(node: MachineNode) -> None:
    node.disk.storing.clear()
    async with node.saved.capture(node.capture("one")) as captured:
        loadable, committed = asyncio.ensure_future(captured.loadable()), asyncio.ensure_future(captured.commit())
        await asyncio.wait([loadable, committed], timeout=0.05)
        assert not loadable.done() and not committed.done()
        node.disk.storing.set()
        assert (await loadable).disk_layers == tuple(layer.digest for layer in (await committed).disk_layers)


async def test_a_disk_that_cannot_be_sealed_or_stored(node: MachineNode, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(disk_id: str, *, sealed: Callable[[], None] | None = None) -> StoredLayer:
        if late and sealed is not None:
            sealed()
        raise StorageError("no such disk")

    monkeypatch.setattr(node.disk, "capture", refuse)
    late = False
    with pytest.raises(StorageError, match="no such disk"):
        async with node.saved.capture(node.capture("one")):
            raise AssertionError("nothing is held")
    late = True
    for number in range(2):
        with pytest.raises(StorageError, match="no such disk"):
            async with node.saved.capture(node.capture(f"late-{number}")) as captured:
                await (captured.commit() if number else captured.loadable())
    assert node.snapshots.ids() == ()


async def test_a_machine_needs_what_it_was_started_with(node: MachineNode) -> None:
    kernel, initramfs = node.home / "assets" / "vmlinux-0-old", node.home / "assets" / "initramfs-old"
    kernel.write_text("an older kernel")
    initramfs.write_text("an older initramfs")
    capture = node.capture("one")
    assert capture.memory is not None
    older = replace(capture, memory=replace(capture.memory, kernel=kernel, initramfs=initramfs))
    async with node.saved.capture(older) as captured:
        loadable = await captured.loadable()
        assert (loadable.kernel, loadable.initramfs) == (kernel, initramfs)
        manifest = await captured.commit()
    assert manifest.environment is not None
    assert manifest.environment.kernel_version == "vmlinux-0-old"
    async with node.saved.load("one", memory=True) as machine:
        assert (machine.kernel, machine.initramfs) == (kernel, initramfs)
    kernel.unlink()
    with pytest.raises(SnapshotMismatchError, match="kernel"):
        async with node.machines().load("one", memory=True):
            raise AssertionError("a kernel that is not there is enough")
