"""Lets machines go on that QEMU stopped because a disk of the host was full.

QEMU stops a guest whose write finds no space, instead of telling it of a broken disk; it goes on unharmed once there
is space, but somebody has to say so. A stopped machine is recognised by its CPU time, so that running ones cost next
to nothing to watch. This file must not resume a machine that was paused on purpose.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import Protocol

import structlog

from agentenv.errors import VmmError

log = structlog.get_logger(__name__)

_PERIOD_S = 5.0
_STILL_PERIODS = 2
"""So many periods without any CPU time make a machine worth asking."""


class Watched(Protocol):
    """What the caretaker needs of a machine."""

    def cpu_time_s(self) -> float | None:
        """CPU time so far, None when the machine has ended. Cheap."""

    async def resume_after_io_error(self) -> bool:
        """Resume the machine if a failed write stopped it; whether it was."""


class Caretaker:
    """Looks after the machines that `machines` returns, from `start` to `close`."""

    def __init__(self, machines: Callable[[], Collection[Watched]]) -> None:
        self._machines = machines
        self._task: asyncio.Task[None] | None = None
        self._still: dict[Watched, tuple[float, int]] = {}

    def start(self) -> None:
        """Begin. Idempotent; needs a running event loop."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="vmm-caretaker")

    async def close(self) -> None:
        """Stop. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_PERIOD_S)
            for machine in self._suspects():
                try:
                    if await machine.resume_after_io_error():
                        log.warning("machine_resumed_after_full_disk", machine=str(machine))
                except VmmError as error:
                    log.warning("machine_not_looked_after", machine=str(machine), error=error.message)

    def _suspects(self) -> list[Watched]:
        found: dict[Watched, tuple[float, int]] = {}
        for machine in self._machines():
            used = machine.cpu_time_s()
            if used is not None:
                before, periods = self._still.get(machine, (-1.0, 0))
                found[machine] = (used, periods + 1 if used == before else 0)
        self._still = found
        suspects = [machine for machine, (_, periods) in found.items() if periods >= _STILL_PERIODS]
        for machine in suspects:
            self._still[machine] = (found[machine][0], 0)
        return suspects
