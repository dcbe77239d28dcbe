"""How callers move the end of a running sandbox: never beyond the longest session, one change after the other."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

from agentenv.errors import ConflictError, InvalidRequestError, SandboxNotFoundError
from agentenv.orchestrator.live import LiveSandbox
from agentenv.orchestrator.model import Sandbox, SandboxState
from agentenv.orchestrator.parts import OperationParts
from agentenv.orchestrator.tasks import to_the_end


class Lifetimes:
    """Moves ends."""

    def __init__(self, parts: OperationParts) -> None:
        self._parts = parts
        self._longest_s = parts.settings.sandbox.max_timeout_s

    def capped(self, timeout_s: int) -> int:
        """So many seconds, or the longest session."""
        return min(timeout_s, self._longest_s)

    async def change_end(self, live: LiveSandbox, timeout_s: int, *, extend_only: bool) -> Sandbox:
        """Let a running sandbox end in `timeout_s` seconds; zero or less: at once. One that is captured is waited for.

        Raises:
            SandboxNotFoundError: it does not run.
            ConflictError: it changes its state.
            InvalidRequestError: the longest session is over already.
        """
        change = self._parts.operations.spawn(
            self._move_end(live, timeout_s, extend_only), f"change the end of {live.sandbox.id}"
        )
        return await to_the_end(change)

    async def _move_end(self, live: LiveSandbox, timeout_s: int, extend_only: bool) -> Sandbox:
        parts = self._parts
        async with live.changing:
            _check_running(live)
            sandbox = live.sandbox
            now = parts.clock.now()
            if timeout_s <= 0:
                parts.presence.expire(live, "expired by request")
                return sandbox
            latest = sandbox.session_began + timedelta(seconds=self._longest_s)
            if latest <= now:
                raise InvalidRequestError(
                    f"sandbox {sandbox.id} has reached the longest session of {self._longest_s} s"
                )
            end_at = min(now + timedelta(seconds=self.capped(timeout_s)), latest)
            if extend_only:
                end_at = max(end_at, sandbox.end_at)
            if end_at != sandbox.end_at:
                await parts.journal.set_end(sandbox.id, end_at)
                _check_running(live)  # it may have expired, or died, meanwhile
                live.sandbox = replace(live.sandbox, end_at=end_at)
                live.not_before = None
                parts.presence.set_end(live)
            return live.sandbox


def _check_running(live: LiveSandbox) -> None:
    if live.state in (SandboxState.PAUSING, SandboxState.RESUMING):
        raise ConflictError(f"sandbox {live.sandbox.id} is {live.state}; try again")
    if live.state is not SandboxState.RUNNING:
        raise SandboxNotFoundError(live.sandbox.id)
