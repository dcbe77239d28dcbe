"""A host in memory for tests of the orchestrator: VMs, slots, disks, agents, and a clock that is moved by hand.

`World` is the host and outlives servers; `Server` is one server process on it. Every call that a server makes passes
`Script.at`, where a test can let it fail, be cancelled, or let the whole server die. The fakes keep the promises of
`orchestrator.ports`: a failed or cancelled taking leaves nothing taken, giving back may be repeated.
"""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
import sys
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, TypeVar

from fake_snapshots import FakeCatalog, FakeSaved, FakeSnapshot
from fake_warm import FakeWaiting

from agentenv.config import NetworkSettings, SandboxSettings, Settings, VmmSettings
from agentenv.errors import (
    GuestAgentError,
    NetworkError,
    VmmError,
)
from agentenv.guest.base import AgentInfo, AgentMetrics, GuestIdentity
from agentenv.network.base import EgressPolicy, Slot
from agentenv.orchestrator.database import Database
from agentenv.orchestrator.journal import Journal
from agentenv.orchestrator.launch import interface_of
from agentenv.orchestrator.model import CollectedSpace, CreateRequest, SandboxState, SpaceReport
from agentenv.orchestrator.orchestrator import Orchestrator
from agentenv.snapshots.manifest import HIDDEN_PREFIX
from agentenv.storage.disks import DiskEvent
from agentenv.storage.layers import StoredLayer
from agentenv.templates.snapshots import to_template
from agentenv.templates.store import Template
from agentenv.vmm.base import Disk, DiskFormat, MachineConfig, MachineExit, MachineRecord, MachineStats
from agentenv.vmm.warm import WarmMachines

T = TypeVar("T")
AGENT_VERSION = "0.6.7"
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


class FakeSlots:
    def __init__(self, world: World, script: Script) -> None:
        self._world, self._script = world, script
        self._mine: set[int] = set()

    async def start(self, keep: Collection[int]) -> None:
        await self._script.at("slots.start")
        for index in set(self._world.lent) - set(keep):
            del self._world.lent[index]

    async def acquire(self) -> Slot:
        await self._script.at("slots.acquire")
        index = next(index for index in itertools.count() if index not in self._world.lent)
        self._world.lent[index] = None
        self._mine.add(index)
        try:
            await self._script.at("slots.acquire done")
        except BaseException:
            if not self._script.dead:
                del self._world.lent[index]
            raise
        return _slot(index)

    async def adopt(self, index: int) -> Slot:
        await self._script.at("slots.adopt")
        if index in self._world.lost_slots or index not in self._world.lent:
            raise NetworkError(f"slot {index} is gone")
        self._mine.add(index)
        return _slot(index)

    async def apply_policy(self, slot: Slot, policy: EgressPolicy) -> None:
        await self._script.at("slots.apply_policy")
        self._world.lent[slot.index] = policy

    async def wait_ready(self, slot: Slot) -> None:
        await self._script.at("slots.wait_ready")
        await self._world.agent_ready.wait()
        if not any(vm.record.version == str(slot.index) for vm in self._world.vms.values()):
            await asyncio.Event().wait()  # a dead guest says nothing

    def clear_ready(self, slot: Slot) -> None:
        assert slot.index in self._world.lent

    async def release(self, slot: Slot) -> None:
        await self._script.at("slots.release")
        for vm in self._world.vms.values():
            assert vm.record.version != str(slot.index), "a slot was taken from under a live VM"
        assert slot.index not in {waiting.index for waiting in self._world.waiting}, "a process waits in it"
        self._world.lent.pop(slot.index, None)
        await self._script.at("slots.release done")

    async def close(self) -> None:
        await self._script.at("slots.close")


def _slot(index: int) -> Slot:
    return Slot(
        index=index,
        namespace=f"fake-{index}",
        address=IPv4Address("10.200.0.0") + 4 * index + 2,
        host_address=IPv4Address("10.200.0.0") + 4 * index + 1,
        veth=f"fake{index}",
    )


