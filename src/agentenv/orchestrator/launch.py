"""The two ways of a sandbox's resources: taken in order by `Launcher`, given back in reverse by `Releaser`.

Neither knows of states, callers or timers. What was taken is in `Holdings` the moment it is, so that a release finds it
whatever interrupted the start.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog

from agentenv.config import Settings
from agentenv.errors import (
    AgentEnvError,
    CapacityError,
    InsufficientStorageError,
    SandboxStartError,
    StorageError,
    VmmError,
)
from agentenv.guest.base import AgentInfo, GuestIdentity
from agentenv.guest.kernel import KERNEL_ARGUMENTS
from agentenv.network.base import (
    GATEWAY_ADDRESS,
    GUEST_ADDRESS,
    GUEST_MAC,
    GUEST_PREFIX,
    TAP_NAME,
    EgressPolicy,
    Slot,
)
from agentenv.orchestrator.journal import Journal
from agentenv.orchestrator.ports import (
    Agent,
    AgentFactory,
    Clock,
    DiskStore,
    GuestAssets,
    GuestMemory,
    HostProbe,
    SavedMachines,
    SlotPool,
)
from agentenv.orchestrator.tasks import first, in_thread, together
from agentenv.snapshots.machines import LoadableMachine
from agentenv.storage.disk_stacks import SOCKET_NAME
from agentenv.vmm.base import Disk, DiskFormat, GuestNetwork, Machine, MachineConfig, NetworkInterface, Vmm
from agentenv.vmm.console import last_lines
from agentenv.vmm.warm import MachineShape, WarmMachine, WarmMachines

_log = structlog.get_logger(__name__)
WarmPool = WarmMachines[Slot]
"""VMM processes that wait for a machine, each in a slot of its own."""
_BOOTS = 2
_DISK = Disk(Path(SOCKET_NAME), DiskFormat.NBD)
"""The disk of every machine that a waiting process can become."""
_CRASH_LINES = 60
"""Lines of the console that are logged when a guest crashed: a kernel's whole complaint."""


class _GuestEndedError(SandboxStartError):
    """The VM ended before its agent was ready."""


