"""Kill: what is killed is gone at once, and really; whatever fails on the way is made good later."""

from __future__ import annotations

import asyncio

import pytest
from fakes import Fate, Server, World, eventually, outcome_of, wish

from agentenv.errors import ConflictError, InsufficientStorageError, NetworkError, SandboxNotFoundError, VmmError


async def test_killed_is_gone(server: Server) -> None:
    sandbox = await server.orchestrator.create(wish())
    withdrawn = []
    server.orchestrator.routes.on_withdraw(withdrawn.append)
    await server.orchestrator.kill(sandbox.id)
    with pytest.raises(SandboxNotFoundError):
        server.orchestrator.get(sandbox.id)
    with pytest.raises(SandboxNotFoundError):
        await server.orchestrator.kill(sandbox.id)
    assert [route.sandbox_id for route in withdrawn] == [sandbox.id]
    server.check([])


async def test_unknown_is_not_found(server: Server) -> None:
    for call in (
        server.orchestrator.kill("nope"),
        server.orchestrator.connect("nope", 10),
        server.orchestrator.set_timeout("nope", 10),
        server.orchestrator.refresh("nope", 10),
        server.orchestrator.logs("nope"),
    ):
        with pytest.raises(SandboxNotFoundError):
            await call
    with pytest.raises(SandboxNotFoundError):
        server.orchestrator.metrics("nope", None, None)


async def test_being_killed_is_out_of_sight_and_unreachable(server: Server) -> None:
    sandbox = await server.orchestrator.create(wish())
    server.script.blocked["machine.kill"] = asyncio.Event()
    task = asyncio.create_task(server.orchestrator.kill(sandbox.id))
    await server.script.reached("machine.kill")
    assert server.orchestrator.list() == []
    assert server.orchestrator.routes.get(sandbox.id) is None
    with pytest.raises(SandboxNotFoundError):
        server.orchestrator.get(sandbox.id)
    with pytest.raises(ConflictError):
        await server.orchestrator.connect(sandbox.id, 100)
    server.script.blocked["machine.kill"].set()
    await task
    server.check([])


async def steps_of_a_kill(server: Server) -> int:
    sandbox = await server.orchestrator.create(wish())
    server.script.arm(Fate.CANCEL, 10**6)
    await server.orchestrator.kill(sandbox.id)
    server.script.armed = None
    return len(server.script.seen)


@pytest.mark.parametrize("fate", [Fate.FAIL, Fate.CANCEL])
async def test_fault_at_every_step_leaves_nothing(server: Server, world: World, fate: Fate) -> None:
    kept = await server.orchestrator.create(wish())
    struck = []
    for number in range(await steps_of_a_kill(server)):
        sandbox = await server.orchestrator.create(wish())
        task = asyncio.create_task(server.orchestrator.kill(sandbox.id))
        server.script.arm(fate, number, task)
        outcome = await outcome_of(task)
        server.script.armed = None
        if server.script.struck is None:
            break
        struck.append(server.script.struck)
        assert [one.id for one in server.orchestrator.list()] == [kept.id]
        if fate is Fate.CANCEL:
            assert isinstance(outcome, asyncio.CancelledError)
        elif server.script.struck.startswith("machine.kill"):
            assert isinstance(outcome, VmmError)  # the VM may run on: the caller must know
        else:
            assert outcome is None  # the VM is gone; the rest is our own business
        await server.settle()
        server.check([kept.id])
    assert {"journal.begin_kill", "machine.kill", "slots.release", "disks.remove", "journal.forget"} <= set(struck)


async def test_slot_is_not_given_back_while_its_vm_may_live(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    server.script.failing["machine.kill"] = VmmError("does not end")
    with pytest.raises(VmmError, match="does not end"):
        await server.orchestrator.kill(sandbox.id)
    assert set(world.vms) == {sandbox.id}
    assert world.lent and world.disks
    await world.clock.advance(1)
    assert world.lent and world.disks
    server.script.failing.clear()
    await server.settle()
    server.check([])


async def test_one_thing_that_cannot_be_removed_does_not_keep_the_others(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    server.script.failing["slots.release"] = NetworkError("netlink is busy")
    await server.orchestrator.kill(sandbox.id)
    assert world.lent and not world.vms and not world.disks
    server.script.failing.clear()
    await server.settle()
    server.check([])


async def test_what_was_given_back_is_not_given_back_again(server: Server, world: World) -> None:
    """By then it may be another sandbox's."""
    sandbox = await server.orchestrator.create(wish())
    server.script.failing["disks.remove"] = NetworkError("busy")
    await server.orchestrator.kill(sandbox.id)
    other = await server.orchestrator.create(wish())
    assert list(world.lent) == [0], "the slot was not used again: this test shows nothing"
    server.script.failing.clear()
    await server.settle()
    server.check([other.id])


async def test_full_disk_does_not_keep_a_vm_alive(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish())
    full = InsufficientStorageError("the disk is full")
    server.script.failing = {"journal.begin_kill": full, "journal.forget": full}
    await server.orchestrator.kill(sandbox.id)
    assert not world.vms and not world.disks and not world.lent
    server.script.failing = {}
    await server.settle()
    server.check([])


async def test_vm_that_ends_by_itself_is_noticed(server: Server) -> None:
    dead, kept = [await server.orchestrator.create(wish()) for _ in range(2)]
    server.vmm.die(dead.id, "Kernel panic")
    await eventually(lambda: server.orchestrator.routes.get(dead.id) is None)
    await server.settle()
    server.check([kept.id])


async def test_many_at_once(world: World) -> None:
    async with Server(world, max_concurrent_starts=4) as server:
        sandboxes = await asyncio.gather(*(server.orchestrator.create(wish()) for _ in range(30)))
        server.check([sandbox.id for sandbox in sandboxes])
        outcomes = await asyncio.gather(
            *(outcome_of(server.orchestrator.kill(sandbox.id)) for sandbox in sandboxes for _ in range(3))
        )
        assert outcomes.count(None) == 30
        assert sum(isinstance(outcome, SandboxNotFoundError) for outcome in outcomes) == 60
        server.check([])
