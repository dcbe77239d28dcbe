"""Named snapshots: what is in them, what runs on, what is created from them, and the way back when a step fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

import pytest
from fakes import START, Fate, Server, World, eventually, outcome_of, turns, wish

from agentenv.errors import (
    AgentEnvError,
    CapacityError,
    ConflictError,
    GuestUnresponsiveError,
    InvalidRequestError,
    NotFoundError,
    SandboxNotFoundError,
    SnapshotError,
    SnapshotNotFoundError,
    StorageError,
    TemplateNotFoundError,
    VmmError,
)
from agentenv.orchestrator.model import OnTimeout, PauseMode, SandboxState
from agentenv.snapshots.manifest import HIDDEN_PREFIX

RUNNING, PAUSED = SandboxState.RUNNING, SandboxState.PAUSED
WINDOW = ("machine.pause", "machine.pause done", "machine.save_state", "saved.capture", "machine.copy_memory")
"""Steps at which it stands still, or is about to."""


async def test_it_runs_on_and_others_begin_where_it_was(server: Server, world: World) -> None:
    source = await server.orchestrator.create(wish(metadata={"a": "b"}, env_vars={"MINE": "1"}))
    world.work()
    route = server.orchestrator.routes.get(source.id)
    taken = await server.orchestrator.snapshot(source.id, name="golden:v1")
    server.check([source.id])
    assert server.orchestrator.routes.get(source.id) is route
    assert (taken.reference, taken.names, taken.kind) == ("golden:v1", ("golden:v1",), PauseMode.FULL)
    assert (taken.sandbox_id, taken.parent_id, taken.template_id) == (source.id, None, "template-golden")
    world.work()
    copy = await server.orchestrator.create(wish(template="golden:v1", env_vars={"BOTH": "mine"}))
    server.check([source.id, copy.id])
    assert (world.content[source.id], world.written[source.id]) == (2, 2)
    assert (world.content[copy.id], world.written[copy.id]) == (1, 1)
    assert copy.id != source.id
    assert copy.envd_access_token != source.envd_access_token
    identity = world.identities[copy.id]
    assert (identity.sandbox_id, identity.hostname, identity.life) == (copy.id, copy.id, 1)
    assert identity.env_vars == {"FROM_TEMPLATE": "1", "BOTH": "mine"}
    assert (copy.template_id, copy.alias, copy.request.metadata) == ("template-golden", "golden", {})
    assert copy.snapshot_id == copy.checkpoint_id == taken.id
    assert (copy.vcpus, copy.memory_mib, copy.disk_mib) == (source.vcpus, source.memory_mib, source.disk_mib)
    for sandbox in (source, copy):
        await server.orchestrator.kill(sandbox.id)
    assert taken.id in world.snapshots, "it outlives its source"
    server.check([])


async def test_nothing_else_happens_while_it_stands_still(server: Server, world: World) -> None:
    source = await server.orchestrator.create(wish())
    server.script.seen.clear()
    await server.orchestrator.snapshot(source.id)
    seen = server.script.seen
    began, ended = seen.index("machine.pause"), seen.index("machine.resume")
    assert set(seen[began:ended]) == {
        "machine.pause",
        "machine.pause done",
        "machine.save_state",
        "saved.capture",
        "saved.capture done",
        "machine.copy_memory",
        "machine.copy_memory done",
    }
    assert seen.index("captured.commit") > ended
    assert seen.index("agent.health") < began


async def test_memory_is_copied_while_the_disk_is_sealed(server: Server) -> None:
    source = await server.orchestrator.create(wish())
    for blocked in ("saved.capture", "machine.copy_memory"):
        server.script.seen.clear()
        server.script.blocked[blocked] = asyncio.Event()
        task = asyncio.create_task(server.orchestrator.snapshot(source.id))
        for step in ("saved.capture", "machine.copy_memory"):
            await server.script.reached(step)
        server.script.blocked.pop(blocked).set()
        await task


async def test_a_line_of_snapshots_is_a_tree(server: Server, world: World) -> None:
    source = await server.orchestrator.create(wish())
    first = await server.orchestrator.snapshot(source.id)
    await world.clock.advance(1)
    second = await server.orchestrator.snapshot(source.id)
    await world.clock.advance(1)
    copy = await server.orchestrator.create(wish(template=first.reference))
    third = await server.orchestrator.snapshot(copy.id)
    assert (second.parent_id, third.parent_id) == (first.id, first.id)
    (root,) = await server.orchestrator.snapshot_tree()
    assert root.snapshot == first
    assert [(node.id, node.snapshot) for node in root.children] == [(second.id, second), (third.id, third)]
    assert (root.exclusive_bytes, root.shared_bytes) == (10, 20)
    assert await server.orchestrator.snapshots() == (first, second, third)
    assert await server.orchestrator.snapshots(sandbox_id=copy.id) == (third,)
    await server.orchestrator.delete_snapshot(first.id)
    (root,) = await server.orchestrator.snapshot_tree()
    assert (root.id, root.snapshot, len(root.children)) == (first.id, None, 2)


async def test_a_very_long_line_is_no_problem(server: Server, world: World) -> None:
    source = await server.orchestrator.create(wish())
    taken = await server.orchestrator.snapshot(source.id)
    one = world.snapshots[taken.id]
    for number in range(3000):
        manifest = replace(one.manifest, snapshot_id=f"s{number}", parent_id=f"s{number - 1}" if number else taken.id)
        world.snapshots[f"s{number}"] = replace(one, manifest=manifest)
    (node,) = await server.orchestrator.snapshot_tree()
    depth = 1
    while node.children:
        (node,) = node.children
        depth += 1
    assert depth == 3001


async def test_the_same_name_twice_is_a_new_build(server: Server) -> None:
    source = await server.orchestrator.create(wish())
    first = await server.orchestrator.snapshot(source.id, name="golden")
    second = await server.orchestrator.snapshot(source.id, name="golden")
    assert first.template_id == second.template_id
    assert second.reference == "golden:default"
    assert await server.orchestrator.find_snapshot("golden:default") == second
    superseded = await server.orchestrator.find_snapshot(first.id)
    assert (superseded.reference, superseded.names) == (f"{first.template_id}:{first.id}", ())
    assert [one.id for one in await server.orchestrator.snapshots(name="golden")] == [first.id, second.id]
    assert await server.orchestrator.snapshots(name="other") == ()
    with pytest.raises(InvalidRequestError):
        await server.orchestrator.snapshots(name="No Name")
    for missing in ("silver", "golden:v9"):
        with pytest.raises(SnapshotNotFoundError):
            await server.orchestrator.find_snapshot(missing)


async def test_names_of_others_are_refused(server: Server) -> None:
    source = await server.orchestrator.create(wish())
    for name in ("base", "no good"):
        with pytest.raises(InvalidRequestError):
            await server.orchestrator.snapshot(source.id, name=name)
    server.check([source.id])
    assert "machine.pause" not in server.script.seen


async def test_without_memory_the_disk_is_flushed_and_copies_boot(server: Server, world: World) -> None:
    source = await server.orchestrator.create(wish())
    world.work()
    server.script.seen.clear()
    taken = await server.orchestrator.snapshot(source.id, memory=False)
    seen = server.script.seen
    assert seen.index("agent.sync") < seen.index("machine.pause")
    assert not {"machine.save_state", "machine.copy_memory"} & set(seen)
    assert taken.kind is PauseMode.FILESYSTEM
    copy = await server.orchestrator.create(wish(template=taken.id))
    assert (world.content[copy.id], world.written[copy.id]) == (0, 1)
    server.check([source.id, copy.id])


async def test_memory_of_a_snapshot_may_be_left_out(server: Server, world: World) -> None:
    source = await server.orchestrator.create(wish())
    world.work()
    taken = await server.orchestrator.snapshot(source.id)
    copy = await server.orchestrator.create(wish(template=taken.id, memory=False))
    assert (world.content[copy.id], world.written[copy.id]) == (0, 1)


async def test_a_silent_agent_is_in_the_snapshot_and_refused_later(server: Server, world: World) -> None:
    source = await server.orchestrator.create(wish())
    world.work()
    world.hung.add(source.id)
    with pytest.raises(GuestUnresponsiveError):
        await server.orchestrator.snapshot(source.id, memory=False)
    server.check([source.id])
    taken = await server.orchestrator.snapshot(source.id)
    server.check([source.id])
    with pytest.raises(ConflictError, match="memory: false") as refused:
        await server.orchestrator.create(wish(template=taken.id))
    assert refused.value.error_code == "sandbox_snapshot_guest_agent_unresponsive"
    copy = await server.orchestrator.create(wish(template=taken.id, memory=False))
    assert (world.content[copy.id], world.written[copy.id]) == (0, 1)


async def test_states_that_refuse(server: Server, world: World) -> None:
    with pytest.raises(SandboxNotFoundError):
        await server.orchestrator.snapshot("inone")
    sandbox = await server.orchestrator.create(wish())
    server.script.blocked["saved.save"] = asyncio.Event()
    pausing = asyncio.create_task(server.orchestrator.pause(sandbox.id))
    await server.script.reached("saved.save")
    with pytest.raises(ConflictError, match="pausing"):
        await server.orchestrator.snapshot(sandbox.id)
    server.script.blocked.pop("saved.save").set()
    await pausing
    with pytest.raises(NotFoundError, match="paused"):
        await server.orchestrator.snapshot(sandbox.id)
    server.script.blocked["vmm.load"] = asyncio.Event()
    resuming = asyncio.create_task(server.orchestrator.connect(sandbox.id, 60))
    await server.script.reached("vmm.load")
    with pytest.raises(ConflictError, match="resuming"):
        await server.orchestrator.snapshot(sandbox.id)
    server.script.blocked.pop("vmm.load").set()
    await resuming
    await server.orchestrator.snapshot(sandbox.id)
    server.check([sandbox.id])


async def test_a_host_without_memory_for_the_copy_refuses(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    world.free_memory = 0
    with pytest.raises(CapacityError):
        await server.orchestrator.snapshot(sandbox.id)
    assert "machine.pause" not in server.script.seen
    server.check([sandbox.id])
    await server.orchestrator.snapshot(sandbox.id, memory=False)


async def test_the_hidden_predecessor_goes_and_diffs_follow(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    await server.orchestrator.pause(sandbox.id)
    hidden = server.orchestrator.get(sandbox.id).snapshot_id
    await server.orchestrator.connect(sandbox.id, 60)
    taken = await server.orchestrator.snapshot(sandbox.id)
    assert server.saved.captures[-1].memory_parent_id == hidden
    assert server.saved.captures[-1].parent_id is None
    assert list(world.snapshots) == [taken.id]
    now = server.orchestrator.get(sandbox.id)
    assert now.snapshot_id == now.checkpoint_id == taken.id
    await server.orchestrator.pause(sandbox.id)
    assert server.saved.captures[-1].memory_parent_id == server.saved.captures[-1].parent_id == taken.id
    paused = server.orchestrator.get(sandbox.id)
    assert paused.snapshot_id is not None and paused.snapshot_id.startswith(HIDDEN_PREFIX)
    assert paused.checkpoint_id == taken.id
    server.check([sandbox.id])
    await server.orchestrator.connect(sandbox.id, 60)
    again = await server.orchestrator.snapshot(sandbox.id)
    assert again.parent_id == taken.id
    server.check([sandbox.id])


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
    steps |= {"captured.commit", "captured.commit done", "journal.note_checkpoint", "saved.delete"}
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


async def test_what_a_paused_sandbox_needs_is_not_deleted(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    taken = await server.orchestrator.snapshot(sandbox.id, name="golden")
    server.script.blocked["vmm.load"] = asyncio.Event()
    creating = asyncio.create_task(server.orchestrator.create(wish(template="golden")))
    await server.script.reached("vmm.load")
    with pytest.raises(InvalidRequestError, match="is being started from it"):
        await server.orchestrator.delete_snapshot(taken.id)
    server.script.blocked.pop("vmm.load").set()
    copy = await creating
    await server.orchestrator.delete_snapshot("golden:default")
    server.check([sandbox.id, copy.id])
    for reference in ("golden:default", "golden"):
        with pytest.raises(SnapshotNotFoundError):
            await server.orchestrator.delete_snapshot(reference)
    with pytest.raises(NotFoundError):
        await server.orchestrator.delete_snapshot(taken.id)
    # Those that went on from it do not need it any more.
    for one in (sandbox, copy):
        await server.orchestrator.pause(one.id)
        await server.orchestrator.connect(one.id, 60)
    server.check([sandbox.id, copy.id])


async def test_none_begins_from_a_snapshot_that_is_being_deleted(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    taken = await server.orchestrator.snapshot(sandbox.id)
    server.script.blocked["catalog.delete"] = asyncio.Event()
    deleting = asyncio.create_task(server.orchestrator.delete_snapshot(taken.id))
    await server.script.reached("catalog.delete")
    with pytest.raises(TemplateNotFoundError):
        await server.orchestrator.create(wish(template=taken.id))
    deleting.cancel()
    server.script.blocked.pop("catalog.delete").set()
    assert isinstance(await outcome_of(deleting), asyncio.CancelledError)
    assert world.snapshots == {}
    server.check([sandbox.id])


async def test_a_deletion_that_fails_can_be_repeated(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    taken = await server.orchestrator.snapshot(sandbox.id)
    server.script.failing["catalog.delete"] = StorageError("no")
    with pytest.raises(StorageError):
        await server.orchestrator.delete_snapshot(taken.id)
    server.script.failing.clear()
    await server.orchestrator.create(wish(template=taken.id))
    world.snapshots[taken.id] = replace(world.snapshots[taken.id], damaged=True)
    with pytest.raises(SnapshotError):
        await server.orchestrator.create(wish(template=taken.id))
    await server.orchestrator.delete_snapshot(taken.id)
    assert world.snapshots == {}


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
