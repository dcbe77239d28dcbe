"""How a sandbox comes up from a snapshot, and the way back to being paused in it when that fails.

The part that resuming and rolling back have in common. Whoever calls has written down what is going to be taken, and
decides what the sandbox is afterwards; the snapshot stays as it is in any case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime

import structlog

from agentenv.errors import (
    AgentEnvError,
    ConflictError,
    SandboxNotFoundError,
    SandboxStartError,
    SnapshotError,
    SnapshotMismatchError,
    SnapshotNotFoundError,
    TooManyRequestsError,
)
from agentenv.orchestrator import logbook
from agentenv.orchestrator.creation import plan_of, worded_start
from agentenv.orchestrator.live import LiveSandbox
from agentenv.orchestrator.model import LogEntry, Sandbox, SandboxState
from agentenv.orchestrator.parts import OperationParts
from agentenv.orchestrator.states import Event
from agentenv.snapshots.machines import LoadableMachine

_log = structlog.get_logger(__name__)
_IN_FLIGHT_RETRY_AFTER_S = 1


class Waker:
    """Brings up sandboxes that are `resuming`."""

    def __init__(self, parts: OperationParts) -> None:
        self._parts = parts

    async def start(
        self, live: LiveSandbox, machine: LoadableMachine, words: str, times: Callable[[Sandbox, datetime], Sandbox]
    ) -> Sandbox:
        """Start a sandbox from what was saved, up to the journal's word that it runs. It is not published yet.

        Args:
            live: whose life was counted, and which holds nothing.
            machine: kept by the caller as long as this runs.
            words: what happened, for its log.
            times: sets when its session began and ends, from the moment when its agent answered.

        Raises:
            SandboxNotFoundError: it was killed meanwhile.
            AgentEnvError: of the step that failed; `sleep_on` is the way back.
        """
        parts = self._parts
        info = await parts.launcher.launch(plan_of(live.sandbox, machine, again=True), live.holdings)
        now = parts.clock.now()
        message = words if machine.state is not None else f"{words}; it booted from its saved disk"
        await logbook.append(live.holdings.directory, LogEntry(now, "info", "orchestrator", message))
        running = replace(
            times(live.sandbox, now),
            state=SandboxState.RUNNING,
            envd_version=info.version,
            paused_at=None,
            pause_mode=None,
            agent_unresponsive_at_pause=False,
            rolling_back=False,
        )
        check_still(live, SandboxState.RESUMING)
        await parts.journal.finish_start(running, None)
        check_still(live, SandboxState.RESUMING)
        return running

    async def sleep_on(self, live: LiveSandbox) -> None:
        """Let a sandbox be paused whose start failed. Raises nothing."""
        parts = self._parts
        await self.tidy(live)
        paused = replace(live.sandbox, state=SandboxState.PAUSED, rolling_back=False)
        try:
            if live.state is SandboxState.RESUMING:
                await parts.journal.finish_pause(paused)
        except AgentEnvError as error:  # the next start takes one that was resuming for paused
            _log.warning("failed_resume_not_noted", sandbox=paused.id, error=error.message)
        if live.state is SandboxState.RESUMING:
            live.apply(Event.RESUME_FAILED)
            live.sandbox = replace(live.sandbox, rolling_back=False)
            parts.presence.let_sleep(live)

    async def tidy(self, live: LiveSandbox) -> None:
        """Give back what a paused sandbox does not need. What cannot be is tried again when it is resumed or killed."""
        try:
            await self._parts.releaser.give_back(live.holdings)
            await self.forget_snapshots(live)
        except AgentEnvError as error:
            _log.warning("release_failed", sandbox=live.sandbox.id, error=error.message)

    async def forget_snapshots(self, live: LiveSandbox) -> None:
        """Delete the hidden snapshots that a sandbox goes on from no more.

        Raises:
            AgentEnvError: one cannot be deleted.
        """
        for snapshot_id in sorted(live.holdings.snapshots - {live.sandbox.snapshot_id}):
            await self._parts.releaser.delete_snapshot(live.holdings, snapshot_id)


def start_in_flight(sandbox_id: str) -> ConflictError:
    """What the second of two resumes gets."""
    return ConflictError(
        f"sandbox {sandbox_id} is being resumed already; try again",
        error_code="sandbox_start_in_flight",
        retry_after_s=_IN_FLIGHT_RETRY_AFTER_S,
        should_retry=True,
    )


def check_still(live: LiveSandbox, state: SandboxState) -> None:
    """Refuse to go on with a sandbox that was killed meanwhile.

    Raises:
        SandboxNotFoundError: it is in another state.
    """
    if live.state is not state:
        raise SandboxNotFoundError(live.sandbox.id)


def worded_wake(sandbox_id: str, what: str, error: BaseException) -> AgentEnvError:
    """The error that the caller of a failed resume or roll back gets.

    Args:
        sandbox_id: whose.
        what: what became of it, behind its name.
        error: why.
    """
    if isinstance(error, SnapshotMismatchError | TooManyRequestsError):
        return error
    if isinstance(error, SnapshotError | SnapshotNotFoundError):
        return SnapshotError(f"sandbox {sandbox_id} {what}: {error.message}")
    worded = worded_start(sandbox_id, error)
    if isinstance(worded, SandboxStartError):
        detail = error.message if isinstance(error, AgentEnvError) else f"internal error ({type(error).__name__})"
        return SandboxStartError(f"sandbox {sandbox_id} {what}: {detail}")
    return type(worded)(
        f"sandbox {sandbox_id} {what}: {worded.message}",
        error_code=worded.error_code,
        retry_after_s=worded.retry_after_s,
        should_retry=worded.should_retry,
    )
