"""What could not be given back at once is tried again until it is.

After a restart of the server the journal takes care of the same. Nothing here decides what must go.
"""

from __future__ import annotations

import structlog

from agentenv.errors import AgentEnvError
from agentenv.orchestrator.launch import Holdings, Releaser
from agentenv.orchestrator.ports import Clock
from agentenv.orchestrator.tasks import OwnedTasks

_log = structlog.get_logger(__name__)
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0


class Cleaner:
    """Owns holdings whose release failed."""

    def __init__(self, releaser: Releaser, clock: Clock) -> None:
        self._releaser = releaser
        self._clock = clock
        self._tasks = OwnedTasks()
        self._remains: dict[str, Holdings] = {}

    @property
    def machines(self) -> int:
        """How many VMs may still run."""
        return sum(holdings.machine is not None for holdings in self._remains.values())

    @property
    def sandbox_ids(self) -> frozenset[str]:
        """Sandboxes of which something is left."""
        return frozenset(self._remains)

    def take_over(self, holdings: Holdings, error: AgentEnvError) -> None:
        """Try to release `holdings` again, later and later."""
        _log.warning("release_failed", sandbox=holdings.sandbox_id, error=error.message)
        self._remains[holdings.sandbox_id] = holdings
        self._tasks.spawn(self._persist(holdings), f"clean {holdings.sandbox_id}")

    async def _persist(self, holdings: Holdings) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            await self._clock.sleep(pause_s)
            try:
                await self._releaser.release(holdings)
            except AgentEnvError as error:
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
                _log.warning("release_failed", sandbox=holdings.sandbox_id, error=error.message, next_try_s=pause_s)
            else:
                del self._remains[holdings.sandbox_id]
                _log.info("release_finished", sandbox=holdings.sandbox_id)
                return

    async def close(self) -> None:
        """Stop trying. What is left stays in the journal for the next start."""
        await self._tasks.close()
