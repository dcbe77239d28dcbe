"""The queue of starts: fair, bounded, and honest about when to come back."""

from __future__ import annotations

import asyncio
import random

import pytest
from fakes import FakeClock, Server, World, eventually, outcome_of, turns, wish

from agentenv.errors import TooManyRequestsError
from agentenv.orchestrator.admission import StartGate


async def hold(gate: StartGate, name: str, entered: list[str], leave: asyncio.Event) -> None:
    async with gate.place():
        entered.append(name)
        await leave.wait()


async def test_first_come_first_served() -> None:
    gate = StartGate(2, 10, FakeClock())
    entered: list[str] = []
    leave = {str(number): asyncio.Event() for number in range(6)}
    tasks = [asyncio.create_task(hold(gate, name, entered, event)) for name, event in leave.items()]
    await turns()
    assert entered == ["0", "1"]
    for freed, expected in (("1", "2"), ("0", "3"), ("3", "4"), ("2", "5")):
        leave[freed].set()
        await turns()
        assert entered[-1] == expected
    for event in leave.values():
        event.set()
    await asyncio.gather(*tasks)
    assert entered == ["0", "1", "2", "3", "4", "5"]


async def test_nobody_overtakes_the_queue() -> None:
    gate = StartGate(1, 10, FakeClock())
    entered: list[str] = []
    leave = {name: asyncio.Event() for name in ("a", "b", "c")}
    tasks = [asyncio.create_task(hold(gate, name, entered, leave[name])) for name in ("a", "b")]
    await turns()
    leave["a"].set()
    tasks.append(asyncio.create_task(hold(gate, "c", entered, leave["c"])))
    await turns()
    assert entered == ["a", "b"]
    for event in leave.values():
        event.set()
    await asyncio.gather(*tasks)
    assert entered == ["a", "b", "c"]


async def test_beyond_the_limit_is_429_with_an_estimate() -> None:
    clock = FakeClock()
    gate = StartGate(2, 3, clock)
    for _ in range(50):  # it learns how long a start takes
        async with gate.place():
            await asyncio.gather(clock.advance(10), clock.sleep(10))
    entered: list[str] = []
    leave = asyncio.Event()
    tasks = [asyncio.create_task(hold(gate, str(number), entered, leave)) for number in range(5)]
    await turns()
    with pytest.raises(TooManyRequestsError) as caught:
        async with gate.place():
            pass
    assert caught.value.retry_after_s == 20  # four before the next one, two at a time, ten seconds each
    leave.set()
    await asyncio.gather(*tasks)
    async with gate.place():
        assert gate.queued == 0


async def test_cancelled_waiters_neither_hold_nor_lose_places() -> None:
    dice = random.Random(7)
    gate = StartGate(3, 100, FakeClock())
    entered: list[str] = []
    leave = asyncio.Event()
    tasks = [asyncio.create_task(hold(gate, str(number), entered, leave)) for number in range(60)]
    await turns()
    for task in dice.sample(tasks, 30):
        task.cancel()
        if dice.random() < 0.5:
            await turns(1)
    await turns()
    assert len([task for task in tasks if not task.done()]) == 30
    leave.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    held = [gate.place() for _ in range(3)]
    for place in held:
        await asyncio.wait_for(place.__aenter__(), 1)
    assert gate.queued == 0
    for place in held:
        await place.__aexit__(None, None, None)


async def test_cancelled_in_the_moment_of_its_turn() -> None:
    gate = StartGate(1, 10, FakeClock())
    entered: list[str] = []
    leave = {name: asyncio.Event() for name in ("a", "b", "c")}

    async def hand_over_to_a_victim() -> None:
        await hold(gate, "a", entered, leave["a"])
        b.cancel()  # its place was given to it just now, and it has not run yet

    a = asyncio.create_task(hand_over_to_a_victim())
    await turns()
    b, c = (asyncio.create_task(hold(gate, name, entered, leave[name])) for name in ("b", "c"))
    await turns()
    leave["a"].set()
    await turns()
    assert entered == ["a", "c"]
    leave["c"].set()
    await asyncio.gather(a, c)
    async with gate.place():
        assert gate.queued == 0


async def test_burst_gets_201_or_429_and_no_orphan(world: World) -> None:
    async with Server(world, max_concurrent_starts=4, max_queued_starts=20) as server:
        outcomes = await asyncio.gather(*(outcome_of(server.orchestrator.create(wish())) for _ in range(200)))
        made = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
        refused = [outcome for outcome in outcomes if isinstance(outcome, TooManyRequestsError)]
        assert len(made) + len(refused) == 200
        assert len(made) >= 24
        assert all(error.retry_after_s for error in refused)
        server.check([sandbox.id for sandbox in made])


async def test_at_most_so_many_start_at_a_time(world: World) -> None:
    world.agent_ready.clear()
    async with Server(world, max_concurrent_starts=3) as server:
        tasks = [asyncio.create_task(server.orchestrator.create(wish())) for _ in range(10)]
        await eventually(lambda: server.script.seen.count("slots.wait_ready") == 3)
        await asyncio.to_thread(lambda: None)
        await turns()
        assert len(world.vms) == 3
        world.agent_ready.set()
        await asyncio.gather(*tasks)
        server.check()
        assert len(world.vms) == 10
