"""The repository for the event loop: each call runs in a thread, to its end even when the caller is cancelled.

Adds nothing of its own; what the calls mean is in `repository.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import TypeVar

from agentenv.snapshots.accounting import SnapshotNode, UsageReport
from agentenv.snapshots.index import SnapshotObserver
from agentenv.snapshots.manifest import SnapshotManifest, StateFile
from agentenv.snapshots.repository import LocalSnapshots, Recovery, SnapshotDraft, SnapshotLease
from agentenv.vmm.process import finish_in_thread

T = TypeVar("T")


class AsyncDraft:
    """A `SnapshotDraft` for the event loop."""

    def __init__(self, draft: SnapshotDraft) -> None:
        self._draft = draft
        self.snapshot_id = draft.snapshot_id
        self.owner = draft.owner
        self.directory = draft.directory

    async def take_state(self, source: Path) -> StateFile:
        """See `SnapshotDraft.take_state`."""
        return await _finish(lambda: self._draft.take_state(source))

    async def commit(self, manifest: SnapshotManifest) -> None:
        """See `SnapshotDraft.commit`. A cancelled call may have committed."""
        await _finish(lambda: self._draft.commit(manifest))


class SnapshotService:
    """See `LocalSnapshots` for every method."""

    def __init__(self, snapshots: LocalSnapshots) -> None:
        self._snapshots = snapshots

    @asynccontextmanager
    async def draft(self, snapshot_id: str, *, kept: bool = True) -> AsyncIterator[AsyncDraft]:
        async with _held(lambda: self._snapshots.draft(snapshot_id, kept=kept)) as draft:
            yield AsyncDraft(draft)

    @asynccontextmanager
    async def lease(self, snapshot_id: str) -> AsyncIterator[SnapshotLease]:
        async with _held(lambda: self._snapshots.lease(snapshot_id)) as lease:
            yield lease

    async def ensure_room(self, size: int) -> None:
        await _finish(lambda: self._snapshots.ensure_room(size))

    async def get(self, snapshot_id: str) -> SnapshotManifest:
        return await _finish(lambda: self._snapshots.get(snapshot_id))

    def watch(self, observer: SnapshotObserver) -> None:
        self._snapshots.watch(observer)

    async def refresh(self) -> None:
        await _finish(self._snapshots.refresh)

    async def list(self) -> tuple[SnapshotManifest, ...]:
        return await _finish(self._snapshots.list)

    async def ids(self) -> tuple[str, ...]:
        return await _finish(self._snapshots.ids)

    async def tree(self) -> tuple[SnapshotNode, ...]:
        return await _finish(self._snapshots.tree)

    async def usage(self) -> UsageReport:
        return await _finish(self._snapshots.usage)

    async def delete(self, snapshot_id: str) -> None:
        await _finish(lambda: self._snapshots.delete(snapshot_id))

    async def verify(self, snapshot_id: str) -> tuple[str, ...]:
        return await _finish(lambda: self._snapshots.verify(snapshot_id))

    async def recover(self) -> Recovery:
        return await _finish(self._snapshots.recover)


async def _finish(work: Callable[[], T]) -> T:
    return await finish_in_thread(work, lambda _: None)


@asynccontextmanager
async def _held(make: Callable[[], AbstractContextManager[T]]) -> AsyncIterator[T]:
    """Enter a blocking context in a thread and leave it in a thread, whatever happens in between."""

    def enter() -> tuple[AbstractContextManager[T], T]:
        context = make()
        return context, context.__enter__()

    def leave(entered: tuple[AbstractContextManager[T], T]) -> None:
        entered[0].__exit__(None, None, None)

    entered = await finish_in_thread(enter, leave)
    try:
        yield entered[1]
    finally:
        leaving = asyncio.ensure_future(asyncio.to_thread(leave, entered))
        cancelled = False
        while not leaving.done():
            try:
                await asyncio.wait([leaving])
            except asyncio.CancelledError:
                cancelled = True
        leaving.result()
        if cancelled:
            raise asyncio.CancelledError
