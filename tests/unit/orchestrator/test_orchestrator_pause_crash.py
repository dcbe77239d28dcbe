"""A server that dies while it pauses or resumes: the sandbox is as before or as after."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fakes import Server, World, wish
from test_orchestrator_crash import crash

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
