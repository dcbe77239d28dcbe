"""How a running sandbox is captured, and goes on: for named snapshots and for forks.

The VM stands still for as long as it takes to save its devices, to copy its memory and to seal its disk; all else,
above all packing the memory, is done from the copy while it runs on. Its routes stay, connections survive. Whatever
fails, the sandbox runs as before, or is killed when its VM cannot run on.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from agentenv import ids
from agentenv.config import MIB
from agentenv.errors import AgentEnvError, ConflictError, NotFoundError, SandboxNotFoundError, VmmError
from agentenv.orchestrator import logbook, responsiveness
from agentenv.orchestrator.live import LiveSandbox
from agentenv.orchestrator.model import LogEntry, Sandbox, SandboxState
from agentenv.orchestrator.parts import OperationParts
from agentenv.orchestrator.states import Event
from agentenv.orchestrator.tasks import in_thread, to_the_end, together
from agentenv.snapshots.machines import Capture, CapturedMachine, SavedMemory
from agentenv.snapshots.manifest import MachineShape
from agentenv.templates.snapshots import Naming, Published
from agentenv.vmm.base import MachineRecord

_log = structlog.get_logger(__name__)
STATE_NAME = "state"
"""The saved devices, in the sandbox's directory, until the snapshot has them."""


@dataclass(frozen=True, slots=True)
class Shot:
    """What is going to be captured."""

    capture_id: str
    memory: bool
    responsive: bool
    """Whether the agent answers."""
    naming: Naming | None = None
    """Of a named snapshot."""
    kept: bool = True
    """Whether it is to become a snapshot."""


