"""Readings of guests: collected, bounded, and one that does not answer delays nobody."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from fakes import START, Server, World, eventually, wish
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import GuestAgentError, SandboxNotFoundError
from agentenv.orchestrator.model import MetricSample
from agentenv.orchestrator.sampling import KEPT, PERIOD_S, SampleRing


def sample(number: int) -> MetricSample:
    return MetricSample(START + timedelta(seconds=number), 64, number / 7, number, 1 << 40, 3, 4, 5)


@given(st.integers(1, 8), st.integers(0, 30))
def test_ring_keeps_the_newest(capacity: int, count: int) -> None:
    ring = SampleRing(capacity)
    for number in range(count):
        ring.append(sample(number))
    assert list(ring) == [sample(number) for number in range(max(0, count - capacity), count)]


async def test_empty_right_after_the_start_then_every_five_seconds(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish(timeout_s=80_000))
    assert server.orchestrator.metrics(sandbox.id, None, None) == []
    await world.clock.advance(PERIOD_S * 3)
    samples = server.orchestrator.metrics(sandbox.id, None, None)
    assert [one.timestamp for one in samples] == [START + timedelta(seconds=5 * number) for number in (1, 2, 3)]
    assert (samples[0].cpu_count, samples[0].cpu_used_pct, samples[0].mem_total) == (2, 12.5, 512)
    start, end = START + timedelta(seconds=10), START + timedelta(seconds=12)
    assert server.orchestrator.metrics(sandbox.id, start, end) == samples[1:2]
    assert server.orchestrator.metrics(sandbox.id, end, None) == samples[2:]


async def test_an_hour_is_kept(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish(timeout_s=80_000))
    await world.clock.advance(PERIOD_S * (KEPT + 20))
    samples = server.orchestrator.metrics(sandbox.id, None, None)
    assert len(samples) == KEPT
    assert (samples[-1].timestamp - samples[0].timestamp).total_seconds() == PERIOD_S * (KEPT - 1)


async def test_hung_and_failing_guests_delay_nobody(server: Server, world: World) -> None:
    hung, failing, good = [await server.orchestrator.create(wish(timeout_s=80_000)) for _ in range(3)]
    address = {route.sandbox_id: route.host for route in server.orchestrator.routes}
    server.script.blocked[f"agent.metrics {address[hung.id]}"] = asyncio.Event()
    server.script.failing[f"agent.metrics {address[failing.id]}"] = GuestAgentError("500")
    await world.clock.advance(PERIOD_S * 10)
    counts = {one.id: len(server.orchestrator.metrics(one.id, None, None)) for one in (hung, failing, good)}
    assert counts == {hung.id: 0, failing.id: 0, good.id: 10}
    assert server.script.seen.count(f"agent.metrics {address[hung.id]}") == 1  # not asked again while it owes an answer
    server.script.blocked[f"agent.metrics {address[hung.id]}"].set()
    server.script.failing.clear()
    await world.clock.advance(PERIOD_S)
    assert len(server.orchestrator.metrics(failing.id, None, None)) == 1
    assert len(server.orchestrator.metrics(hung.id, None, None)) == 2


async def test_killed_has_no_metrics_and_is_not_asked(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    await world.clock.advance(PERIOD_S)
    await server.orchestrator.kill(sandbox.id)
    with pytest.raises(SandboxNotFoundError):
        server.orchestrator.metrics(sandbox.id, None, None)
    server.script.seen.clear()
    await world.clock.advance(PERIOD_S * 3)
    assert not [step for step in server.script.seen if step.startswith("agent.metrics")]


async def test_adopted_are_sampled(world: World) -> None:
    async with Server(world) as server:
        sandbox = await server.orchestrator.create(wish())
    async with Server(world) as successor:
        await eventually(lambda: len(successor.orchestrator.metrics(sandbox.id, None, None)) == 1)
