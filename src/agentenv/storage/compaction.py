"""Merges the layers of disks whose stacks have become deep, in the background, one disk at a time.

Only a disk's own layers are merged, never those that it was made from: these are shared. What is merged stays in the
store as long as anybody references it. How a merged layer takes the place of the others is `disks.py`'s business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog

from agentenv.errors import AgentEnvError
from agentenv.storage.layers import LayerStore, StoredLayer

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring layers of a stack, counted from the bottom."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Chain:
    """A disk's layers below its upper, bottom first."""

    digests: tuple[str, ...]
    base_layers: int
    """So many, from the bottom, are not the disk's own."""


def choose_run(sizes: Sequence[int], base_layers: int, max_depth: int) -> Run | None:
    """Which layers to merge: None when the stack is not too deep.

    The newest ones, and older ones only as long as each is not larger than all that is merged above it: with a sensible
    limit a byte is rewritten about as often as the logarithm of the number of captures says.

    Args:
        sizes: of all layers, bottom first, bytes.
        base_layers: so many from the bottom are left alone.
        max_depth: how many layers a stack may have. Where the base itself takes up most of it, half as many of the
            disk's own are allowed.
    """
    own = len(sizes) - base_layers
    limit = max(max_depth - base_layers, max_depth // 2, 2)
    if own <= limit:
        return None
    count = own - max(1, limit // 2) + 1
    first = len(sizes) - count
    merged = sum(sizes[first:])
    while first > base_layers and sizes[first - 1] <= merged:
        first -= 1
        merged += sizes[first]
    return Run(first, len(sizes) - first)


def merge_owner(disk_id: str) -> str:
    """Who references a merged layer until it has its place."""
    return f"merge:{disk_id}"


class Compactor:
    """Used from one event loop.

    Args:
        layers: where the layers are.
        max_depth: see `choose_run`.
        chain: the present chain of a disk; an `AgentEnvError` when it is gone.
        swap: puts a merged layer in the place of a run, if the disk still has the run (`digests`) there; drops the
            reference of `merge_owner`. Returns whether it did.
    """

    def __init__(
        self,
        layers: LayerStore,
        max_depth: int,
        *,
        chain: Callable[[str], Awaitable[Chain]],
        swap: Callable[[str, Run, tuple[str, ...], StoredLayer], Awaitable[bool]],
    ) -> None:
        self._layers = layers
        self._max_depth = max_depth
        self._chain = chain
        self._swap = swap
        self._waiting: asyncio.Queue[str] = asyncio.Queue()
        self._queued: set[str] = set()
        self._task: asyncio.Task[None] | None = None
        self.active: str | None = None
        """The disk whose layers are being merged now."""

    def start(self) -> None:
        """Begin. Idempotent; needs a running event loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="compaction")

    async def close(self) -> None:
        """Stop; a merge under way ends first, its result is thrown away. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def consider(self, disk_id: str) -> None:
        """Have a look at a disk's chain soon."""
        if disk_id not in self._queued:
            self._queued.add(disk_id)
            self._waiting.put_nowait(disk_id)

    async def settled(self) -> None:
        """Return when every disk that was considered has been dealt with."""
        await self._waiting.join()

    async def _run(self) -> None:
        while True:
            disk_id = await self._waiting.get()
            self._queued.discard(disk_id)
            self.active = disk_id
            try:
                await self._compact(disk_id)
            except AgentEnvError as error:
                log.warning("compaction_failed", disk=disk_id, error=error.message)
            except Exception:
                log.exception("compaction_crashed", disk=disk_id)
            finally:
                self.active = None
                self._waiting.task_done()

    async def _compact(self, disk_id: str) -> None:
        chain = await self._chain(disk_id)
        if choose_run([0] * len(chain.digests), chain.base_layers, self._max_depth) is None:
            return
        # Captures come at the top and nobody else changes the chain, so that the run stays where it is.
        merging = asyncio.ensure_future(asyncio.to_thread(self._merge, disk_id, chain))
        try:
            merged = await asyncio.shield(merging)
        except asyncio.CancelledError:
            await asyncio.wait([merging])
            await asyncio.to_thread(self._layers.drop, merge_owner(disk_id))
            raise
        if merged is None:
            return
        run, layer = merged
        digests = chain.digests[run.first : run.first + run.count]
        if await self._swap(disk_id, run, digests, layer):
            log.info("layers_merged", disk=disk_id, layers=run.count, digest=layer.digest, size=layer.size)

    def _merge(self, disk_id: str, chain: Chain) -> tuple[Run, StoredLayer] | None:
        with self._layers.lease(chain.digests) as layers:
            run = choose_run([layer.size for layer in layers], chain.base_layers, self._max_depth)
            if run is None:
                return None
            parts = layers[run.first : run.first + run.count]
            with self._layers.draft() as draft:
                # The newest one's UUID: the layer or upper above names it as its parent.
                self._layers.tools.merge([layer.path for layer in parts], draft, uuid=parts[-1].uuid)
                return run, self._layers.import_file(draft, owner=merge_owner(disk_id))
