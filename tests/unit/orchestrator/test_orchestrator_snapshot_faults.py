"""Snapshots in bad company: every step failing, callers that leave, kills, pauses and ends of time in between."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from fakes import START, Fate, Server, World, eventually, outcome_of, turns, wish

from agentenv.errors import (
    AgentEnvError,
    SandboxNotFoundError,
    VmmError,
)
from agentenv.orchestrator.model import OnTimeout, SandboxState
from agentenv.snapshots.manifest import HIDDEN_PREFIX

RUNNING, PAUSED = SandboxState.RUNNING, SandboxState.PAUSED
WINDOW = ("machine.pause", "machine.pause done", "machine.save_state", "saved.capture", "machine.copy_memory")
"""Steps at which it stands still, or is about to."""


@pytest.mark.parametrize("memory", [True, False])
async def test_every_step_of_a_snapshot_fails(world: World, memory: bool) -> None:
    struck: list[str | None] = []
    async with Server(world) as server:
        sandbox = await server.orchestrator.create(wish())
        for number in range(60):
            world.work()
            await server.orchestrator.pause(sandbox.id)
            await server.orchestrator.connect(sandbox.id, 60)
            before = set(world.snapshots)
            counted = world.content[sandbox.id], world.written[sandbox.id]
            server.script.arm(Fate.FAIL, number)
            outcome = await outcome_of(server.orchestrator.snapshot(sandbox.id, memory=memory))
            await server.orchestrator.settled()
            server.script.armed = None
            struck.append(server.script.struck)
            after = set(world.snapshots)
            assert (world.content[sandbox.id], world.written[sandbox.id]) == counted
            if isinstance(outcome, AgentEnvError):
                assert after == before, server.script.struck
            else:
                assert not isinstance(outcome, BaseException), server.script.struck
                assert outcome.id in after - before
            leftover = {name for name in after if name.startswith(HIDDEN_PREFIX)}
            assert server.orchestrator.get(sandbox.id).state is RUNNING
            assert len(leftover) <= 1
            # Whatever could not be given back then is given back now.
            await server.orchestrator.snapshot(sandbox.id)
            server.check([sandbox.id])
            if server.script.struck is None:
                break
        else:
            pytest.fail("the snapshot never came to its end")
    steps = {"journal.begin_capture", "machine.pause", "saved.capture", "machine.resume", "journal.end_capture"}
    steps |= {
        "captured.commit",
        "captured.commit done",
        "saved.capture over",
        "journal.note_checkpoint",
        "saved.delete",
    }
    steps |= {"machine.save_state", "machine.copy_memory"} if memory else {"agent.sync"}
    assert steps <= set(struck)


@pytest.mark.parametrize("memory", [True, False])
async def test_callers_that_leave_at_every_step_do_not_stop_it(world: World, memory: bool) -> None:
    async with Server(world) as server:
        sandbox = await server.orchestrator.create(wish())
        for number in range(60):
            before = set(world.snapshots)
            caller = asyncio.create_task(server.orchestrator.snapshot(sandbox.id, memory=memory))
            server.script.arm(Fate.CANCEL, number, caller)
            outcome = await outcome_of(caller)
            await server.orchestrator.settled()
            server.script.armed = None
            assert len(set(world.snapshots) - before) == 1
            server.check([sandbox.id])
            assert not isinstance(outcome, Exception)
            if server.script.struck is None:
                break
        else:
            pytest.fail("the snapshot never came to its end")


async def test_one_that_cannot_run_on_is_killed(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    server.script.failing["machine.resume"] = VmmError("no")
    with pytest.raises(SandboxNotFoundError):
        await server.orchestrator.snapshot(sandbox.id)
    await server.orchestrator.settled()
    server.script.failing.clear()
    server.check([])
    assert world.snapshots == {}


@pytest.mark.parametrize(
    "step",
    ["agent.health", "journal.begin_capture", *WINDOW, "machine.resume", "journal.end_capture", "captured.commit"],
)
async def test_kill_at_any_moment(server: Server, world: World, step: str) -> None:
    sandbox = await server.orchestrator.create(wish())
    server.script.seen.clear()
    server.script.blocked[step] = asyncio.Event()
    taking = asyncio.create_task(server.orchestrator.snapshot(sandbox.id))
    await server.script.reached(step)
    killing = asyncio.create_task(server.orchestrator.kill(sandbox.id))
    await turns()
    assert server.orchestrator.list() == []
    server.script.blocked.pop(step).set()
    await killing
    outcome = await outcome_of(taking)
    await server.orchestrator.settled()
    server.check([])
    if step == "captured.commit":
        assert not isinstance(outcome, BaseException) and list(world.snapshots) == [outcome.id]
    else:
        assert isinstance(outcome, SandboxNotFoundError)
        assert world.snapshots == {}


@pytest.mark.parametrize("step", [*WINDOW, "captured.commit"])
async def test_a_vm_that_ends_at_any_moment(server: Server, world: World, step: str) -> None:
    sandbox = await server.orchestrator.create(wish())
    server.script.seen.clear()
    server.script.blocked[step] = asyncio.Event()
    taking = asyncio.create_task(server.orchestrator.snapshot(sandbox.id))
    await server.script.reached(step)
    server.vmm.die(sandbox.id, "died")
    await eventually(lambda: not server.orchestrator.list())
    server.script.blocked.pop(step).set()
    outcome = await outcome_of(taking)
    await server.orchestrator.settled()
    server.check([])
    assert isinstance(outcome, SandboxNotFoundError) == (step != "captured.commit")


@pytest.mark.parametrize("step", [*WINDOW, "captured.commit"])
async def test_a_pause_waits(server: Server, world: World, step: str) -> None:
    sandbox = await server.orchestrator.create(wish())
    world.work()
    server.script.seen.clear()
    server.script.blocked[step] = asyncio.Event()
    taking = asyncio.create_task(server.orchestrator.snapshot(sandbox.id))
    await server.script.reached(step)
    pausing = asyncio.create_task(server.orchestrator.pause(sandbox.id))
    await turns()
    assert not pausing.done()
    server.script.blocked.pop(step).set()
    taken = await taking
    await pausing
    server.check([sandbox.id])
    paused = server.orchestrator.get(sandbox.id)
    assert (paused.state, paused.checkpoint_id) == (PAUSED, taken.id)
    assert server.saved.captures[-1].parent_id == taken.id
    await server.orchestrator.connect(sandbox.id, 60)
    assert world.content[sandbox.id] == 1


async def test_a_roll_back_waits(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    world.work()
    first = await server.orchestrator.snapshot(sandbox.id)
    world.work()
    server.script.seen.clear()
    server.script.blocked["captured.commit"] = asyncio.Event()
    taking = asyncio.create_task(server.orchestrator.snapshot(sandbox.id))
    await server.script.reached("captured.commit")
    rolling = asyncio.create_task(server.orchestrator.rollback(sandbox.id, first.id))
    await turns()
    assert "journal.begin_roll_back" not in server.script.seen
    server.script.blocked.pop("captured.commit").set()
    assert (await taking).parent_id == first.id
    back = await rolling
    assert (back.checkpoint_id, world.content[sandbox.id]) == (first.id, 1)
    await server.orchestrator.settled()
    server.check([sandbox.id])


async def test_changes_of_its_end_wait_for_the_moment_only(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    server.script.blocked["machine.copy_memory"] = asyncio.Event()
    server.script.blocked["captured.commit"] = asyncio.Event()
    taking = asyncio.create_task(server.orchestrator.snapshot(sandbox.id))
    await server.script.reached("machine.copy_memory")
    changes = [
        asyncio.create_task(server.orchestrator.set_timeout(sandbox.id, 40)),
        asyncio.create_task(server.orchestrator.connect(sandbox.id, 50)),
        asyncio.create_task(server.orchestrator.refresh(sandbox.id, 60)),
    ]
    await turns()
    assert not any(change.done() for change in changes)
    server.script.blocked.pop("machine.copy_memory").set()
    await asyncio.gather(*changes)
    assert server.orchestrator.get(sandbox.id).end_at == START + timedelta(seconds=60)
    await server.script.reached("captured.commit")
    await server.orchestrator.set_timeout(sandbox.id, 90)
    server.script.blocked.pop("captured.commit").set()
    await taking
    assert server.orchestrator.get(sandbox.id).end_at == START + timedelta(seconds=90)
    server.check([sandbox.id])


@pytest.mark.parametrize("on_timeout", list(OnTimeout))
@pytest.mark.parametrize("step", ["machine.copy_memory", "captured.commit"])
async def test_time_that_ends_meanwhile(server: Server, world: World, on_timeout: OnTimeout, step: str) -> None:
    sandbox = await server.orchestrator.create(wish(timeout_s=10, on_timeout=on_timeout))
    server.script.blocked[step] = asyncio.Event()
    taking = asyncio.create_task(server.orchestrator.snapshot(sandbox.id))
    await server.script.reached(step)
    await world.clock.advance(11)
    if step == "machine.copy_memory":
        assert sandbox.id in world.vms
    server.script.blocked.pop(step).set()
    taken = await taking
    if on_timeout is OnTimeout.KILL:
        await eventually(lambda: not server.orchestrator.list())
    else:
        await eventually(lambda: server.orchestrator.get(sandbox.id).state is PAUSED)
    await server.orchestrator.settled()
    server.check([] if on_timeout is OnTimeout.KILL else [sandbox.id])
    assert taken.id in world.snapshots


async def test_traffic_and_lookups_go_on_meanwhile(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    server.script.blocked["saved.capture"] = asyncio.Event()
    taking = asyncio.create_task(server.orchestrator.snapshot(sandbox.id))
    await server.script.reached("saved.capture")
    assert server.orchestrator.get(sandbox.id).state is SandboxState.CAPTURING
    assert await server.orchestrator.wake(sandbox.id) is server.orchestrator.routes.get(sandbox.id) is not None
    server.script.blocked.pop("saved.capture").set()
    await taking


async def test_snapshots_of_one_at_the_same_time_come_one_after_the_other(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    taken = await asyncio.gather(*(server.orchestrator.snapshot(sandbox.id, name=f"n{i}") for i in range(5)))
    parents = [None, *(one.id for one in taken)]
    assert [one.parent_id for one in taken] == parents[:-1]
    assert server.orchestrator.get(sandbox.id).checkpoint_id == taken[-1].id
    server.check([sandbox.id])


async def test_snapshots_of_several_do_not_wait_for_each_other(server: Server, world: World) -> None:
    first, second = [await server.orchestrator.create(wish()) for _ in range(2)]
    server.script.blocked["captured.commit"] = gate = asyncio.Event()
    slow = asyncio.create_task(server.orchestrator.snapshot(first.id))
    await server.script.reached("captured.commit")
    del server.script.blocked["captured.commit"]
    await server.orchestrator.snapshot(second.id)
    gate.set()
    await slow
    server.check([first.id, second.id])


@pytest.mark.parametrize("fate", [Fate.FAIL, Fate.CANCEL])
@pytest.mark.parametrize("memory", [True, False])
async def test_every_step_of_a_create_from_a_snapshot_fails(world: World, fate: Fate, memory: bool) -> None:
    struck: list[str | None] = []
    async with Server(world) as server:
        source = await server.orchestrator.create(wish())
        world.work()
        taken = await server.orchestrator.snapshot(source.id)
        for number in range(60):
            caller = asyncio.create_task(server.orchestrator.create(wish(template=taken.id, memory=memory)))
            server.script.arm(fate, number, caller)
            outcome = await outcome_of(caller)
            await server.settle()
            server.script.armed = None
            struck.append(server.script.struck)
            if server.script.struck is None:
                assert not isinstance(outcome, BaseException)
                assert (world.content[outcome.id], world.written[outcome.id]) == (int(memory), 1)
                server.check([source.id, outcome.id])
                break
            expected = AgentEnvError if fate is Fate.FAIL else asyncio.CancelledError
            assert isinstance(outcome, expected), server.script.struck
            server.check([source.id])
            assert taken.id in world.snapshots
        else:
            pytest.fail("the create never came to its end")
    assert {"saved.load", "journal.begin_start", "journal.finish_start", "agent.init"} <= set(struck)
    assert {"unpack", "vmm.load"} <= set(struck) or not memory
