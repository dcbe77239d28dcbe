"""Readings of running guests, every few seconds, kept in memory for an hour. Lost with the server: they are history."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

import structlog

from agentenv.errors import GuestAgentError
from agentenv.orchestrator.codec import from_micros, to_micros
from agentenv.orchestrator.model import MetricSample
from agentenv.orchestrator.ports import Agent, Clock
from agentenv.orchestrator.tasks import OwnedTasks

_log = structlog.get_logger(__name__)

PERIOD_S = 5.0
"""The buckets of the E2B API are about this long."""
KEPT = 720
"""Samples per sandbox: one hour."""
_AT_ONCE = 32
"""Guests that are asked at the same time."""


class SampleRing:
    """The newest samples of one sandbox, packed: a thousand sandboxes keep an hour in some 43 MB."""

    _LAYOUT = struct.Struct("<qidqqqqq")

    def __init__(self, capacity: int = KEPT) -> None:
        self._capacity = capacity
        self._data = bytearray()
        self._next = 0

    def __len__(self) -> int:
        return len(self._data) // self._LAYOUT.size

    def append(self, sample: MetricSample) -> None:
        """Add a sample; the oldest gives way when the ring is full."""
        packed = self._LAYOUT.pack(
            to_micros(sample.timestamp),
            sample.cpu_count,
            sample.cpu_used_pct,
            sample.mem_used,
            sample.mem_total,
            sample.mem_cache,
            sample.disk_used,
            sample.disk_total,
        )
        offset = self._next * self._LAYOUT.size
        self._data[offset : offset + self._LAYOUT.size] = packed
        self._next = (self._next + 1) % self._capacity

    def __iter__(self) -> Iterator[MetricSample]:
        """Oldest first."""
        count = len(self)
        oldest = self._next if count == self._capacity else 0
        for position in range(count):
            offset = (oldest + position) % self._capacity * self._LAYOUT.size
            micros, *values = self._LAYOUT.unpack_from(self._data, offset)
            yield MetricSample(from_micros(micros), *values)


@dataclass(slots=True)
class _Sampled:
    agent: Agent | None
    """None while the guest is paused."""
    ring: SampleRing = field(default_factory=SampleRing)
    asking: asyncio.Task[None] | None = None


class Sampler:
    """Asks every known guest once per period. A guest that does not answer delays nobody: it is skipped meanwhile."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._sampled: dict[str, _Sampled] = {}
        self._places = asyncio.Semaphore(_AT_ONCE)
        self._tasks = OwnedTasks()

    def add(self, sandbox_id: str, agent: Agent) -> None:
        """Begin to sample a guest, or go on after a pause."""
        known = self._sampled.get(sandbox_id)
        self._sampled[sandbox_id] = _Sampled(agent) if known is None else _Sampled(agent, known.ring)

    def suspend(self, sandbox_id: str) -> None:
        """Stop, and keep the history. Idempotent."""
        sampled = self._sampled.get(sandbox_id)
        if sampled is not None:
            sampled.agent = None
            if sampled.asking is not None:
                sampled.asking.cancel()

    def remove(self, sandbox_id: str) -> None:
        """Stop, and drop the history. Idempotent."""
        sampled = self._sampled.pop(sandbox_id, None)
        if sampled is not None and sampled.asking is not None:
            sampled.asking.cancel()

    def samples(self, sandbox_id: str, start: datetime | None, end: datetime | None) -> list[MetricSample]:
        """Samples from `start` to `end`, both included, oldest first."""
        sampled = self._sampled.get(sandbox_id)
        if sampled is None:
            return []
        return [
            sample
            for sample in sampled.ring
            if (start is None or sample.timestamp >= start) and (end is None or sample.timestamp <= end)
        ]

    async def run(self) -> None:
        """Serve for ever."""
        due = self._clock.monotonic()
        while True:
            for sandbox_id, sampled in self._sampled.items():
                if sampled.agent is not None and (sampled.asking is None or sampled.asking.done()):
                    asking = self._ask(sandbox_id, sampled.agent, sampled.ring)
                    sampled.asking = self._tasks.spawn(asking, f"sample {sandbox_id}")
            # After a late turn (a suspended host) there is nothing to catch up with.
            due = max(due + PERIOD_S, self._clock.monotonic())
            await self._clock.sleep(due - self._clock.monotonic())

    async def _ask(self, sandbox_id: str, agent: Agent, ring: SampleRing) -> None:
        async with self._places:
            try:
                reading = await agent.metrics()
            except GuestAgentError as error:
                _log.debug("sample_missed", sandbox=sandbox_id, error=error.message)
                return
        ring.append(
            MetricSample(
                timestamp=self._clock.now(),
                cpu_count=reading.cpu_count,
                cpu_used_pct=reading.cpu_used_pct,
                mem_used=reading.mem_used,
                mem_total=reading.mem_total,
                mem_cache=reading.mem_cache,
                disk_used=reading.disk_used,
                disk_total=reading.disk_total,
            )
        )

    async def close(self) -> None:
        """Stop asking."""
        await self._tasks.close()
