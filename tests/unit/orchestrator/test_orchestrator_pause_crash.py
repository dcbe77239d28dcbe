"""A server that dies while it pauses or resumes: the sandbox is as before or as after; and random histories."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from fakes import Server, World, outcome_of, wish
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_orchestrator_crash import crash

from agentenv.errors import AgentEnvError
from agentenv.orchestrator.model import OnTimeout, SandboxState

RUNNING, PAUSED = SandboxState.RUNNING, SandboxState.PAUSED


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("reboot", [False, True])
async def test_crash_at_every_step_of_a_pause(world: World, memory: bool, reboot: bool) -> None:
    seen: set[SandboxState | None] = set()
    for number in range(60):
        server = Server(world)
        await server.start()
        sandbox = await server.orchestrator.create(wish())
        world.work()
        crashed = await crash(server, number, asyncio.create_task(server.orchestrator.pause(sandbox.id, memory=memory)))
        if reboot:
            world.reboot()
        async with Server(world) as successor:
            found = {one.id: one.state for one in successor.orchestrator.list()}
            state = found.get(sandbox.id)
            seen.add(state)
            assert state is not None or reboot, server.script.struck
            assert state is not RUNNING or not reboot
            if server.script.struck in ("saved.save done", "journal.finish_pause", "machine.kill") or not crashed:
                assert state is PAUSED, server.script.struck
            successor.check(found)
            if state is PAUSED:
                await successor.orchestrator.connect(sandbox.id, 60)
                assert (world.content[sandbox.id], world.written[sandbox.id]) == (int(memory), 1)
            elif state is RUNNING:
                assert (world.content[sandbox.id], world.written[sandbox.id]) == (1, 1)
                await successor.orchestrator.pause(sandbox.id, memory=memory)
            successor.check(found)
            for name in found:
                await successor.orchestrator.kill(name)
            successor.check([])
        if not crashed:
            break
    else:
        pytest.fail("pause never came to its end")
    assert seen == ({None, PAUSED} if reboot else {RUNNING, PAUSED})


@pytest.mark.parametrize("memory", [None, False])
async def test_crash_at_every_step_of_a_resume(world: World, memory: bool | None) -> None:
    states: list[SandboxState] = []
    for number in range(60):
        server = Server(world)
        await server.start()
        sandbox = await server.orchestrator.create(wish())
        world.work()
        await server.orchestrator.pause(sandbox.id)
        crashed = await crash(
            server, number, asyncio.create_task(server.orchestrator.connect(sandbox.id, 60, memory=memory))
        )
        async with Server(world) as successor:
            state = successor.orchestrator.get(sandbox.id).state
            states.append(state)
            successor.check([sandbox.id])
            if state is PAUSED:
                await successor.orchestrator.connect(sandbox.id, 60)
                assert world.content[sandbox.id] == 1
            await successor.orchestrator.kill(sandbox.id)
            successor.check([])
        if not crashed:
            break
    else:
        pytest.fail("resume never came to its end")
    assert states[0] is PAUSED
    assert states[-1] is RUNNING
    assert states == sorted(states, key=[PAUSED, RUNNING].index), "once it is written down that it runs, it does"


async def test_paused_one_survives_servers_and_reboots(world: World) -> None:
    async with Server(world) as server:
        sandbox = await server.orchestrator.create(wish(auto_resume=True, on_timeout=OnTimeout.PAUSE))
        world.work()
        await server.orchestrator.pause(sandbox.id)
        paused = server.orchestrator.get(sandbox.id)
    for _ in range(2):
        world.reboot()
        async with Server(world) as successor:
            assert successor.orchestrator.get(sandbox.id) == paused
            assert successor.orchestrator.routes.sleeper(sandbox.id) is not None
            successor.check([sandbox.id])
    async with Server(world) as last:
        await last.orchestrator.wake(sandbox.id)
        assert world.content[sandbox.id] == 1
        last.check([sandbox.id])


async def test_drain_leaves_paused_ones(world: World) -> None:
    server = await Server(world).start()
    paused, running = [await server.orchestrator.create(wish()) for _ in range(2)]
    await server.orchestrator.pause(paused.id)
    await server.orchestrator.close(drain=True)
    assert running.id not in world.vms
    async with Server(world) as successor:
        successor.check([paused.id])


async def test_lost_and_damaged_snapshots_and_those_of_nobody(world: World) -> None:
    async with Server(world) as server:
        lost, damaged = [await server.orchestrator.create(wish()) for _ in range(2)]
        for sandbox in (lost, damaged):
            await server.orchestrator.pause(sandbox.id)
        ids = {one.id: one.snapshot_id for one in server.orchestrator.list()}
    snapshot = world.snapshots.pop(ids[lost.id])
    world.snapshots["pause-inone-1"] = snapshot
    world.snapshots[ids[damaged.id]] = replace(world.snapshots[ids[damaged.id]], damaged=True)
    async with Server(world) as successor:
        successor.check([damaged.id])
        assert successor.orchestrator.get(damaged.id).state is PAUSED


@dataclass
class Model:
    """What a sandbox must be: its state, and the counters in its memory and on its disk."""

    state: SandboxState = RUNNING
    memory: int = 0
    disk: int = 0
    saved_memory: int | None = None


operations = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "create",
                "work",
                "pause",
                "pause cold",
                "connect",
                "connect cold",
                "kill",
                "fail",
                "die",
                "reboot",
                "stop",
            ]
        ),
        st.integers(0, 3),
        st.integers(0, 30),
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(history=operations)
def test_random_histories(history: list[tuple[str, int, int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_live_through(World(Path(directory)), history))


async def _live_through(world: World, history: list[tuple[str, int, int]]) -> None:
    models: dict[str, Model] = {}
    server = await Server(world).start()
    for name, index, step in [("create", 0, 0), *history]:
        sandbox_id = sorted(models)[index % len(models)] if models else "inone"
        model = models.get(sandbox_id, Model())
        if name == "create":
            models[(await server.orchestrator.create(wish())).id] = Model()
        elif name == "work":
            world.work()
            for one in models.values():
                if one.state is RUNNING:
                    one.memory, one.disk = one.memory + 1, one.disk + 1
        elif name in ("pause", "pause cold", "fail"):
            if name == "fail":
                server.script.failing["saved.save"] = AgentEnvError("no room")
            outcome = await outcome_of(server.orchestrator.pause(sandbox_id, memory=name != "pause cold"))
            server.script.failing.clear()
            expected = sandbox_id in models and model.state is RUNNING and name != "fail"
            assert (outcome is None) == expected
            if expected:
                model.state, model.saved_memory = PAUSED, model.memory if name == "pause" else None
        elif name in ("connect", "connect cold"):
            memory = None if name == "connect" else False
            outcome = await outcome_of(server.orchestrator.connect(sandbox_id, 60, memory=memory))
            assert isinstance(outcome, tuple) == (sandbox_id in models)
            if isinstance(outcome, tuple):
                assert outcome[1] == (model.state is PAUSED)
                if outcome[1]:
                    warm = name == "connect" and model.saved_memory is not None
                    model.state, model.memory = RUNNING, model.saved_memory or 0 if warm else 0
        elif name == "kill":
            outcome = await outcome_of(server.orchestrator.kill(sandbox_id))
            assert (outcome is None) == (models.pop(sandbox_id, None) is not None)
        else:
            if name == "die":  # in the middle of whatever a pause or a resume is at
                paused = model.state is PAUSED
                call = server.orchestrator.connect(sandbox_id, 60) if paused else server.orchestrator.pause(sandbox_id)
                await crash(server, step, asyncio.create_task(call))
            elif name == "stop":
                await server.orchestrator.close()
            else:
                await server.vanish()
                world.reboot()
                models = {key: one for key, one in models.items() if one.state is PAUSED}
            server = await Server(world).start()
            if name == "die" and sandbox_id in models:
                after = server.orchestrator.get(sandbox_id).state
                if after is PAUSED and model.state is RUNNING:
                    model.saved_memory = model.memory
                elif after is RUNNING and model.state is PAUSED:
                    model.memory = model.saved_memory or 0
                model.state = after
        await server.orchestrator.settled()
        server.check(models)
        for key, one in models.items():
            assert server.orchestrator.get(key).state is one.state
            if one.state is RUNNING:
                assert (world.content.get(key, 0), world.written.get(key, 0)) == (one.memory, one.disk)
    await server.orchestrator.close()
