"""How a running sandbox goes back to a snapshot of its own, in place: same id, same tokens, a new life.

All that can be refused is refused before anything changes. Then the journal says where the sandbox is going: from that
moment on it is one that is paused in that snapshot, and the rest is a resume. When it fails the sandbox stays paused
there; a server that dies leaves it to the next one, which goes on by itself.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from datetime import datetime

import structlog

from agentenv.errors import (
    AgentEnvError,
    ConflictError,
    InvalidRequestError,
    SandboxNotFoundError,
    SnapshotNotFoundError,
    TemplateNotFoundError,
)
from agentenv.orchestrator import responsiveness
from agentenv.orchestrator.live import LiveSandbox
from agentenv.orchestrator.model import OnTimeout, PauseMode, Sandbox, SandboxState
from agentenv.orchestrator.parts import OperationParts
from agentenv.orchestrator.pausing import Pauser
from agentenv.orchestrator.states import Event
from agentenv.orchestrator.tasks import to_the_end
from agentenv.orchestrator.waking import Waker, worded_wake
from agentenv.snapshots.machines import LoadableMachine
from agentenv.templates.snapshots import Published

_log = structlog.get_logger(__name__)


class RollBack:
    """Rolls sandboxes back.

    Args:
        parts: shared with the other operations.
        pauser: resumes what an earlier server left on its way.
    """

    def __init__(self, parts: OperationParts, pauser: Pauser) -> None:
        self._parts = parts
        self._pauser = pauser
        self._waker = Waker(parts)

    def begin(self, live: LiveSandbox, reference: str) -> asyncio.Task[Sandbox]:
        """Begin to roll a running sandbox back.

        The task comes to its end whoever leaves. It raises, and nothing has changed:
            SnapshotNotFoundError: there is no such snapshot.
            InvalidRequestError: it was taken of another sandbox, or the reference is malformed.
            ConflictError: the sandbox does not run (any more), or the snapshot does not fit to this node.
            AgentEnvError: too many sandboxes are being started, or the snapshot is damaged.
        Or, and it is paused in the snapshot:
            AgentEnvError: it could not be started; the message says so.
        Or, and it is gone:
            SandboxNotFoundError: it was killed meanwhile.

        Raises:
            ConflictError: it does not run.
        """
        _check_runs(live)
        return self._parts.operations.spawn(self._roll_back(live, reference), f"roll back {live.sandbox.id}")

    def go_on(self, live: LiveSandbox) -> None:
        """Finish what an earlier server began with a sandbox that is paused now, in the background."""
        parts, sandbox = self._parts, live.sandbox
        left_s = math.ceil((sandbox.end_at - parts.clock.now()).total_seconds())
        if left_s > 0:
            parts.operations.spawn(self._go_on(live, left_s), f"go on with rolling back {sandbox.id}")
        elif sandbox.request.on_timeout is OnTimeout.KILL:
            parts.presence.end(live, "expired")

    async def _go_on(self, live: LiveSandbox, timeout_s: int) -> None:
        sandbox = live.sandbox
        _log.info("roll_back_goes_on", sandbox=sandbox.id, snapshot=sandbox.snapshot_id)
        try:
            await self._pauser.resume(live, timeout_s, memory=None)
        except AgentEnvError as error:
            _log.warning("roll_back_failed", sandbox=sandbox.id, error=error.message)

    async def _roll_back(self, live: LiveSandbox, reference: str) -> Sandbox:
        parts = self._parts
        began = parts.clock.monotonic()
        sandbox_id = live.sandbox.id
        target = await self._find(sandbox_id, reference)
        # The old VM goes before the new one comes, so only a place is needed, no memory.
        async with parts.gate.place(), parts.saved.load(target.snapshot_id, memory=True) as machine:
            async with live.saving:  # a snapshot that is being taken needs the disk until it is there
                before = await self._settled(live)
                try:
                    self._turn(live, target)
                    await self._write_down(live)
                except (Exception, asyncio.CancelledError) as error:
                    await self._undo(live, before, error)
                    raise
            running = await self._start(live, target, machine)
        # From here to the publishing nothing waits.
        live.sandbox = running
        parts.presence.publish(live)
        parts.operations.spawn(self._tidy(live), f"tidy up after rolling back {sandbox_id}")
        took_s = round(parts.clock.monotonic() - began, 3)
        _log.info("sandbox_rolled_back", sandbox=sandbox_id, snapshot=target.snapshot_id, took_s=took_s)
        return running

    async def _find(self, sandbox_id: str, reference: str) -> Published:
        try:
            found = await self._parts.catalog.find(reference)
        except TemplateNotFoundError as error:
            raise SnapshotNotFoundError(reference.strip()[:200]) from error
        manifest = found.manifest
        if manifest.sandbox_id != sandbox_id:
            raise InvalidRequestError(
                f"snapshot '{found.reference}' was taken of sandbox {manifest.sandbox_id}, not of {sandbox_id}; a "
                "sandbox can only be rolled back to a snapshot of its own. Create one from that snapshot instead"
            )
        if not manifest.agent_responsive and manifest.state is not None:
            raise responsiveness.agent_was_silent(
                f"the agent of sandbox {sandbox_id} did not answer when snapshot '{found.reference}' was taken, so "
                "its saved memory is of no use"
            )
        return found

    async def _settled(self, live: LiveSandbox) -> Sandbox:
        """A sandbox that runs, and is not captured in this moment."""
        while live.state is SandboxState.CAPTURING and live.transition is not None:
            await asyncio.wait([live.transition])
        _check_runs(live)
        return live.sandbox

    def _turn(self, live: LiveSandbox, target: Published) -> None:
        """Make it one that is on its way from being paused in the snapshot to running."""
        parts = self._parts
        if target.snapshot_id in parts.deleting:
            raise SnapshotNotFoundError(target.reference)
        live.apply(Event.ROLL_BACK)
        live.transition = asyncio.current_task()
        live.sandbox = replace(
            live.sandbox,
            life=live.sandbox.life + 1,
            snapshot_id=target.snapshot_id,
            checkpoint_id=target.snapshot_id,
            rolling_back=True,
            paused_at=parts.clock.now(),
            pause_mode=PauseMode(target.manifest.kind.value),
            agent_unresponsive_at_pause=False,
        )

    async def _write_down(self, live: LiveSandbox) -> None:
        parts, snapshot_id = self._parts, live.sandbox.snapshot_id
        assert snapshot_id is not None  # noqa: S101 - the target
        # Nobody deletes it from now on, but somebody may have since it was found.
        await parts.saved.get(snapshot_id)
        await parts.journal.begin_roll_back(live.sandbox, parts.clock.now())

    async def _undo(self, live: LiveSandbox, before: Sandbox, reason: BaseException) -> None:
        """The way back before anything has happened."""
        if live.state is SandboxState.RESUMING:
            await to_the_end(self._parts.operations.spawn(self._run_on(live, before), f"run on {before.id}"))
        if live.state is SandboxState.KILLING:
            raise SandboxNotFoundError(before.id) from reason

    async def _run_on(self, live: LiveSandbox, before: Sandbox) -> None:
        parts = self._parts
        try:
            await parts.journal.finish_start(before, None)
        except AgentEnvError as error:
            _log.warning("failed_roll_back_not_noted", sandbox=before.id, error=error.message)
        if live.state is not SandboxState.RESUMING:  # killed meanwhile
            return
        live.apply(Event.READY)
        live.sandbox = before
        if live.watcher is not None:
            live.watcher.cancel()
        parts.presence.publish(live)

    async def _start(self, live: LiveSandbox, target: Published, machine: LoadableMachine) -> Sandbox:
        parts = self._parts
        sandbox_id = live.sandbox.id
        parts.presence.hide(live)
        parts.presence.let_sleep(live)
        if live.watcher is not None:
            live.watcher.cancel()
        try:
            await parts.releaser.give_back(live.holdings)
            return await self._waker.start(live, machine, f"rolled back to {target.reference}", _same_session)
        except (Exception, asyncio.CancelledError) as error:
            if live.state is not SandboxState.RESUMING:  # killed: the kill clears up
                raise SandboxNotFoundError(sandbox_id) from error
            live.sandbox = replace(live.sandbox, end_at=live.sandbox.paused_at or live.sandbox.end_at)
            await to_the_end(parts.operations.spawn(self._waker.sleep_on(live), f"undo the start {sandbox_id}"))
            if isinstance(error, asyncio.CancelledError):
                raise
            what = f"could not be rolled back to '{target.reference}', it is paused there now; connect to it"
            raise worded_wake(sandbox_id, what, error) from error

    async def _tidy(self, live: LiveSandbox) -> None:
        """The snapshots of its former pauses are of no use any more."""
        try:
            await self._waker.forget_snapshots(live)
        except AgentEnvError as error:  # the next pause tries again
            _log.warning("snapshot_not_deleted", sandbox=live.sandbox.id, error=error.message)


def _same_session(sandbox: Sandbox, _: datetime) -> Sandbox:
    """Its time goes on as if nothing had happened."""
    return sandbox


def _check_runs(live: LiveSandbox) -> None:
    sandbox = live.sandbox
    if live.state is SandboxState.KILLING:
        raise SandboxNotFoundError(sandbox.id)
    if live.state is SandboxState.PAUSED:
        raise ConflictError(f"sandbox {sandbox.id} is paused; connect to it first", should_retry=False)
    if live.state not in (SandboxState.RUNNING, SandboxState.CAPTURING):
        raise ConflictError(f"sandbox {sandbox.id} is {live.state}; try again")
