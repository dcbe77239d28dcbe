"""When sandboxes end: by the clock, by request, never sooner than `connect` and `refresh` promised."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from fakes import START, FakeClock, Server, World, outcome_of, read_journal, turns, wish

from agentenv.errors import InsufficientStorageError, InvalidRequestError, SandboxNotFoundError
from agentenv.orchestrator import codec
from agentenv.orchestrator.expiry import Expiry


async def test_ends_on_time(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish(timeout_s=300))
    await world.clock.advance(299.9)
    assert server.orchestrator.get(sandbox.id)
    await world.clock.advance(0.2)
    with pytest.raises(SandboxNotFoundError):
        server.orchestrator.get(sandbox.id)
    await server.settle()
    server.check([])


async def test_each_at_its_own_time(server: Server, world: World) -> None:
    by_timeout = {
        timeout: await server.orchestrator.create(wish(timeout_s=timeout)) for timeout in (50, 10, 30, 20, 40)
    }
    for timeout in (10, 20, 30, 40, 50):
        await world.clock.advance(10)
        left = {sandbox.id for sandbox in server.orchestrator.list()}
        assert left == {sandbox.id for at, sandbox in by_timeout.items() if at > timeout}
    await server.settle()
    server.check([])


async def test_wall_clock_that_is_set_forward_is_noticed(server: Server, world: World) -> None:
    await server.orchestrator.create(wish(timeout_s=3600))
    await world.clock.advance(1)  # the loop sleeps now
    world.clock.wall_offset += timedelta(hours=1)
    await world.clock.advance(30)
    await server.settle()
    server.check([])


async def test_timeout_moves_the_end_both_ways(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish(timeout_s=300))
    await server.orchestrator.set_timeout(sandbox.id, 1000)
    await world.clock.advance(500)
    assert server.orchestrator.get(sandbox.id).end_at == START + timedelta(seconds=1000)
    await server.orchestrator.set_timeout(sandbox.id, 5)
    await world.clock.advance(5)
    await server.settle()
    server.check([])


@pytest.mark.parametrize("timeout_s", [0, -5])
async def test_timeout_of_zero_or_less_ends_at_once(server: Server, timeout_s: int) -> None:
    sandbox = await server.orchestrator.create(wish())
    await server.orchestrator.set_timeout(sandbox.id, timeout_s)
    with pytest.raises(SandboxNotFoundError):
        server.orchestrator.get(sandbox.id)
    await server.settle()
    server.check([])


async def test_timeout_is_capped_to_the_longest_session(world: World) -> None:
    async with Server(world, max_timeout_s=1000) as server:
        sandbox = await server.orchestrator.create(wish(timeout_s=1000))
        await world.clock.advance(600)
        await server.orchestrator.set_timeout(sandbox.id, 999_999_999_999)
        assert server.orchestrator.get(sandbox.id).end_at == START + timedelta(seconds=1000)


async def test_session_that_is_over_cannot_be_extended(world: World) -> None:
    async with Server(world, max_timeout_s=1000) as server:
        sandbox = await server.orchestrator.create(wish(timeout_s=1000))
        world.clock.wall_offset += timedelta(seconds=1000)  # the loop has not looked yet
        with pytest.raises(InvalidRequestError, match="longest session"):
            await server.orchestrator.set_timeout(sandbox.id, 10)


async def test_connect_never_shortens(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish(timeout_s=300))
    again, resumed = await server.orchestrator.connect(sandbox.id, 10)
    assert (again, resumed) == (sandbox, False)
    longer, _ = await server.orchestrator.connect(sandbox.id, 400)
    assert longer.end_at == START + timedelta(seconds=400)
    assert longer.envd_access_token == sandbox.envd_access_token
    for timeout_s in (0, -1):
        with pytest.raises(InvalidRequestError):
            await server.orchestrator.connect(sandbox.id, timeout_s)


async def test_refresh_extends_only_and_by_fifteen_at_least(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish(timeout_s=20))
    await server.orchestrator.refresh(sandbox.id, 1)
    assert server.orchestrator.get(sandbox.id).end_at == START + timedelta(seconds=20)
    await world.clock.advance(10)
    await server.orchestrator.refresh(sandbox.id, 1)
    assert server.orchestrator.get(sandbox.id).end_at == START + timedelta(seconds=25)
    await server.orchestrator.refresh(sandbox.id, 100)
    assert server.orchestrator.get(sandbox.id).end_at == START + timedelta(seconds=110)


async def test_what_is_shown_is_what_is_written_down(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    await asyncio.gather(*(server.orchestrator.set_timeout(sandbox.id, 100 + number) for number in range(20)))
    (row,) = read_journal(world.home / "state.db")["sandboxes"]
    assert codec.from_micros(row["end_at"]) == server.orchestrator.get(sandbox.id).end_at
    assert server.orchestrator.get(sandbox.id).end_at == START + timedelta(seconds=119)


async def test_change_that_cannot_be_written_down_is_not_made(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish(timeout_s=300))
    server.script.failing["journal.set_end"] = InsufficientStorageError("full")
    for change in (
        server.orchestrator.set_timeout(sandbox.id, 10),
        server.orchestrator.connect(sandbox.id, 1000),
        server.orchestrator.refresh(sandbox.id, 1000),
    ):
        with pytest.raises(InsufficientStorageError):
            await change
    assert server.orchestrator.get(sandbox.id) == sandbox
    await world.clock.advance(200)
    server.check([sandbox.id])


async def test_expiry_during_an_extension_wins_and_says_so(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish(timeout_s=300))
    server.script.blocked["journal.set_end"] = asyncio.Event()
    task = asyncio.create_task(server.orchestrator.set_timeout(sandbox.id, 1000))
    await server.script.reached("journal.set_end")
    await world.clock.advance(300)
    server.script.blocked["journal.set_end"].set()
    assert isinstance(await outcome_of(task), SandboxNotFoundError)
    await server.settle()
    server.check([])


async def test_cancelled_change_is_made_whole_or_not_at_all(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish(timeout_s=300))
    server.script.blocked["journal.set_end"] = asyncio.Event()
    task = asyncio.create_task(server.orchestrator.set_timeout(sandbox.id, 1000))
    await server.script.reached("journal.set_end")
    task.cancel()
    server.script.blocked["journal.set_end"].set()
    assert isinstance(await outcome_of(task), asyncio.CancelledError)
    (row,) = read_journal(world.home / "state.db")["sandboxes"]
    assert codec.from_micros(row["end_at"]) == server.orchestrator.get(sandbox.id).end_at


async def test_callers_that_extend_all_the_time_cost_no_memory() -> None:
    clock = FakeClock()
    ended: list[str] = []
    expiry = Expiry(clock, ended.append)
    loop = asyncio.create_task(expiry.run())
    for number in range(1000):
        expiry.set("a", START + timedelta(seconds=10 + number))
    assert len(expiry._heap) < 100
    expiry.set("b", START + timedelta(seconds=3))
    expiry.set("c", START + timedelta(seconds=4))
    expiry.clear("c")
    expiry.clear("c")
    await clock.advance(1008)
    assert ended == ["b"]
    await clock.advance(1)
    assert ended == ["b", "a"]
    loop.cancel()
    await turns()
