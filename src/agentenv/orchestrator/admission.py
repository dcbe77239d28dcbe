"""Who may start a sandbox now: a fair queue for start places, and a look at the memory and disk that are really left.

Decides from numbers it is given; takes nothing on the host.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from agentenv.config import MIB, SandboxSettings
from agentenv.errors import CapacityError, InsufficientStorageError, TooManyRequestsError
from agentenv.orchestrator.ports import Clock, HostProbe

_FIRST_GUESS_S = 1.0
_WEIGHT_OF_NEWEST = 0.2
_LONGEST_RETRY_AFTER_S = 60


class StartGate:
    """At most N starts at a time; the others wait in the order of their arrival, up to a limit."""

    def __init__(self, max_concurrent: int, max_queued: int, clock: Clock) -> None:
        self._free = max_concurrent
        self._max_concurrent = max_concurrent
        self._max_queued = max_queued
        self._clock = clock
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._typical_s = _FIRST_GUESS_S

    @property
    def queued(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold a start place.

        Raises:
            TooManyRequestsError: too many wait already; `retry_after_s` is how long these will take.
        """
        await self._enter()
        began = self._clock.monotonic()
        try:
            yield
        finally:
            took = self._clock.monotonic() - began
            self._typical_s += _WEIGHT_OF_NEWEST * (took - self._typical_s)
            self._leave()

    async def _enter(self) -> None:
        if self._free > 0:
            self._free -= 1
            return
        if len(self._waiting) >= self._max_queued:
            raise TooManyRequestsError(
                f"{self._max_concurrent} sandboxes are being started and {len(self._waiting)} wait; try again later",
                retry_after_s=self._wait_estimate_s(),
            )
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif not turn.cancelled():  # the place came together with the cancellation
                self._leave()
            raise

    def _leave(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    def _wait_estimate_s(self) -> int:
        rounds = (len(self._waiting) + 1) / self._max_concurrent
        return max(1, min(_LONGEST_RETRY_AFTER_S, math.ceil(rounds * self._typical_s)))


class Admission:
    """Refuses a start that the host has no room for.

    A guest touches its memory while it boots, so what is being started is counted in full and what runs is counted as
    far as it shows in the host's numbers.
    """

    def __init__(self, settings: SandboxSettings, host: HostProbe) -> None:
        self._settings = settings
        self._host = host
        self._starting_bytes = 0

    @contextmanager
    def reserve(self, memory_mib: int) -> Iterator[None]:
        """Keep room for a guest of that size while it starts.

        Raises:
            InsufficientStorageError: the home's disk is too full.
            CapacityError: the host would have too little memory left.
        """
        disk_needed = self._settings.min_free_disk_mib * MIB
        disk_free = self._host.free_disk_bytes()
        if disk_free < disk_needed:
            raise InsufficientStorageError(
                f"the disk of the state directory has {disk_free // MIB} MiB free, a new sandbox needs "
                f"{self._settings.min_free_disk_mib} MiB; remove sandboxes or free some space"
            )
        wanted = memory_mib * MIB
        left = self._host.available_memory_bytes() - self._starting_bytes - wanted
        if left < self._settings.min_free_memory_mib * MIB:
            raise CapacityError(
                f"this node has no memory for a sandbox of {memory_mib} MiB: {max(0, left) // MIB} MiB would be left, "
                f"{self._settings.min_free_memory_mib} MiB must stay free"
            )
        self._starting_bytes += wanted
        try:
            yield
        finally:
            self._starting_bytes -= wanted
