"""How a running sandbox becomes a paused one, and back: the steps, and the complete way back when one of them fails.

A pause stops the VM, saves it into a hidden snapshot, and ends the VM only when that snapshot is durable: until then
it can simply run on. A resume starts a new VM from the snapshot, which stays as it is. Both run in tasks of their own
that come to their end whoever leaves; only a kill cuts them short, and then the kill clears up.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import structlog

from agentenv.errors import (
    AgentEnvError,
    CapacityError,
    ConflictError,
    GuestUnresponsiveError,
    InsufficientStorageError,
    SandboxNotFoundError,
    StorageError,
    VmmError,
)
from agentenv.orchestrator import logbook, responsiveness
from agentenv.orchestrator.capturing import STATE_NAME, Shot, capture_of, saved_memory_of
from agentenv.orchestrator.creation import check_room
from agentenv.orchestrator.journal import Resource, ResourceKind
from agentenv.orchestrator.live import LiveSandbox
from agentenv.orchestrator.model import LogEntry, PauseMode, Sandbox, SandboxState
from agentenv.orchestrator.parts import OperationParts
from agentenv.orchestrator.states import Event
from agentenv.orchestrator.tasks import in_thread, to_the_end
from agentenv.orchestrator.waking import Waker, check_still, start_in_flight, worded_wake
from agentenv.snapshots.machines import SavedMemory, hidden_id

_log = structlog.get_logger(__name__)
_REFUSAL = "was not paused"
_RETRY_S = 30
"""A pause that failed at the end of a sandbox's time is tried again after so long, then after twice as long, …"""
_LONGEST_RETRY_S = 1800


