"""A server that dies at any moment: the next one shows what is true and removes what belongs to nobody."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from datetime import timedelta

import pytest
from fakes import Fate, Server, World, eventually, outcome_of, read_journal, wish

from agentenv.errors import ConflictError, NetworkError, SandboxNotFoundError, StorageError, VmmError
from agentenv.orchestrator.model import NetworkOptions


async def crash(server: Server, number: int, work: asyncio.Task[object]) -> bool:
    """Let the server die at a step of `work`; False when the work was over before."""
    server.script.arm(Fate.CRASH, number)
    died = asyncio.create_task(server.script.died.wait())
    await asyncio.wait({work, died}, return_when=asyncio.FIRST_COMPLETED)
    crashed = server.script.dead
    server.script.armed = None
    died.cancel()
    await server.vanish()
    await outcome_of(work)
    return crashed


@pytest.mark.parametrize("key", [None, "key"])
async def test_crash_at_every_step_of_create(world: World, key: str | None) -> None:
    struck: list[str] = []
    survived = 0
    for number in range(100):
        server = Server(world)
        await server.start()
        one_key = None if key is None else f"{key}-{number}"
        crashed = await crash(
            server, number, asyncio.create_task(server.orchestrator.create(wish(idempotency_key=one_key)))
        )
        struck.append(server.script.struck or "")
        async with Server(world) as successor:
            new = {sandbox.id for sandbox in successor.orchestrator.list()}
            if server.script.struck == "journal.finish_start done" or not crashed:
                assert len(new) == 1  # it was written down that it runs, and it does
                survived += 1
            else:
                assert not new, server.script.struck
            successor.check(new)
            if one_key is not None:
                await check_key(successor, one_key, server.script.struck, new)
            for sandbox_id in new:
                await successor.orchestrator.kill(sandbox_id)
        if not crashed:
            break
    else:
        pytest.fail("create never came to its end")
    assert survived == 2
    assert {"slots.acquire done", "vmm.boot done", "journal.note_machine", "agent.init"} <= set(struck)


async def check_key(server: Server, key: str, struck: str | None, new: set[str]) -> None:
    outcome = await outcome_of(server.orchestrator.create(wish(idempotency_key=key)))
    if new:
        assert not isinstance(outcome, BaseException)
        assert {outcome.id} == new
    elif struck in ("journal.find_key", "journal.find_key done", "templates.resolve", "journal.begin_start"):
        assert not isinstance(outcome, BaseException)  # nothing had been begun: the caller may simply try again
        await server.orchestrator.kill(outcome.id)
    else:
        assert isinstance(outcome, ConflictError), struck
        assert outcome.error_code == "idempotency_outcome_unknown"
        assert outcome.should_retry is False


async def test_crash_at_every_step_of_kill(world: World) -> None:
    for number in range(50):
        server = Server(world)
        await server.start()
        kept, doomed = [await server.orchestrator.create(wish()) for _ in range(2)]
        crashed = await crash(server, number, asyncio.create_task(server.orchestrator.kill(doomed.id)))
        async with Server(world) as successor:
            shown = {sandbox.id for sandbox in successor.orchestrator.list()}
            if server.script.struck == "journal.begin_kill":  # died before anything had happened
                assert shown == {kept.id, doomed.id}
            else:
                assert shown == {kept.id}, server.script.struck
            successor.check()
            for sandbox_id in shown:
                await successor.orchestrator.kill(sandbox_id)
        if not crashed:
            return
    pytest.fail("kill never came to its end")


async def test_crash_at_every_step_of_a_start_after_a_crash(world: World) -> None:
    for number in range(100):
        server = Server(world)
        await server.start()
        lives, dies, gone = [await server.orchestrator.create(wish()) for _ in range(3)]
        world.agent_ready.clear()
        half = asyncio.create_task(server.orchestrator.create(wish()))
        await eventually(lambda: len(world.vms) == 4)
        await eventually(lambda: read_journal(world.home / "state.db")["intents"][0]["step"] == "wait for the agent")
        await server.vanish()
        await outcome_of(half)
        world.agent_ready.set()
        server.vmm.die(dies.id, "killed by somebody")
        (world.home / "sandboxes" / "stray").mkdir()
        world.lost_slots = {int(world.vms[gone.id].record.version)}
        middle = Server(world)
        crashed = await crash(middle, number, asyncio.create_task(middle.orchestrator.start()))
        async with Server(world) as last:
            last.check([lives.id])
            await last.orchestrator.kill(lives.id)
        world.lost_slots.clear()
        if not crashed:
            return
    pytest.fail("start never came to its end")


async def test_running_sandbox_is_taken_over_with_all_it_had(world: World) -> None:
    options = NetworkOptions(allow_public_traffic=False, mask_request_host="app:${PORT}", https_ports=(8443,))
    request = wish(
        metadata={"name": "\udcff é"}, env_vars={"SECRET": "x"}, network=options, allow_internet_access=False
    )
    server = Server(world)
    await server.orchestrator.start()
    sandbox = await server.orchestrator.create(request)
    await server.orchestrator.set_timeout(sandbox.id, 1000)
    policy = world.lent[0]
    sandbox, route = server.orchestrator.get(sandbox.id), server.orchestrator.routes.get(sandbox.id)
    await server.vanish()
    async with Server(world) as successor:
        assert successor.orchestrator.get(sandbox.id) == sandbox
        assert successor.orchestrator.routes.get(sandbox.id) == route
        assert world.lent[0] == policy
        await world.clock.advance(999)
        successor.check([sandbox.id])
        await world.clock.advance(1)
        await successor.settle()
        successor.check([])


async def test_graceful_stop_leaves_it_running_for_the_next(world: World) -> None:
    async with Server(world) as server:
        sandbox = await server.orchestrator.create(wish())
    assert set(world.vms) == {sandbox.id}
    async with Server(world) as successor:
        successor.check([sandbox.id])
        await successor.orchestrator.kill(sandbox.id)
        successor.check([])


async def test_expired_while_no_server_ran(world: World) -> None:
    async with Server(world) as server:
        early = await server.orchestrator.create(wish(timeout_s=10))
        late = await server.orchestrator.create(wish(timeout_s=1000))
    world.clock.wall_offset += timedelta(seconds=500)
    async with Server(world) as successor:
        assert successor.orchestrator.get(late.id)
        await eventually(lambda: early.id not in world.vms)
        await successor.settle()
        successor.check([late.id])


async def test_vm_of_an_adopted_sandbox_is_watched(world: World) -> None:
    async with Server(world) as server:
        sandbox = await server.orchestrator.create(wish())
    async with Server(world) as successor:
        successor.vmm.die(sandbox.id, "gone")
        await eventually(lambda: successor.orchestrator.routes.get(sandbox.id) is None)
        await successor.settle()
        successor.check([])


async def test_vm_that_ended_meanwhile_is_gone(world: World) -> None:
    async with Server(world) as server:
        dead, kept = [await server.orchestrator.create(wish()) for _ in range(2)]
    server.vmm.die(dead.id, "oom")
    async with Server(world) as successor:
        with pytest.raises(SandboxNotFoundError):
            successor.orchestrator.get(dead.id)
        successor.check([kept.id])


async def test_reboot_ends_everything(world: World) -> None:
    async with Server(world) as server:
        for _ in range(3):
            await server.orchestrator.create(wish())
    world.reboot()
    async with Server(world) as successor:
        assert "vmm.adopt" not in successor.script.seen  # a pid of another boot means nothing
        successor.check([])


async def test_vm_that_cannot_be_taken_over_is_ended(world: World) -> None:
    async with Server(world) as server:
        await server.orchestrator.create(wish())
    successor = Server(world)
    successor.script.failing["vmm.adopt"] = VmmError("its monitor does not answer")
    async with successor:
        successor.check([])


async def test_silent_agent_is_kept_and_written_down(world: World) -> None:
    async with Server(world) as server:
        sandbox = await server.orchestrator.create(wish())
    world.agent_ready.clear()
    async with Server(world) as successor:
        log = world.home / "sandboxes" / sandbox.id / "log.jsonl"
        await eventually(lambda: "agent is silent" in log.read_text())
        successor.check([sandbox.id])
        (entry,) = await successor.orchestrator.logs(sandbox.id, level="warn")
        assert entry.logger == "orchestrator"


async def test_unremovable_remains_do_not_keep_the_server_from_starting(world: World) -> None:
    async with Server(world) as server:
        sandbox = await server.orchestrator.create(wish())
    server.vmm.die(sandbox.id, "gone")
    successor = Server(world)
    successor.script.failing["disks.remove"] = StorageError("device busy")
    async with successor:
        assert successor.orchestrator.list() == []
        assert len(read_journal(world.home / "state.db")["sandboxes"]) == 1
        successor.script.failing.clear()
        await successor.settle()
        successor.check([])


async def test_disks_that_nobody_owns_are_removed_and_those_of_sandboxes_kept(world: World) -> None:
    async with Server(world) as server:
        kept = await server.orchestrator.create(wish())
    world.disks.add("forgotten")
    async with Server(world) as successor:
        seen = successor.script.seen
        assert seen.index("orphans.reap") < seen.index("disks.reconcile") < seen.index("slots.start")
        successor.check([kept.id])


async def test_a_sandbox_of_an_older_version_has_no_disk_in_the_store(world: World) -> None:
    async with Server(world) as server:
        sandbox = await server.orchestrator.create(wish())
    with sqlite3.connect(world.home / "state.db") as journal:
        journal.execute("DELETE FROM resources WHERE kind = 'disk'")
    journal.close()
    world.disks.clear()
    async with Server(world) as successor:
        assert successor.orchestrator.get(sandbox.id).id == sandbox.id
        await successor.orchestrator.kill(sandbox.id)
        successor.check([])


async def test_disks_that_cannot_be_reconciled_do_not_keep_the_server_from_starting(world: World) -> None:
    async with Server(world) as server:
        kept, lost = [await server.orchestrator.create(wish()) for _ in range(2)]
    server.vmm.die(lost.id, "gone")
    successor = Server(world)
    successor.script.failing["disks.reconcile"] = StorageError("device busy")
    async with successor:
        successor.check([kept.id])


async def test_start_that_fails_can_be_repeated(world: World) -> None:
    async with Server(world) as server:
        sandbox = await server.orchestrator.create(wish())
    broken = Server(world)
    broken.script.failing["slots.start"] = NetworkError("no nft")
    with pytest.raises(NetworkError):
        await broken.orchestrator.start()
    async with Server(world) as successor:
        successor.check([sandbox.id])


async def test_stray_files_of_any_kind_are_removed(world: World) -> None:
    sandboxes = world.home / "sandboxes"
    sandboxes.mkdir()
    (sandboxes / "file").write_text("x")
    (sandboxes / "directory").mkdir()
    (sandboxes / "directory" / "disk.raw").write_text("x")
    (sandboxes / ".hidden").mkdir()
    (sandboxes / "i0123456789abcdefghi").mkdir()
    outside = world.home / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (sandboxes / "link").symlink_to(outside)
    async with Server(world) as server:
        server.check([])
        assert server.script.seen.count("disks.remove") == 4, "`.hidden` is no id of a sandbox, so it had no disk"
    assert os.listdir(outside) == ["precious"]  # noqa: PTH208
