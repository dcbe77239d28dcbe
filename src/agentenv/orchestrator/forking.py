"""How a running sandbox becomes several: one capture, however many children, which start in parallel.

The source runs on before the first child starts. The capture is kept as long as children are started from it, and
never becomes a snapshot. Each child succeeds or fails by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, nullcontext
from dataclasses import replace

import structlog

from agentenv import ids
from agentenv.errors import AgentEnvError, ConflictError, InvalidRequestError, SandboxNotFoundError
from agentenv.orchestrator import responsiveness
from agentenv.orchestrator.capturing import Capturer, Shot
from agentenv.orchestrator.creation import Creator, Origin
from agentenv.orchestrator.live import LiveSandbox
from agentenv.orchestrator.model import CreateRequest, Sandbox, SandboxState
from agentenv.orchestrator.parts import OperationParts
from agentenv.orchestrator.tasks import to_the_end
from agentenv.snapshots.machines import LoadableMachine

_log = structlog.get_logger(__name__)
MOST_FORKS = 100
"""By the contract, of one call."""
_PREFIX = "fork-"
Told = Callable[[Sandbox | AgentEnvError], None]


class Forker:
    """Forks running sandboxes."""

    def __init__(self, parts: OperationParts, capturer: Capturer, creator: Creator) -> None:
        self._parts = parts
        self._capturer = capturer
        self._creator = creator

    async def fork(
        self, live: LiveSandbox, *, count: int, timeout_s: int, on_result: Told | None
    ) -> Sequence[Sandbox | AgentEnvError]:
        """See `Orchestrator.fork`. A cancelled call leaves no child."""
        parts = self._parts
        most = parts.settings.sandbox.max_running
        if not 1 <= count <= MOST_FORKS:
            raise InvalidRequestError(f"count must be between 1 and {MOST_FORKS}")
        if count >= most:
            raise InvalidRequestError(
                f"this node runs at most {most} sandboxes, so {count} forks and their source are too many"
            )
        _check_forkable(live)
        source = live.sandbox
        request = replace(source.request, timeout_s=timeout_s, memory=True, idempotency_key=None, request_digest=None)
        self._creator.check(request)
        began = parts.clock.monotonic()
        outcomes: Sequence[Sandbox | AgentEnvError] = ()
        try:
            async with AsyncExitStack() as stack:
                async with live.saving:
                    _check_forkable(live)
                    await responsiveness.answers(parts.agents, live, needed=True, refusal="was not forked")
                    _check_forkable(live)
                    source = live.sandbox
                    shot = Shot(f"{_PREFIX}{ids.new_uuid()}", memory=True, responsive=True, kept=False)
                    captured = await self._capturer.capture(live, shot, stack)
                    loadable = await captured.loadable()
                outcomes = await self._start(_origin(source, loadable), request, count, on_result)
        except AgentEnvError as error:
            if not outcomes:
                raise
            _log.warning("capture_not_cleared", sandbox=source.id, error=error.message)  # the next start does it
        except asyncio.CancelledError:
            self._end(outcomes)
            raise
        failed = sum(isinstance(one, AgentEnvError) for one in outcomes)
        took_s = round(parts.clock.monotonic() - began, 3)
        _log.info("sandbox_forked", sandbox=source.id, count=count, failed=failed, took_s=took_s)
        return outcomes

    async def _start(
        self, origin: Origin, request: CreateRequest, count: int, on_result: Told | None
    ) -> list[Sandbox | AgentEnvError]:
        async def child() -> Sandbox | AgentEnvError:
            outcome: Sandbox | AgentEnvError
            try:
                outcome = await self._creator.create_from(origin, request)
            except AgentEnvError as error:
                outcome = error
            if on_result is not None:
                on_result(outcome)
            return outcome

        children = [asyncio.ensure_future(child()) for _ in range(count)]
        try:
            return list(await asyncio.gather(*children))
        except BaseException:
            await to_the_end(self._parts.operations.spawn(self._undo(children), "undo a fork"))
            raise

    async def _undo(self, children: Sequence[asyncio.Future[Sandbox | AgentEnvError]]) -> None:
        """Nobody is told of the children: those that are there already must go, too."""
        for child in children:
            child.cancel()
        await asyncio.wait(children)
        done = (child for child in children if not child.cancelled() and child.exception() is None)
        self._end([child.result() for child in done])

    def _end(self, outcomes: Sequence[Sandbox | AgentEnvError]) -> None:
        for outcome in outcomes:
            live = self._parts.live.find(outcome.id) if isinstance(outcome, Sandbox) else None
            if live is not None and live.state is not SandboxState.KILLING:
                self._parts.presence.end(live, "the caller left before it was told of it")


def _origin(source: Sandbox, machine: LoadableMachine) -> Origin:
    return Origin(
        template_id=source.template_id,
        alias=source.alias,
        vcpus=source.vcpus,
        memory_mib=source.memory_mib,
        disk_mib=source.disk_mib,
        default_user=source.default_user,
        default_workdir=source.default_workdir,
        env=source.template_env,
        snapshot_id=source.snapshot_id,
        checkpoint_id=source.checkpoint_id,
        machine=lambda: nullcontext(machine),
    )


def _check_forkable(live: LiveSandbox) -> None:
    """Refuse what does not run. One that is captured just now runs in a moment."""
    if live.state is SandboxState.KILLING:
        raise SandboxNotFoundError(live.sandbox.id)
    if live.state not in (SandboxState.RUNNING, SandboxState.CAPTURING):
        raise ConflictError(f"sandbox {live.sandbox.id} is {live.state}; only one that runs can be forked")
