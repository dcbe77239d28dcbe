"""The state table, and random histories of callers, clock and crashes against a model."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from fakes import Server, World, eventually, outcome_of, turns, wish
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentenv.errors import ConflictError, SandboxNotFoundError
from agentenv.orchestrator.model import SandboxState
from agentenv.orchestrator.states import TRANSITIONS, VISIBLE, Event, after

T = TypeVar("T")


@given(st.lists(st.sampled_from(Event), max_size=30))
def test_any_history_stays_in_the_table(events: list[Event]) -> None:
    state: SandboxState | None = SandboxState.STARTING
    killed = False
    for event in events:
        if state is None:
            break
        try:
            state = after(state, event)
        except ConflictError:
            assert (state, event) not in TRANSITIONS
            continue
        killed = killed or state is SandboxState.KILLING
        assert not killed or state in (SandboxState.KILLING, None), "nothing comes back from being killed"


def test_every_state_can_be_reached_and_killed() -> None:
    reached = {SandboxState.STARTING}
    while more := {to for (state, _), to in TRANSITIONS.items() if state in reached and to is not None} - reached:
        reached |= more
    assert reached == set(SandboxState)
    for state in set(SandboxState) - {SandboxState.KILLING}:
        assert after(state, Event.KILL) is SandboxState.KILLING
    assert after(SandboxState.KILLING, Event.RELEASED) is None
    assert {SandboxState.STARTING, SandboxState.KILLING}.isdisjoint(VISIBLE)


@dataclass
class Model:
    """What callers may expect: which sandboxes live, and until when."""

    ends: dict[str, float] = field(default_factory=dict)
    began: dict[str, float] = field(default_factory=dict)
    ever: list[str] = field(default_factory=list)

    def expire(self, now: float) -> None:
        self.ends = {name: end for name, end in self.ends.items() if end > now}


LONGEST = 1000
_which = st.integers(0, 5)
_seconds = st.integers(-5, 1500)
_operation = st.one_of(
    st.tuples(st.just("create"), st.integers(1, LONGEST), st.booleans()),
    st.tuples(st.just("kill"), _which),
    st.tuples(st.just("timeout"), _which, _seconds),
    st.tuples(st.just("connect"), _which, st.integers(1, 1500)),
    st.tuples(st.just("refresh"), _which, st.integers(0, 1500)),
    st.tuples(st.just("advance"), st.integers(1, 400)),
    st.tuples(st.just("die"), _which),
    st.tuples(st.just("restart"), st.booleans()),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(_operation, min_size=1, max_size=20))
def test_random_histories_agree_with_the_model(operations: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as home:
        asyncio.run(_play(Path(home), operations))


async def _play(home: Path, operations: list[tuple[Any, ...]]) -> None:
    world = World(home)
    server = await Server(world, max_timeout_s=LONGEST).start()
    model = Model()
    for name, *arguments in operations:
        if name == "restart":
            (gracefully,) = arguments
            await (server.orchestrator.close() if gracefully else server.vanish())
            server = await Server(world, max_timeout_s=LONGEST).start()
        elif name == "advance":
            await world.clock.advance(arguments[0])
        elif name == "create":
            timeout_s, cancelled = arguments
            await _create(server, model, timeout_s, cancelled)
        else:
            await _change(server, model, name, *arguments)
        model.expire(world.clock.elapsed)
        await server.orchestrator.settled()
        server.check(model.ends)
        for sandbox in server.orchestrator.list():
            assert (sandbox.end_at - world.clock.now()).total_seconds() == model.ends[sandbox.id] - world.clock.elapsed
    await server.orchestrator.close(drain=True)
    assert not world.vms and not world.lent and not world.memory


async def _create(server: Server, model: Model, timeout_s: int, cancelled: bool) -> None:
    task = asyncio.create_task(server.orchestrator.create(wish(timeout_s=timeout_s)))
    if cancelled:
        await turns(3)
        task.cancel()
    outcome = await outcome_of(task)
    if isinstance(outcome, BaseException):
        assert cancelled and isinstance(outcome, asyncio.CancelledError)
        return
    now = server.world.clock.elapsed
    model.ends[outcome.id], model.began[outcome.id] = now + timeout_s, now
    model.ever.append(outcome.id)


async def _change(server: Server, model: Model, name: str, which: int, seconds: int = 0) -> None:
    sandbox_id = model.ever[which % len(model.ever)] if model.ever else "i0"
    orchestrator, now = server.orchestrator, server.world.clock.elapsed
    if name == "die":
        if sandbox_id in model.ends:
            server.vmm.die(sandbox_id, "died")
            await eventually(lambda: orchestrator.routes.get(sandbox_id) is None)
            del model.ends[sandbox_id]
        return
    call: Coroutine[Any, Any, Any] = {
        "kill": lambda: orchestrator.kill(sandbox_id),
        "timeout": lambda: orchestrator.set_timeout(sandbox_id, seconds),
        "connect": lambda: orchestrator.connect(sandbox_id, seconds),
        "refresh": lambda: orchestrator.refresh(sandbox_id, seconds),
    }[name]()
    if sandbox_id not in model.ends:
        with pytest.raises(SandboxNotFoundError):
            await call
        return
    await call
    latest = model.began[sandbox_id] + LONGEST
    if name == "kill" or (name == "timeout" and seconds <= 0):
        del model.ends[sandbox_id]
    elif name == "timeout":
        model.ends[sandbox_id] = min(now + seconds, latest)
    else:
        asked = max(seconds, 15) if name == "refresh" else seconds
        model.ends[sandbox_id] = max(model.ends[sandbox_id], min(now + asked, latest))
