"""Create: what a sandbox gets, and that a create that fails or is cancelled at any step leaves nothing."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from ipaddress import IPv4Network

import pytest
from fakes import AGENT_VERSION, START, Fate, Server, World, eventually, outcome_of, read_journal, turns, wish

from agentenv.errors import (
    AgentEnvError,
    CapacityError,
    InsufficientStorageError,
    InvalidRequestError,
    SandboxNotFoundError,
    SandboxStartError,
    TemplateNotFoundError,
    TooManyRequestsError,
)
from agentenv.network.base import EgressPolicy
from agentenv.orchestrator.model import NetworkOptions, SandboxState
from agentenv.orchestrator.routes import Route


async def test_sandbox_is_ready_routed_and_journaled(server: Server, world: World) -> None:
    sandbox = await server.orchestrator.create(wish(metadata={"a": "b"}, env_vars={"BOTH": "request", "MINE": "2"}))

    assert sandbox.state is SandboxState.RUNNING
    assert sandbox.envd_version == AGENT_VERSION
    assert sandbox.alias == "base"
    assert sandbox.traffic_access_token is None
    assert server.orchestrator.get(sandbox.id) == sandbox
    identity = world.identities[sandbox.id]
    assert identity.env_vars == {"FROM_TEMPLATE": "1", "BOTH": "request", "MINE": "2"}
    assert identity.access_token == sandbox.envd_access_token
    assert (identity.sandbox_id, identity.template_id, identity.hostname) == (sandbox.id, "base", sandbox.id)
    route = server.orchestrator.routes.get(sandbox.id)
    assert route is not None
    assert (route.host, route.life, route.envd_access_token) == ("10.200.0.2", 1, sandbox.envd_access_token)
    config = server.vmm.configs[0]
    assert (config.vcpus, config.memory_mib, config.machine_id) == (2, 512, sandbox.id)
    assert (config.guest_network.address, config.guest_network.gateway) == ("169.254.0.21/30", "169.254.0.22")
    server.check([sandbox.id])


async def test_life_begins_when_the_sandbox_is_ready(server: Server, world: World) -> None:
    world.agent_ready.clear()
    task = asyncio.create_task(server.orchestrator.create(wish(timeout_s=60)))
    await server.script.reached("slots.wait_ready")
    await world.clock.advance(100)
    world.agent_ready.set()
    sandbox = await task
    assert sandbox.started_at == START + timedelta(seconds=100)
    assert sandbox.end_at == START + timedelta(seconds=160)


async def test_tokens_differ_between_sandboxes_and_are_not_shown(server: Server) -> None:
    private = wish(network=NetworkOptions(allow_public_traffic=False))
    first, second = [await server.orchestrator.create(private) for _ in range(2)]
    assert first.traffic_access_token is not None
    tokens = [
        first.traffic_access_token,
        second.traffic_access_token,
        first.envd_access_token,
        second.envd_access_token,
    ]
    assert len(set(tokens)) == 4
    assert not any(str(token) in repr(first) for token in tokens)
    route = server.orchestrator.routes.get(first.id)
    assert route is not None
    assert route.traffic_access_token == first.traffic_access_token


async def test_network_rules_are_in_force_before_boot(server: Server, world: World) -> None:
    options = NetworkOptions(allow_out=("1.1.1.1", "10.1.2.0/24"), deny_out=("0.0.0.0/0",))
    await server.orchestrator.create(wish(allow_internet_access=False, network=options))
    assert world.lent[0] == EgressPolicy(
        internet=False,
        allow=(IPv4Network("1.1.1.1/32"), IPv4Network("10.1.2.0/24")),
        deny=(IPv4Network("0.0.0.0/0"),),
    )
    assert server.script.seen.index("slots.apply_policy") < server.script.seen.index("vmm.boot")


@pytest.mark.parametrize("timeout_s", [0, -1, 24 * 3600 + 1])
async def test_timeouts_out_of_range_are_refused(server: Server, timeout_s: int) -> None:
    with pytest.raises(InvalidRequestError):
        await server.orchestrator.create(wish(timeout_s=timeout_s))
    server.check([])


async def test_unknown_template_takes_nothing(server: Server) -> None:
    with pytest.raises(TemplateNotFoundError, match="template 'nope' not found"):
        await server.orchestrator.create(wish(template="nope"))
    server.check([])


async def test_full_disk_is_507_until_space_returns(server: Server, world: World) -> None:
    kept = await server.orchestrator.create(wish())
    world.free_disk = 100
    with pytest.raises(InsufficientStorageError):
        await server.orchestrator.create(wish())
    server.check([kept.id])
    world.free_disk = 1 << 40
    again = await server.orchestrator.create(wish())
    server.check([kept.id, again.id])


async def test_memory_of_starts_under_way_is_counted(world: World) -> None:
    async with Server(world, min_free_memory_mib=100) as server:
        world.free_memory = (2 * 512 + 100 - 1) << 20
        world.agent_ready.clear()
        task = asyncio.create_task(server.orchestrator.create(wish()))
        await server.script.reached("slots.wait_ready")
        with pytest.raises(CapacityError, match="no memory for a sandbox of 512 MiB"):
            await server.orchestrator.create(wish())
        world.agent_ready.set()
        first = await task
        second = await server.orchestrator.create(wish())  # the host's own number counts the first from now on
        server.check([first.id, second.id])


async def test_running_limit_counts_starting_ones(world: World) -> None:
    async with Server(world, max_running=2) as server:
        outcomes = await asyncio.gather(*(outcome_of(server.orchestrator.create(wish())) for _ in range(5)))
        refused = [error for error in outcomes if isinstance(error, TooManyRequestsError)]
        assert len(refused) == 3
        assert all(error.retry_after_s for error in refused)
        running = server.orchestrator.list()
        await server.orchestrator.kill(running[0].id)
        await server.orchestrator.create(wish())


async def test_vm_that_dies_while_starting_tells_why(server: Server, world: World) -> None:
    world.vm_dies_at_boot = "Kernel panic - not syncing: no init"
    world.agent_ready.clear()
    with pytest.raises(SandboxStartError, match="Kernel panic") as caught:
        await server.orchestrator.create(wish())
    assert caught.value.error_code == "sandbox_create_failed"
    server.check([])


async def test_vm_that_dies_once_while_starting_is_booted_again(server: Server, world: World) -> None:
    world.vm_dies_at_boot = "Kernel panic - not syncing: Fatal exception in interrupt"
    world.dying_boots = 1
    sandbox = await server.orchestrator.create(wish())
    assert [config.machine_id for config in server.vmm.configs] == [sandbox.id, sandbox.id]
    server.check([sandbox.id])


async def test_silent_agent_ends_the_start_with_its_last_words(world: World) -> None:
    async with Server(world, start_timeout_s=30) as server:
        world.agent_ready.clear()
        task = asyncio.create_task(server.orchestrator.create(wish()))
        await server.script.reached("slots.wait_ready")
        (vm,) = world.vms.values()
        vm.console.write_text("[    1.0] booting\ncannot mount /dev/vda\n")
        await world.clock.advance(29)
        assert not task.done()
        await world.clock.advance(1)
        with pytest.raises(SandboxStartError, match=r"30 s.*cannot mount /dev/vda"):
            await task
        server.check([])


async def count_steps(server: Server) -> int:
    server.script.seen.clear()
    server.script.armed = (Fate.CANCEL, 10**6)  # counts the steps after commits as well
    sandbox = await server.orchestrator.create(wish(idempotency_key="count"))
    steps = len(server.script.seen)
    server.script.armed = None
    await server.orchestrator.kill(sandbox.id)
    return steps


@pytest.mark.parametrize("unexpected", [False, True])
async def test_failure_at_every_step_leaves_nothing(world: World, unexpected: bool) -> None:
    async with Server(world, max_concurrent_starts=1) as server:
        kept = await server.orchestrator.create(wish())
        if unexpected:
            server.script.error = lambda step: RuntimeError(f"a library failed at {step}")
        struck = []
        for number in range(await count_steps(server)):
            server.script.arm(Fate.FAIL, number)
            outcome = await outcome_of(server.orchestrator.create(wish()))
            server.script.armed = None
            if server.script.struck is None:  # fewer steps than with a key
                assert not isinstance(outcome, BaseException)
                await server.orchestrator.kill(outcome.id)
                break
            struck.append(server.script.struck)
            if server.script.struck.startswith("templates"):
                assert isinstance(outcome, AgentEnvError | RuntimeError)
            else:
                assert isinstance(outcome, SandboxStartError), server.script.struck
            await server.settle()
            server.check([kept.id])
        assert {"slots.acquire", "disks.create", "vmm.boot", "agent.init", "journal.finish_start"} <= set(struck)


@pytest.mark.parametrize("key", [None, "some-key"])
async def test_cancellation_at_every_step(world: World, key: str | None) -> None:
    """Without a key a cancelled create is undone; with one it goes on."""
    async with Server(world, max_concurrent_starts=1) as server:
        kept = await server.orchestrator.create(wish())
        struck = []
        for number in range(await count_steps(server)):
            one_key = None if key is None else f"{key}-{number}"
            task = asyncio.create_task(server.orchestrator.create(wish(idempotency_key=one_key)))
            server.script.arm(Fate.CANCEL, number, task)
            outcome = await outcome_of(task)
            server.script.armed = None
            if server.script.struck is None:
                assert not isinstance(outcome, BaseException)
                await server.orchestrator.kill(outcome.id)
                break
            struck.append(server.script.struck)
            assert isinstance(outcome, asyncio.CancelledError), server.script.struck
            await server.orchestrator._creator._starts.settle()
            await server.settle()
            if key is None:
                server.check([kept.id])
            else:
                sandbox = await server.orchestrator.create(wish(idempotency_key=one_key))
                server.check([kept.id, sandbox.id])
                await server.orchestrator.kill(sandbox.id)
        assert {"slots.acquire", "vmm.boot done", "agent.init", "journal.finish_start done"} <= set(struck)


async def test_caller_that_leaves_ends_a_start_that_would_never_end(server: Server, world: World) -> None:
    world.agent_ready.clear()
    task = asyncio.create_task(server.orchestrator.create(wish()))
    await server.script.reached("slots.wait_ready")
    task.cancel()
    assert isinstance(await outcome_of(task), asyncio.CancelledError)
    server.check([])  # at once, not later


async def test_caller_that_leaves_in_the_moment_of_success_leaves_nothing(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = asyncio.create_task(server.orchestrator.create(wish()))
    publish = server.orchestrator.routes.publish

    def publish_and_leave(route: Route) -> None:
        publish(route)
        task.cancel()

    monkeypatch.setattr(server.orchestrator.routes, "publish", publish_and_leave)
    assert isinstance(await outcome_of(task), asyncio.CancelledError)
    await server.settle()
    server.check([])


async def test_failed_roll_back_is_tried_again(server: Server, world: World) -> None:
    server.script.failing = {"agent.init": RuntimeError("broken"), "machine.kill": SandboxStartError("busy")}
    with pytest.raises(SandboxStartError):
        await server.orchestrator.create(wish())
    assert len(world.vms) == 1
    assert server.orchestrator.list() == []
    (row,) = read_journal(world.home / "state.db")["sandboxes"]
    assert row["machine"] is not None
    server.script.failing = {}
    await server.settle()
    server.check([])


async def test_starting_sandbox_is_nobodys_yet(server: Server, world: World) -> None:
    world.agent_ready.clear()
    task = asyncio.create_task(server.orchestrator.create(wish()))
    await eventually(lambda: len(world.vms) > 0)
    (sandbox_id,) = world.vms
    with pytest.raises(SandboxNotFoundError):
        server.orchestrator.get(sandbox_id)
    with pytest.raises(SandboxNotFoundError):
        await server.orchestrator.kill(sandbox_id)
    assert server.orchestrator.list() == []
    world.agent_ready.set()
    assert (await task).id == sandbox_id


async def test_close_undoes_starts_and_leaves_the_rest_running(world: World) -> None:
    async with Server(world) as server:
        kept = await server.orchestrator.create(wish())
        world.agent_ready.clear()
        task = asyncio.create_task(server.orchestrator.create(wish()))
        await eventually(lambda: len(world.vms) == 2)
    with pytest.raises(CapacityError):
        await task
    assert set(world.vms) == {kept.id}
    with pytest.raises(CapacityError):
        await server.orchestrator.create(wish())


async def test_close_does_not_interrupt_a_roll_back(world: World) -> None:
    async with Server(world) as server:
        server.script.failing["agent.init"] = SandboxStartError("no")
        server.script.blocked["machine.kill"] = asyncio.Event()
        task = asyncio.create_task(server.orchestrator.create(wish()))
        await server.script.reached("machine.kill")
        closing = asyncio.create_task(server.orchestrator.close())
        await turns()
        assert not closing.done()
        server.script.blocked["machine.kill"].set()
        await closing
        await outcome_of(task)
        assert not world.vms and not world.lent and not world.disks
        assert read_journal(world.home / "state.db")["sandboxes"] == []


async def test_drain_ends_all(world: World) -> None:
    server = Server(world)
    await server.orchestrator.start()
    for _ in range(3):
        await server.orchestrator.create(wish())
    await server.orchestrator.close(drain=True)
    assert not world.vms and not world.lent and not world.disks
    assert read_journal(world.home / "state.db")["sandboxes"] == []
