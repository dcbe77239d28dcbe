"""The rooms below the orchestrator, on a `World`: slots, disks, VMs, agents, templates.

They keep the promises of `orchestrator.ports`: a failed or cancelled taking leaves nothing taken, giving back may be
repeated.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Sequence
from ipaddress import IPv4Address
from pathlib import Path

from fake_snapshots import FakeCatalog
from fake_warm import FakeWaiting
from fake_world import FakeTemplate, FakeVm, Script, World

from agentenv.errors import (
    CapacityError,
    GuestAgentError,
    NetworkError,
    VmmError,
)
from agentenv.guest.base import AgentInfo, AgentMetrics, GuestIdentity
from agentenv.network.base import EgressPolicy, Slot
from agentenv.orchestrator.model import CollectedSpace, SpaceReport
from agentenv.storage.disks import DiskEvent
from agentenv.storage.layers import StoredLayer
from agentenv.templates.snapshots import to_template
from agentenv.templates.store import Template
from agentenv.vmm.base import Disk, DiskFormat, MachineConfig, MachineExit, MachineRecord, MachineStats

AGENT_VERSION = "0.6.7"


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
        if len(self._world.lent) >= self._world.most_slots:
            raise CapacityError("every slot is taken")
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
