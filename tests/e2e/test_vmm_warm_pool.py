"""Real QEMU processes that wait for their machine: taken, moved and filled, or left behind by whom they waited for."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agentenv.config import MIB
from agentenv.errors import VmmError
from agentenv.orchestrator.orphans import HostOrphans
from agentenv.storage.memory import fill_memory, pack_memory
from agentenv.vmm.base import Disk, DiskFormat, MachineConfig, NetworkInterface
from agentenv.vmm.host import machine_uid, may_change_user
from agentenv.vmm.process import ProcessHandle, take_lock
from agentenv.vmm.qmp import QmpClient
from agentenv.vmm.records import find_orphans
from agentenv.vmm.warm import MachineShape, WarmMachines
from harness.server import BUILT_HOME
from harness.storage import kill_daemon, share_built, storage_of
from harness.vmm_lab import Lab, counts_in, still_going, text_of

pytestmark = [pytest.mark.vm, pytest.mark.root]

DISK = Disk(Path("disk.sock"), DiskFormat.NBD)
DISK_MIB = 16


class Networks:
    """Lends one of the lab's namespaces at a time."""

    def __init__(self, lab: Lab) -> None:
        interface = lab.config("unused", namespace=1).interface
        assert interface is not None
        self.interface: NetworkInterface = interface
        self.lent = 0

    async def lend(self) -> NetworkInterface:
        self.lent += 1
        return self.interface

    async def give_back(self, lease: NetworkInterface) -> None:
        self.lent -= 1


def shape_of(config: MachineConfig) -> MachineShape:
    return MachineShape(config.kernel, config.initramfs, config.vcpus, config.memory_mib, (DISK,))


@asynccontextmanager
async def pool_of(lab: Lab, networks: Networks) -> AsyncIterator[WarmMachines[NetworkInterface]]:
    """A pool with one process that waits for a machine of the lab."""
    pool = WarmMachines(
        lab.vmm,
        lab.sandboxes,
        lend=networks.lend,
        give_back=networks.give_back,
        interface_of=lambda lease: lease,
        most=1,
        idle_s=1000,
    )
    pool.start()
    try:
        assert await pool.take(shape_of(lab.config("unused")), "first", lab.sandboxes / "first") is None
        await pool.settled()
        assert pool.waiting == 1
        yield pool
    finally:
        await pool.close()


async def test_a_waiting_process_becomes_a_machine(lab: Lab, tmp_path: Path) -> None:
    """With another disk, tap and directory than its state was saved with; its disk's server dies once after that."""
    share_built(BUILT_HOME, tmp_path / "home")
    networks = Networks(lab)
    async with storage_of(tmp_path / "home") as storage, pool_of(lab, networks) as pool:
        image = lab.root / "image"
        with image.open("wb") as file:
            file.truncate(DISK_MIB * MIB)
        config = lab.config("source", f"aenv.test_check={DISK_MIB}")
        lab.vmm.prepare_directory("source", config.directory)
        disk = await storage.disk("source", image, config.directory)
        source = await lab.vmm.boot(dataclasses.replace(config, disks=(disk,)))
        await still_going(source)
        await source.pause()
        await source.save_state(lab.root / "state")
        await pack_memory(Path(source.record.memory_file or ""), (), lab.root / "layer")
        await storage.disks.capture("source")
        layers = [layer.digest for layer in await storage.disks.chain("source")]
        last = counts_in(text_of(source))[-1]
        await source.resume()

        (orphan,) = await find_orphans(lab.sandboxes, [config.directory])
        directory = lab.sandboxes / "clone"
        warm = await pool.take(shape_of(config), "clone", directory)
        assert warm is not None
        assert warm.memory == lab.memory_dir / "clone.mem"
        await fill_memory((lab.root / "layer",), warm.memory)
        lab.vmm.prepare_directory("clone", directory)
        await storage.disks.create("clone", layers, 0, directory)
        config = dataclasses.replace(
            config, machine_id="clone", directory=directory, disks=(DISK,), interface=warm.lease
        )
        clone = await warm.load(config, lab.root / "state")
        assert clone.record == dataclasses.replace(
            orphan,
            directory=str(directory),
            memory_file=str(lab.memory_dir / "clone.mem"),
            kernel=str(config.kernel),
            initramfs=str(config.initramfs),
        ), "it is another process"
        assert counts_in(text_of(clone)) == [], "a loaded machine runs before it is resumed"
        await clone.resume()
        await still_going(clone)
        assert counts_in(text_of(clone))[0] in (last, last + 1), "it does not go on at the saved instant"
        await still_going(source)
        await source.kill()
        kill_daemon(tmp_path / "home")
        await still_going(clone)
        # It is found again, and saved and loaded once more, like any machine.
        assert await lab.vmm.adopt(clone.record) is not None
        assert not (lab.sandboxes / Path(orphan.directory).name).exists()
        await clone.pause()
        await clone.save_state(lab.root / "state")
        memory = lab.vmm.prepare_memory("again")
        await clone.release_memory(memory)
        await storage.disks.capture("clone")
        again = await lab.vmm.load(config, lab.root / "state", memory)
        await again.resume()
        await still_going(again)
        await again.kill()
        assert networks.lent == 1
    assert networks.lent == 1


