"""Pause and resume: what goes on, what stays, what is refused, and the way back when any step fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest
from fakes import START, Fate, Server, World, eventually, outcome_of, wish

from agentenv.errors import (
    AgentEnvError,
    BlockDaemonError,
    ConflictError,
    GuestUnresponsiveError,
    InsufficientStorageError,
    SandboxNotFoundError,
    SnapshotError,
    TooManyRequestsError,
    VmmError,
)
from agentenv.orchestrator.model import OnTimeout, PauseMode, SandboxState

PAUSE_ON_TIMEOUT = {"on_timeout": OnTimeout.PAUSE}


async def test_memory_and_disk_go_on_and_identity_stays(server: Server, world: World) -> None:
    before = await server.orchestrator.create(wish(metadata={"a": "b"}, env_vars={"BOTH": "mine"}))
    identity = world.identities[before.id]
    for cycle in range(3):
        world.work()
        await world.clock.advance(10)
        await server.orchestrator.pause(before.id)
        server.check([before.id])
        paused = server.orchestrator.get(before.id)
        assert (paused.state, paused.pause_mode) == (SandboxState.PAUSED, PauseMode.FULL)
        assert paused.end_at == paused.paused_at == world.clock.now()
        await world.clock.advance(900)
        server.check([before.id])
        resumed, was_paused = await server.orchestrator.connect(before.id, 60)
        server.check([before.id])
        assert was_paused
        assert (resumed.state, resumed.paused_at, resumed.pause_mode) == (SandboxState.RUNNING, None, None)
        assert resumed.end_at == world.clock.now() + timedelta(seconds=60)
        assert resumed.started_at == before.started_at == START
        assert world.content[before.id] == world.written[before.id] == cycle + 1
        told = world.identities[before.id]
        assert told == replace(identity, life=cycle + 2)
        assert resumed.envd_access_token == before.envd_access_token
        assert server.orchestrator.routes.get(before.id).life == resumed.life == cycle + 2
    await server.orchestrator.kill(before.id)
    server.check([])


async def test_without_memory_it_boots_from_its_flushed_disk(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    world.work()
    await server.orchestrator.pause(sandbox.id, memory=False)
    server.check([sandbox.id])
    assert "agent.sync" in server.script.seen
    assert server.orchestrator.get(sandbox.id).pause_mode is PauseMode.FILESYSTEM
    _, was_paused = await server.orchestrator.connect(sandbox.id, 60)
    assert was_paused
    assert (world.content[sandbox.id], world.written[sandbox.id]) == (0, 1)
    server.check([sandbox.id])


async def test_connect_without_memory_boots_and_keeps_the_saved_memory_until_then(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    world.work()
    await server.orchestrator.pause(sandbox.id)
    server.script.failing["vmm.boot"] = VmmError("no")
    with pytest.raises(AgentEnvError, match="stays paused"):
        await server.orchestrator.connect(sandbox.id, 60, memory=False)
    server.script.failing.clear()
    server.check([sandbox.id])
    await server.orchestrator.connect(sandbox.id, 60)
    assert world.content[sandbox.id] == 1
    await server.orchestrator.pause(sandbox.id)
    await server.orchestrator.connect(sandbox.id, 60, memory=False)
    assert (world.content[sandbox.id], world.written[sandbox.id]) == (0, 1)


async def test_every_step_of_a_pause_fails(world: World) -> None:
    struck: list[str | None] = []
    async with Server(world) as server:
        for memory in (True, False):
            for number in range(60):
                sandbox = await server.orchestrator.create(wish())
                world.work()
                server.script.arm(Fate.FAIL, number)
                outcome = await outcome_of(server.orchestrator.pause(sandbox.id, memory=memory))
                await server.orchestrator.settled()
                server.script.armed = None
                struck.append(server.script.struck)
                state = server.orchestrator.get(sandbox.id).state
                if isinstance(outcome, AgentEnvError):
                    assert state is SandboxState.RUNNING, server.script.struck
                    server.check([sandbox.id])
                    assert world.content[sandbox.id] == 1
                    assert server.orchestrator.get(sandbox.id).end_at == sandbox.end_at
                else:
                    assert (outcome, state) == (None, SandboxState.PAUSED), server.script.struck
                    _, was_paused = await server.orchestrator.connect(sandbox.id, 60)
                    assert was_paused
                    assert (world.content[sandbox.id], world.written[sandbox.id]) == (int(memory), 1)
                # Whatever could not be given back then is given back now.
                await server.orchestrator.pause(sandbox.id)
                server.check([sandbox.id])
                await server.orchestrator.kill(sandbox.id)
                server.check([])
                if server.script.struck is None:
                    break
            else:
                pytest.fail("pause never came to its end")
    steps = {"journal.begin_pause", "machine.pause", "saved.save", "journal.finish_pause", "machine.kill", "agent.sync"}
    assert steps <= set(struck)


async def test_every_step_of_a_resume_fails(world: World) -> None:
    struck: list[str | None] = []
    async with Server(world) as server:
        for memory in (None, False):
            for number in range(60):
                sandbox = await server.orchestrator.create(wish())
                world.work()
                await server.orchestrator.pause(sandbox.id)
                server.script.arm(Fate.FAIL, number)
                outcome = await outcome_of(server.orchestrator.connect(sandbox.id, 60, memory=memory))
                server.script.armed = None
                struck.append(server.script.struck)
                if isinstance(outcome, AgentEnvError):
                    assert "stays paused" in outcome.message, server.script.struck
                    server.check([sandbox.id])
                    assert server.orchestrator.get(sandbox.id).state is SandboxState.PAUSED
                    await server.orchestrator.connect(sandbox.id, 60)
                    assert world.content[sandbox.id] == 1
                server.check([sandbox.id])
                await server.orchestrator.kill(sandbox.id)
                server.check([])
                if server.script.struck is None:
                    break
            else:
                pytest.fail("resume never came to its end")
    steps = {"saved.load", "unpack", "vmm.load", "vmm.boot", "disks.create", "slots.acquire", "agent.init"}
    assert steps | {"journal.begin_resume", "journal.finish_start", "machine.resume"} <= set(struck)


@pytest.mark.parametrize(
    "step",
    ["agent.health", "journal.begin_pause", "machine.pause", "saved.save", "journal.finish_pause", "disks.remove"],
)
async def test_killed_while_it_is_paused(server: Server, step: str) -> None:
    sandbox = await server.orchestrator.create(wish())
    gate = server.script.blocked[step] = asyncio.Event()
    server.script.seen.clear()
    pausing = asyncio.create_task(server.orchestrator.pause(sandbox.id))
    await server.script.reached(step)
    killing = asyncio.create_task(server.orchestrator.kill(sandbox.id))
    await eventually(lambda: server.orchestrator.list() == [])
    assert server.orchestrator.routes.get(sandbox.id) is None
    gate.set()
    await killing
    assert isinstance(await outcome_of(pausing), SandboxNotFoundError)
    server.check([])


@pytest.mark.parametrize("step", ["journal.begin_resume", "unpack", "vmm.load", "agent.init", "journal.finish_start"])
async def test_killed_while_it_is_resumed(server: Server, step: str) -> None:
    sandbox = await server.orchestrator.create(wish())
    await server.orchestrator.pause(sandbox.id)
    gate = server.script.blocked[step] = asyncio.Event()
    server.script.seen.clear()
    resuming = asyncio.create_task(server.orchestrator.connect(sandbox.id, 60))
    await server.script.reached(step)
    killing = asyncio.create_task(server.orchestrator.kill(sandbox.id))
    await eventually(lambda: server.orchestrator.list() == [])
    gate.set()
    await killing
    assert isinstance(await outcome_of(resuming), SandboxNotFoundError)
    server.check([])


async def test_paused_twice_and_resumed_twice(server: Server) -> None:
    sandbox = await server.orchestrator.create(wish())
    outcomes = await asyncio.gather(*(outcome_of(server.orchestrator.pause(sandbox.id)) for _ in range(3)))
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["ConflictError", "ConflictError", "NoneType"]
    with pytest.raises(ConflictError, match="already paused"):
        await server.orchestrator.pause(sandbox.id)
    for call in (server.orchestrator.set_timeout, server.orchestrator.refresh):
        with pytest.raises(SandboxNotFoundError):
            await call(sandbox.id, 60)
    resumes = (server.orchestrator.connect(sandbox.id, 60) for _ in range(3))
    outcomes = await asyncio.gather(*(outcome_of(resume) for resume in resumes))
    in_flight = [outcome for outcome in outcomes if isinstance(outcome, ConflictError)]
    assert [error.error_code for error in in_flight] == 2 * ["sandbox_start_in_flight"]
    with pytest.raises(ConflictError, match="running already"):
        await server.orchestrator.resume(sandbox.id, 60)
    assert (await server.orchestrator.connect(sandbox.id, 60))[1] is False
    with pytest.raises(SandboxNotFoundError):
        await server.orchestrator.pause("inone")
    server.check([sandbox.id])


async def test_connect_while_it_is_paused_waits_and_resumes(server: Server) -> None:
    sandbox = await server.orchestrator.create(wish())
    gate = server.script.blocked["saved.save"] = asyncio.Event()
    pausing = asyncio.create_task(server.orchestrator.pause(sandbox.id))
    await server.script.reached("saved.save")
    assert server.orchestrator.routes.get(sandbox.id) is None
    with pytest.raises(ConflictError):
        await server.orchestrator.set_timeout(sandbox.id, 60)
    connecting = asyncio.create_task(server.orchestrator.connect(sandbox.id, 60))
    gate.set()
    await pausing
    resumed, was_paused = await connecting
    assert (resumed.state, was_paused) == (SandboxState.RUNNING, True)
    server.check([sandbox.id])


async def test_a_caller_that_leaves_stops_neither(server: Server) -> None:
    sandbox = await server.orchestrator.create(wish())
    for call, step in (
        (server.orchestrator.pause(sandbox.id), "saved.save"),
        (server.orchestrator.connect(sandbox.id, 60), "agent.init"),
    ):
        gate = server.script.blocked[step] = asyncio.Event()
        server.script.seen.clear()
        task = asyncio.create_task(call)
        await server.script.reached(step)
        task.cancel()
        assert isinstance(await outcome_of(task), asyncio.CancelledError)
        gate.set()
        await server.orchestrator.settled()
        server.check([sandbox.id])
    assert server.orchestrator.get(sandbox.id).state is SandboxState.RUNNING


async def test_hung_agent(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish(on_timeout=OnTimeout.PAUSE, auto_resume=True))
    world.work()
    world.hung.add(sandbox.id)
    for options in ({"memory": False}, {"require_healthy": True}):
        with pytest.raises(GuestUnresponsiveError) as refused:
            await server.orchestrator.pause(sandbox.id, **options)
        assert refused.value.status == 503
        server.check([sandbox.id])
        assert server.orchestrator.get(sandbox.id).state is SandboxState.RUNNING
    await server.orchestrator.pause(sandbox.id)
    assert server.orchestrator.get(sandbox.id).agent_unresponsive_at_pause
    assert server.orchestrator.routes.sleeper(sandbox.id) is None
    with pytest.raises(ConflictError) as conflict:
        await server.orchestrator.connect(sandbox.id, 60)
    assert conflict.value.error_code == "sandbox_snapshot_guest_agent_unresponsive"
    world.hung.clear()
    resumed, _ = await server.orchestrator.connect(sandbox.id, 60, memory=False)
    assert not resumed.agent_unresponsive_at_pause
    assert (world.content[sandbox.id], world.written[sandbox.id]) == (0, 1)
    server.check([sandbox.id])


async def test_a_guest_that_cannot_run_on_is_killed(server: Server) -> None:
    sandbox = await server.orchestrator.create(wish())
    server.script.failing["saved.save"] = server.script.failing["machine.resume"] = VmmError("broken")
    with pytest.raises(SandboxNotFoundError):
        await server.orchestrator.pause(sandbox.id)
    await server.orchestrator.settled()
    server.check([])


async def test_machine_that_ends_while_it_is_paused(server: Server) -> None:
    sandbox = await server.orchestrator.create(wish())
    gate = server.script.blocked["saved.save"] = asyncio.Event()
    pausing = asyncio.create_task(server.orchestrator.pause(sandbox.id))
    await server.script.reached("saved.save")
    server.vmm.die(sandbox.id, "out of memory")
    await eventually(lambda: server.orchestrator.list() == [])
    gate.set()
    assert isinstance(await outcome_of(pausing), SandboxNotFoundError)
    await server.orchestrator.settled()
    server.check([])


async def test_paused_at_the_end_of_its_time(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish(timeout_s=10, **PAUSE_ON_TIMEOUT))
    await world.clock.advance(10)
    await server.orchestrator.settled()
    server.check([sandbox.id])
    assert server.orchestrator.get(sandbox.id).pause_mode is PauseMode.FULL
    await server.orchestrator.resume(sandbox.id, 20, auto_pause=False)
    await world.clock.advance(20)
    await server.orchestrator.settled()
    server.check([])


@pytest.mark.parametrize("hung", [False, True])
async def test_paused_without_memory_at_the_end_of_its_time(server: Server, world: World, hung: bool) -> None:
    sandbox = await server.orchestrator.create(wish(timeout_s=10, auto_pause_memory=False, **PAUSE_ON_TIMEOUT))
    if hung:
        world.hung.add(sandbox.id)
    await server.orchestrator.set_timeout(sandbox.id, 0)
    await server.orchestrator.settled()
    server.check([sandbox.id])
    expected = PauseMode.FULL if hung else PauseMode.FILESYSTEM  # a silent agent's unwritten files are in its memory
    assert server.orchestrator.get(sandbox.id).pause_mode is expected


async def test_pause_at_the_end_of_its_time_is_tried_until_it_works(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish(timeout_s=10, **PAUSE_ON_TIMEOUT))
    server.script.failing["saved.save"] = VmmError("full")
    for seconds in (10, 30, 60, 120):
        server.script.seen.clear()
        await world.clock.advance(seconds)
        await server.orchestrator.settled()
        assert server.script.seen.count("saved.save") == 1
        server.check([sandbox.id])
        assert server.orchestrator.get(sandbox.id).state is SandboxState.RUNNING
    server.script.failing.clear()
    await world.clock.advance(239)
    await server.orchestrator.settled()
    assert server.orchestrator.get(sandbox.id).state is SandboxState.RUNNING, "each try cuts its connections"
    await world.clock.advance(1)
    await server.orchestrator.settled()
    assert server.orchestrator.get(sandbox.id).state is SandboxState.PAUSED
    server.check([sandbox.id])


async def test_a_failed_pause_says_what_became_of_the_sandbox(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    for error in (InsufficientStorageError("full"), BlockDaemonError("unavailable", "gone"), VmmError("no")):
        server.script.failing["saved.save"] = error
        with pytest.raises(
            AgentEnvError, match=f"sandbox {sandbox.id} was not paused, it runs on: {error.message}"
        ) as failed:
            await server.orchestrator.pause(sandbox.id)
        assert failed.value.status == error.status
        server.check([sandbox.id])


async def test_traffic_wakes_it_once(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish(timeout_s=77, auto_resume=True, **PAUSE_ON_TIMEOUT))
    world.work()
    gate = server.script.blocked["saved.save"] = asyncio.Event()
    pausing = asyncio.create_task(server.orchestrator.pause(sandbox.id))
    await server.script.reached("saved.save")
    server.script.seen.clear()
    early = asyncio.create_task(server.orchestrator.wake(sandbox.id))
    gate.set()
    await pausing
    sleeper = server.orchestrator.routes.sleeper(sandbox.id)
    assert sleeper is None or sleeper.envd_access_token == sandbox.envd_access_token
    routes = await asyncio.gather(early, *(server.orchestrator.wake(sandbox.id) for _ in range(10)))
    assert server.script.seen.count("vmm.load") == 1
    assert {route.life for route in routes if route is not None} == {2}
    assert server.orchestrator.get(sandbox.id).end_at == world.clock.now() + timedelta(seconds=77)
    assert server.orchestrator.routes.sleeper(sandbox.id) is None
    server.check([sandbox.id])


async def test_traffic_wakes_nothing_that_may_not_be_woken(server: Server) -> None:
    plain = await server.orchestrator.create(wish())
    cold = await server.orchestrator.create(wish(auto_resume=True, **PAUSE_ON_TIMEOUT))
    await server.orchestrator.pause(plain.id)
    await server.orchestrator.pause(cold.id, memory=False)
    for sandbox in (plain, cold):
        assert server.orchestrator.routes.sleeper(sandbox.id) is None
        assert await server.orchestrator.wake(sandbox.id) is None
    assert await server.orchestrator.wake("inone") is None
    server.check([plain.id, cold.id])


async def test_traffic_is_told_why_it_could_not_be_woken(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish(auto_resume=True, **PAUSE_ON_TIMEOUT))
    await server.orchestrator.pause(sandbox.id)
    server.script.failing["vmm.load"] = VmmError("another CPU")
    for outcome in await asyncio.gather(*(outcome_of(server.orchestrator.wake(sandbox.id)) for _ in range(3))):
        assert isinstance(outcome, AgentEnvError)
        assert "another CPU" in outcome.message
    server.script.failing.clear()
    assert server.orchestrator.routes.sleeper(sandbox.id) is not None
    assert await server.orchestrator.wake(sandbox.id) is not None


async def test_paused_ones_take_no_place_of_running_ones(world: World) -> None:
    async with Server(world, max_running=1) as server:
        first = await server.orchestrator.create(wish())
        await server.orchestrator.pause(first.id)
        second = await server.orchestrator.create(wish())
        with pytest.raises(TooManyRequestsError):
            await server.orchestrator.connect(first.id, 60)
        server.check([first.id, second.id])
        await server.orchestrator.pause(second.id)
        await server.orchestrator.connect(first.id, 60)
        server.check([first.id, second.id])


async def test_damaged_snapshot_is_named_and_it_stays_paused(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    await server.orchestrator.pause(sandbox.id)
    ((snapshot_id, snapshot),) = world.snapshots.items()
    world.snapshots[snapshot_id] = replace(snapshot, damaged=True)
    with pytest.raises(SnapshotError, match=r"stays paused: .*damaged"):
        await server.orchestrator.connect(sandbox.id, 60)
    server.check([sandbox.id])
    await server.orchestrator.kill(sandbox.id)
    server.check([])
