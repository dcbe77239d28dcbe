"""The pool of waiting processes: what it keeps ready, when it lets go, and that every lease is given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from agentenv.errors import CapacityError, VmmError
from agentenv.vmm.base import Disk, DiskFormat, Machine, MachineConfig, NetworkInterface
from agentenv.vmm.warm import MachineShape, WarmMachines

SMALL = MachineShape(Path("/k"), Path("/i"), 1, 256, (Disk(Path("disk.sock"), DiskFormat.NBD),))
LARGE = replace(SMALL, memory_mib=1024)
LONG_S = 1000.0


class FakeWaiting:
    def __init__(self, host: Host, config: MachineConfig) -> None:
        self.config = config
        self.alive = True
        self.directory = config.directory
        self.memory = Path("/m") / f"{config.machine_id}.mem"
        self._host = host

    async def move(self, machine_id: str, directory: Path) -> None:
        await asyncio.sleep(0)
        if self._host.move_fails:
            raise VmmError("no")
        self.directory = directory

    async def load(self, config: MachineConfig, state: Path) -> Machine:
        if self._host.load_fails:
            raise VmmError("no")
        return cast(Machine, self)

    async def discard(self) -> None:
        await asyncio.sleep(0)
        self.alive = False
        self._host.processes.discard(self)


class Host:
    """Starts fake processes and lends numbers."""

    def __init__(self) -> None:
        self.processes: set[FakeWaiting] = set()
        self.lent: set[int] = set()
        self.numbers = 0
        self.start_fails = False
        self.move_fails = False
        self.load_fails = False
        self.given_back = asyncio.Event()

    async def lend(self) -> int:
        await asyncio.sleep(0)
        if self.numbers == 1000:
            raise CapacityError("all are taken")
        self.numbers += 1
        self.lent.add(self.numbers)
        return self.numbers

    async def give_back(self, lease: int) -> None:
        await asyncio.sleep(0)
        self.lent.remove(lease)
        self.given_back.set()

    async def start_waiting(self, config: MachineConfig) -> FakeWaiting:
        await asyncio.sleep(0)
        if self.start_fails:
            raise VmmError("it does not start")
        made = FakeWaiting(self, config)
        self.processes.add(made)
        return made

    @asynccontextmanager
    async def pool(self, most: int = 2, idle_s: float = LONG_S) -> AsyncIterator[WarmMachines[int]]:
        pool = WarmMachines(
            self,
            Path("/sandboxes"),
            lend=self.lend,
            give_back=self.give_back,
            interface_of=lambda lease: NetworkInterface(Path(f"/run/netns/{lease}"), "tap0", "02::"),
            most=most,
            idle_s=idle_s,
        )
        pool.start()
        try:
            yield pool
        finally:
            await pool.close()
            await pool.close()

    def leases_of_processes(self) -> set[int]:
        interfaces = [process.config.interface for process in self.processes]
        return {int(interface.namespace.name) for interface in interfaces if interface is not None}

    def memory(self) -> list[int]:
        return sorted(process.config.memory_mib for process in self.processes)


async def test_networks_that_are_needed_are_given_up(tmp_path: Path) -> None:
    host = Host()
    async with host.pool() as pool:
        assert not await pool.make_room()
        for name in ("one", "two"):
            assert await pool.take(replace(SMALL, vcpus=len(name)), name, tmp_path / name) is None
            assert await pool.take(LARGE, name, tmp_path / name) is None
        await pool.settled()
        for left in reversed(range(pool.waiting)):
            assert await pool.make_room()
            assert (len(host.lent), len(host.processes)) == (left, left)
        assert not await pool.make_room()
        await pool.settled()
        assert pool.waiting == 0, "what was given up is started again"
        assert await pool.take(SMALL, "three", tmp_path / "three") is None
        await pool.settled()
        assert pool.waiting == 1


async def test_what_was_wanted_is_ready_for_the_next(tmp_path: Path) -> None:
    host = Host()
    async with host.pool() as pool:
        assert await pool.take(SMALL, "one", tmp_path / "one") is None
        await pool.settled()
        assert (pool.waiting, host.memory()) == (1, [256])
        assert await pool.take(LARGE, "two", tmp_path / "two") is None, "one of another shape was given"
        await pool.settled()
        assert host.memory() == [256, 1024]
        taken = await pool.take(SMALL, "three", tmp_path / "three")
        assert taken is not None
        assert taken.waiting.directory == tmp_path / "three"
        assert taken.lease in host.lent
        waiting = taken.waiting
        assert isinstance(waiting, FakeWaiting)
        assert waiting.config.interface == NetworkInterface(Path(f"/run/netns/{taken.lease}"), "tap0", "02::")
        assert waiting.config.directory.parent == Path("/sandboxes")
        await pool.settled()
        assert pool.waiting == 1, "the next was started at the expense of this one"
        assert cast(object, await taken.load(waiting.config, tmp_path / "state")) is waiting
        await pool.settled()
        assert pool.waiting == 2, "nothing took its place"
    assert host.processes == {waiting}, "a taken process is the taker's"
    assert host.lent == {taken.lease}


async def test_the_newest_wishes_drive_out_older_ones(tmp_path: Path) -> None:
    host = Host()
    async with host.pool(most=3) as pool:
        for number, shape in enumerate((SMALL, SMALL, SMALL, LARGE)):
            await pool.take(shape, f"{number}", tmp_path / f"{number}")
        await pool.settled()
        assert host.memory() == [256, 256, 1024]
        for number in range(3):
            await pool.take(LARGE, f"{number}", tmp_path / f"{number}")
        await pool.settled()
        assert [ready.shape for ready in pool._ready] == [LARGE] * 3
    assert host.lent == host.leases_of_processes(), "what was taken is the takers', the rest was given back"


async def test_nobody_asking_empties_it(tmp_path: Path) -> None:
    host = Host()
    async with host.pool(idle_s=0.05) as pool:
        await pool.take(SMALL, "one", tmp_path / "one")
        await host.given_back.wait()
        assert (pool.waiting, host.processes, host.lent) == (0, set(), set())


async def test_a_process_that_ended_is_not_given_out(tmp_path: Path) -> None:
    host = Host()
    async with host.pool() as pool:
        await pool.take(SMALL, "one", tmp_path / "one")
        await pool.settled()
        (process,) = host.processes
        process.alive = False
        assert await pool.take(SMALL, "two", tmp_path / "two") is None
        await pool.settled()
        assert process not in host.processes
        assert pool.waiting == 2
        assert len(host.lent) == 2
    assert host.lent == set()


async def test_one_that_was_of_no_use_is_replaced_as_well(tmp_path: Path) -> None:
    host = Host()
    async with host.pool() as pool:
        await pool.take(SMALL, "one", tmp_path / "one")
        await pool.settled()
        for load in (True, False):
            taken = await pool.take(SMALL, "two", tmp_path / "two")
            assert taken is not None
            assert pool.waiting <= 1
            if load:
                host.load_fails = True
                with pytest.raises(VmmError):
                    await taken.load(cast(FakeWaiting, taken.waiting).config, tmp_path / "state")
            await taken.discard()
            await host.give_back(taken.lease)
            await pool.settled()
            assert pool.waiting == 2
    assert (host.processes, host.lent) == (set(), set())


@pytest.mark.parametrize("what", ["start", "lend"])
async def test_a_host_that_cannot_is_asked_once_for_each_taker(tmp_path: Path, what: str) -> None:
    host = Host()
    host.start_fails = what == "start"
    host.numbers = 1000 if what == "lend" else 0
    async with host.pool() as pool:
        for _ in range(2):
            assert await pool.take(SMALL, "one", tmp_path / "one") is None
            await pool.settled()
            assert host.lent == set()
        host.start_fails, host.numbers = False, 0
        await pool.take(SMALL, "one", tmp_path / "one")
        await pool.settled()
        assert pool.waiting == 1


async def test_a_process_that_cannot_be_moved_is_ended(tmp_path: Path) -> None:
    host = Host()
    async with host.pool() as pool:
        await pool.take(SMALL, "one", tmp_path / "one")
        await pool.settled()
        (process,) = host.processes
        host.move_fails = True
        assert await pool.take(SMALL, "two", tmp_path / "two") is None
        assert process not in host.processes
        host.move_fails = False
        await pool.settled()
        taking = asyncio.create_task(pool.take(SMALL, "two", tmp_path / "two"))
        await asyncio.sleep(0)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        await pool.settled()
    assert (host.processes, host.lent) == (set(), set())


async def test_a_pool_of_none_or_that_does_not_run_gives_nothing(tmp_path: Path) -> None:
    host = Host()
    async with host.pool(most=0) as pool:
        assert await pool.take(SMALL, "one", tmp_path / "one") is None
        await pool.settled()
        assert host.numbers == 0
    assert await pool.take(SMALL, "one", tmp_path / "one") is None
    async with host.pool() as pool:
        await pool.take(SMALL, "one", tmp_path / "one")
    assert (host.processes, host.lent) == (set(), set()), "it was closed while it started one"