class Capturer:
    """Captures running sandboxes."""

    def __init__(self, parts: OperationParts) -> None:
        self._parts = parts

    async def snapshot(self, live: LiveSandbox, *, name: str | None, memory: bool) -> Published:
        """Make a named snapshot. To be run in a task that is not cancelled.

        Raises:
            NotFoundError: the sandbox is paused.
            SandboxNotFoundError: it was killed meanwhile.
            ConflictError: it changes its state.
            InvalidRequestError: the name is malformed, or belongs to something else.
            GuestUnresponsiveError: its agent does not answer.
            AgentEnvError: of the step that failed. It runs on.
        """
        parts = self._parts
        _check_capturable(live)
        naming = await parts.catalog.name(name, await parts.templates.taken())
        async with live.saving:
            _check_capturable(live)
            sandbox = live.sandbox
            refusal = "was not captured"
            # A sandbox that is started from the memory of a hung agent is of no use, and the name would be taken from a
            # snapshot that is. A pause keeps it.
            await responsiveness.answers(parts.agents, live, needed=True, refusal=refusal)
            _check_capturable(live)
            if not memory:
                await responsiveness.flush(parts.agents, live, refusal=refusal)
            shot = Shot(ids.new_uuid(), memory, responsive=True, naming=naming)
            published = await self._take(live, shot, naming)
            await self._note(live, sandbox.life, shot.capture_id)
        message = f"snapshot {published.reference} was taken" + ("" if memory else ", without memory")
        await logbook.append(live.holdings.directory, LogEntry(parts.clock.now(), "info", "orchestrator", message))
        return published

    async def capture(self, live: LiveSandbox, shot: Shot, stack: AsyncExitStack) -> CapturedMachine:
        """Stop a running sandbox, hold all of it, and let it run on. The caller has its `saving` lock.

        Args:
            live: which.
            shot: what to hold.
            stack: keeps it, until it is closed.

        Raises:
            SandboxNotFoundError: it was killed meanwhile.
            ConflictError: it changes its state.
            AgentEnvError: of the step that failed. It runs on.
        """
        name = f"capture {live.sandbox.id}"
        window = self._parts.operations.spawn(self._window(live, shot, stack), name)
        try:
            return await to_the_end(window)
        except asyncio.CancelledError:
            if window.cancelled():  # by a kill
                raise SandboxNotFoundError(live.sandbox.id) from None
            raise

    async def _window(self, live: LiveSandbox, shot: Shot, stack: AsyncExitStack) -> CapturedMachine:
        parts = self._parts
        memory: Path | None = None
        if shot.memory:
            copy = memory = await in_thread(lambda: parts.vmm.prepare_memory(shot.capture_id))
            stack.push_async_callback(_remove, copy)
        room = parts.admission.reserve(live.sandbox.memory_mib) if shot.memory else nullcontext()
        # What changes the end of a sandbox waits meanwhile.
        async with parts.standing, live.changing:
            _check_capturable(live)
            live.apply(Event.CAPTURE)
            live.transition = asyncio.current_task()
            try:
                await parts.journal.begin_capture(live.sandbox, parts.clock.now())
                with room:
                    captured = await self._stand_still(live, shot, memory, stack)
            except (Exception, asyncio.CancelledError) as error:
                await self._run_on(live, error)
                if isinstance(error, AgentEnvError | asyncio.CancelledError):
                    raise
                _log.error("capture_crashed", sandbox=live.sandbox.id, exc_info=error)
                raise VmmError(f"sandbox {live.sandbox.id} could not be captured: {type(error).__name__}") from error
            await self._run_on(live, None)
            return captured

    async def _stand_still(
        self, live: LiveSandbox, shot: Shot, memory: Path | None, stack: AsyncExitStack
    ) -> CapturedMachine:
        parts = self._parts
        machine, state = live.holdings.machine, live.holdings.directory / STATE_NAME
        assert machine is not None  # noqa: S101 - it runs
        saved = None if memory is None else saved_memory_of(machine.record, memory, state, live.sandbox)
        capture = capture_of(live.sandbox, shot, saved)
        captured: CapturedMachine | None = None

        async def seal() -> None:
            nonlocal captured
            captured = await stack.enter_async_context(parts.saved.capture(capture))

        began = parts.clock.monotonic()
        try:
            # Nothing but what must be done while it stands still belongs between here and the resume.
            await machine.pause()
            if memory is None:
                await seal()
            else:
                await machine.save_state(state)
                await together(seal(), machine.copy_memory(memory))
            await machine.resume()
            stopped_s = round(parts.clock.monotonic() - began, 4)
        finally:
            await in_thread(lambda: state.unlink(missing_ok=True))
        assert captured is not None  # noqa: S101 - seal returned
        _log.info("sandbox_captured", sandbox=live.sandbox.id, capture=shot.capture_id, stopped_s=stopped_s)
        return captured

    async def _run_on(self, live: LiveSandbox, reason: BaseException | None) -> None:
        """The end of every capture. The sandbox runs as before, or is killed.

        Args:
            live: which.
            reason: why the capture failed; then its VM may stand still.

        Raises:
            SandboxNotFoundError: it was killed.
        """
        parts = self._parts
        machine = live.holdings.machine
        if live.state is not SandboxState.CAPTURING or machine is None:
            raise SandboxNotFoundError(live.sandbox.id) from reason
        if reason is not None:
            try:
                await machine.resume()
            except AgentEnvError as error:
                if live.state is SandboxState.CAPTURING:
                    parts.presence.end(live, f"a capture failed ({reason}), and it could not run on: {error.message}")
                raise SandboxNotFoundError(live.sandbox.id) from error
        try:
            if live.state is SandboxState.CAPTURING:
                await parts.journal.end_capture(replace(live.sandbox, state=SandboxState.RUNNING))
        except AgentEnvError as error:  # the next start finds the VM alive, and lets it run
            _log.warning("end_of_capture_not_noted", sandbox=live.sandbox.id, error=error.message)
        if live.state is not SandboxState.CAPTURING:
            raise SandboxNotFoundError(live.sandbox.id)
        live.apply(Event.CAPTURE_ENDED)
        parts.presence.set_end(live)  # its time may have ended meanwhile

    async def _take(self, live: LiveSandbox, shot: Shot, naming: Naming) -> Published:
        parts = self._parts
        sandbox_id = live.sandbox.id
        began = parts.clock.monotonic()
        try:
            async with AsyncExitStack() as stack:
                captured = await self.capture(live, shot, stack)
                manifest = await captured.commit()
        except BaseException as error:
            # Nobody is told of it, so it must not be there.
            await to_the_end(parts.operations.spawn(self._forget(shot), f"forget {shot.capture_id}"))
            if live.state is SandboxState.KILLING and isinstance(error, Exception):
                raise SandboxNotFoundError(sandbox_id) from error
            if isinstance(error, AgentEnvError) or not isinstance(error, Exception):
                raise
            _log.error("snapshot_crashed", sandbox=sandbox_id, exc_info=error)
            raise VmmError(f"sandbox {sandbox_id} could not be saved: {type(error).__name__}") from error
        took_s = round(parts.clock.monotonic() - began, 3)
        _log.info("snapshot_taken", sandbox=sandbox_id, snapshot=shot.capture_id, memory=shot.memory, took_s=took_s)
        return Published(manifest, naming.reference, naming.names)

    async def _forget(self, shot: Shot) -> None:
        try:
            await self._parts.saved.delete(shot.capture_id)
        except AgentEnvError as error:
            _log.warning("snapshot_not_deleted", snapshot=shot.capture_id, error=error.message)

    async def _note(self, live: LiveSandbox, life: int, snapshot_id: str) -> None:
        """Let the sandbox go on from its new snapshot. What fails here costs a longer way to the next one, no more."""
        parts = self._parts
        async with live.changing:
            # It may have been killed meanwhile, or rolled back to another one.
            if not _is_in(live, life):
                return
            noted = replace(live.sandbox, snapshot_id=snapshot_id, checkpoint_id=snapshot_id)
            try:
                await parts.journal.note_checkpoint(noted)
            except AgentEnvError as error:
                _log.warning("checkpoint_not_noted", sandbox=live.sandbox.id, error=error.message)
                return
            if not _is_in(live, life):
                return
            live.sandbox = replace(live.sandbox, snapshot_id=snapshot_id, checkpoint_id=snapshot_id)
        for hidden in sorted(live.holdings.snapshots):
            try:
                await parts.releaser.delete_snapshot(live.holdings, hidden)
            except AgentEnvError as error:  # tried again when it is paused or killed
                _log.warning("snapshot_not_deleted", snapshot=hidden, error=error.message)


