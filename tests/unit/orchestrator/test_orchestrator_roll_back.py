"""Rolling back in place: what goes back, what stays, what is refused, what is left when a step fails or is the last."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

import pytest
from fake_snapshots import FakeSnapshot
from fakes import Fate, Server, World, eventually, outcome_of, turns, wish
from test_orchestrator_crash import crash

from agentenv.errors import (
    AgentEnvError,
    CapacityError,
    ConflictError,
    InsufficientStorageError,
    InvalidRequestError,
    SandboxNotFoundError,
    SandboxStartError,
    SnapshotError,
    SnapshotMismatchError,
    SnapshotNotFoundError,
    TooManyRequestsError,
    VmmError,
)
from agentenv.orchestrator.model import OnTimeout, PauseMode, Sandbox, SandboxState
from agentenv.snapshots.manifest import (
    Environment,
    LayerReference,
    MachineShape,
    SnapshotKind,
    SnapshotManifest,
    StateFile,
)

RUNNING, PAUSED = SandboxState.RUNNING, SandboxState.PAUSED
LAYER = LayerReference("sha256:" + 64 * "c", 1)


def take(world: World, sandbox: Sandbox, *, memory: bool = True, responsive: bool = True) -> str:
    """A named snapshot of a sandbox as it is now; returns its id."""
    manifest = SnapshotManifest(
        snapshot_id=str(uuid4()),
        created_at=world.clock.now(),
        kind=SnapshotKind.FULL if memory else SnapshotKind.FILESYSTEM,
        architecture="x86_64",
        sandbox_id=sandbox.id,
        template_id=sandbox.template_id,
        machine=MachineShape(sandbox.vcpus, sandbox.memory_mib, sandbox.disk_mib << 20),
        agent_version="1",
        disk_layers=(LAYER,),
        default_user="user",
        own_template_id="own",
        memory_layers=(LAYER,) if memory else (),
        state=StateFile("state", 1, LAYER.digest) if memory else None,
        environment=Environment("fake", "1", "tcg", "fake", "max", LAYER.digest, 0, "6", LAYER.digest, LAYER.digest),
        agent_responsive=responsive,
        agent_token=sandbox.envd_access_token if memory else None,
    )
    content = world.content[sandbox.id] if memory else None
    world.snapshots[manifest.snapshot_id] = FakeSnapshot(manifest, content, world.written[sandbox.id])
    return manifest.snapshot_id


def counters(world: World, sandbox_id: str) -> tuple[int, int]:
    """What is in its memory and on its disk."""
    return world.content[sandbox_id], world.written[sandbox_id]


async def test_it_goes_back_and_stays_itself(server: Server, world: World) -> None:
    before = await server.orchestrator.create(wish(metadata={"a": "b"}, env_vars={"BOTH": "mine"}, timeout_s=300))
    identity = world.identities[before.id]
    world.work()
    one = take(world, before)
    world.work()
    two = take(world, before)
    await world.clock.advance(100)
    for number, (target, content) in enumerate(((one, 1), (two, 2), (one, 1)), start=2):
        world.work()
        back = await server.orchestrator.rollback(before.id, target)
        await server.orchestrator.settled()
        server.check([before.id])
        assert counters(world, before.id) == (content, content)
        assert server.orchestrator.get(before.id) == back
        assert back == replace(
            before, life=number, snapshot_id=target, checkpoint_id=target, envd_version=back.envd_version
        ), "its tokens, its time and all else stay"
        assert world.identities[before.id] == replace(identity, life=number)
        assert server.orchestrator.routes.get(before.id).life == number
        assert {one, two} <= set(world.snapshots)
    await world.clock.advance(200)
    await server.orchestrator.settled()
    server.check([])
    assert {one, two} == set(world.snapshots), "they are not its own"


async def test_the_snapshot_of_a_former_pause_goes_and_the_next_pause_builds_on_the_target(
    server: Server, world: World
) -> None:
    sandbox = await server.orchestrator.create(wish())
    world.work()
    target = take(world, sandbox)
    await server.orchestrator.pause(sandbox.id)
    await server.orchestrator.connect(sandbox.id, 60)
    assert len(world.snapshots) == 2
    await server.orchestrator.rollback(sandbox.id, target)
    await server.orchestrator.settled()
    assert set(world.snapshots) == {target}
    server.check([sandbox.id])
    world.work()
    await server.orchestrator.pause(sandbox.id)
    capture = server.saved.captures[-1]
    assert (capture.parent_id, capture.memory_parent_id) == (target, target)
    server.check([sandbox.id])
    await server.orchestrator.connect(sandbox.id, 60)
    assert counters(world, sandbox.id) == (2, 2)
    await server.orchestrator.kill(sandbox.id)
    assert set(world.snapshots) == {target}


async def test_without_memory_it_boots_from_the_disk_of_then(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    world.work()
    target = take(world, sandbox, memory=False)
    world.work()
    await server.orchestrator.rollback(sandbox.id, target)
    await server.orchestrator.settled()
    assert counters(world, sandbox.id) == (0, 1)
    server.check([sandbox.id])


async def test_what_is_refused_changes_nothing(server: Server, world: World) -> None:
    sandbox, other = [await server.orchestrator.create(wish()) for _ in range(2)]
    world.work()
    foreign = take(world, other)
    with pytest.raises(InvalidRequestError, match=f"was taken of sandbox {other.id}"):
        await server.orchestrator.rollback(sandbox.id, foreign)
    with pytest.raises(SnapshotNotFoundError):
        await server.orchestrator.rollback(sandbox.id, "nothing")
    with pytest.raises(SandboxNotFoundError):
        await server.orchestrator.rollback("inone", foreign)
    silent = take(world, sandbox, responsive=False)
    with pytest.raises(ConflictError) as conflict:
        await server.orchestrator.rollback(sandbox.id, silent)
    assert conflict.value.error_code == "sandbox_snapshot_guest_agent_unresponsive"
    damaged = take(world, sandbox)
    world.snapshots[damaged] = replace(world.snapshots[damaged], damaged=True)
    with pytest.raises(SnapshotError, match="damaged"):
        await server.orchestrator.rollback(sandbox.id, damaged)
    target = take(world, sandbox)
    server.script.failing["saved.load"] = SnapshotMismatchError("another CPU")
    with pytest.raises(SnapshotMismatchError, match="another CPU"):
        await server.orchestrator.rollback(sandbox.id, target)
    server.script.failing.clear()
    assert server.orchestrator.get(sandbox.id) == sandbox
    assert counters(world, sandbox.id) == (1, 1)
    server.check([sandbox.id, other.id])
    await server.orchestrator.pause(sandbox.id)
    with pytest.raises(ConflictError, match="is paused; connect"):
        await server.orchestrator.rollback(sandbox.id, target)
    server.check([sandbox.id, other.id])


async def test_one_that_is_on_its_way_is_refused(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    target = take(world, sandbox)
    gate = server.script.blocked["saved.save"] = asyncio.Event()
    pausing = asyncio.create_task(server.orchestrator.pause(sandbox.id))
    await server.script.reached("saved.save")
    with pytest.raises(ConflictError, match="is pausing"):
        await server.orchestrator.rollback(sandbox.id, target)
    gate.set()
    await pausing
    await server.orchestrator.connect(sandbox.id, 60)
    outcomes = await asyncio.gather(*(outcome_of(server.orchestrator.rollback(sandbox.id, target)) for _ in range(3)))
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ["ConflictError", "ConflictError", "Sandbox"]
    await server.orchestrator.settled()
    server.check([sandbox.id])


async def test_a_pause_that_overtakes_it_wins(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    world.work()
    target = take(world, sandbox)
    world.work()
    gate = server.script.blocked["saved.load"] = asyncio.Event()
    rolling = asyncio.create_task(server.orchestrator.rollback(sandbox.id, target))
    await server.script.reached("saved.load")
    await server.orchestrator.pause(sandbox.id)
    gate.set()
    assert isinstance(await outcome_of(rolling), ConflictError)
    server.check([sandbox.id])
    server.script.blocked.clear()
    await server.orchestrator.connect(sandbox.id, 60)
    assert counters(world, sandbox.id) == (2, 2)


async def test_a_snapshot_that_is_deleted_meanwhile(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    world.work()
    target = take(world, sandbox)
    gate = server.script.blocked["saved.load"] = asyncio.Event()
    rolling = asyncio.create_task(server.orchestrator.rollback(sandbox.id, target))
    await server.script.reached("saved.load")
    server.orchestrator._parts.deleting.add(target)
    gate.set()
    assert isinstance(await outcome_of(rolling), SnapshotNotFoundError)
    server.orchestrator._parts.deleting.clear()
    assert server.orchestrator.get(sandbox.id) == sandbox
    server.check([sandbox.id])
    # Between the moment in which it is kept and the one in which nobody may delete it any more.
    server.script.blocked.clear()
    server.script.seen.clear()
    server.script.arm(Fate.FAIL, 3)
    server.script.error = lambda _: SnapshotNotFoundError(target)
    with pytest.raises(SnapshotNotFoundError):
        await server.orchestrator.rollback(sandbox.id, target)
    assert server.script.struck == "saved.get"
    assert server.orchestrator.get(sandbox.id) == sandbox
    server.check([sandbox.id])


async def test_every_step_fails(world: World) -> None:
    struck: list[str | None] = []
    outcomes: set[SandboxState] = set()
    async with Server(world) as server:
        for memory in (True, False):
            for number in range(60):
                sandbox = await server.orchestrator.create(wish())
                await server.orchestrator.pause(sandbox.id)
                sandbox, _ = await server.orchestrator.connect(sandbox.id, 60)
                world.work()
                target = take(world, sandbox, memory=memory)
                world.work()
                server.script.arm(Fate.FAIL, number)
                outcome = await outcome_of(server.orchestrator.rollback(sandbox.id, target))
                await server.orchestrator.settled()
                server.script.armed = None
                struck.append(server.script.struck)
                now = server.orchestrator.get(sandbox.id)
                back = (1 if memory else 0, 1)
                if isinstance(outcome, Sandbox):
                    assert now == outcome
                    assert counters(world, sandbox.id) == back
                elif now.state is PAUSED:
                    assert isinstance(outcome, AgentEnvError)
                    assert "paused there now" in outcome.message, server.script.struck
                    server.check([sandbox.id])
                    assert (now.snapshot_id, now.rolling_back, now.end_at) == (target, False, now.paused_at)
                    assert now.pause_mode is (PauseMode.FULL if memory else PauseMode.FILESYSTEM)
                    await server.orchestrator.connect(sandbox.id, 60)
                    assert counters(world, sandbox.id) == back
                else:
                    assert isinstance(outcome, AgentEnvError)
                    assert now == sandbox, server.script.struck
                    server.check([sandbox.id])
                    assert counters(world, sandbox.id) == (2, 2)
                outcomes.add(now.state)
                # Whatever could not be given back then is given back now.
                await server.orchestrator.pause(sandbox.id)
                server.check([sandbox.id])
                await server.orchestrator.kill(sandbox.id)
                server.check([])
                if server.script.struck is None:
                    break
            else:
                pytest.fail("it never came to its end")
    assert outcomes == {RUNNING, PAUSED}
    before = {"catalog.find", "saved.load", "saved.get", "journal.begin_roll_back"}
    assert before | {"machine.kill", "slots.release", "disks.remove", "vmm.load", "vmm.boot", "agent.init"} <= set(
        struck
    )


async def test_a_caller_that_leaves_stops_nothing(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    world.work()
    target = take(world, sandbox)
    for step in ("catalog.find", "saved.load", "journal.begin_roll_back", "machine.kill", "vmm.load", "agent.init"):
        world.work()
        gate = server.script.blocked[step] = asyncio.Event()
        server.script.seen.clear()
        rolling = asyncio.create_task(server.orchestrator.rollback(sandbox.id, target))
        await server.script.reached(step)
        rolling.cancel()
        assert isinstance(await outcome_of(rolling), asyncio.CancelledError)
        gate.set()
        await server.orchestrator.settled()
        server.check([sandbox.id])
        assert counters(world, sandbox.id) == (1, 1), step


@pytest.mark.parametrize(
    "step",
    [
        "catalog.find",
        "saved.load",
        "journal.begin_roll_back",
        "machine.kill",
        "disks.remove",
        "unpack",
        "vmm.load",
        "agent.init",
        "journal.finish_start",
    ],
)
async def test_killed_meanwhile(server: Server, world: World, step: str) -> None:
    sandbox = await server.orchestrator.create(wish())
    target = take(world, sandbox)
    gate = server.script.blocked[step] = asyncio.Event()
    server.script.seen.clear()
    rolling = asyncio.create_task(server.orchestrator.rollback(sandbox.id, target))
    await server.script.reached(step)
    killing = asyncio.create_task(server.orchestrator.kill(sandbox.id))
    await eventually(lambda: server.orchestrator.list() == [])
    assert server.orchestrator.routes.get(sandbox.id) is None
    gate.set()
    await killing
    assert isinstance(await outcome_of(rolling), SandboxNotFoundError)
    server.check([])
    assert set(world.snapshots) == {target}


async def test_killed_while_it_is_undone(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    target = take(world, sandbox)
    server.script.failing["journal.begin_roll_back"] = VmmError("no")
    gate = server.script.blocked["journal.finish_start"] = asyncio.Event()
    server.script.seen.clear()
    rolling = asyncio.create_task(server.orchestrator.rollback(sandbox.id, target))
    await server.script.reached("journal.finish_start")
    killing = asyncio.create_task(server.orchestrator.kill(sandbox.id))
    await eventually(lambda: server.orchestrator.list() == [])
    gate.set()
    await killing
    assert isinstance(await outcome_of(rolling), SandboxNotFoundError)
    server.check([])


async def test_a_vm_that_ends_just_then_is_noticed(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    target = take(world, sandbox)
    server.script.failing["journal.begin_roll_back"] = VmmError("no")
    gate = server.script.blocked["journal.begin_roll_back"] = asyncio.Event()
    rolling = asyncio.create_task(server.orchestrator.rollback(sandbox.id, target))
    await server.script.reached("journal.begin_roll_back")
    server.vmm.die(sandbox.id, "out of memory")
    await turns()
    gate.set()
    assert isinstance(await outcome_of(rolling), VmmError | SandboxNotFoundError)
    await eventually(lambda: server.orchestrator.list() == [])
    await server.settle()
    server.check([])


async def test_its_time_ends_meanwhile(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish(timeout_s=60, on_timeout=OnTimeout.PAUSE))
    world.work()
    target = take(world, sandbox)
    gate = server.script.blocked["vmm.load"] = asyncio.Event()
    rolling = asyncio.create_task(server.orchestrator.rollback(sandbox.id, target))
    await server.script.reached("vmm.load")
    await world.clock.advance(90)
    assert server.orchestrator.get(sandbox.id).state is SandboxState.RESUMING
    gate.set()
    assert (await rolling).end_at == sandbox.end_at
    await eventually(lambda: server.orchestrator.get(sandbox.id).state is PAUSED)
    await server.orchestrator.settled()
    server.check([sandbox.id])


async def test_traffic_waits_for_it_where_it_may_wake(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish(auto_resume=True, on_timeout=OnTimeout.PAUSE))
    target = take(world, sandbox)
    gate = server.script.blocked["vmm.load"] = asyncio.Event()
    rolling = asyncio.create_task(server.orchestrator.rollback(sandbox.id, target))
    await server.script.reached("vmm.load")
    assert server.orchestrator.routes.sleeper(sandbox.id) is not None
    waking = asyncio.create_task(server.orchestrator.wake(sandbox.id))
    await turns()
    gate.set()
    await rolling
    route = await waking
    assert route is not None
    assert route.life == 2


async def test_too_many_starts_refuse_it(world: World) -> None:
    async with Server(world, max_concurrent_starts=1, max_queued_starts=0) as server:
        sandbox = await server.orchestrator.create(wish())
        target = take(world, sandbox)
        gate = server.script.blocked["vmm.boot"] = asyncio.Event()
        server.script.seen.clear()
        creating = asyncio.create_task(server.orchestrator.create(wish()))
        await server.script.reached("vmm.boot")
        with pytest.raises(TooManyRequestsError):
            await server.orchestrator.rollback(sandbox.id, target)
        gate.set()
        other = await creating
        assert server.orchestrator.get(sandbox.id) == sandbox
        server.check([sandbox.id, other.id])


async def test_a_full_node_can_roll_back(world: World) -> None:
    async with Server(world, max_running=1) as server:
        sandbox = await server.orchestrator.create(wish())
        target = take(world, sandbox)
        world.free_memory = 0
        await server.orchestrator.rollback(sandbox.id, target)
        server.check([sandbox.id])


@pytest.mark.parametrize("reboot", [False, True])
async def test_crash_at_every_step(world: World, reboot: bool) -> None:
    seen: list[int] = []
    for number in range(80):
        server = Server(world)
        await server.start()
        sandbox = await server.orchestrator.create(wish())
        await server.orchestrator.pause(sandbox.id)
        sandbox, _ = await server.orchestrator.connect(sandbox.id, 300)
        world.work()
        target = take(world, sandbox)
        world.work()
        crashed = await crash(server, number, asyncio.create_task(server.orchestrator.rollback(sandbox.id, target)))
        if reboot:
            world.reboot()
        async with Server(world) as successor:
            await successor.orchestrator.settled()
            found = {one.id: one for one in successor.orchestrator.list()}
            successor.check(found)
            assert found or reboot, server.script.struck
            assert target in world.snapshots
            if found:
                now = found[sandbox.id]
                assert (now.state, now.rolling_back) == (RUNNING, False), server.script.struck
                assert now.end_at == sandbox.end_at
                content, written = counters(world, sandbox.id)
                assert content == written
                assert (now.snapshot_id == target) == (content == 1), server.script.struck
                seen.append(content)
                await successor.orchestrator.kill(sandbox.id)
            successor.check([])
            assert set(world.snapshots) == {target}
        world.snapshots.clear()
        if not crashed:
            break
    else:
        pytest.fail("it never came to its end")
    assert set(seen) == ({1} if reboot else {1, 2})
    assert seen == sorted(seen, reverse=True), "once it is written down that it goes back, it does"


async def test_what_the_next_server_cannot_finish_stays_paused_there(world: World) -> None:
    server = Server(world)
    await server.start()
    sandbox = await server.orchestrator.create(wish())
    world.work()
    target = take(world, sandbox)
    gate = server.script.blocked["vmm.load"] = asyncio.Event()
    rolling = asyncio.create_task(server.orchestrator.rollback(sandbox.id, target))
    await server.script.reached("vmm.load")
    await server.vanish()
    gate.set()
    await outcome_of(rolling)
    successor = Server(world)
    successor.script.failing["vmm.load"] = VmmError("no")
    async with successor:
        await successor.orchestrator.settled()
        now = successor.orchestrator.get(sandbox.id)
        assert (now.state, now.snapshot_id, now.rolling_back) == (PAUSED, target, False)
        successor.check([sandbox.id])
        successor.script.failing.clear()
        await successor.orchestrator.connect(sandbox.id, 60)
        assert counters(world, sandbox.id) == (1, 1)
        successor.check([sandbox.id])


@pytest.mark.parametrize("on_timeout", list(OnTimeout))
async def test_its_time_ends_while_no_server_runs(world: World, on_timeout: OnTimeout) -> None:
    server = Server(world)
    await server.start()
    sandbox = await server.orchestrator.create(wish(timeout_s=60, on_timeout=on_timeout))
    target = take(world, sandbox)
    gate = server.script.blocked["vmm.load"] = asyncio.Event()
    rolling = asyncio.create_task(server.orchestrator.rollback(sandbox.id, target))
    await server.script.reached("vmm.load")
    await server.vanish()
    gate.set()
    await outcome_of(rolling)
    world.clock.wall_offset += timedelta(seconds=90)
    async with Server(world) as successor:
        await successor.orchestrator.settled()
        if on_timeout is OnTimeout.KILL:
            successor.check([])
        else:
            assert successor.orchestrator.get(sandbox.id).state is PAUSED
            successor.check([sandbox.id])


@pytest.mark.parametrize(
    ("step", "error", "kind"),
    [
        ("vmm.load", VmmError("another CPU"), SandboxStartError),
        ("slots.acquire", CapacityError("no slot", retry_after_s=7), CapacityError),
        ("disks.create", InsufficientStorageError("it is full"), InsufficientStorageError),
        ("unpack", RuntimeError("?"), SandboxStartError),
    ],
)
async def test_the_error_of_a_failed_start_names_the_place(
    server: Server, world: World, step: str, error: Exception, kind: type[AgentEnvError]
) -> None:
    sandbox = await server.orchestrator.create(wish())
    target = take(world, sandbox)
    server.script.failing[step] = error
    with pytest.raises(kind, match="paused there now; connect to it: ") as failed:
        await server.orchestrator.rollback(sandbox.id, target)
    assert failed.value.retry_after_s == getattr(error, "retry_after_s", None)
    assert server.orchestrator.get(sandbox.id).state is PAUSED
    server.check([sandbox.id])
