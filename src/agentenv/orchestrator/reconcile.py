"""At the start of a server: what the journal says is compared with what really is, and the truth wins.

Sandboxes that run are taken over, paused ones stay paused. A sandbox that the server left on the way from one to the
other is as before, or, once its snapshot exists, as after; one that it left standing still for a capture runs on. All
else that carries our mark and belongs to none of them is removed: processes, memory files, disks, slots, directories,
hidden snapshots, journal rows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from agentenv.errors import AgentEnvError, SnapshotNotFoundError, StorageError
from agentenv.ids import is_sandbox_id
from agentenv.network.base import Slot
from agentenv.orchestrator.cleanup import Cleaner
from agentenv.orchestrator.journal import Journal, JournalEntry, ResourceKind
from agentenv.orchestrator.launch import Holdings, Releaser, remove_directory
from agentenv.orchestrator.live import owned_snapshots
from agentenv.orchestrator.model import PauseMode, Sandbox, SandboxState
from agentenv.orchestrator.ports import DiskStore, HostProbe, OrphanReaper, SavedMachines, SlotPool
from agentenv.orchestrator.tasks import in_thread, together
from agentenv.vmm.base import Machine, Vmm

_log = structlog.get_logger(__name__)
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Adopted:
    """A sandbox that outlived the last server: it runs, or is paused."""

    sandbox: Sandbox
    holdings: Holdings


@dataclass(slots=True)
class _Found:
    """A journal entry, and what could be found of it."""

    entry: JournalEntry
    machine: Machine | None = None
    slot: Slot | None = None
    verdict: str | None = None
    """Why it cannot be taken over; None while it can."""
    paused: Sandbox | None = None
    """What it is when it is paused; then it has no machine and no slot."""

    @property
    def runs(self) -> bool:
        return self.verdict is None and self.paused is None

    @property
    def has_disk(self) -> bool:
        return any(resource.kind is ResourceKind.DISK for resource in self.entry.resources)


class Reconciler:
    """Runs once, before any create."""

    def __init__(
        self,
        sandboxes: Path,
        *,
        journal: Journal,
        vmm: Vmm,
        slots: SlotPool,
        disks: DiskStore,
        orphans: OrphanReaper,
        releaser: Releaser,
        cleaner: Cleaner,
        host: HostProbe,
        saved: SavedMachines,
    ) -> None:
        self._sandboxes = sandboxes
        self._journal = journal
        self._vmm = vmm
        self._slots = slots
        self._disks = disks
        self._orphans = orphans
        self._releaser = releaser
        self._cleaner = cleaner
        self._host = host
        self._saved = saved

    async def run(self) -> list[Adopted]:
        """Take over what runs, remove the rest, start the slot pool.

        Raises:
            AgentEnvError: processes of an earlier server could not be ended, or the slot pool could not start. What
                merely could not be removed is tried again later and raises nothing.
        """
        await self._journal.doubt_keys()
        found = [_Found(entry) for entry in await self._journal.load()]
        await self._for_each(found, self._find_machine)
        # Processes first: a slot or a disk must not be pulled away under a VM that still runs.
        records = [one.machine.record for one in found if one.machine is not None]
        for words in await self._orphans.reap(records):
            _log.info("orphan_removed", what=words)
        # A sandbox of an older version has none in the store: its disk is a file that its VMM has open.
        await self._reconcile_disks([one.entry.sandbox.id for one in found if one.runs and one.has_disk])
        await self._slots.start([one.entry.slot.index for one in found if one.runs and one.entry.slot])
        await self._for_each([one for one in found if one.runs], self._find_slot)
        await self._for_each(found, self._settle)
        await self._for_each([one for one in found if one.verdict is not None], self._remove)
        await self._remove_strays({one.entry.sandbox.id for one in found})
        kept = [one for one in found if one.verdict is None]
        await self._remove_snapshots({name for one in kept for name in owned_snapshots(one.entry.sandbox)})
        return [Adopted(one.entry.sandbox, self._holdings(one.entry.sandbox, one.slot, one.machine)) for one in kept]

    async def _reconcile_disks(self, keep: list[str]) -> None:
        try:
            for words in await self._disks.reconcile(keep):
                _log.info("disk_reconciled", what=words)
        except AgentEnvError as error:
            # What the journal names is tried again when that sandbox is released, all else at the next start.
            _log.warning("disks_not_reconciled", error=error.message)

    async def _for_each(self, found: list[_Found], step: Callable[[_Found], Awaitable[None]]) -> None:
        places = asyncio.Semaphore(_AT_ONCE)

        async def limited(one: _Found) -> None:
            async with places:
                await step(one)

        await together(*(limited(one) for one in found))

    async def _find_machine(self, one: _Found) -> None:
        entry = one.entry
        state = entry.sandbox.state
        if state in (SandboxState.PAUSED, SandboxState.PAUSING, SandboxState.RESUMING):
            one.paused, one.verdict = await self._find_paused(entry.sandbox)
        if one.paused is not None or one.verdict is not None:
            return
        if state not in (SandboxState.RUNNING, SandboxState.PAUSING, SandboxState.CAPTURING):
            one.verdict = f"the server stopped while it was {state}"
        elif entry.machine is None or entry.slot is None:
            one.verdict = "the journal lacks its machine or its slot"
        elif entry.boot_id != self._host.boot_id():
            one.verdict = "the host was rebooted"
        else:
            try:
                one.machine = await self._vmm.adopt(entry.machine)
            except AgentEnvError as error:
                one.verdict = f"its VM cannot be taken over: {error.message}"
            else:
                if one.machine is None:
                    one.verdict = "its VM ended while no server ran"

    async def _find_paused(self, sandbox: Sandbox) -> tuple[Sandbox | None, str | None]:
        """What a sandbox is as a paused one, or why it is lost; neither when its pause had not come to its end."""
        pausing = sandbox.state is SandboxState.PAUSING
        snapshot_id = sandbox.pausing_into if pausing else sandbox.snapshot_id
        if snapshot_id is None:
            return None, None if pausing else "the journal lacks its snapshot"
        try:
            manifest = await self._saved.get(snapshot_id)
        except SnapshotNotFoundError:
            return None, None if pausing else f"its snapshot {snapshot_id} is gone"
        except AgentEnvError as error:
            # It may be mended; whoever resumes it is told. A pause writes its manifest whole or not at all.
            _log.error("paused_sandbox_damaged", sandbox=sandbox.id, error=error.message)
            return replace(sandbox, state=SandboxState.PAUSED, snapshot_id=snapshot_id, pausing_into=None), None
        if not pausing:
            return replace(sandbox, state=SandboxState.PAUSED), None
        paused = replace(
            sandbox,
            state=SandboxState.PAUSED,
            paused_at=manifest.created_at,
            end_at=manifest.created_at,
            pause_mode=PauseMode(manifest.kind.value),
            agent_unresponsive_at_pause=not manifest.agent_responsive,
            snapshot_id=snapshot_id,
            pausing_into=None,
        )
        return paused, None

    async def _settle(self, one: _Found) -> None:
        """Write down what became of a sandbox that was on the way from one state to another."""
        if one.verdict is not None:
            return
        sandbox = one.entry.sandbox
        if one.paused is not None:
            if sandbox != one.paused or one.entry.machine is not None or one.entry.intent is not None:
                await self._journal.finish_pause(one.paused)
            one.entry = replace(one.entry, sandbox=one.paused)
        elif sandbox.state in (SandboxState.PAUSING, SandboxState.CAPTURING):
            what = "pause" if sandbox.state is SandboxState.PAUSING else "capture"
            assert one.machine is not None  # noqa: S101 - it runs
            try:
                await one.machine.resume()
            except AgentEnvError as error:
                one.verdict = f"a {what} was cut short, and its VM cannot run on: {error.message}"
                return
            running = replace(sandbox, state=SandboxState.RUNNING, pausing_into=None)
            await self._journal.abort_pause(running)
            one.entry = replace(one.entry, sandbox=running)
            _log.info(f"{what}_undone", sandbox=sandbox.id)

    async def _find_slot(self, one: _Found) -> None:
        slot = one.entry.slot
        assert slot is not None  # noqa: S101 - _find_machine saw it
        one.slot = slot
        try:
            one.slot = await self._slots.adopt(slot.index)
        except AgentEnvError as error:
            one.verdict = f"its network cannot be taken over: {error.message}"

    async def _remove(self, one: _Found) -> None:
        _log.warning("sandbox_lost", sandbox=one.entry.sandbox.id, reason=one.verdict)
        await self._release(self._holdings(one.entry.sandbox, one.slot, one.machine))

    async def _remove_strays(self, known: set[str]) -> None:
        """Directories that the journal never heard of, or forgot in a power cut."""

        def names() -> list[str]:
            try:
                return sorted(path.name for path in self._sandboxes.iterdir())
            except FileNotFoundError:
                return []
            except OSError as error:
                raise StorageError(f"cannot read {self._sandboxes}: {error.strerror}") from error

        for name in await in_thread(names):
            if name in known:
                continue
            _log.info("stray_directory_removed", directory=name)
            if is_sandbox_id(name):
                await self._release(Holdings(name, self._sandboxes / name))
            else:  # no sandbox had it, so there is no disk or slot of that name
                await self._remove_stray(self._sandboxes / name)

    async def _remove_stray(self, path: Path) -> None:
        try:
            await in_thread(lambda: remove_directory(path))
        except AgentEnvError as error:
            _log.warning("stray_directory_not_removed", path=str(path), error=error.message)

    async def _release(self, holdings: Holdings) -> None:
        try:
            await self._releaser.release(holdings)
        except AgentEnvError as error:
            self._cleaner.take_over(holdings, error)

    async def _remove_snapshots(self, kept: Collection[str]) -> None:
        """Hidden snapshots that no sandbox goes on from."""
        try:
            for snapshot_id in await self._saved.hidden():
                if snapshot_id not in kept:
                    await self._saved.delete(snapshot_id)
                    _log.info("stray_snapshot_removed", snapshot=snapshot_id)
        except AgentEnvError as error:
            _log.warning("stray_snapshots_not_removed", error=error.message)

    def _holdings(self, sandbox: Sandbox, slot: Slot | None, machine: Machine | None) -> Holdings:
        return Holdings(sandbox.id, self._sandboxes / sandbox.id, slot, machine, owned_snapshots(sandbox))
