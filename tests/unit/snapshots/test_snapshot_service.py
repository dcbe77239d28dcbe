"""The asynchronous faces: the same results, and a cancelled caller leaves nothing half done."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from snapshots_samples import Node, manifest

from agentenv.errors import SnapshotNotFoundError
from agentenv.snapshots.manifest import SnapshotKind, SnapshotManifest
from agentenv.snapshots.service import SnapshotService


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


async def test_a_snapshot_from_its_draft_to_its_end(node: Node) -> None:
    service = SnapshotService(node.snapshots)
    source = node.home / "source"
    source.write_bytes(b"state")
    async with service.draft("one") as draft:
        memory, disk = node.add_layer(b"m", draft.owner), node.add_layer(b"d", draft.owner)
        state = await draft.take_state(source)
        made = manifest("one", memory_layers=(memory,), disk_layers=(disk,), state=state)
        await draft.commit(made)
    assert await service.get("one") == made and await service.list() == (made,)
    assert (await service.tree())[0].manifest == made
    assert (await service.usage()).snapshots[0].snapshot_id == "one"
    assert await service.verify("one") == ()
    await service.ensure_room(1 << 40)
    async with service.lease("one") as lease:
        await service.delete("one")
        assert lease.state is not None and lease.state.read_bytes() == b"state"
    assert await service.list() == () and (await service.recover()).removed == ()
    with pytest.raises(SnapshotNotFoundError):
        await service.get("one")


async def test_an_error_ends_a_draft(node: Node) -> None:
    service = SnapshotService(node.snapshots)
    with pytest.raises(ZeroDivisionError):
        async with service.draft("one") as draft:
            node.add_layer(b"m", draft.owner)
            raise ZeroDivisionError
    assert node.layers.owners_with_prefix("snapshot:") == () and not (node.directory / "one").exists()


async def test_a_cancelled_commit_is_over_when_the_caller_goes_on(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    service = SnapshotService(node.snapshots)
    begun, go_on = threading.Event(), threading.Event()
    commit = node.snapshots._commit

    def slow(directory: object, made: SnapshotManifest) -> None:
        begun.set()
        assert go_on.wait(60)
        commit(directory, made)  # type: ignore[arg-type]

    monkeypatch.setattr(node.snapshots, "_commit", slow)

    async def capture() -> None:
        async with service.draft("one") as draft:
            disk = node.add_layer(b"d", draft.owner)
            await draft.commit(manifest("one", kind=SnapshotKind.FILESYSTEM, disk_layers=(disk,)))

    task = asyncio.create_task(capture())
    assert await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await service.get("one")).snapshot_id == "one" and await service.verify("one") == ()


async def test_a_cancelled_entry_holds_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    service = SnapshotService(node.snapshots)
    begun, go_on = threading.Event(), threading.Event()

    def slow(size: int) -> None:
        begun.set()
        assert go_on.wait(60)

    monkeypatch.setattr(node.snapshots, "ensure_room", slow)

    async def capture() -> None:
        async with service.draft("one"):
            raise AssertionError("entered although it was cancelled")

    task = asyncio.create_task(capture())
    assert await asyncio.to_thread(begun.wait, 60)
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not (node.directory / "one").exists()