class FakeDisks:
    def __init__(self, world: World, script: Script) -> None:
        self._world, self._script = world, script
        self.tell: Callable[[DiskEvent], None] = lambda _: None

    async def create(self, disk_id: str, layers: Sequence[str], virtual_size: int, directory: Path) -> Disk:
        await self._script.at("disks.create")
        assert directory.is_dir()
        assert directory in self._world.prepared, "the socket would have the wrong owner"
        assert virtual_size == 1024 << 20
        if tuple(layers) == FakeTemplate.layers:
            self._world.written[disk_id] = 0
        else:
            (snapshot_id,) = layers
            self._world.written[disk_id] = self._world.kept(snapshot_id).written
        assert disk_id not in self._world.disks, "a second disk of one sandbox"
        (directory / "disk.sock").touch()
        self._world.disks.add(disk_id)
        try:
            await self._script.at("disks.create done")
        except BaseException:
            if not self._script.dead:
                (directory / "disk.sock").unlink()
                self._world.disks.discard(disk_id)
            raise
        return Disk(Path("disk.sock"), DiskFormat.NBD)

    async def remove(self, disk_id: str) -> None:
        await self._script.at("disks.remove")
        assert disk_id not in self._world.vms, "a disk was taken from under a live VM"
        self._world.disks.discard(disk_id)
        await self._script.at("disks.remove done")

    async def reconcile(self, keep: Collection[str]) -> Sequence[str]:
        await self._script.at("disks.reconcile")
        assert set(self._world.vms) & self._world.disks <= set(keep), "a disk was taken from under a live VM"
        assert set(keep) <= self._world.disks, "a disk that never was is missed"
        gone = self._world.disks - set(keep)
        self._world.disks -= gone
        return sorted(gone)

    def on_event(self, callback: Callable[[DiskEvent], None]) -> None:
        self.tell = callback

    async def capture(self, disk_id: str, *, sealed: Callable[[], None] | None = None) -> StoredLayer:
        raise AssertionError("snapshots capture disks")

    async def chain(self, disk_id: str) -> tuple[StoredLayer, ...]:
        raise AssertionError("snapshots capture disks")


class FakeMachine:
    def __init__(self, world: World, script: Script, vm: FakeVm) -> None:
        self._world, self._script, self._vm = world, script, vm

    @property
    def record(self) -> MachineRecord:
        return self._vm.record

    async def pause(self) -> None:
        await self._script.at("machine.pause")
        self._alive().paused = True
        await self._script.at("machine.pause done")

    async def resume(self) -> None:
        await self._script.at("machine.resume")
        assert not self._vm.copying, "its memory is being copied"
        self._alive().paused = False
        await self._script.at("machine.resume done")

    async def save_state(self, destination: Path) -> None:
        await self._script.at("machine.save_state")
        assert self._alive().paused
        destination.write_text(self._vm.directory.name)

    async def copy_memory(self, destination: Path) -> None:
        assert self._alive().paused
        assert not destination.exists()
        self._vm.copying = True
        try:
            await self._script.at("machine.copy_memory")
            destination.write_text(str(self._world.content[self._vm.directory.name]))
            await self._script.at("machine.copy_memory done")
        except BaseException:
            if not self._script.dead:
                destination.unlink(missing_ok=True)
            raise
        finally:
            self._vm.copying = False

    def _alive(self) -> FakeVm:
        if self._vm.ended.is_set():
            raise VmmError(f"the machine has ended: {self._vm.reason}")
        return self._vm

    async def shutdown(self, timeout_s: float) -> None:
        await self.kill()

    async def kill(self) -> None:
        await self._script.at("machine.kill")
        _remove_vm(self._world, self._vm, "killed")
        await self._script.at("machine.kill done")

    async def stats(self) -> MachineStats:
        return MachineStats(0.0, 0, 0)

    async def wait(self) -> MachineExit:
        await self._vm.ended.wait()
        return MachineExit(1, self._vm.reason)

    def console_log(self) -> Path:
        return self._vm.console


def _remove_vm(world: World, vm: FakeVm, reason: str) -> None:
    vm.end(reason)
    if world.vms.get(vm.directory.name) is vm:
        del world.vms[vm.directory.name]
    world.memory.discard(vm.directory.name)