def _is_in(live: LiveSandbox, life: int) -> bool:
    """Whether a sandbox still runs as it did when it was captured. A pause waits until it is saved."""
    return live.state in (SandboxState.RUNNING, SandboxState.PAUSING) and live.sandbox.life == life


def saved_memory_of(record: MachineRecord, image: Path, state: Path, sandbox: Sandbox) -> SavedMemory:
    """What is saved of a machine besides its disk, and what it needs in order to be loaded."""
    return SavedMemory(
        image,
        state,
        sandbox.envd_access_token,
        kernel=None if record.kernel is None else Path(record.kernel),
        initramfs=None if record.initramfs is None else Path(record.initramfs),
    )


def capture_of(sandbox: Sandbox, shot: Shot, memory: SavedMemory | None) -> Capture:
    """What the snapshot of a sandbox is to say."""
    return Capture(
        snapshot_id=shot.capture_id,
        sandbox_id=sandbox.id,
        template_id=sandbox.template_id,
        parent_id=sandbox.checkpoint_id,
        memory_parent_id=sandbox.snapshot_id,
        machine=MachineShape(sandbox.vcpus, sandbox.memory_mib, sandbox.disk_mib * MIB),
        agent_version=sandbox.envd_version,
        agent_responsive=shot.responsive,
        default_user=sandbox.default_user,
        default_workdir=sandbox.default_workdir,
        env=sandbox.template_env,
        metadata=sandbox.request.metadata,
        memory=memory,
        names=() if shot.naming is None else shot.naming.names,
        own_template_id=None if shot.naming is None else shot.naming.own_template_id,
        kept=shot.kept,
    )


def _check_capturable(live: LiveSandbox) -> None:
    """Refuse what does not run. One that is captured just now runs in a moment."""
    sandbox = live.sandbox
    if live.state is SandboxState.PAUSED:
        raise NotFoundError(f"sandbox {sandbox.id} is paused; connect to it first")
    if live.state in (SandboxState.PAUSING, SandboxState.RESUMING):
        raise ConflictError(f"sandbox {sandbox.id} is {live.state}; try again")
    if live.state not in (SandboxState.RUNNING, SandboxState.CAPTURING):
        raise SandboxNotFoundError(sandbox.id)


async def _remove(path: Path) -> None:
    await in_thread(lambda: path.unlink(missing_ok=True))
