"""Saved machines in processes that wait for them: used when they fit, given back whole when anything goes wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fakes import Server, World, eventually, outcome_of, wish

from agentenv.errors import AgentEnvError, CapacityError, SandboxNotFoundError, StorageError, VmmError
from agentenv.orchestrator import logbook
from agentenv.orchestrator.model import Sandbox, SandboxState

STEPS = [
    "waiting.move",
    "disks.create",
    "disks.create done",
    "journal.note_slot",
    "slots.apply_policy",
    "unpack",
    "waiting.load",
    "journal.note_machine",
    "machine.resume",
    "agent.init",
    "journal.finish_start",
]
RUNNING, PAUSED = SandboxState.RUNNING, SandboxState.PAUSED


@pytest.fixture
async def server(world: World) -> AsyncIterator[Server]:
    async with Server(world, warm=2) as running:
        yield running


async def paused_one(server: Server, world: World) -> Sandbox:
    """A sandbox that was paused, and for which a process waits."""
    sandbox = await server.orchestrator.create(wish())
    world.work()
    await server.orchestrator.pause(sandbox.id)
    await server.orchestrator.connect(sandbox.id, 300)
    await server.warm.settled()
    await server.orchestrator.pause(sandbox.id)
    assert server.warm.waiting >= 1
    server.script.seen.clear()
    return server.orchestrator.get(sandbox.id)


async def test_the_second_resume_needs_no_start(server: Server, world: World) -> None:
    sandbox = await paused_one(server, world)
    (waiting,) = world.waiting
    before = len((server.settings.paths.sandbox(sandbox.id) / logbook.FILE_NAME).read_text().splitlines())
    await server.orchestrator.connect(sandbox.id, 300)
    assert "vmm.load" not in server.script.seen
    assert server.script.seen.index("journal.note_slot") < server.script.seen.index("waiting.load")
    assert server.script.seen.index("slots.apply_policy") < server.script.seen.index("waiting.load")
    assert world.vms[sandbox.id].record.version == str(waiting.index), "it is in another slot than its process"
    assert world.content[sandbox.id] == 1
    lines = (server.settings.paths.sandbox(sandbox.id) / logbook.FILE_NAME).read_text().splitlines()
    assert len(lines) == before + 1, "its log is not there any more"
    await server.warm.settled()
    assert server.warm.waiting == 2
    server.check([sandbox.id])
    await server.orchestrator.kill(sandbox.id)
    server.check([])


async def test_sandboxes_go_before_processes_that_wait(server: Server, world: World) -> None:
    paused = await paused_one(server, world)
    world.most_slots = len(world.lent)
    assert world.waiting
    sandboxes = [await server.orchestrator.create(wish()) for _ in range(world.most_slots)]
    assert not world.waiting
    with pytest.raises(CapacityError):
        await server.orchestrator.create(wish())
    server.check([paused.id, *(sandbox.id for sandbox in sandboxes)])


async def test_one_of_another_size_does_not_fit(server: Server, world: World) -> None:
    sandbox = await paused_one(server, world)
    world.templates["large"] = type(world.templates["base"])(template_id="large", memory_mib=1024)
    large = await server.orchestrator.create(wish(template="large"))
    await server.orchestrator.pause(large.id)
    server.script.seen.clear()
    await server.orchestrator.connect(large.id, 300)
    assert "waiting.move" not in server.script.seen
    assert "vmm.load" in server.script.seen
    await server.warm.settled()
    server.check([sandbox.id, large.id])


async def test_copies_of_a_captured_machine(server: Server, world: World) -> None:
    sandbox = await paused_one(server, world)
    await server.orchestrator.connect(sandbox.id, 300)
    await server.warm.settled()
    server.script.seen.clear()
    children = await server.orchestrator.fork(sandbox.id, count=3, timeout_s=60)
    assert all(isinstance(child, Sandbox) for child in children)
    assert server.script.seen.count("waiting.load") == 2
    assert server.script.seen.count("vmm.load") == 1
    ids = [child.id for child in children if isinstance(child, Sandbox)]
    assert [world.content[name] for name in ids] == [1, 1, 1]
    assert len({world.identities[name].access_token for name in [sandbox.id, *ids]}) == 4
    await server.warm.settled()
    server.check([sandbox.id, *ids])


@pytest.mark.parametrize("step", ["waiting.load", "waiting.move"])
async def test_one_that_does_not_work_is_done_without(server: Server, world: World, step: str) -> None:
    sandbox = await paused_one(server, world)
    server.script.failing[step] = VmmError("the process has ended")
    await server.orchestrator.connect(sandbox.id, 300)
    assert server.script.seen.count("vmm.load") == 1
    assert world.content[sandbox.id] == 1
    assert server.orchestrator.get(sandbox.id).state is RUNNING
    await server.warm.settled()
    server.check([sandbox.id])


async def test_memory_that_cannot_be_read_gives_all_back(server: Server, world: World) -> None:
    sandbox = await paused_one(server, world)
    server.script.failing["unpack"] = StorageError("a layer is gone")
    with pytest.raises(AgentEnvError, match="a layer is gone"):
        await server.orchestrator.connect(sandbox.id, 300)
    assert server.script.seen.count("waiting.discard") == 1
    await server.warm.settled()
    assert server.orchestrator.get(sandbox.id).state is PAUSED
    server.check([sandbox.id])


async def test_a_process_that_does_not_end_keeps_its_slot(server: Server, world: World) -> None:
    sandbox = await paused_one(server, world)
    (waiting,) = world.waiting
    server.script.failing["waiting.load"] = server.script.failing["waiting.discard"] = VmmError("it does not end")
    world.waiting.append(waiting)  # it is there twice, so that it stays when it is ended once
    with pytest.raises(AgentEnvError, match="it does not end"):
        await server.orchestrator.connect(sandbox.id, 300)
    assert waiting.alive
    assert waiting.index in world.lent
    server.script.failing.clear()
    await server.orchestrator.kill(sandbox.id)
    await server.warm.settled()
    server.check([])


@pytest.mark.parametrize("step", STEPS)
async def test_every_step_fails(server: Server, world: World, step: str) -> None:
    sandbox = await paused_one(server, world)
    server.script.failing[step] = VmmError("injected")
    outcome = await outcome_of(server.orchestrator.connect(sandbox.id, 60))
    assert step in server.script.seen
    server.script.failing.clear()
    await server.orchestrator.settled()
    await server.warm.settled()
    if step not in ("waiting.move", "waiting.load"):
        assert isinstance(outcome, AgentEnvError)
        assert "stays paused" in outcome.message
        assert server.orchestrator.get(sandbox.id).state is PAUSED
        server.check([sandbox.id])
        await server.orchestrator.connect(sandbox.id, 60)
    assert world.content[sandbox.id] == 1
    await server.warm.settled()
    server.check([sandbox.id])
    await server.orchestrator.kill(sandbox.id)
    server.check([])


@pytest.mark.parametrize("step", ["waiting.move", "disks.create", "unpack", "waiting.load", "agent.init"])
async def test_killed_meanwhile(server: Server, world: World, step: str) -> None:
    sandbox = await paused_one(server, world)
    gate = server.script.blocked[step] = asyncio.Event()
    resuming = asyncio.create_task(server.orchestrator.connect(sandbox.id, 60))
    await server.script.reached(step)
    killing = asyncio.create_task(server.orchestrator.kill(sandbox.id))
    await eventually(lambda: server.orchestrator.list() == [])
    gate.set()
    await killing
    assert isinstance(await outcome_of(resuming), SandboxNotFoundError)
    await server.warm.settled()
    server.check([])


async def test_a_caller_that_leaves_while_a_copy_starts(server: Server, world: World) -> None:
    sandbox = await paused_one(server, world)
    await server.orchestrator.connect(sandbox.id, 300)
    await server.warm.settled()
    info = await server.orchestrator.snapshot(sandbox.id)
    for step in ("waiting.move", "unpack", "waiting.load", "agent.init"):
        gate = server.script.blocked[step] = asyncio.Event()
        server.script.seen.clear()
        creating = asyncio.create_task(server.orchestrator.create(wish(template=info.reference)))
        await server.script.reached(step)
        creating.cancel()
        gate.set()
        assert isinstance(await outcome_of(creating), asyncio.CancelledError)
        await server.orchestrator.settled()
        await server.warm.settled()
        server.check([sandbox.id])


@pytest.mark.parametrize("step", [*STEPS, "waiting.load done"])
async def test_the_server_dies(world: World, step: str) -> None:
    server = await Server(world, warm=2).start()
    sandbox = await paused_one(server, world)
    server.script.blocked[step] = asyncio.Event()
    connecting = asyncio.create_task(server.orchestrator.connect(sandbox.id, 60))
    await server.script.reached(step)
    await server.vanish()
    await outcome_of(connecting)
    async with Server(world, warm=2) as successor:
        assert world.waiting == []
        assert successor.orchestrator.get(sandbox.id).state is PAUSED
        successor.check([sandbox.id])
        await successor.orchestrator.connect(sandbox.id, 60)
        assert world.content[sandbox.id] == 1
        await successor.warm.settled()
        successor.check([sandbox.id])
        await successor.orchestrator.kill(sandbox.id)
        successor.check([])


async def test_a_server_that_stops_leaves_none(world: World) -> None:
    server = await Server(world, warm=2).start()
    sandbox = await paused_one(server, world)
    await server.orchestrator.connect(sandbox.id, 300)
    await server.warm.settled()
    assert len(world.waiting) == 2
    await server.close()
    assert world.waiting == []
    assert len(world.lent) == 1, "that of the sandbox, which runs on"
    async with Server(world, warm=2) as successor:
        successor.check([sandbox.id])