class FakeVmm:
    name = "fake"
    version = "1"
    acceleration = "tcg"

    def __init__(self, world: World, script: Script) -> None:
        self._world, self._script = world, script
        self.configs: list[MachineConfig] = []

    def prepare_memory(self, machine_id: str) -> Path:
        directory = self._world.home / "memory"
        directory.mkdir(exist_ok=True)
        return directory / machine_id

    def prepare_directory(self, machine_id: str, directory: Path) -> None:
        assert {path.name for path in directory.iterdir()} <= {"log.jsonl", "disk.sock"}
        self._world.prepared.add(directory)

    async def boot(self, config: MachineConfig) -> FakeMachine:
        await self._script.at("vmm.boot")
        return await self._start(config, "vmm.boot done", 0)

    async def load(self, config: MachineConfig, state: Path, memory: Path) -> FakeMachine:
        return await self.load_at("vmm.load", config, state, memory)

    async def load_at(self, step: str, config: MachineConfig, state: Path, memory: Path) -> FakeMachine:
        content = int(memory.read_text())
        memory.unlink()
        try:
            await self._script.at(step)
            saved = self._world.kept(state.parent.name)
            assert saved.content in (None, content)
            machine = await self._start(config, f"{step} done", content)
        except BaseException:
            if not self._script.dead:
                self._world.memory.discard(config.machine_id)
            raise
        self._world.tokens[config.machine_id] = saved.manifest.agent_token
        machine._vm.paused = True
        return machine

    async def start_waiting(self, config: MachineConfig) -> FakeWaiting:
        await self._script.at("vmm.start_waiting")
        return FakeWaiting(self._world, self._script, self, config)

    async def _start(self, config: MachineConfig, done: str, content: int) -> FakeMachine:
        self._world.content[config.machine_id] = content
        self._world.tokens[config.machine_id] = None
        assert config.directory.name in self._world.disks
        index = int(config.interface.namespace.name.removeprefix("fake-"))
        assert self._world.lent[index] is not None, "booted before its network rules were in force"
        self.configs.append(config)
        record = MachineRecord(
            vmm="fake",
            version=str(index),
            pid=next(self._world.pids),
            start_time=1,
            directory=str(config.directory),
            memory_file=f"/memory/{config.machine_id}",
        )
        vm = FakeVm(record, config.directory)
        self._world.memory.add(config.machine_id)
        self._world.vms[config.machine_id] = vm
        if self._world.vm_dies_at_boot is not None and len(self.configs) <= self._world.dying_boots:
            self.die(config.machine_id, self._world.vm_dies_at_boot)
        try:
            await self._script.at(done)
        except BaseException:
            if not self._script.dead:
                _remove_vm(self._world, vm, "boot failed")
            raise
        return FakeMachine(self._world, self._script, vm)

    def die(self, sandbox_id: str, reason: str) -> None:
        """The process ends by itself; its memory file stays until somebody removes it."""
        self._world.vms.pop(sandbox_id).end(reason)

    async def adopt(self, record: MachineRecord) -> FakeMachine | None:
        await self._script.at("vmm.adopt")
        for vm in self._world.vms.values():
            if vm.record == record:
                return FakeMachine(self._world, self._script, vm)
        return None


class FakeAgent:
    def __init__(self, world: World, script: Script, host: str, token: str) -> None:
        self._world, self._script = world, script
        self.host, self.token = host, token

    async def health(self) -> None:
        await self._script.at("agent.health")
        if not self._world.agent_ready.is_set() or self._hung():
            raise GuestAgentError("silent")

    def _hung(self) -> bool:
        return any(
            self.host == str(_slot(int(vm.record.version)).address) and vm.directory.name in self._world.hung
            for vm in self._world.vms.values()
        )

    async def sync(self) -> None:
        await self._script.at("agent.sync")
        if self._hung():
            raise GuestAgentError("silent")

    async def init(self, identity: GuestIdentity) -> AgentInfo:
        await self._script.at("agent.init")
        assert not self._world.vms[identity.sandbox_id].paused
        assert self._world.tokens[identity.sandbox_id] in (None, self.token), "the agent knows another token"
        self._world.tokens[identity.sandbox_id] = identity.access_token
        self._world.identities[identity.sandbox_id] = identity
        return AgentInfo(AGENT_VERSION)

    async def metrics(self) -> AgentMetrics:
        await self._script.at(f"agent.metrics {self.host}")
        return AgentMetrics(self._world.clock.now(), 2, 12.5, 100, 512, 50, 10, 1024)


