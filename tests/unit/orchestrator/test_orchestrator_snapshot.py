"""Named snapshots: what is in them, what runs on, what is created from them, what is refused."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fakes import Server, World, outcome_of, wish

from agentenv.errors import (
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
)
from agentenv.orchestrator.model import PauseMode, SandboxState
from agentenv.snapshots.manifest import HIDDEN_PREFIX

RUNNING, PAUSED = SandboxState.RUNNING, SandboxState.PAUSED


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


async def test_a_silent_agent_is_not_captured(server: Server, world: World) -> None:
    source = await server.orchestrator.create(wish())
    world.work()
    good = await server.orchestrator.snapshot(source.id, name="ready")
    world.hung.add(source.id)
    for memory in (False, True):
        with pytest.raises(GuestUnresponsiveError, match="was not captured, it runs on"):
            await server.orchestrator.snapshot(source.id, name="ready", memory=memory)
        server.check([source.id])
    assert (await server.orchestrator.find_snapshot("ready")).id == good.id, "a useless one has the name"


async def test_a_silent_agent_in_a_snapshot_is_refused(server: Server, world: World) -> None:
    source = await server.orchestrator.create(wish())
    world.work()
    taken = await server.orchestrator.snapshot(source.id)
    snapshot = world.snapshots[taken.id]
    world.snapshots[taken.id] = replace(snapshot, manifest=replace(snapshot.manifest, agent_responsive=False))
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
