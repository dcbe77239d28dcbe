"""A server that dies while it takes a snapshot, forks, or creates from a snapshot: the source runs, nothing is left."""

from __future__ import annotations

import asyncio

import pytest
from fakes import Server, World, wish
from test_orchestrator_crash import crash

from agentenv.errors import VmmError
from agentenv.orchestrator.model import SandboxState
from agentenv.snapshots.manifest import HIDDEN_PREFIX

RUNNING = SandboxState.RUNNING


@pytest.mark.parametrize("memory", [True, False])
@pytest.mark.parametrize("reboot", [False, True])
async def test_crash_at_every_step_of_a_snapshot(world: World, memory: bool, reboot: bool) -> None:
    struck: list[str] = []
    survived: set[bool] = set()
    for number in range(60):
        server = await Server(world).start()
        sandbox = await server.orchestrator.create(wish())
        await server.orchestrator.pause(sandbox.id)  # so that there is a hidden predecessor
        await server.orchestrator.connect(sandbox.id, 300)
        world.work()
        call = server.orchestrator.snapshot(sandbox.id, name="golden", memory=memory)
        crashed = await crash(server, number, asyncio.create_task(call))
        struck.append(server.script.struck or "")
        if reboot:
            world.reboot()
        async with Server(world) as successor:
            found = {one.id: one.state for one in successor.orchestrator.list()}
            assert found == ({} if reboot else {sandbox.id: RUNNING}), server.script.struck
            successor.check(found)
            assert not (world.home / "memory").exists() or not list((world.home / "memory").iterdir())
            named = [name for name in world.snapshots if not name.startswith(HIDDEN_PREFIX)]
            survived.add(bool(named))
            if not crashed or server.script.struck in ("captured.commit done", "journal.note_checkpoint"):
                assert len(named) == 1
            else:
                assert len(named) <= 1
            if found:
                assert (world.content[sandbox.id], world.written[sandbox.id]) == (1, 1)
                end_at = successor.orchestrator.get(sandbox.id).end_at
                assert (end_at - world.clock.now()).total_seconds() == 300
                await successor.orchestrator.pause(sandbox.id)
                await successor.orchestrator.connect(sandbox.id, 60)
                again = await successor.orchestrator.snapshot(sandbox.id, memory=memory)
                assert again.parent_id in (None, *named)
                successor.check(found)
                await successor.orchestrator.kill(sandbox.id)
            if named:
                copy = await successor.orchestrator.create(wish(template="golden"))
                assert (world.content[copy.id], world.written[copy.id]) == (int(memory), 1)
                await successor.orchestrator.kill(copy.id)
            successor.check([])
            for one in await successor.orchestrator.snapshots():
                await successor.orchestrator.delete_snapshot(one.id)
            assert world.snapshots == {}
        if not crashed:
            break
    else:
        pytest.fail("the snapshot never came to its end")
    assert survived == {True, False}
    assert {"journal.begin_capture done", "machine.pause done", "machine.resume", "journal.end_capture"} <= set(struck)
    assert {"captured.commit", "journal.note_checkpoint done", "saved.delete"} <= set(struck)


@pytest.mark.parametrize("reboot", [False, True])
async def test_crash_at_every_step_of_a_fork(world: World, reboot: bool) -> None:
    struck: list[str] = []
    for number in range(120):
        server = await Server(world).start()
        source = await server.orchestrator.create(wish())
        world.work()
        call = server.orchestrator.fork(source.id, count=2, timeout_s=60)
        crashed = await crash(server, number, asyncio.create_task(call))
        struck.append(server.script.struck or "")
        if reboot:
            world.reboot()
        async with Server(world) as successor:
            found = {one.id: one.state for one in successor.orchestrator.list()}
            successor.check(found)
            assert world.snapshots == {}
            if reboot:
                assert not found
            else:
                assert found[source.id] is RUNNING
                assert len(found) == 3 or crashed
            for name, state in found.items():
                assert state is RUNNING
                assert (world.content[name], world.written[name]) == (1, 1)
                await successor.orchestrator.kill(name)
            successor.check([])
        if not crashed:
            break
    else:
        pytest.fail("the fork never came to its end")
    assert {"saved.capture done", "machine.copy_memory", "journal.end_capture"} <= set(struck)
    # Children start side by side, so that which of their steps are struck is up to chance.
    assert len({"journal.begin_start", "unpack", "unpack done", "vmm.load", "agent.init"} & set(struck)) > 1


@pytest.mark.parametrize("memory", [True, False])
async def test_crash_at_every_step_of_a_create_from_a_snapshot(world: World, memory: bool) -> None:
    async with Server(world) as first:
        source = await first.orchestrator.create(wish())
        world.work()
        taken = await first.orchestrator.snapshot(source.id)
        await first.orchestrator.kill(source.id)
    survived = 0
    for number in range(60):
        server = await Server(world).start()
        call = server.orchestrator.create(wish(template=taken.id, memory=memory))
        crashed = await crash(server, number, asyncio.create_task(call))
        world.leased.clear()
        async with Server(world) as successor:
            found = [one.id for one in successor.orchestrator.list()]
            successor.check(found)
            assert len(found) == int(not crashed or server.script.struck == "journal.finish_start done")
            survived += len(found)
            assert list(world.snapshots) == [taken.id]
            for name in found:
                assert (world.content[name], world.written[name]) == (int(memory), 1)
                await successor.orchestrator.kill(name)
            successor.check([])
        if not crashed:
            break
    else:
        pytest.fail("the create never came to its end")
    assert survived == 2


async def test_one_whose_vm_cannot_run_on_is_lost(world: World) -> None:
    server = await Server(world).start()
    sandbox = await server.orchestrator.create(wish())
    server.script.blocked["machine.copy_memory"] = asyncio.Event()
    taking = asyncio.create_task(server.orchestrator.snapshot(sandbox.id))
    await server.script.reached("machine.copy_memory")
    await server.vanish()
    await asyncio.wait([taking])
    successor = Server(world)
    successor.script.failing["machine.resume"] = VmmError("no")
    async with successor:
        successor.check([])