class FakeTemplates:
    def __init__(self, world: World, script: Script, catalog: FakeCatalog) -> None:
        self._world, self._script, self._catalog = world, script, catalog

    async def resolve(self, reference: str) -> FakeTemplate | Template:
        await self._script.at("templates.resolve")
        if reference in self._world.templates:
            return self._world.templates[reference]
        return to_template(await self._catalog.find(reference))

    async def taken(self) -> Collection[str]:
        await self._script.at("templates.taken")
        return frozenset(self._world.templates)


class FakeSpace:
    async def report(self) -> SpaceReport:
        return SpaceReport(1, 2, 3, 4, 5, 6, None, 7)

    async def collect(self) -> CollectedSpace:
        return CollectedSpace(1, 2)


class FakeOrphans:
    def __init__(self, world: World, script: Script) -> None:
        self._world, self._script = world, script

    async def reap(self, live: Collection[MachineRecord]) -> Sequence[str]:
        await self._script.at("orphans.reap")
        strays = [vm for vm in self._world.vms.values() if vm.record not in live]
        for vm in strays:
            _remove_vm(self._world, vm, "reaped")
        self._world.memory &= {Path(record.directory).name for record in live}
        for path in (self._world.home / "memory").glob("*"):
            path.unlink()
        self._world.waiting.clear()
        return [vm.directory.name for vm in strays]


class FakeHost:
    def __init__(self, world: World) -> None:
        self._world = world

    def available_memory_bytes(self) -> int:
        return self._world.free_memory

    def free_disk_bytes(self) -> int:
        return self._world.free_disk

    def boot_id(self) -> str:
        return self._world.boot


class FakeAssets:
    kernel = Path("/assets/vmlinux")
    initramfs = Path("/assets/initramfs.img")


class ScriptedDatabase(Database):
    """The real database; its operations are steps too."""

    def __init__(self, path: Path, script: Script) -> None:
        super().__init__(path)
        self._script = script

    async def run(self, work: Callable[[sqlite3.Connection], T], *, durable: bool = False) -> T:
        name = work.__qualname__.split(".")[1]
        await self._script.at(f"journal.{name}")
        result = await super().run(work, durable=durable)
        if self._script.armed is not None and self._script.armed[0] is not Fate.FAIL:  # a commit that reports failure
            await self._script.at(f"journal.{name} done")  # would not be one
        return result


class ScriptedJournal(Journal):
    def __init__(self, path: Path, script: Script) -> None:
        super().__init__(path)
        self._database = ScriptedDatabase(path, script)


