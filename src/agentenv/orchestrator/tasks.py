"""Tasks with an owner: they are known, their failures are logged, and none outlives its owner.

Used where a TaskGroup does not fit, because tasks begin and end in different calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import structlog

T = TypeVar("T")
_log = structlog.get_logger(__name__)


class OwnedTasks:
    """A set of running tasks. Used from one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task. Whoever awaits it gets its error; an error that nobody may await is logged too."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.debug("task_failed", task=task.get_name(), error=repr(error))

    async def settle(self) -> None:
        """Wait until no task runs, those included that start while waiting."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def close(self) -> None:
        """Cancel what runs and wait for its end."""
        while self._tasks:
            tasks = set(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
