"""Forks: what the children are, what the source keeps, limits, and the way back when a step fails."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from fakes import Fate, Server, World, outcome_of, turns, wish

from agentenv.errors import (
    AgentEnvError,
    CapacityError,
    ConflictError,
    GuestUnresponsiveError,
    InvalidRequestError,
    SandboxNotFoundError,
    SandboxStartError,
    TooManyRequestsError,
    VmmError,
)
from agentenv.orchestrator.model import NetworkOptions, OnTimeout, Sandbox, SandboxState
from agentenv.snapshots.manifest import HIDDEN_PREFIX

CHILD_STEPS = {"journal.begin_start", "unpack", "vmm.load", "agent.init", "journal.finish_start"}


async def test_children_go_on_from_one_moment_as_sandboxes_of_their_own(server: Server, world: World) -> None:
    network = NetworkOptions(allow_public_traffic=False, deny_out=("10.0.0.0/8",))
    source = await server.orchestrator.create(
        wish(metadata={"a": "b"}, env_vars={"BOTH": "mine"}, network=network, on_timeout=OnTimeout.PAUSE)
    )
    world.work()
    route = server.orchestrator.routes.get(source.id)
    told: list[Sandbox | AgentEnvError] = []
    children = await server.orchestrator.fork(source.id, count=3, timeout_s=70, on_result=told.append)
    assert server.script.seen.count("machine.pause") == 1, "one capture, however many children"
    assert sorted(told, key=id) == sorted(children, key=id)
    ids = {child.id for child in children if isinstance(child, Sandbox)}
    assert len(ids) == 3
    server.check([source.id, *ids])
    assert server.orchestrator.get(source.id) == source
    assert server.orchestrator.routes.get(source.id) is route
    assert world.snapshots == {}
    tokens = {source.envd_access_token, source.traffic_access_token}
    for child in children:
        assert isinstance(child, Sandbox)
        assert (world.content[child.id], world.written[child.id]) == (1, 1)
        identity = world.identities[child.id]
        assert (identity.sandbox_id, identity.hostname, identity.life) == (child.id, child.id, 1)
        assert identity.env_vars == {"FROM_TEMPLATE": "1", "BOTH": "mine"}
        assert child.end_at == world.clock.now() + timedelta(seconds=70)
        assert child.request.metadata == {"a": "b"}
        assert (child.request.network, child.request.on_timeout) == (network, OnTimeout.PAUSE)
        assert (child.template_id, child.alias) == (source.template_id, source.alias)
        assert child.traffic_access_token is not None
        tokens |= {child.envd_access_token, child.traffic_access_token}
    assert len(tokens) == 8
    world.work()
    for child_id in ids:
        await server.orchestrator.pause(child_id)
        await server.orchestrator.connect(child_id, 60)
        assert world.content[child_id] == 2
    server.check([source.id, *ids])


async def test_the_source_runs_before_the_first_child_starts(server: Server) -> None:
    source = await server.orchestrator.create(wish())
    server.script.seen.clear()
    await server.orchestrator.fork(source.id, count=2, timeout_s=60)
    seen = server.script.seen
    assert seen.index("machine.resume done") < seen.index("journal.end_capture") < seen.index("journal.begin_start")


async def test_children_inherit_parents_and_own_no_hidden_one(world: World) -> None:
    async with Server(world) as server:
        source = await server.orchestrator.create(wish())
        named = await server.orchestrator.snapshot(source.id)
        await server.orchestrator.pause(source.id)
        await server.orchestrator.connect(source.id, 60)
        hidden = server.orchestrator.get(source.id).snapshot_id
        (child,) = await server.orchestrator.fork(source.id, count=1, timeout_s=60)
        assert isinstance(child, Sandbox)
        assert (child.snapshot_id, child.checkpoint_id) == (hidden, named.id)
        server.check([source.id, child.id])
        await server.orchestrator.kill(child.id)
        assert hidden in world.snapshots
        (child,) = await server.orchestrator.fork(source.id, count=1, timeout_s=60)
        assert isinstance(child, Sandbox)
    async with Server(world) as successor:
        successor.check([source.id, child.id])
        await successor.orchestrator.kill(source.id)
        assert not [name for name in world.snapshots if name.startswith(HIDDEN_PREFIX)]
        await successor.orchestrator.pause(child.id)
        successor.check([child.id])
    async with Server(world) as last:
        await last.orchestrator.connect(child.id, 60)
        last.check([child.id])


@pytest.mark.parametrize("count", [0, -1, 101])
async def test_counts_out_of_range(server: Server, count: int) -> None:
    source = await server.orchestrator.create(wish())
    with pytest.raises(InvalidRequestError, match="count"):
        await server.orchestrator.fork(source.id, count=count, timeout_s=60)


@pytest.mark.parametrize("timeout_s", [0, -5, 10**9])
async def test_timeouts_out_of_range(server: Server, timeout_s: int) -> None:
    source = await server.orchestrator.create(wish())
    with pytest.raises(InvalidRequestError, match="timeout"):
        await server.orchestrator.fork(source.id, count=1, timeout_s=timeout_s)
    assert "machine.pause" not in server.script.seen


async def test_limits_of_the_node(world: World) -> None:
    async with Server(world, max_running=3) as server:
        source = await server.orchestrator.create(wish())
        with pytest.raises(InvalidRequestError, match="3"):
            await server.orchestrator.fork(source.id, count=3, timeout_s=60)
        other = await server.orchestrator.create(wish())
        outcomes = await server.orchestrator.fork(source.id, count=2, timeout_s=60)
        assert isinstance(outcomes[0], Sandbox)
        assert isinstance(outcomes[1], TooManyRequestsError)
        server.check([source.id, other.id, outcomes[0].id])


async def test_a_queue_that_is_full_refuses_some(world: World) -> None:
    async with Server(world, max_concurrent_starts=1, max_queued_starts=1) as server:
        source = await server.orchestrator.create(wish())
        outcomes = await server.orchestrator.fork(source.id, count=4, timeout_s=60)
        children = [one.id for one in outcomes if isinstance(one, Sandbox)]
        assert len(children) == 2
        assert all(one.status == 429 for one in outcomes if isinstance(one, AgentEnvError))
        server.check([source.id, *children])


async def test_each_child_fails_by_itself(server: Server, world: World) -> None:
    source = await server.orchestrator.create(wish())
    server.script.failing["agent.init"] = VmmError("no")
    outcomes = await server.orchestrator.fork(source.id, count=2, timeout_s=60)
    assert [type(one) for one in outcomes] == [SandboxStartError, SandboxStartError]
    server.script.failing.clear()
    await server.settle()
    server.check([source.id])
    server.script.arm(Fate.FAIL, 45)
    outcomes = await server.orchestrator.fork(source.id, count=3, timeout_s=60)
    assert server.script.struck is not None
    children = [one.id for one in outcomes if isinstance(one, Sandbox)]
    assert len(children) == 2, server.script.struck
    await server.settle()
    server.check([source.id, *children])


async def test_states_that_refuse(server: Server, world: World) -> None:
    with pytest.raises(SandboxNotFoundError):
        await server.orchestrator.fork("inone", count=1, timeout_s=60)
    sandbox = await server.orchestrator.create(wish())
    world.hung.add(sandbox.id)
    with pytest.raises(GuestUnresponsiveError, match="was not forked"):
        await server.orchestrator.fork(sandbox.id, count=1, timeout_s=60)
    world.hung.clear()
    server.script.blocked["saved.save"] = asyncio.Event()
    pausing = asyncio.create_task(server.orchestrator.pause(sandbox.id))
    await server.script.reached("saved.save")
    with pytest.raises(ConflictError, match="pausing"):
        await server.orchestrator.fork(sandbox.id, count=1, timeout_s=60)
    server.script.blocked.pop("saved.save").set()
    await pausing
    with pytest.raises(ConflictError, match="paused"):
        await server.orchestrator.fork(sandbox.id, count=1, timeout_s=60)
    server.check([sandbox.id])


async def test_every_step_of_a_fork_fails(world: World) -> None:
    struck: list[str | None] = []
    async with Server(world) as server:
        source = await server.orchestrator.create(wish())
        for number in range(120):
            world.work()
            counted = world.content[source.id]
            server.script.arm(Fate.FAIL, number)
            outcome = await outcome_of(server.orchestrator.fork(source.id, count=2, timeout_s=60))
            await server.settle()
            server.script.armed = None
            struck.append(server.script.struck)
            entries = [] if isinstance(outcome, BaseException) else list(outcome)
            assert isinstance(outcome, AgentEnvError) or len(entries) == 2, server.script.struck
            children = [one.id for one in entries if isinstance(one, Sandbox)]
            if server.script.struck == "journal.end_capture":  # the next word about it puts that right
                await server.orchestrator.snapshot(source.id)
            server.check([source.id, *children])
            assert all(world.content[child] == counted for child in children)
            assert world.content[source.id] == counted
            for child in children:
                await server.orchestrator.kill(child)
            if server.script.struck is None:
                assert len(children) == 2
                break
        else:
            pytest.fail("the fork never came to its end")
    assert {"journal.begin_capture", "saved.capture", "machine.copy_memory", "saved.capture over"} <= set(struck)
    # Children start side by side, so that which of their steps are struck is up to chance.
    assert len(CHILD_STEPS & set(struck)) > 1


@pytest.mark.parametrize("step", sorted(CHILD_STEPS))
async def test_a_step_that_fails_for_every_child(server: Server, world: World, step: str) -> None:
    source = await server.orchestrator.create(wish())
    server.script.failing[step] = VmmError("no")
    outcomes = await server.orchestrator.fork(source.id, count=3, timeout_s=60)
    server.script.failing.clear()
    assert [type(one) for one in outcomes] == 3 * [SandboxStartError]
    await server.settle()
    server.check([source.id])


async def test_a_cancelled_fork_leaves_no_child(world: World) -> None:
    async with Server(world) as server:
        source = await server.orchestrator.create(wish())
        for number in range(120):
            caller = asyncio.create_task(server.orchestrator.fork(source.id, count=2, timeout_s=60))
            server.script.arm(Fate.CANCEL, number, caller)
            outcome = await outcome_of(caller)
            await server.settle()
            server.script.armed = None
            if server.script.struck is None:
                break
            assert isinstance(outcome, asyncio.CancelledError), server.script.struck
            server.check([source.id])
        else:
            pytest.fail("the fork never came to its end")


async def test_a_child_that_is_there_when_the_caller_leaves_goes(server: Server, world: World) -> None:
    source = await server.orchestrator.create(wish())
    first = asyncio.Event()
    caller = asyncio.create_task(
        server.orchestrator.fork(source.id, count=2, timeout_s=60, on_result=lambda _: first.set())
    )
    await server.script.reached("journal.begin_start")
    server.script.blocked["journal.finish_start"] = gate = asyncio.Event()
    await turns()
    while server.script.seen.count("journal.finish_start") < 3:  # that of the source, too
        await asyncio.to_thread(lambda: None)
    del server.script.blocked["journal.finish_start"]
    server.script.blocked["journal.begin_kill"] = asyncio.Event()
    gate.set()
    await first.wait()
    caller.cancel()
    server.script.blocked.pop("journal.begin_kill").set()
    assert isinstance(await outcome_of(caller), asyncio.CancelledError)
    await server.settle()
    server.check([source.id])


async def test_the_source_may_go_while_children_start(server: Server, world: World) -> None:
    source = await server.orchestrator.create(wish())
    world.work()
    server.script.blocked["unpack"] = asyncio.Event()
    forking = asyncio.create_task(server.orchestrator.fork(source.id, count=2, timeout_s=60))
    await server.script.reached("unpack")
    await server.orchestrator.pause(source.id)
    await server.orchestrator.kill(source.id)
    server.script.blocked.pop("unpack").set()
    children = [one.id for one in await forking if isinstance(one, Sandbox)]
    server.check(children)
    assert [world.content[child] for child in children] == [1, 1]


async def test_two_forks_at_once(server: Server, world: World) -> None:
    source = await server.orchestrator.create(wish())
    world.work()
    calls = [server.orchestrator.fork(source.id, count=2, timeout_s=60) for _ in range(3)]
    children = [one.id for entries in await asyncio.gather(*calls) for one in entries if isinstance(one, Sandbox)]
    assert len(children) == 6
    assert all(world.content[child] == 1 for child in children)
    server.check([source.id, *children])


async def test_a_server_that_stops_undoes_the_children(world: World) -> None:
    server = await Server(world).start()
    source = await server.orchestrator.create(wish())
    server.script.blocked["unpack"] = asyncio.Event()
    forking = asyncio.create_task(server.orchestrator.fork(source.id, count=2, timeout_s=60))
    await server.script.reached("unpack")
    await server.orchestrator.close()
    assert [type(one) for one in await forking] == [CapacityError, CapacityError]
    async with Server(world) as successor:
        successor.check([source.id])
        assert successor.orchestrator.get(source.id).state is SandboxState.RUNNING