@dataclass(slots=True)
class Holdings:
    """What a sandbox has on this host. Changed by `Launcher` and `Releaser` only."""

    sandbox_id: str
    directory: Path
    slot: Slot | None = None
    machine: Machine | None = None
    snapshots: set[str] = field(default_factory=set)
    """Hidden snapshots that exist or may exist."""
    waiting: WarmMachine[Slot] | None = None
    """A process that is going to be its machine."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """All decisions of a start."""

    layers: Sequence[str]
    """Of the disk: digests, bottom first."""
    disk_bytes: int
    policy: EgressPolicy
    vcpus: int
    memory_mib: int
    identity: GuestIdentity
    again: bool = False
    """Whether the sandbox ran before, so that its directory may be there."""
    saved: LoadableMachine | None = None
    """What to load the machine from; it boots when there is none, or when this has no state."""


class Launcher:
    """Takes what a sandbox needs and brings it up to a ready agent."""

    def __init__(
        self,
        settings: Settings,
        *,
        journal: Journal,
        vmm: Vmm,
        slots: SlotPool,
        disks: DiskStore,
        assets: GuestAssets,
        agents: AgentFactory,
        host: HostProbe,
        clock: Clock,
        memory: GuestMemory,
        warm: WarmPool | None = None,
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._warm = warm
        self._journal = journal
        self._vmm = vmm
        self._slots = slots
        self._disks = disks
        self._assets = assets
        self._agents = agents
        self._host = host
        self._clock = clock

    async def launch(self, plan: LaunchPlan, holdings: Holdings) -> AgentInfo:
        """Bring the sandbox up. On failure `holdings` says what must be given back.

        Raises:
            AgentEnvError: of the step that failed.
            SandboxStartError: the VM ended, or its agent was not ready in time; with the guest's last words.
        """
        saved = plan.saved
        if saved is not None and saved.state is not None:
            return await self._load(plan, holdings, saved, saved.state)
        await in_thread(lambda: self._make_directory(holdings, again=plan.again))
        disk, slot = await self._take_disk_and_slot(plan, holdings)
        for boots_left in reversed(range(_BOOTS)):
            outcome = await self._bring_up(plan, holdings, disk, slot)
            if isinstance(outcome, AgentInfo):
                return outcome
            if not isinstance(outcome, _GuestEndedError) or not boots_left:
                raise outcome
            # Emulated kernels crash once in a hundred boots or so, for no fault of the caller.
            machine = holdings.machine
            assert machine is not None  # noqa: S101 - it just ended
            console = await _console_end(machine, _CRASH_LINES)
            _log.warning("guest_ended_at_boot", sandbox=holdings.sandbox_id, error=outcome.message, console=console)
            await machine.kill()
            await self._disks.remove(holdings.sandbox_id)
            disk = await self._make_disk(plan, holdings)
        raise AssertionError("the last boot returned or raised")

    async def _bring_up(
        self, plan: LaunchPlan, holdings: Holdings, disk: Disk, slot: Slot
    ) -> AgentInfo | AgentEnvError:
        """Boot once, up to a ready agent or to the error that says why there is none."""
        self._slots.clear_ready(slot)
        machine = holdings.machine = await self._vmm.boot(self._machine_config(plan, holdings, disk, slot))
        await self._journal.note_machine(holdings.sandbox_id, machine.record, self._host.boot_id(), self._clock.now())
        agent = self._agents(str(slot.address), plan.identity.access_token)
        return await first(
            self._machine_end(machine),
            self._introduce(slot, agent, plan.identity),
            self._deadline(machine),
        )

    async def _load(self, plan: LaunchPlan, holdings: Holdings, saved: LoadableMachine, state: Path) -> AgentInfo:
        """Bring a saved machine up, to the answer of its agent."""
        sandbox_id = holdings.sandbox_id
        kernel, initramfs = saved.kernel or self._assets.kernel, saved.initramfs or self._assets.initramfs
        waiting = await self._take_waiting(plan, holdings, kernel, initramfs)
        again = plan.again or waiting is not None
        await in_thread(lambda: self._make_directory(holdings, again=again))
        if waiting is None:
            memory = await in_thread(lambda: self._vmm.prepare_memory(sandbox_id))
            filling = self._memory.write(saved, memory)
        else:
            memory = waiting.memory
            filling = self._memory.fill(saved, memory)
        try:
            disk, slot = await self._take_disk_and_slot(plan, holdings, filling)
            config = replace(
                self._machine_config(plan, holdings, disk, slot),
                kernel=kernel,
                initramfs=initramfs,
            )
            machine = await self._load_into(waiting, holdings, config, state) if waiting is not None else None
            if machine is None:
                if waiting is not None:
                    memory = await in_thread(lambda: self._vmm.prepare_memory(sandbox_id))
                    await self._memory.write(saved, memory)
                machine = await self._vmm.load(config, state, memory)
            holdings.machine = machine
        except BaseException:
            if holdings.waiting is None:  # that of a waiting process goes with it
                await in_thread(lambda: memory.unlink(missing_ok=True))
            raise
        await self._journal.note_machine(sandbox_id, machine.record, self._host.boot_id(), self._clock.now())
        await machine.resume()
        # The saved agent knows the token of the machine that was saved, and gets that of this one.
        agent = self._agents(str(slot.address), saved.agent_token or plan.identity.access_token)
        outcome = await first(
            self._machine_end(machine),
            self._greet(agent, plan.identity),
            self._deadline(machine),
        )
        if isinstance(outcome, AgentInfo):
            return outcome
        raise outcome

    async def _take_waiting(
        self, plan: LaunchPlan, holdings: Holdings, kernel: Path, initramfs: Path
    ) -> WarmMachine[Slot] | None:
        """A process that waits for such a machine, if there is one; it brings the slot."""
        if self._warm is None:
            return None
        shape = MachineShape(kernel, initramfs, plan.vcpus, plan.memory_mib, (_DISK,))
        waiting = await self._warm.take(shape, holdings.sandbox_id, holdings.directory)
        if waiting is not None:
            holdings.waiting, holdings.slot = waiting, waiting.lease
        return waiting

    async def _load_into(
        self, waiting: WarmMachine[Slot], holdings: Holdings, config: MachineConfig, state: Path
    ) -> Machine | None:
        """Let a waiting process become the machine. None when it does not; then nothing but its slot is left of it."""
        try:
            machine = await waiting.load(config, state)
        except VmmError as error:
            await waiting.discard()
            holdings.waiting = None
            _log.warning("warm_machine_not_loaded", sandbox=holdings.sandbox_id, error=error.message)
            return None
        holdings.waiting = None
        return machine

    async def _greet(self, agent: Agent, identity: GuestIdentity) -> AgentInfo | AgentEnvError:
        return await agent.init(identity)

    def _make_directory(self, holdings: Holdings, *, again: bool) -> None:
        _make_directory(holdings.directory, again=again)
        # Before the disk: its socket gets the owner that the directory has.
        self._vmm.prepare_directory(holdings.sandbox_id, holdings.directory)

    async def _take_disk_and_slot(
        self, plan: LaunchPlan, holdings: Holdings, beside: Coroutine[Any, Any, None] | None = None
    ) -> tuple[Disk, Slot]:
        """Take both, and do something else at the same time."""
        disk: Disk | None = None

        async def make_disk() -> None:
            nonlocal disk
            disk = await self._make_disk(plan, holdings)

        await together(make_disk(), self._take_slot(plan, holdings), *(() if beside is None else (beside,)))
        assert disk is not None and holdings.slot is not None  # noqa: S101 - all have returned
        return disk, holdings.slot

    async def _make_disk(self, plan: LaunchPlan, holdings: Holdings) -> Disk:
        return await self._disks.create(holdings.sandbox_id, plan.layers, plan.disk_bytes, holdings.directory)

    async def _take_slot(self, plan: LaunchPlan, holdings: Holdings) -> None:
        slot = holdings.slot
        if slot is None:  # a waiting process brings its own
            slot = holdings.slot = await self._acquire()
        await self._journal.note_slot(holdings.sandbox_id, slot, self._clock.now())
        # Before boot: no packet of this guest passes under the rules of another.
        await self._slots.apply_policy(slot, plan.policy)

    async def _acquire(self) -> Slot:
        while True:
            try:
                return await self._slots.acquire()
            except CapacityError:
                # Sandboxes that are wanted go before processes that might be.
                if self._warm is None or not await self._warm.make_room():
                    raise

    def _machine_config(self, plan: LaunchPlan, holdings: Holdings, disk: Disk, slot: Slot) -> MachineConfig:
        return MachineConfig(
            machine_id=holdings.sandbox_id,
            directory=holdings.directory,
            kernel=self._assets.kernel,
            initramfs=self._assets.initramfs,
            vcpus=plan.vcpus,
            memory_mib=plan.memory_mib,
            disks=(disk,),
            interface=interface_of(slot),
            guest_network=guest_network(self._settings.network.uplink_mtu),
            extra_arguments=KERNEL_ARGUMENTS,
        )

    async def _introduce(self, slot: Slot, agent: Agent, identity: GuestIdentity) -> AgentInfo | AgentEnvError:
        await self._slots.wait_ready(slot)
        return await agent.init(identity)

    async def _deadline(self, machine: Machine) -> AgentInfo | AgentEnvError:
        timeout_s = self._settings.sandbox.start_timeout_s
        await self._clock.sleep(timeout_s)
        words = await last_words(machine)
        return SandboxStartError(
            f"the guest's agent was not ready after {timeout_s:g} s; its console ends with: {words}"
        )

    async def _machine_end(self, machine: Machine) -> AgentInfo | AgentEnvError:
        ended = await machine.wait()
        return _GuestEndedError(f"the VM ended while it started: {ended.reason}")


def interface_of(slot: Slot) -> NetworkInterface:
    """What a machine in a slot has as its network."""
    return NetworkInterface(namespace=slot.namespace_path, tap=TAP_NAME, mac=GUEST_MAC)


def guest_network(mtu: int) -> GuestNetwork:
    """What every guest configures: the same addresses in each slot."""
    return GuestNetwork(
        address=f"{GUEST_ADDRESS}/{GUEST_PREFIX}",
        gateway=str(GATEWAY_ADDRESS),
        dns=str(GATEWAY_ADDRESS),
        mtu=mtu,
    )


class Releaser:
    """Gives back what a sandbox holds."""

    def __init__(self, *, journal: Journal, slots: SlotPool, disks: DiskStore, saved: SavedMachines) -> None:
        self._journal = journal
        self._slots = slots
        self._disks = disks
        self._saved = saved

    async def release(self, holdings: Holdings) -> None:
        """Give everything back and strike it out of the journal. May be repeated after a failure; then it goes on.

        The VM comes first: while it may live, its slot and its disk stay its own.

        Raises:
            AgentEnvError: of the first step that failed. `holdings` says what is left.
        """
        await self._give_back(holdings, self._release_slot, self._remove_disk, self._remove_rest)
        await _worded(
            self._journal.forget(holdings.sandbox_id), f"sandbox {holdings.sandbox_id} could not be struck out"
        )

    async def give_back(self, holdings: Holdings) -> None:
        """Give back what a paused sandbox does not need: VM, slot, disk. May be repeated, as `release`.

        Raises:
            AgentEnvError: of the first step that failed. `holdings` says what is left.
        """
        await self._give_back(holdings, self._release_slot, self._remove_disk)

    async def delete_snapshot(self, holdings: Holdings, snapshot_id: str) -> None:
        """Delete a hidden snapshot. May be repeated.

        Raises:
            AgentEnvError: it cannot be deleted.
        """
        await _worded(self._saved.delete(snapshot_id), f"snapshot {snapshot_id} could not be deleted")
        holdings.snapshots.discard(snapshot_id)

    async def _give_back(self, holdings: Holdings, *steps: Callable[[Holdings], Awaitable[None]]) -> None:
        if holdings.machine is not None:
            await _worded(holdings.machine.kill(), f"the VM of sandbox {holdings.sandbox_id} could not be ended")
            holdings.machine = None
        if holdings.waiting is not None:
            await _worded(holdings.waiting.discard(), f"the VM of sandbox {holdings.sandbox_id} could not be ended")
            holdings.waiting = None
        failures = [failure for step in steps if (failure := await _failure_of(step(holdings))) is not None]
        if failures:
            raise failures[0]

    async def _release_slot(self, holdings: Holdings) -> None:
        if holdings.slot is not None:
            await _worded(self._slots.release(holdings.slot), f"slot {holdings.slot.index} could not be taken back")
            holdings.slot = None

    async def _remove_disk(self, holdings: Holdings) -> None:
        sandbox_id = holdings.sandbox_id
        await _worded(self._disks.remove(sandbox_id), f"the disk of sandbox {sandbox_id} could not be removed")

    async def _remove_rest(self, holdings: Holdings) -> None:
        for snapshot_id in sorted(holdings.snapshots):
            await self.delete_snapshot(holdings, snapshot_id)
        await in_thread(lambda: remove_directory(holdings.directory))


async def _worded(step: Awaitable[None], what: str) -> None:
    """Await a step; an error that is not ours becomes one."""
    try:
        await step
    except AgentEnvError:
        raise
    except Exception as error:
        _log.exception("release_step_failed", what=what)
        raise VmmError(f"{what}: {error}") from error


async def _failure_of(step: Awaitable[None]) -> AgentEnvError | None:
    try:
        await step
    except AgentEnvError as error:
        return error
    return None


def _make_directory(directory: Path, *, again: bool) -> None:
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700, exist_ok=again)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InsufficientStorageError(f"no space for the directory {directory}; free some") from error
        raise StorageError(f"cannot make the directory {directory}: {error.strerror}") from error


def remove_directory(directory: Path) -> None:
    """Remove a sandbox's directory and all in it. Idempotent. Blocking.

    Raises:
        StorageError: something in it cannot be removed.
    """
    try:
        if directory.is_symlink() or directory.is_file():
            directory.unlink()
            return
        shutil.rmtree(directory)
    except FileNotFoundError:
        if directory.exists():  # somebody else removed a part meanwhile
            raise StorageError(f"cannot remove the directory {directory}: it changes") from None
    except OSError as error:
        raise StorageError(f"cannot remove the directory {directory}: {error.strerror}") from error


async def last_words(machine: Machine) -> str:
    """The last line that the guest wrote to its console, for messages."""
    lines = await _console_end(machine, 1)
    return lines[0] if lines else "(nothing)"


async def _console_end(machine: Machine, lines: int) -> list[str]:
    return await in_thread(lambda: last_lines(machine.console_log(), lines))
