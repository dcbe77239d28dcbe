"""The official Python SDK: snapshots, forks, lifecycle options; both clients."""

from __future__ import annotations

import asyncio
import inspect
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from e2b import AsyncSandbox, NotFoundException, Sandbox, SandboxException, SandboxState

pytestmark = pytest.mark.vm


@pytest.fixture(scope="module")
def source(endpoint: str) -> Iterator[Sandbox]:
    """One that is captured again and again; a process of it runs."""
    created = Sandbox.create(timeout=1200, metadata={"suite": "snapshots"}, envs={"SANDBOX_VARIABLE": "from create"})
    try:
        created.files.write("/home/user/kept", "before")
        created.commands.run("sleep 5000", background=True, timeout=0)
        yield created
    finally:
        created.kill()


def _all(**arguments: Any) -> list[Any]:
    pages = Sandbox.list_snapshots(**arguments)
    found = []
    while pages.has_next:
        found += pages.next_items()
    return found


def _sleeps(sandbox: Sandbox) -> bool:
    return any("sleep 5000" in " ".join([process.cmd, *process.args]) for process in sandbox.commands.list())


def test_created_from_after_its_source_was_killed_and_deleted_twice(endpoint: str) -> None:
    source = Sandbox.create(timeout=600)
    source.files.write("/home/user/kept", "before")
    source.commands.run("sleep 5000", background=True, timeout=0)
    made = source.create_snapshot()
    assert made.names == []
    assert source.commands.run("echo goes on").stdout == "goes on\n"
    source.files.write("/home/user/kept", "after")
    assert [one.snapshot_id for one in _all(sandbox_id=source.sandbox_id)] == [made.snapshot_id]
    assert source.kill() is True
    assert [one.snapshot_id for one in _all(sandbox_id=source.sandbox_id)] == [made.snapshot_id]

    copy = Sandbox.create(made.snapshot_id, timeout=300, envs={"OWN": "copy"})
    try:
        assert copy.sandbox_id != source.sandbox_id
        assert copy.files.read("/home/user/kept") == "before"
        assert _sleeps(copy)
        assert copy.commands.run("echo $OWN $E2B_SANDBOX_ID").stdout == f"copy {copy.sandbox_id}\n"
        assert Sandbox.delete_snapshot(made.snapshot_id) is True
        assert Sandbox.delete_snapshot(made.snapshot_id) is False
        assert _all(sandbox_id=source.sandbox_id) == []
        with pytest.raises(SandboxException):
            Sandbox.create(made.snapshot_id)
        assert copy.files.read("/home/user/kept") == "before"
    finally:
        copy.kill()


def test_named_twice_is_one_template_with_two_builds(source: Sandbox) -> None:
    if "name" not in inspect.signature(source.create_snapshot).parameters:
        pytest.skip("this release cannot name snapshots")
    name = f"suite-{uuid.uuid4().hex[:12]}"
    source.files.write("/tmp/which", "first")
    first = source.create_snapshot(name=f"{name}:v1")
    source.files.write("/tmp/which", "second")
    second = source.create_snapshot(name=f"{name}:v1")
    assert first.snapshot_id == second.snapshot_id == f"{name}:v1"
    assert second.names == [f"{name}:v1"]
    other = source.create_snapshot(name=name)
    assert (other.snapshot_id, other.names) == (f"{name}:default", [f"{name}:default"])
    builds = _all(name=name)
    assert len(builds) == 3
    assert len({one.snapshot_id for one in builds}) == 3
    copy = Sandbox.create(f"{name}:v1", timeout=300)
    try:
        assert copy.files.read("/tmp/which") == "second"
    finally:
        copy.kill()
    (superseded,) = {one.snapshot_id for one in builds} - {first.snapshot_id, other.snapshot_id}
    for snapshot_id in (superseded, first.snapshot_id, other.snapshot_id):
        assert Sandbox.delete_snapshot(snapshot_id) is True
        assert Sandbox.delete_snapshot(snapshot_id) is False
    assert _all(name=name) == []
    with pytest.raises(SandboxException):
        source.create_snapshot(name="No Name!")


