"""What is asked of a guest's agent before its machine stands still. Changes no state; the machine runs meanwhile."""

from __future__ import annotations

import structlog

from agentenv.errors import ConflictError, GuestAgentError, GuestUnresponsiveError
from agentenv.orchestrator.live import LiveSandbox
from agentenv.orchestrator.ports import Agent, AgentFactory

_log = structlog.get_logger(__name__)
_HEALTH_TRIES = 3
"""An emulated guest on a busy host may miss one or two; one that is taken for hung loses its memory."""


async def answers(agents: AgentFactory, live: LiveSandbox, *, needed: bool, refusal: str) -> bool:
    """Whether the agent of a running sandbox answers.

    Args:
        agents: makes its client.
        live: which.
        needed: raise when it does not.
        refusal: what was not done then, for the message: "was not paused".

    Raises:
        GuestUnresponsiveError: it does not, and that is needed.
    """
    agent = _agent_of(agents, live)
    for tries_left in reversed(range(_HEALTH_TRIES)):
        try:
            await agent.health()
            return True
        except GuestAgentError as error:
            if tries_left:
                continue
            if needed:
                raise GuestUnresponsiveError(
                    f"sandbox {live.sandbox.id} {refusal}, it runs on: {error.message}"
                ) from error
            _log.warning("agent_silent", sandbox=live.sandbox.id, error=error.message)
    return False


async def flush(agents: AgentFactory, live: LiveSandbox, *, refusal: str) -> None:
    """Bring all that the guest of a running sandbox wrote to its disk.

    Raises:
        GuestUnresponsiveError: its agent does not answer.
    """
    try:
        await _agent_of(agents, live).sync()
    except GuestAgentError as error:
        raise GuestUnresponsiveError(
            f"sandbox {live.sandbox.id} {refusal}, it runs on: its disk could not be flushed: {error.message}"
        ) from error


def _agent_of(agents: AgentFactory, live: LiveSandbox) -> Agent:
    slot = live.holdings.slot
    assert slot is not None  # noqa: S101 - it runs
    return agents(str(slot.address), live.sandbox.envd_access_token)


def agent_was_silent(words: str) -> ConflictError:
    """Refuse to go on from memory that holds a hung agent."""
    return ConflictError(words, error_code="sandbox_snapshot_guest_agent_unresponsive", should_retry=False)