class Server:
    """One server process on a world."""

    def __init__(self, world: World, *, warm: int = 0, **sandbox: Any) -> None:
        self.world = world
        self.script = Script()
        self.settings = Settings(
            home=world.home,
            sandbox=SandboxSettings(**sandbox),
            network=NetworkSettings(),
            vmm=VmmSettings(warm_machines=warm),
        )
        self.vmm = FakeVmm(world, self.script)
        self.disks = FakeDisks(world, self.script)
        self.saved = FakeSaved(world, self.script)
        catalog = FakeCatalog(world, self.script)
        slots = FakeSlots(world, self.script)
        self.warm = WarmMachines(
            self.vmm,
            self.settings.paths.sandboxes,
            lend=slots.acquire,
            give_back=slots.release,
            interface_of=interface_of,
            most=warm,
            idle_s=1000,
        )
        self.orchestrator = Orchestrator(
            self.settings,
            vmm=self.vmm,
            slots=slots,
            disks=self.disks,
            templates=FakeTemplates(world, self.script, catalog),
            assets=FakeAssets(),
            agents=lambda host, token: FakeAgent(world, self.script, host, token),
            orphans=FakeOrphans(world, self.script),
            host=FakeHost(world),
            saved=self.saved,
            catalog=catalog,
            space=FakeSpace(),
            memory=self.saved,
            warm=self.warm if warm else None,
            clock=world.clock,
            journal=ScriptedJournal(world.home / "state.db", self.script),
        )
        self._before = asyncio.all_tasks()

    async def start(self) -> Server:
        """Start, and wait until the work that it does by itself is at rest."""
        self.world.drafts.clear()  # as the repository does when a server starts
        await self.orchestrator.start()
        if self.settings.vmm.warm_machines:
            self.warm.start()
        await self.script.reached("journal.purge_keys")
        await self.orchestrator._journal.load()
        return self

    async def __aenter__(self) -> Server:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        if not self.script.dead:
            self.script.armed = None
            self.script.failing.clear()
            for gate in self.script.blocked.values():
                gate.set()
            await self.close()

    async def close(self, *, drain: bool = False) -> None:
        """Stop as a server does."""
        await self.warm.close()
        await self.orchestrator.close(drain=drain)

    async def vanish(self) -> None:
        """The process is gone: whatever it still wanted to do does not happen."""
        self.script.dead = True
        tasks = asyncio.all_tasks() - self._before - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.orchestrator._journal.close()

    async def settle(self) -> None:
        """Wait for operations under way, then let the retries of failed releases come true."""
        await self.orchestrator.settled()
        if self.orchestrator._cleaner.sandbox_ids:
            await self.world.clock.advance(2)
            await eventually(lambda: not self.orchestrator._cleaner.sandbox_ids)

    def check(self, expected: Collection[str] | None = None) -> None:
        """State is true: what the server shows, the host has, and nothing more; the journal says the same."""
        sandboxes = {sandbox.id: sandbox for sandbox in self.orchestrator.list()}
        shown = set(sandboxes)
        if expected is not None:
            assert shown == set(expected)
        world = self.world
        running = {name for name, sandbox in sandboxes.items() if sandbox.state is SandboxState.RUNNING}
        paused = {name for name, sandbox in sandboxes.items() if sandbox.state is SandboxState.PAUSED}
        assert running | paused == shown
        assert set(world.vms) == running
        assert not any(vm.paused for vm in world.vms.values())
        assert world.memory == running
        assert world.disks == running
        assert world.leased == []
        assert world.drafts == {}
        memory = {waiting.memory for waiting in world.waiting}
        assert set((world.home / "memory").glob("*")) == memory, "memory of a machine that was never loaded"
        owned = {
            (name, one.snapshot_id)
            for name, one in sandboxes.items()
            if one.snapshot_id is not None and one.snapshot_id.startswith(f"{HIDDEN_PREFIX}{name}-")
        }
        hidden = {name for name in world.snapshots if name.startswith(HIDDEN_PREFIX)}
        assert hidden == {snapshot_id for _, snapshot_id in owned}
        assert {sandboxes[name].snapshot_id for name in paused} <= set(world.snapshots)
        waiting = {waiting.index for waiting in world.waiting}
        assert {int(vm.record.version) for vm in world.vms.values()} | waiting == set(world.lent)
        waiting_in = {waiting.directory.name for waiting in world.waiting}
        assert {path.name for path in (world.home / "sandboxes").glob("*")} == shown | waiting_in
        assert not list((world.home / "sandboxes").glob("*/state"))
        assert {route.sandbox_id for route in self.orchestrator.routes} == running
        assert {live.sandbox.id for live in self.orchestrator._live} == shown
        rows = read_journal(world.home / "state.db")
        states = {(name, sandbox.state.value) for name, sandbox in sandboxes.items()}
        assert {(row["id"], row["state"]) for row in rows["sandboxes"]} == states
        assert {row["id"] for row in rows["sandboxes"] if row["machine"] is not None} == running
        assert {row["sandbox_id"] for row in rows["resources"]} == shown
        kept = {(row["sandbox_id"], row["name"]) for row in rows["resources"] if row["kind"] == "snapshot"}
        assert kept == owned
        assert rows["intents"] == []
        assert [row for row in rows["idempotency"] if row["outcome"] == "in_progress"] == []


def read_journal(path: Path) -> dict[str, list[dict[str, Any]]]:
    """All rows, past the code under test."""
    with sqlite3.connect(path) as connection:
        connection.row_factory = sqlite3.Row
        tables = ("sandboxes", "resources", "intents", "idempotency")
        rows = {table: [dict(row) for row in connection.execute(f"SELECT * FROM {table}")] for table in tables}
    connection.close()
    return rows


async def eventually(condition: Callable[[], bool]) -> None:
    """Let the loop and its threads work until something is true. The test's own timeout ends a hopeless wait."""
    while not condition():
        await asyncio.to_thread(lambda: None)
        await turns(2)


def wish(**changes: Any) -> CreateRequest:
    """A create request."""
    return CreateRequest(**{"template": "base", "timeout_s": 300} | changes)


async def outcome_of(work: Awaitable[T]) -> T | BaseException:
    """The result or the error, cancellation included."""
    try:
        return await work
    except (Exception, asyncio.CancelledError) as error:
        return error
