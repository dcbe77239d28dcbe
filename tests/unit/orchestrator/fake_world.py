"""The host of the orchestrator's tests, in memory: what is on it, a clock that is moved by hand, and fate.

`World` outlives servers. Every call that a server makes passes `Script.at`, where a test can let it fail, be cancelled,
or let the whole server die.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any

from fake_snapshots import FakeSnapshot
from fake_warm import FakeWaiting

from agentenv.errors import (
    VmmError,
)
from agentenv.guest.base import GuestIdentity
from agentenv.network.base import EgressPolicy
from agentenv.vmm.base import MachineRecord

START = datetime(2030, 1, 1, 12, 0, tzinfo=UTC)


class FakeClock:
    """Time stands still until `advance`."""

    def __init__(self) -> None:
        self.elapsed = 0.0
        self.wall_offset = timedelta()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    def now(self) -> datetime:
        return START + timedelta(seconds=self.elapsed) + self.wall_offset

    def monotonic(self) -> float:
        return self.elapsed

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sleeper = (self.elapsed + seconds, next(self._numbers), future)
        self._sleepers.append(sleeper)
        try:
            await future
        finally:
            self._sleepers.remove(sleeper)

    async def advance(self, seconds: float) -> None:
        """Let time pass, and every sleeper wake in its turn."""
        target = self.elapsed + seconds
        await turns()
        while due := [sleeper for sleeper in self._sleepers if sleeper[0] <= target and not sleeper[2].done()]:
            moment, _, future = min(due, key=lambda sleeper: sleeper[:2])
            self.elapsed = max(self.elapsed, moment)
            future.set_result(None)
            await turns()
        self.elapsed = target
        await turns()


async def turns(count: int = 20) -> None:
    """Let everything that is ready to run do so. Nothing that a thread does is waited for."""
    for _ in range(count):
        await asyncio.sleep(0)


async def eventually(condition: Callable[[], bool]) -> None:
    """Let the loop and its threads work until something is true. The test's own timeout ends a hopeless wait."""
    while not condition():
        await asyncio.to_thread(lambda: None)
        await turns(2)


class Fate(Enum):
    """What happens at the chosen step."""

    FAIL = "fail"
    CANCEL = "cancel"
    CRASH = "crash"


class Script:
    """Counts the steps of one server and lets fate strike at one of them."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.armed: tuple[Fate, int] | None = None
        self.struck: str | None = None
        self.error: Callable[[str], Exception] = lambda step: VmmError(f"injected at {step}")
        self.victim: asyncio.Task[Any] | None = None
        self.dead = False
        self.died = asyncio.Event()
        self.blocked: dict[str, asyncio.Event] = {}
        """Steps that wait until their event is set."""
        self.failing: dict[str, Exception] = {}
        """Steps that fail whenever they come."""
        self._news = asyncio.Event()

    async def reached(self, step: str) -> None:
        """Wait until a step was begun."""
        while step not in self.seen:
            self._news.clear()
            await self._news.wait()

    def arm(self, fate: Fate, step_number: int, victim: asyncio.Task[Any] | None = None) -> None:
        """Strike at the n-th step from now, beginning with 0."""
        self.seen.clear()
        self.struck = None
        self.armed = (fate, step_number)
        self.victim = victim

    async def at(self, step: str) -> None:
        if self.dead:
            raise VmmError("this server is dead")
        self.seen.append(step)
        self._news.set()
        if step in self.blocked:
            await self.blocked[step].wait()
        if step in self.failing:
            raise self.failing[step]
        if self.armed is None or len(self.seen) - 1 != self.armed[1]:
            return
        fate, self.armed, self.struck = self.armed[0], None, step
        if fate is Fate.FAIL:
            raise self.error(step)
        if fate is Fate.CANCEL:
            assert self.victim is not None
            self.victim.cancel()
            await turns()
            return
        self.dead = True
        self.died.set()
        await asyncio.Event().wait()


class FakeVm:
    """A VM of the host: a process, its memory file, its console."""

    def __init__(self, record: MachineRecord, directory: Path) -> None:
        self.record = record
        self.directory = directory
        self.console = directory / "console.log"
        self.ended = asyncio.Event()
        self.reason = ""
        self.paused = False
        self.copying = False

    def end(self, reason: str) -> None:
        if not self.ended.is_set():
            self.reason = reason
            self.ended.set()


@dataclass
class FakeTemplate:
    template_id: str = "base"
    names: tuple[str, ...] = ("base",)
    layers: tuple[str, ...] = ("sha256:" + 64 * "a", "sha256:" + 64 * "b")
    vcpus: int = 2
    memory_mib: int = 512
    disk_mib: int = 1024
    default_user: str = "user"
    default_workdir: str | None = "/home/user"
    env: dict[str, str] = field(default_factory=lambda: {"FROM_TEMPLATE": "1", "BOTH": "template"})
    snapshot_id: str | None = None


class World:
    """What is on the host, whichever server put it there."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.clock = FakeClock()
        self.leased: list[str] = []
        self.vms: dict[str, FakeVm] = {}
        """Live VMs by sandbox id."""
        self.lent: dict[int, EgressPolicy | None] = {}
        self.most_slots = 1000
        self.disks: set[str] = set()
        self.prepared: set[Path] = set()
        """Directories that a VMM has given to their machines."""
        self.memory: set[str] = set()
        self.identities: dict[str, GuestIdentity] = {}
        self.templates = {"base": FakeTemplate()}
        self.boot = "boot-1"
        self.free_memory = 1 << 40
        self.free_disk = 1 << 40
        self.pids = itertools.count(1000)
        self.agent_ready = asyncio.Event()
        self.agent_ready.set()
        self.vm_dies_at_boot: str | None = None
        self.dying_boots = sys.maxsize
        """How many boots die when `vm_dies_at_boot` is set."""
        self.lost_slots: set[int] = set()
        self.hung: set[str] = set()
        """Sandboxes whose agent says nothing."""
        self.content: dict[str, int] = {}
        """What a guest has in its memory, by sandbox id: a counter that its processes raise while it runs."""
        self.written: dict[str, int] = {}
        """What is on a guest's disk."""
        self.snapshots: dict[str, FakeSnapshot] = {}
        self.waiting: list[FakeWaiting] = []
        """Processes that wait for their machine."""
        self.drafts: dict[str, FakeSnapshot] = {}
        """Machines that are held, by the id of their capture."""
        self.tokens: dict[str, str | None] = {}
        """What the agent of a guest lets callers in with, by sandbox id; None: it lets in anybody."""

    def work(self) -> None:
        """Let every guest that runs do something, in memory and on its disk."""
        for sandbox_id, vm in self.vms.items():
            if not vm.paused:
                self.content[sandbox_id] = self.content.get(sandbox_id, 0) + 1
                self.written[sandbox_id] = self.written.get(sandbox_id, 0) + 1

    def kept(self, snapshot_id: str) -> FakeSnapshot:
        """A snapshot, or a machine that is held, that may be used now."""
        if snapshot_id in self.drafts:
            return self.drafts[snapshot_id]
        assert snapshot_id in self.leased, "layers that nobody keeps"
        return self.snapshots[snapshot_id]

    def reboot(self) -> None:
        self.boot += "+"
        for vm in list(self.vms.values()):
            vm.end("host rebooted")
        self.vms.clear()
        self.memory.clear()
        self.lent.clear()
