"""The state machine of a sandbox, as a table. Pure: no time, no I/O.

A sandbox that is gone has no state; that is written `None`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

from agentenv.errors import ConflictError
from agentenv.orchestrator.model import SandboxState


class Event(StrEnum):
    """What moves a sandbox from one state to another."""

    READY = "ready"
    """The guest's agent took its identity; traffic may pass."""
    START_FAILED = "start failed"
    KILL = "kill"
    """Somebody, the timer, or the end of the VM process asks for the end."""
    RELEASED = "released"
    """Nothing of it is left on the host."""
    CAPTURE = "capture"
    """The VM stops for a moment, for a snapshot or a fork."""
    CAPTURE_ENDED = "capture ended"
    """It runs on, whether the capture is good or not."""
    ROLL_BACK = "roll back"
    """It is going to be started again from a snapshot of its own."""
    PAUSE = "pause"
    CAPTURED = "captured"
    """The pause is durable."""
    PAUSE_FAILED = "pause failed"
    """The VM runs on."""
    RESUME = "resume"
    RESUME_FAILED = "resume failed"
    """The saved state is untouched."""


_S = SandboxState
TRANSITIONS: Mapping[tuple[SandboxState, Event], SandboxState | None] = MappingProxyType(
    {
        (_S.STARTING, Event.READY): _S.RUNNING,
        (_S.STARTING, Event.START_FAILED): _S.KILLING,
        (_S.STARTING, Event.KILL): _S.KILLING,
        (_S.RUNNING, Event.KILL): _S.KILLING,
        (_S.RUNNING, Event.PAUSE): _S.PAUSING,
        (_S.RUNNING, Event.CAPTURE): _S.CAPTURING,
        (_S.RUNNING, Event.ROLL_BACK): _S.RESUMING,
        (_S.CAPTURING, Event.CAPTURE_ENDED): _S.RUNNING,
        (_S.CAPTURING, Event.KILL): _S.KILLING,
        (_S.PAUSING, Event.CAPTURED): _S.PAUSED,
        (_S.PAUSING, Event.PAUSE_FAILED): _S.RUNNING,
        (_S.PAUSING, Event.KILL): _S.KILLING,
        (_S.PAUSED, Event.RESUME): _S.RESUMING,
        (_S.PAUSED, Event.KILL): _S.KILLING,
        (_S.RESUMING, Event.READY): _S.RUNNING,
        (_S.RESUMING, Event.RESUME_FAILED): _S.PAUSED,
        (_S.RESUMING, Event.KILL): _S.KILLING,
        (_S.KILLING, Event.RELEASED): None,
    }
)

VISIBLE = frozenset({_S.RUNNING, _S.CAPTURING, _S.PAUSING, _S.PAUSED, _S.RESUMING})
"""States in which a caller may know of the sandbox."""


def after(state: SandboxState, event: Event) -> SandboxState | None:
    """Return the state that `event` leads to from `state`; None when the sandbox is gone.

    Raises:
        ConflictError: the event is impossible in that state.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise ConflictError(f"a sandbox that is {state} cannot take the event '{event}'") from None
