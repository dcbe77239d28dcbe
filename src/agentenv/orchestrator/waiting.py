"""Pause, resume and waking as callers ask for them: what has to be over first, and what becomes of those that leave.

The operations themselves are those of `pausing.py`, and know no callers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from typing import TypeVar

from agentenv.errors import ConflictError, InvalidRequestError, SandboxNotFoundError
from agentenv.orchestrator.lifetimes import Lifetimes
from agentenv.orchestrator.live import LiveSandbox, LiveSandboxes
from agentenv.orchestrator.model import OnTimeout, Sandbox, SandboxState
from agentenv.orchestrator.pausing import Pauser
from agentenv.orchestrator.presence import wakes
from agentenv.orchestrator.states import VISIBLE
from agentenv.orchestrator.waking import start_in_flight

T = TypeVar("T")
_MOMENTS = (SandboxState.CAPTURING, SandboxState.PAUSING)
"""What is waited for, because it is over soon."""


class Waiting:
    """See `Orchestrator` for what is no different here."""

    def __init__(self, live: LiveSandboxes, pauser: Pauser, lifetimes: Lifetimes) -> None:
        self._live = live
        self._pauser = pauser
        self._lifetimes = lifetimes

    async def connect(self, sandbox_id: str, timeout_s: int, *, memory: bool | None) -> tuple[Sandbox, bool]:
        """See `Orchestrator.connect`."""
        _check_timeout(timeout_s)
        while True:
            live = self._live.find(sandbox_id)
            if live is not None and live.state is SandboxState.KILLING:
                raise ConflictError(f"sandbox {sandbox_id} is being killed")
            live = await self._settled(sandbox_id)
            if live.state is SandboxState.PAUSED:
                task = self._pauser.resume(live, self._lifetimes.capped(timeout_s), memory=memory)
                return await outcome_of(task, sandbox_id), True
            if live.state is not SandboxState.RUNNING:
                raise start_in_flight(sandbox_id)
            try:
                return await self._lifetimes.change_end(live, timeout_s, extend_only=True), False
            except (ConflictError, SandboxNotFoundError):
                # Its time may have ended in a pause just now; then it is resumed.
                if live.state not in (SandboxState.PAUSING, SandboxState.PAUSED):
                    raise

    async def resume(self, sandbox_id: str, timeout_s: int, *, auto_pause: bool | None, memory: bool | None) -> Sandbox:
        """See `Orchestrator.resume`."""
        _check_timeout(timeout_s)
        live = await self._settled(sandbox_id)
        if live.state is SandboxState.RUNNING:
            raise ConflictError(f"sandbox {sandbox_id} is running already", should_retry=False)
        task = self._pauser.resume(live, self._lifetimes.capped(timeout_s), memory=memory)
        if auto_pause is not None:
            on_timeout = OnTimeout.PAUSE if auto_pause else OnTimeout.KILL
            request = replace(
                live.sandbox.request, on_timeout=on_timeout, auto_resume=live.sandbox.request.auto_resume and auto_pause
            )
            live.sandbox = replace(live.sandbox, request=request)
        return await outcome_of(task, sandbox_id)

    async def pause(self, sandbox_id: str, *, memory: bool, require_healthy: bool) -> None:
        """See `Orchestrator.pause`."""
        live = await self._settled(sandbox_id, (SandboxState.CAPTURING,))
        await outcome_of(self._pauser.pause(live, memory=memory, require_healthy=require_healthy), sandbox_id)

    async def wake(self, sandbox_id: str) -> bool:
        """Bring a sandbox that does not run nearer to running. Calls at the same time make one resume.

        Returns:
            Whether it may run now; otherwise it may not be woken.

        Raises:
            AgentEnvError: it could not be resumed.
        """
        live = self._live.find(sandbox_id)
        if live is None or live.state not in VISIBLE:
            return False
        if live.state is SandboxState.PAUSED:
            if not wakes(live.sandbox):
                return False
            self._pauser.resume(live, self._lifetimes.capped(live.sandbox.request.timeout_s), memory=None)
        transition = live.transition
        if transition is None:
            return False
        if live.state is SandboxState.RESUMING:
            await outcome_of(transition, sandbox_id)
        else:
            await asyncio.wait([transition])
        return True

    async def _settled(self, sandbox_id: str, moments: Collection[SandboxState] = _MOMENTS) -> LiveSandbox:
        """A visible sandbox that is in none of these states."""
        live = self._live.visible(sandbox_id)
        while live.state in moments and live.transition is not None:
            await asyncio.wait([live.transition])
            live = self._live.visible(sandbox_id)
        return live


def _check_timeout(timeout_s: int) -> None:
    if timeout_s <= 0:
        raise InvalidRequestError("timeout must be positive")


async def outcome_of(task: asyncio.Task[T], sandbox_id: str) -> T:
    """Wait for a task that goes on when the caller leaves, and ends early when the sandbox is killed.

    Raises:
        SandboxNotFoundError: it was killed.
    """
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if task.cancelled() and (caller is None or not caller.cancelling()):
            raise SandboxNotFoundError(sandbox_id) from None
        raise
