"""Captures of real machines with memory and disk, and clones that go on from them elsewhere.

The guest checks its disk against its own memory for ever, so a clone only goes on when both are of the same instant.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentenv import _native
from agentenv.config import MIB
from agentenv.errors import InsufficientStorageError, VmmError
from agentenv.storage.memory import pack_memory, unpack_memory
from agentenv.vmm.base import Machine, MachineConfig
from harness.server import BUILT_HOME
from harness.storage import Storage, share_built, storage_of
from harness.vmm_lab import MEMORY_MIB, Lab, counts_in, still_going, text_of

pytestmark = [pytest.mark.vm, pytest.mark.root]

DISK_MIB = 16


@pytest.fixture
async def storage(tmp_path: Path) -> AsyncIterator[Storage]:
    share_built(BUILT_HOME, tmp_path / "home")
    async with storage_of(tmp_path / "home") as running:
        yield running


class Captures:
    """Machines of a lab with disks of a storage, and what is captured of them."""

    def __init__(self, lab: Lab, storage: Storage) -> None:
        self.lab = lab
        self.storage = storage

    def prepared(self, name: str) -> MachineConfig:
        config = self.lab.config(name, f"aenv.test_check={DISK_MIB}", namespace=0)
        self.lab.vmm.prepare_directory(name, config.directory)
        return config

    async def boot(self, name: str) -> Machine:
        config = self.prepared(name)
        image = self.lab.root / "image"
        with image.open("wb") as file:
            file.truncate(DISK_MIB * MIB)
        disk = await self.storage.disk(name, image, config.directory)
        return await self.lab.vmm.boot(dataclasses.replace(config, disks=(disk,)))

    async def load(self, name: str, namespace: int, state: Path, memory: Path, layers: tuple[str, ...]) -> Machine:
        """A clone on a disk, a tap and in a namespace of its own."""
        config = self.prepared(name)
        interface = self.lab.config(name, namespace=namespace).interface
        disk = await self.storage.disks.create(name, layers, 0, config.directory)
        machine = await self.lab.vmm.load(
            dataclasses.replace(config, disks=(disk,), interface=interface), state, memory
        )
        assert counts_in(text_of(machine)) == [], "a loaded machine runs before it is resumed"
        await machine.resume()
        return machine

    async def end(self, machine: Machine) -> None:
        await machine.kill()
        await self.storage.disks.remove(Path(machine.record.directory).name)

    async def disk_of(self, name: str) -> tuple[str, ...]:
        """Seal what a machine wrote so far; the layers below what it writes from now on."""
        await self.storage.disks.capture(name)
        layers = tuple(layer.digest for layer in await self.storage.disks.chain(name))
        self.storage.layers.set_references("test", layers)
        return layers


async def test_a_machine_goes_on_in_two_clones_and_itself(lab: Lab, storage: Storage) -> None:
    captures = Captures(lab, storage)
    source = await captures.boot("source")
    await still_going(source)
    copy, state = lab.vmm.prepare_memory("copy"), lab.root / "state"
    with pytest.raises(VmmError, match="must be paused"):
        await source.copy_memory(copy)
    with pytest.raises(VmmError, match="must be paused"):
        await source.release_memory(copy)
    assert not copy.exists()

    await source.pause()
    await source.save_state(state)
    await source.copy_memory(copy)
    layers = await captures.disk_of("source")
    last = counts_in(text_of(source))[-1]
    await source.resume()
    with pytest.raises(VmmError, match="must be paused"):
        await source.copy_memory(lab.vmm.prepare_memory("late"))
    await still_going(source)

    # One clone has its memory from a layer, and runs beside its source.
    layer, unpacked = lab.root / "layer", lab.vmm.prepare_memory("layered")
    await pack_memory(copy, (), layer)
    await unpack_memory((layer,), unpacked)
    layered = await captures.load("layered", 1, state, unpacked, layers)
    await still_going(layered)
    assert counts_in(text_of(layered))[0] in (last, last + 1), "it does not go on at the saved instant"
    await still_going(source)

    # The other has the memory that its source gave up when it ended, at a later instant.
    await source.pause()
    await source.save_state(state)
    layers = await captures.disk_of("source")
    last = counts_in(text_of(source))[-1]
    released = lab.vmm.prepare_memory("released")
    with pytest.raises(VmmError, match="exists"):
        await source.release_memory(copy)
    await source.release_memory(released)
    with pytest.raises(VmmError, match="has ended"):
        await source.resume()
    assert not Path(source.record.memory_file or "").exists()
    assert released.stat().st_size == MEMORY_MIB * MIB
    await captures.end(source)
    again = await captures.load("again", 0, state, released, layers)
    await asyncio.gather(still_going(again), still_going(layered))
    assert counts_in(text_of(again))[0] in (last, last + 1), "it does not go on at the saved instant"
    # What was copied first did not change meanwhile.
    assert (await pack_memory(copy, (layer,), lab.root / "difference")).data_bytes == 0
    copy.unlink()
    await captures.end(again)
    await captures.end(layered)


async def test_a_copy_without_room_leaves_the_machine_as_it_was(lab: Lab, small_file_system: Path) -> None:
    machine = await lab.vmm.boot(lab.config("one"))
    await still_going(machine)
    await machine.pause()
    for attempt in (machine.copy_memory, machine.release_memory):
        with pytest.raises(InsufficientStorageError, match=r"copy\.mem"):
            await attempt(small_file_system / "copy.mem")
        assert list(small_file_system.iterdir()) == []
    await machine.resume()
    await still_going(machine)
    await machine.kill()


async def test_a_cancelled_copy_leaves_nothing_and_nobody_resumes_meanwhile(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = await lab.vmm.boot(lab.config("one"))
    await machine.pause()
    started, finish = threading.Event(), threading.Event()
    copy_image = _native.copy_image

    def slow(image: Path, out: Path, **options: Any) -> int:
        copied = copy_image(image, out, **options)
        started.set()
        finish.wait()
        return copied

    monkeypatch.setattr(_native, "copy_image", slow)
    copying = asyncio.create_task(machine.copy_memory(lab.root / "copy"))
    await asyncio.to_thread(started.wait)
    resuming = asyncio.create_task(machine.resume())
    copying.cancel()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await asyncio.shield(resuming)
    finish.set()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert not (lab.root / "copy").exists()
    await resuming
    await machine.kill()


async def test_memory_of_another_machine_is_refused(lab: Lab) -> None:
    (lab.root / "state").write_bytes(b"not looked at")
    memory = lab.vmm.prepare_memory("short")
    with memory.open("wb") as file:
        file.truncate((MEMORY_MIB - 1) * MIB)
    with pytest.raises(VmmError, match=r"has \d+ bytes"):
        await lab.vmm.load(lab.config("one"), lab.root / "state", memory)
    assert lab.leftovers() == []
