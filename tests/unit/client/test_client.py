"""The Python extras against a control plane over a fake service, through the official SDK's own HTTP client."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import e2b
import pytest
import pytest_asyncio
import structlog

from agentenv.client import AsyncSandbox, SnapshotNode
from agentenv.errors import (
    CapacityError,
    ConflictError,
    SandboxStartError,
    SnapshotMismatchError,
    TooManyRequestsError,
)
from unit.api.api_fakes import KEY, FakeService, control_plane, make_sandbox, make_snapshot


@pytest_asyncio.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeService]:
    """A service whose control plane the SDK finds."""
    service = FakeService()
    with structlog.testing.capture_logs():
        async with control_plane(service) as client:
            monkeypatch.setenv("E2B_API_URL", client.url)
            monkeypatch.setenv("E2B_SANDBOX_URL", client.url)
            monkeypatch.setenv("E2B_API_KEY", KEY)
            yield service


async def test_it_is_the_official_one(service: FakeService) -> None:
    sandbox = await AsyncSandbox.create("base", timeout=60)
    assert isinstance(sandbox, AsyncSandbox)
    assert isinstance(sandbox, e2b.AsyncSandbox)
    again = await AsyncSandbox.connect(sandbox.sandbox_id)
    assert isinstance(again, AsyncSandbox)
    [copy] = await sandbox.fork()
    assert isinstance(copy, AsyncSandbox)
    taken = await sandbox.create_snapshot("ready")
    assert taken.snapshot_id == "ready:default"
    assert await sandbox.kill()


async def test_cold_starts(service: FakeService) -> None:
    sandbox = await AsyncSandbox.create_cold("base", timeout=77, metadata={"a": "b"}, envs={"C": "d"})
    assert isinstance(sandbox, AsyncSandbox)
    [request] = service.created
    assert (request.memory, request.timeout_s) == (False, 77)
    assert (request.metadata, request.env_vars) == ({"a": "b"}, {"C": "d"})
    made = service.get(sandbox.sandbox_id)
    assert sandbox.connection_config.sandbox_headers["X-Access-Token"] == made.envd_access_token
    assert sandbox.connection_config.sandbox_headers["E2b-Sandbox-Id"] == made.id
    await AsyncSandbox.create_cold("base")
    assert service.created[1].timeout_s == 300
    with pytest.raises(e2b.NotFoundException, match="template 'nope' not found"):
        await AsyncSandbox.create_cold("nope")


async def test_rolling_back(service: FakeService) -> None:
    sandbox = await AsyncSandbox.create("base")
    taken = await sandbox.create_snapshot()
    await sandbox.rollback(taken.snapshot_id)
    assert service.get(sandbox.sandbox_id).checkpoint_id == service.taken[0].id
    with pytest.raises(e2b.NotFoundException, match="'nope' not found"):
        await sandbox.rollback("nope")
    for error in (ConflictError("it is pausing"), SnapshotMismatchError("another CPU")):
        service.fail_with = error
        with pytest.raises(e2b.SandboxException, match=error.message) as raised:
            await sandbox.rollback(taken.snapshot_id)
        assert raised.value.status_code == 409
    service.fail_with = CapacityError("busy")
    with pytest.raises(e2b.exceptions.ServiceBusyException, match="busy"):
        await sandbox.rollback(taken.snapshot_id, retries=0)
    service.fail_with, service.slow = None, asyncio.Event()
    with pytest.raises(e2b.TimeoutException):
        await sandbox.rollback(taken.snapshot_id, request_timeout=0.5)


async def test_forks_come_one_by_one(service: FakeService) -> None:
    sandbox = await AsyncSandbox.create("base")
    service.fork_failures = {1: TooManyRequestsError("all places are taken"), 2: SandboxStartError("broken")}
    results = [result async for result in sandbox.fork_each(40, timeout=60)]
    assert service.calls[-1] == ("fork", (40, 60))
    assert len(results) == 40
    assert isinstance(results[1], e2b.RateLimitException)
    assert isinstance(results[2], e2b.SandboxException)
    copies = [result for result in results if isinstance(result, AsyncSandbox)]
    assert {copy.sandbox_id for copy in copies} == set(service.sandboxes) - {sandbox.sandbox_id}
    headers = copies[0].connection_config.sandbox_headers
    assert headers["X-Access-Token"] == service.get(copies[0].sandbox_id).envd_access_token
    with pytest.raises(e2b.SandboxException, match="count"):
        _ = [result async for result in sandbox.fork_each(101)]
    await sandbox.kill()
    with pytest.raises(e2b.NotFoundException, match="doesn't exist"):
        _ = [result async for result in sandbox.fork_each(1)]


async def test_who_leaves_a_fork_has_no_copies(service: FakeService) -> None:
    sandbox = await AsyncSandbox.create("base")
    service.slow, service.fork_pauses_at = asyncio.Event(), 1
    copies = sandbox.fork_each(3)
    assert isinstance(await anext(copies), AsyncSandbox)
    await service.slow.wait()
    await copies.aclose()
    await service.cancelled.wait()


async def test_the_request_timeout_of_a_fork_is_for_the_whole(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = await AsyncSandbox.create("base")
    ended = asyncio.Event()

    async def fork(sandbox_id: str, *, count: int, timeout_s: int, on_result: Any) -> None:
        try:
            for _ in range(99):  # each read is short, there is only no end to them
                on_result(make_sandbox("icopy"))
                await asyncio.sleep(0.05)
            await asyncio.Event().wait()
        finally:
            ended.set()

    monkeypatch.setattr(service, "fork", fork)
    with pytest.raises(e2b.TimeoutException, match="/fork: no answer within the request timeout"):
        _ = [result async for result in sandbox.fork_each(100, request_timeout=1)]
    await ended.wait()


async def test_a_fork_that_begins_too_late(service: FakeService) -> None:
    sandbox = await AsyncSandbox.create("base")
    service.slow = asyncio.Event()
    with pytest.raises(e2b.TimeoutException):
        _ = [result async for result in sandbox.fork_each(2, request_timeout=0.5)]


async def test_a_server_that_dies_amid_a_fork(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = await AsyncSandbox.create("base")

    async def fork(sandbox_id: str, *, count: int, timeout_s: int, on_result: Any) -> None:
        on_result(make_sandbox("ifirst"))
        raise RuntimeError("broken")

    monkeypatch.setattr(service, "fork", fork)
    copies = sandbox.fork_each(2)
    first = await anext(copies)
    assert isinstance(first, AsyncSandbox)
    with pytest.raises(e2b.SandboxException, match="/fork: the connection to the server failed"):
        await anext(copies)


async def test_an_answer_with_too_few_copies(service: FakeService, monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = await AsyncSandbox.create("base")

    async def fork(sandbox_id: str, *, count: int, timeout_s: int, on_result: Any) -> None:
        on_result(make_sandbox("ifirst"))

    monkeypatch.setattr(service, "fork", fork)
    with pytest.raises(e2b.SandboxException, match="ended after 1 of 2 copies"):
        _ = [result async for result in sandbox.fork_each(2)]


async def test_nobody_there_is_an_error_of_the_sdk(service: FakeService) -> None:
    sandbox = await AsyncSandbox.create("base")
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        nowhere = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(e2b.SandboxException, match="the connection to the server failed"):
            _ = [result async for result in sandbox.fork_each(1, api_url=nowhere)]
        with pytest.raises(e2b.SandboxException, match="the connection to the server failed"):
            await sandbox.rollback("x", api_url=nowhere)


async def test_trees(service: FakeService) -> None:
    sandbox = await AsyncSandbox.create("base")
    root = make_snapshot(1, name="root:default")
    left = make_snapshot(2, parent=root)
    leaf = make_snapshot(3, parent=left)
    right = make_snapshot(4, parent=root)
    other = make_snapshot(5)
    service.taken = [root, left, leaf, right, other]
    roots = await sandbox.snapshot_tree()
    assert service.calls[-1] == ("tree", sandbox.sandbox_id)

    def shape(node: SnapshotNode) -> list[tuple[int, str]]:
        return [(depth, below.build_id) for depth, below in node.walk()]

    assert [shape(node) for node in roots] == [
        [(0, root.id), (1, left.id), (2, leaf.id), (1, right.id)],
        [(0, other.id)],
    ]
    snapshot = roots[0].snapshot
    assert snapshot is not None
    assert (snapshot.snapshot_id, snapshot.names, snapshot.mode) == ("root:default", ("root:default",), "full")
    assert snapshot.created_at == root.created_at
    assert (roots[0].exclusive_bytes, roots[0].shared_bytes) == (1000, 50)
    await AsyncSandbox.all_snapshot_trees()
    assert service.calls[-1] == ("tree", None)


async def test_one_snapshot(service: FakeService) -> None:
    parent = make_snapshot(1)
    service.taken = [parent, make_snapshot(2, name="a:v1", parent=parent)]
    found = await AsyncSandbox.get_snapshot("a:v1")
    assert (found.build_id, found.parent_id, found.memory_mib) == (service.taken[1].id, parent.id, 512)
    with pytest.raises(e2b.NotFoundException):
        await AsyncSandbox.get_snapshot("team/nope:v1")
    for empty in ("", " "):
        with pytest.raises(e2b.InvalidArgumentException, match="snapshot_id is empty"):
            await AsyncSandbox.get_snapshot(empty)


async def test_a_wrong_key_is_the_sdks_error(service: FakeService) -> None:
    with pytest.raises(e2b.AuthenticationException):
        await AsyncSandbox.all_snapshot_trees(api_key="e2b_wrong")


def test_without_the_sdk_it_says_what_is_missing() -> None:
    program = "import sys; sys.modules['e2b'] = None; import agentenv.client"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].endswith("agentenv.client needs the package e2b: pip install 'agentenv[client]'")
