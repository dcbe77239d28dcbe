"""`Idempotency-Key` on create: one key makes one sandbox, whatever the caller and the network do."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from fakes import Server, World, eventually, outcome_of, read_journal, wish

from agentenv.errors import (
    ConflictError,
    IdempotencyMismatchError,
    SandboxStartError,
    StorageError,
    TooManyRequestsError,
)


async def test_same_key_and_body_replays(server: Server) -> None:
    first = await server.orchestrator.create(wish(idempotency_key="k", request_digest="d"))
    second = await server.orchestrator.create(wish(idempotency_key="k", request_digest="d"))
    assert second == first
    server.check([first.id])


async def test_other_body_is_refused(server: Server) -> None:
    first = await server.orchestrator.create(wish(idempotency_key="k", request_digest="d"))
    with pytest.raises(IdempotencyMismatchError) as caught:
        await server.orchestrator.create(wish(idempotency_key="k", request_digest="other"))
    assert (caught.value.status, caught.value.error_code) == (422, "idempotency_request_mismatch")
    server.check([first.id])


async def test_without_a_digest_the_request_itself_is_compared(server: Server) -> None:
    first = await server.orchestrator.create(wish(idempotency_key="k", metadata={"a": "1"}))
    assert (await server.orchestrator.create(wish(idempotency_key="k", metadata={"a": "1"}))).id == first.id
    with pytest.raises(IdempotencyMismatchError):
        await server.orchestrator.create(wish(idempotency_key="k", metadata={"a": "2"}))


async def test_still_running_is_409_and_worth_a_retry(server: Server, world: World) -> None:
    world.agent_ready.clear()
    task = asyncio.create_task(server.orchestrator.create(wish(idempotency_key="k")))
    await eventually(lambda: len(world.vms) > 0)
    with pytest.raises(ConflictError) as caught:
        await server.orchestrator.create(wish(idempotency_key="k"))
    assert caught.value.error_code == "idempotency_in_progress"
    assert caught.value.retry_after_s and caught.value.should_retry is True
    with pytest.raises(IdempotencyMismatchError):
        await server.orchestrator.create(wish(idempotency_key="k", timeout_s=7))
    world.agent_ready.set()
    sandbox = await task
    assert (await server.orchestrator.create(wish(idempotency_key="k"))).id == sandbox.id


async def test_hundred_at_once_make_one(server: Server) -> None:
    outcomes = await asyncio.gather(
        *(outcome_of(server.orchestrator.create(wish(idempotency_key="k"))) for _ in range(100))
    )
    made = [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]
    assert len(made) == 1
    assert all(isinstance(outcome, ConflictError) for outcome in outcomes if isinstance(outcome, BaseException))
    server.check([made[0].id])


async def test_failed_create_frees_the_key(server: Server) -> None:
    server.script.failing["vmm.boot"] = SandboxStartError("no")
    with pytest.raises(SandboxStartError):
        await server.orchestrator.create(wish(idempotency_key="k"))
    assert read_journal(server.world.home / "state.db")["idempotency"] == []
    server.script.failing.clear()
    sandbox = await server.orchestrator.create(wish(idempotency_key="k"))
    server.check([sandbox.id])


async def test_key_of_a_failed_create_waits_for_the_clean_up(server: Server) -> None:
    server.script.failing = {"vmm.boot": SandboxStartError("no"), "disks.remove": StorageError("busy")}
    with pytest.raises(SandboxStartError):
        await server.orchestrator.create(wish(idempotency_key="k"))
    with pytest.raises(ConflictError) as caught:
        await server.orchestrator.create(wish(idempotency_key="k"))
    assert caught.value.error_code == "idempotency_in_progress"
    server.script.failing = {}
    await server.settle()
    await server.orchestrator.create(wish(idempotency_key="k"))


async def test_refused_create_can_be_tried_again(world: World) -> None:
    async with Server(world, max_running=1) as server:
        first = await server.orchestrator.create(wish())
        with pytest.raises(TooManyRequestsError):
            await server.orchestrator.create(wish(idempotency_key="k"))
        await server.orchestrator.kill(first.id)
        await server.orchestrator.create(wish(idempotency_key="k"))


async def test_outcome_outlives_sandbox_and_server_for_a_day(world: World) -> None:
    async with Server(world) as server:
        sandbox = await server.orchestrator.create(wish(idempotency_key="k"))
        await server.orchestrator.kill(sandbox.id)
        assert (await server.orchestrator.create(wish(idempotency_key="k"))).id == sandbox.id
    async with Server(world) as successor:
        world.clock.wall_offset += timedelta(days=1)
        assert (await successor.orchestrator.create(wish(idempotency_key="k"))).id == sandbox.id
        successor.check([])
    world.clock.wall_offset += timedelta(days=2)
    async with Server(world) as later:
        await later.script.reached("journal.purge_keys")
        assert (await later.orchestrator.create(wish(idempotency_key="k"))).id != sandbox.id