@pytest.mark.skipif(not may_change_user(), reason="this container may not change user ids")
async def test_a_waiting_process_has_no_rights(lab: Lab) -> None:
    async with pool_of(lab, Networks(lab)) as pool:
        (found,) = await find_orphans(lab.sandboxes)
        status = Path(f"/proc/{found.pid}/status").read_text()
        user = str(machine_uid(Path(found.directory).name))
        assert status.split("Uid:")[1].split()[:3] == [user] * 3
        warm = await pool.take(shape_of(lab.config("unused")), "one", lab.sandboxes / "one")
        assert warm is not None
        lab.vmm.prepare_directory("one", lab.sandboxes / "one")
        assert (lab.sandboxes / "one").stat().st_gid == int(user), "it cannot go through its own directory"
        assert Path(f"/proc/{found.pid}/root").readlink() == lab.sandboxes / "one"
        await warm.discard()


async def test_what_cannot_be_loaded_leaves_nothing(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b"this is no state")
    networks = Networks(lab)
    config = dataclasses.replace(lab.config("unused"), interface=networks.interface, disks=())
    shape = dataclasses.replace(shape_of(config), disks=())
    async with pool_of(lab, networks) as pool:
        for number, wrong in enumerate((config, dataclasses.replace(config, memory_mib=config.memory_mib + 1))):
            await pool.take(shape, "none", lab.sandboxes / "none")
            await pool.settled()
            name = f"machine{number}"
            warm = await pool.take(shape, name, lab.sandboxes / name)
            assert warm is not None
            with pytest.raises(VmmError, match="of another kind" if number else "has ended: .*migration"):
                await warm.load(
                    dataclasses.replace(wrong, machine_id=name, directory=lab.sandboxes / name), tmp_path / "state"
                )
            assert not (lab.memory_dir / f"{name}.mem").exists()
            await warm.discard()
            await networks.give_back(warm.lease)
    assert networks.lent == 0


async def test_a_directory_keeps_what_a_former_machine_left(lab: Lab) -> None:
    networks = Networks(lab)
    async with pool_of(lab, networks) as pool:
        shape = shape_of(lab.config("unused"))
        directory = lab.sandboxes / "one"
        directory.mkdir()
        (directory / "log.jsonl").write_text("of before\n")
        (directory / "console.log").write_text("words of before\n")
        (directory / "vmm.lock").touch()
        first = await pool.take(shape, "one", directory)
        assert first is not None
        assert (directory / "log.jsonl").read_text() == "of before\n"
        assert (directory / "log.jsonl").stat().st_nlink == 1
        assert (directory / "console.log").read_text() == "words of before\n"
        (found,) = await find_orphans(lab.sandboxes)
        assert (found.directory, Path(f"/proc/{found.pid}/root").readlink()) == (str(directory), directory)
        assert not list(lab.sandboxes.glob("warm-*")), "the directory that it changed places with is still there"
        await first.discard()
        assert (directory / "console.log").read_text() == "words of before\n"
        await pool.settled()
        waiting = pool._ready[0].waiting
        lock = take_lock(directory)  # as a process has that works there
        with pytest.raises(VmmError, match="exists already"):
            await waiting.move("one", directory)
        os.close(lock)
        assert waiting.alive
        assert waiting.directory.exists()
        second = await pool.take(shape, "one", directory)
        assert second is not None, "one that was discarded is in the way"
        await second.discard()
        (directory / "log.jsonl").unlink()
        for warm in (first, second):
            await networks.give_back(warm.lease)
    assert networks.lent == 0


async def test_waiting_processes_of_a_killed_server_are_found(lab: Lab) -> None:
    networks = Networks(lab)
    async with pool_of(lab, networks) as pool:
        (found,) = await find_orphans(lab.sandboxes)
        assert found.memory_file is not None
        assert Path(found.memory_file).exists()
        warm = await pool.take(shape_of(lab.config("unused")), "one", lab.sandboxes / "one")
        assert warm is not None
        # Nobody starts or ends processes while a server looks for those of the last one.
        await pool.settled()
        # A server that was killed here has written down nothing of the machine.
        removed = await HostOrphans(lab.sandboxes, lab.memory_dir).reap([])
        assert [line for line in removed if str(found.pid) in line and "sandboxes/one" in line]
        assert not (lab.memory_dir / "one.mem").exists()
        await warm.discard()
        await networks.give_back(warm.lease)


async def test_a_waiting_process_that_is_killed_is_replaced(lab: Lab) -> None:
    networks = Networks(lab)
    async with pool_of(lab, networks) as pool:
        (found,) = await find_orphans(lab.sandboxes)
        async with await QmpClient.connect(Path(found.directory), "qmp.sock") as qmp:
            assert (await qmp.execute("query-status"))["status"] == "inmigrate"
        process = ProcessHandle.adopt(found.pid, found.start_time)
        assert process is not None
        process.kill()
        await process.wait()
        assert await pool.take(shape_of(lab.config("unused")), "one", lab.sandboxes / "one") is None
        await pool.settled()
        assert pool.waiting == 1
        assert not Path(found.directory).exists()
        assert networks.lent == 1
    assert networks.lent == 0
