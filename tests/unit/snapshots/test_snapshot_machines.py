"""Machines saved into real layers and loaded again: what is stored, what is checked, what is left when it fails."""

from __future__ import annotations

import asyncio
import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
from machine_samples import FACTS, MIB, MachineNode

from agentenv.errors import LayerError, SnapshotMismatchError, SnapshotNotFoundError, StorageError
from agentenv.snapshots import machines
from agentenv.snapshots.machines import hidden_id
from agentenv.snapshots.manifest import SnapshotKind


@pytest.fixture
async def node(tmp_path: Path) -> MachineNode:
    node = MachineNode(tmp_path)
    await node.begin()
    return node


async def test_a_chain_of_captures_stores_what_changed(node: MachineNode) -> None:
    parent: str | None = None
    sizes = []
    for number in range(machines.MOST_MEMORY_LAYERS + 2):
        node.touch(number * 8192, os.urandom(4096))
        if number == 0:
            node.touch(MIB, os.urandom(MIB))
        snapshot_id = hidden_id("i1")
        manifest = await node.saved.save(node.capture(snapshot_id, parent))
        if parent is not None:
            await node.saved.delete(parent)
        sizes.append(manifest.memory_layers[-1].size)
        assert len(manifest.memory_layers) == number % machines.MOST_MEMORY_LAYERS + 1
        async with node.saved.load(snapshot_id, memory=True) as machine:
            assert await node.loaded(machine.memory_layers) == node.memory.read_bytes()
            assert machine.state is not None
            assert machine.state.read_bytes() == b"devices"
            assert machine.disk_layers == tuple(layer.digest for layer in node.disk.chains[0])
            assert (machine.kernel, machine.initramfs) == (node.assets.kernel, node.assets.initramfs)
        assert [path.name for path in (node.home / "snapshots" / snapshot_id).iterdir() if path.name == "memory"] == []
        parent = snapshot_id
    assert await node.saved.hidden() == (parent,)
    assert sizes[0] > MIB
    assert max(sizes[1 : machines.MOST_MEMORY_LAYERS]) < 64 * 1024
    assert sizes[machines.MOST_MEMORY_LAYERS] > MIB, "a deep stack is stored whole"


async def test_the_disk_alone(node: MachineNode) -> None:
    manifest = await node.saved.save(node.capture("pause-i1-1", memory=False))
    assert (manifest.kind, manifest.state, manifest.agent_token) == (SnapshotKind.FILESYSTEM, None, None)
    async with node.saved.load("pause-i1-1", memory=True) as machine:
        assert (machine.state, machine.kernel, machine.memory_layers) == (None, None, ())
    await node.saved.remove("pause-i1-1")
    with pytest.raises(SnapshotNotFoundError):
        await node.saved.remove("pause-i1-1")
    await node.saved.delete("pause-i1-1")
    with pytest.raises(SnapshotNotFoundError):
        await node.saved.get("pause-i1-1")


async def test_without_memory_it_boots_on_any_node(node: MachineNode) -> None:
    await node.saved.save(node.capture("pause-i1-1"))
    node.facts = replace(FACTS, version="8.0", acceleration="kvm")
    with pytest.raises(SnapshotMismatchError, match=r"qemu 7\.2, this node runs 8\.0.*acceleration tcg.*memory: false"):
        async with node.saved.load("pause-i1-1", memory=True):
            pytest.fail("loaded")
    async with node.saved.load("pause-i1-1", memory=False) as machine:
        assert machine.state is None


async def test_older_kernel_and_initramfs_are_found_by_what_they_are(node: MachineNode) -> None:
    await node.saved.save(node.capture("pause-i1-1"))
    directory = node.assets.kernel.parent
    for name in ("vmlinux-2-b", "initramfs-b"):
        (directory / name).write_text(name)
    newer = replace(node.assets, kernel=directory / "vmlinux-2-b", initramfs=directory / "initramfs-b")
    async with node.machines(newer).load("pause-i1-1", memory=True) as machine:
        assert (machine.kernel, machine.initramfs) == (node.assets.kernel, node.assets.initramfs)
    node.assets.initramfs.unlink()
    digest = hashlib.sha256(b"initramfs-a").hexdigest()[:12]
    with pytest.raises(SnapshotMismatchError, match=f"saved with the initramfs {digest}"):
        async with node.machines(newer).load("pause-i1-1", memory=True):
            pytest.fail("loaded")


async def test_chain_that_is_merged_meanwhile_is_looked_at_again(node: MachineNode) -> None:
    gone = replace(node.disk.chains[0][0], digest="sha256:" + 64 * "0")
    node.disk.chains.insert(0, (gone,))
    manifest = await node.saved.save(node.capture("pause-i1-1"))
    assert [layer.digest for layer in manifest.disk_layers] == [node.disk.chains[0][0].digest]
    node.disk.chains = [(gone,)]
    with pytest.raises(StorageError, match="change all the time"):
        await node.saved.save(node.capture("pause-i1-2"))
    assert await node.saved.hidden() == ("pause-i1-1",)
    assert node.layers.references("snapshot:pause-i1-2") == ()


async def test_damaged_or_missing_parent_costs_space_only(node: MachineNode) -> None:
    node.touch(0, os.urandom(MIB))
    first = await node.saved.save(node.capture("pause-i1-1"))
    path = node.layers.get(first.memory_layers[0].digest).path
    path.chmod(0o600)
    path.write_bytes(bytes(path.stat().st_size))
    for snapshot_id, parent_id in (("pause-i1-2", "pause-i1-1"), ("pause-i1-3", "pause-i1-none")):
        node.touch(8192, snapshot_id.encode())
        manifest = await node.saved.save(node.capture(snapshot_id, parent_id))
        assert len(manifest.memory_layers) == 1
        async with node.saved.load(snapshot_id, memory=True) as machine:
            assert await node.loaded(machine.memory_layers) == node.memory.read_bytes()


async def test_nothing_is_left_of_a_failure(node: MachineNode) -> None:
    node.memory.unlink()
    with pytest.raises((StorageError, LayerError)):
        await node.saved.save(node.capture("pause-i1-1"))
    assert await node.saved.hidden() == ()
    assert node.layers.references("snapshot:pause-i1-1") == ()
    assert [path.name for path in (node.home / "snapshots").iterdir() if path.is_dir()] == []


async def test_space_comes_back(node: MachineNode) -> None:
    node.touch(0, os.urandom(MIB))
    for number in range(4):
        await node.saved.save(node.capture(f"pause-i1-{number}"))
        node.touch(0, os.urandom(MIB))
    await asyncio.gather(*(node.saved.delete(f"pause-i1-{number}") for number in range(4)))
    assert [layer.digest for layer in node.layers.list()] == [node.disk.chains[0][0].digest]
    assert 0 < node.disk.collections <= 4
