"""When sandboxes end: one loop over a heap of wall-clock times. What expiry means is the caller's business."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from datetime import datetime

from agentenv.orchestrator.ports import Clock
from agentenv.orchestrator.tasks import first

_LONGEST_NAP_S = 30.0
"""The wall clock may be set while we sleep on the monotonic one; it is looked at this often."""
_STALE_ENTRIES = 64
"""Moved times stay in the heap until their turn, up to about this many more than there are sandboxes."""


class Expiry:
    """Calls `expired(sandbox_id)` once when the wall clock reaches the time set for it."""

    def __init__(self, clock: Clock, expired: Callable[[str], None]) -> None:
        self._clock = clock
        self._expired = expired
        self._end: dict[str, datetime] = {}
        self._heap: list[tuple[datetime, str]] = []
        self._changed = asyncio.Event()

    def set(self, sandbox_id: str, end_at: datetime) -> None:
        """Set or move the time of a sandbox. A time that has passed expires at the loop's next turn."""
        self._end[sandbox_id] = end_at
        heapq.heappush(self._heap, (end_at, sandbox_id))
        if len(self._heap) > 2 * len(self._end) + _STALE_ENTRIES:  # callers that extend every few seconds
            self._heap = [(moment, owner) for owner, moment in self._end.items()]
            heapq.heapify(self._heap)
        self._changed.set()

    def clear(self, sandbox_id: str) -> None:
        """Forget a sandbox. Idempotent."""
        self._end.pop(sandbox_id, None)

    async def run(self) -> None:
        """Serve for ever."""
        while True:
            self._changed.clear()
            nap_s = self._expire_due()
            await first(self._clock.sleep(nap_s), self._wait_for_change())

    def _expire_due(self) -> float:
        """Call back for what is due; return how long to sleep."""
        while self._heap:
            end_at, sandbox_id = self._heap[0]
            if self._end.get(sandbox_id) != end_at:  # moved or cleared since
                heapq.heappop(self._heap)
                continue
            left = (end_at - self._clock.now()).total_seconds()
            if left > 0:
                return min(left, _LONGEST_NAP_S)
            heapq.heappop(self._heap)
            del self._end[sandbox_id]
            self._expired(sandbox_id)
        return _LONGEST_NAP_S

    async def _wait_for_change(self) -> None:
        await self._changed.wait()