def test_snapshots_come_in_pages(source: Sandbox) -> None:
    made = {source.create_snapshot().snapshot_id for _ in range(3)}
    assert len(made) == 3
    pages = source.list_snapshots(limit=2)
    first = pages.next_items()
    assert (len(first), pages.has_next) == (2, True)
    second = pages.next_items()
    assert (len(second), pages.has_next) == (1, False)
    assert {one.snapshot_id for one in (*first, *second)} == made
    for snapshot_id in made:
        assert Sandbox.delete_snapshot(snapshot_id) is True


def test_snapshot_of_the_file_system(source: Sandbox) -> None:
    if "mode" not in inspect.signature(source.create_snapshot).parameters:
        pytest.skip("this release only takes full snapshots")
    source.files.write("/home/user/unsynced", "flushed by the snapshot")
    made = source.create_snapshot(mode="filesystem")
    assert _sleeps(source)
    copy = Sandbox.create(made.snapshot_id, timeout=300)
    try:
        assert copy.files.read("/home/user/unsynced") == "flushed by the snapshot"
        assert copy.commands.list() == []
    finally:
        copy.kill()
    assert Sandbox.delete_snapshot(made.snapshot_id) is True


def test_fork(source: Sandbox) -> None:
    before = source.get_info()
    forks = source.fork(timeout=300, count=2)
    try:
        assert [type(fork) for fork in forks] == [Sandbox, Sandbox]
        assert len({fork.sandbox_id for fork in (source, *forks)}) == 3
        for fork in forks:
            info = fork.get_info()
            assert info.metadata == {"suite": "snapshots"}
            assert 0 < (info.end_at - datetime.now(UTC)).total_seconds() <= 310
            assert fork.files.read("/home/user/kept") == "before"
            assert _sleeps(fork)
            done = fork.commands.run("echo $SANDBOX_VARIABLE; hostname")
            assert done.stdout.splitlines() == ["from create", fork.sandbox_id]
        forks[0].files.write("/home/user/kept", "mine")
        assert source.files.read("/home/user/kept") == "before"
        assert source.get_info().end_at == before.end_at
    finally:
        for fork in forks:
            if isinstance(fork, Sandbox):
                fork.kill()
    with pytest.raises(NotFoundException):
        Sandbox.fork("i0000000000000000000")


def test_paused_ones_are_not_captured(endpoint: str) -> None:
    pause = "pause" if hasattr(Sandbox, "pause") else "beta_pause"
    created = Sandbox.create(timeout=300)
    try:
        getattr(created, pause)()
        with pytest.raises(SandboxException):
            created.create_snapshot()
        with pytest.raises(SandboxException):
            created.fork()
        assert created.get_info().state == SandboxState.PAUSED
    finally:
        created.kill()


def test_lifecycle_options(endpoint: str) -> None:
    created = Sandbox.create(timeout=300, lifecycle={"on_timeout": "pause", "auto_resume": True})
    try:
        lifecycle = getattr(created.get_info(), "lifecycle", None)
        if lifecycle is not None:
            assert (lifecycle["on_timeout"], lifecycle["auto_resume"]) == ("pause", True)
        created.files.write("/home/user/kept", "before")
        created.set_timeout(1)
        deadline = time.monotonic() + 120
        while created.get_info().state != SandboxState.PAUSED:
            assert time.monotonic() < deadline, "it was not paused at its end"
        assert created.files.read("/home/user/kept") == "before", "traffic wakes it"
        assert created.get_info().state == SandboxState.RUNNING
    finally:
        assert created.kill() is True


def test_async_client(source: Sandbox) -> None:
    async def main() -> None:
        attached = await AsyncSandbox.connect(source.sandbox_id)
        made = await attached.create_snapshot()
        copy, forks = await asyncio.gather(
            AsyncSandbox.create(made.snapshot_id, timeout=300), attached.fork(timeout=300, count=2)
        )
        try:
            texts = await asyncio.gather(*(one.files.read("/home/user/kept") for one in (copy, *forks)))
            assert texts == 3 * ["before"]
            assert len({one.sandbox_id for one in (attached, copy, *forks)}) == 4
        finally:
            await asyncio.gather(*(one.kill() for one in (copy, *forks)))
        pages = AsyncSandbox.list_snapshots(sandbox_id=source.sandbox_id)
        assert [one.snapshot_id for one in await pages.next_items()] == [made.snapshot_id]
        assert await AsyncSandbox.delete_snapshot(made.snapshot_id) is True
        assert await AsyncSandbox.delete_snapshot(made.snapshot_id) is False

    asyncio.run(main())