class Pauser:
    """Pauses and resumes sandboxes. Every method but the tasks decides at once, without waiting."""

    def __init__(self, parts: OperationParts) -> None:
        self._parts = parts
        self._waker = Waker(parts)

    def pause(self, live: LiveSandbox, *, memory: bool, require_healthy: bool = False) -> asyncio.Task[None]:
        """Begin to pause a running sandbox.

        The task raises:
            GuestUnresponsiveError: the agent is silent, and `require_healthy`, or `memory` is off. It runs on.
            SandboxNotFoundError: it was killed meanwhile.
            AgentEnvError: of the step that failed. It runs on.

        Raises:
            ConflictError: it does not run.
        """
        sandbox = live.sandbox
        if live.state is not SandboxState.RUNNING:
            what = "already paused" if live.state in (SandboxState.PAUSED, SandboxState.PAUSING) else f"{live.state}"
            raise ConflictError(f"sandbox {sandbox.id} is {what}")
        live.apply(Event.PAUSE)
        task = self._parts.operations.spawn(self._pause(live, memory, require_healthy), f"pause {sandbox.id}")
        live.transition = task
        return task

    def resume(self, live: LiveSandbox, timeout_s: int, *, memory: bool | None) -> asyncio.Task[Sandbox]:
        """Begin to resume a paused sandbox, which then lives for `timeout_s` seconds.

        Args:
            live: which.
            timeout_s: seconds, from the moment when it runs.
            memory: False boots from its disk.

        The task raises as `Orchestrator.create` does, and `SnapshotError`, `SnapshotMismatchError`. It is paused as
        before then.

        Raises:
            ConflictError: it is not paused, or its memory holds a hung agent and is wanted.
            TooManyRequestsError: too many sandboxes run.
        """
        sandbox = live.sandbox
        if live.state is not SandboxState.PAUSED:
            raise start_in_flight(sandbox.id)
        if sandbox.agent_unresponsive_at_pause and memory is not False and sandbox.pause_mode is PauseMode.FULL:
            raise responsiveness.agent_was_silent(
                f"the agent of sandbox {sandbox.id} did not answer when it was paused, so its saved memory is of no "
                "use; connect with memory: false boots it from its disk"
            )
        running = self._parts.live.running + self._parts.cleaner.machines
        check_room(running, self._parts.settings.sandbox.max_running)
        live.apply(Event.RESUME)
        task = self._parts.operations.spawn(self._resume(live, timeout_s, memory), f"resume {sandbox.id}")
        live.transition = task
        return task

    def pause_at_end(self, live: LiveSandbox) -> None:
        """Pause a sandbox whose time is over. When that fails it runs on, and is paused a little later."""
        self._parts.operations.spawn(self._pause_at_end(live), f"pause {live.sandbox.id} at its end")

    async def _pause_at_end(self, live: LiveSandbox) -> None:
        while live.state is SandboxState.CAPTURING and live.transition is not None:
            await asyncio.wait([live.transition])
        if live.state is not SandboxState.RUNNING:
            return
        memory = live.sandbox.request.auto_pause_memory
        try:
            try:
                await self.pause(live, memory=memory)
            except GuestUnresponsiveError:
                # Nobody is there who could be told; what a silent agent cannot flush is in its memory.
                if live.state is SandboxState.RUNNING:
                    await self.pause(live, memory=True)
        except AgentEnvError as error:
            _log.warning("auto_pause_failed", sandbox=live.sandbox.id, error=error.message)

    async def _pause(self, live: LiveSandbox, memory: bool, require_healthy: bool) -> None:
        needed = require_healthy or not memory
        if not needed:
            # It is called paused from now on, so new traffic waits and wakes it, instead of being cut in the middle.
            self._hide(live, memory)
        async with live.saving:  # until a snapshot that is being taken is there
            await self._pause_now(live, memory, needed)

    def _hide(self, live: LiveSandbox, memory: bool) -> None:
        self._parts.presence.hide(live)
        if memory:
            self._parts.presence.let_sleep(live)

    async def _pause_now(self, live: LiveSandbox, memory: bool, needed: bool) -> None:
        """Pause it; it is not reachable already unless its agent is needed."""
        parts = self._parts
        sandbox = live.sandbox
        began = parts.clock.monotonic()
        snapshot_id = hidden_id(sandbox.id)
        hidden = not needed
        try:
            responsive = await responsiveness.answers(parts.agents, live, needed=needed, refusal=_REFUSAL)
            live.holdings.snapshots.add(snapshot_id)
            live.sandbox = replace(live.sandbox, pausing_into=snapshot_id)
            await parts.journal.begin_pause(live.sandbox, parts.clock.now())
            async with parts.standing:
                check_still(live, SandboxState.PAUSING)
                if not hidden:
                    hidden = True
                    self._hide(live, memory)
                if not memory:
                    await responsiveness.flush(parts.agents, live, refusal=_REFUSAL)
                await self._save(live, snapshot_id, memory, responsive)
            now = parts.clock.now()
            paused = replace(
                live.sandbox,
                state=SandboxState.PAUSED,
                paused_at=now,
                end_at=now,
                pause_mode=PauseMode.FULL if memory else PauseMode.FILESYSTEM,
                agent_unresponsive_at_pause=not responsive,
                snapshot_id=snapshot_id,
                pausing_into=None,
            )
            check_still(live, SandboxState.PAUSING)
            await parts.journal.finish_pause(paused)
            check_still(live, SandboxState.PAUSING)
        except (Exception, asyncio.CancelledError) as error:
            if live.state is not SandboxState.PAUSING:  # killed: the kill clears up
                raise SandboxNotFoundError(sandbox.id) from error
            await to_the_end(parts.operations.spawn(self._run_on(live, hidden, error), f"undo the pause {sandbox.id}"))
            if isinstance(error, AgentEnvError):
                if live.sandbox.state is SandboxState.RUNNING:
                    raise _worded(sandbox.id, error) from error
                raise
            if isinstance(error, asyncio.CancelledError):
                raise
            _log.error("pause_crashed", sandbox=sandbox.id, exc_info=error)
            raise VmmError(f"sandbox {sandbox.id} could not be paused: {type(error).__name__}") from error
        if live.watcher is not None:
            live.watcher.cancel()
        live.sandbox = paused
        live.not_before, live.failed_pauses = None, 0
        parts.presence.hide(live)
        parts.presence.let_sleep(live)
        await self._waker.tidy(live)
        _log.info("sandbox_paused", sandbox=sandbox.id, memory=memory, took_s=round(parts.clock.monotonic() - began, 3))
        message = "paused" if memory else "paused without its memory"
        await logbook.append(live.holdings.directory, LogEntry(now, "info", "orchestrator", message))

    async def _save(self, live: LiveSandbox, snapshot_id: str, memory: bool, responsive: bool) -> None:
        sandbox, machine, directory = live.sandbox, live.holdings.machine, live.holdings.directory
        assert machine is not None  # noqa: S101 - it runs
        await machine.pause()
        saved_memory: SavedMemory | None = None
        state = directory / STATE_NAME
        try:
            if memory:
                if machine.record.memory_file is None:
                    raise VmmError(f"the memory of sandbox {sandbox.id} is in no file that could be saved")
                await machine.save_state(state)
                saved_memory = saved_memory_of(machine.record, Path(machine.record.memory_file), state, sandbox)
            shot = Shot(snapshot_id, memory, responsive)
            await self._parts.saved.save(capture_of(sandbox, shot, saved_memory))
        finally:
            await in_thread(lambda: state.unlink(missing_ok=True))

    async def _run_on(self, live: LiveSandbox, hidden: bool, reason: BaseException) -> None:
        """The way back of a pause. The sandbox runs as before, or is killed: never anything between."""
        parts = self._parts
        sandbox, holdings = live.sandbox, live.holdings
        try:
            if sandbox.pausing_into in holdings.snapshots:
                await parts.releaser.delete_snapshot(holdings, sandbox.pausing_into)
        except AgentEnvError as error:
            # A server that found both, this snapshot and the running VM, would believe the snapshot.
            _log.warning("snapshot_not_deleted", snapshot=sandbox.pausing_into, error=error.message)
        try:
            if hidden and holdings.machine is not None:
                await holdings.machine.resume()
        except AgentEnvError as error:
            if live.state is SandboxState.PAUSING:
                parts.presence.end(live, f"a pause failed ({reason}), and it could not run on: {error.message}")
            return
        if live.state is not SandboxState.PAUSING:  # killed meanwhile
            return
        now = parts.clock.now()
        # Another life: connections of the last one were cut for good.
        running = replace(live.sandbox, state=SandboxState.RUNNING, pausing_into=None, life=live.sandbox.life + hidden)
        try:
            await parts.journal.abort_pause(running)
        except AgentEnvError as error:  # the next start finds the VM alive, and no snapshot
            _log.warning("failed_pause_not_noted", sandbox=sandbox.id, error=error.message)
        if live.state is not SandboxState.PAUSING:
            return
        live.apply(Event.PAUSE_FAILED)
        live.sandbox = running
        # Each try makes the guest stand still and cuts its connections.
        live.not_before = now + timedelta(seconds=min(_RETRY_S << min(live.failed_pauses, 16), _LONGEST_RETRY_S))
        live.failed_pauses += 1
        if live.watcher is not None:
            live.watcher.cancel()
        parts.presence.publish(live)
        message = f"a pause failed, it runs on: {getattr(reason, 'message', type(reason).__name__)}"
        await logbook.append(holdings.directory, LogEntry(now, "warn", "orchestrator", message))

    async def _resume(self, live: LiveSandbox, timeout_s: int, memory: bool | None) -> Sandbox:
        parts = self._parts
        sandbox = live.sandbox
        began = parts.clock.monotonic()
        try:
            assert sandbox.snapshot_id is not None  # noqa: S101 - it is paused
            async with parts.gate.place():
                with parts.admission.reserve(sandbox.memory_mib):
                    running = await self._start(live, sandbox.snapshot_id, timeout_s, memory)
        except (Exception, asyncio.CancelledError) as error:
            if live.state is not SandboxState.RESUMING:  # killed: the kill clears up
                raise SandboxNotFoundError(sandbox.id) from error
            await to_the_end(parts.operations.spawn(self._waker.sleep_on(live), f"undo the resume {sandbox.id}"))
            if isinstance(error, asyncio.CancelledError):
                raise
            raise worded_wake(sandbox.id, "could not be resumed, it stays paused", error) from error
        # From here to the return nothing waits: the sandbox runs in the moment it is published.
        live.sandbox = running
        parts.presence.publish(live)
        _log.info("sandbox_resumed", sandbox=sandbox.id, took_s=round(parts.clock.monotonic() - began, 3))
        return running

    async def _start(self, live: LiveSandbox, snapshot_id: str, timeout_s: int, memory: bool | None) -> Sandbox:
        parts = self._parts
        resources = (Resource(ResourceKind.DISK, live.sandbox.id), Resource(ResourceKind.MACHINE, live.sandbox.id))

        def times(sandbox: Sandbox, now: datetime) -> Sandbox:
            return replace(sandbox, resumed_at=now, end_at=now + timedelta(seconds=timeout_s))

        live.sandbox = replace(live.sandbox, life=live.sandbox.life + 1)
        await parts.journal.begin_resume(live.sandbox, resources, parts.clock.now())
        await parts.releaser.give_back(live.holdings)
        async with parts.saved.load(snapshot_id, memory=memory is not False) as machine:
            return await self._waker.start(live, machine, "resumed", times)


def _worded(sandbox_id: str, error: AgentEnvError) -> AgentEnvError:
    """The error that the caller of a failed pause gets: what became of the sandbox, then why."""
    if isinstance(error, GuestUnresponsiveError):  # says so itself
        return error
    for kind in (InsufficientStorageError, CapacityError, StorageError):
        if isinstance(error, kind):
            return kind(f"sandbox {sandbox_id} {_REFUSAL}, it runs on: {error.message}")
    return VmmError(f"sandbox {sandbox_id} {_REFUSAL}, it runs on: {error.message}")
