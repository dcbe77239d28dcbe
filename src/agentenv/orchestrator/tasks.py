"""Tasks with an owner: they are known, their failures are logged, and none outlives its owner.

Used where a TaskGroup does not fit, because tasks begin and end in different calls. Also the few ways of waiting that
the orchestrator needs and asyncio lacks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import structlog

from agentenv.errors import AgentEnvError

T = TypeVar("T")
_log = structlog.get_logger(__name__)


class OwnedTasks:
    """A set of running tasks. Used from one event loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Start a task. Whoever awaits it gets its error; it is marked as seen here, since nobody may."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, AgentEnvError):
                # The caller's own mistake is the caller's news: it gets the error as its answer.
                report = _log.debug if error.status < 500 else _log.info
                report("task_failed", task=task.get_name(), error=error.message)
            else:
                _log.error("task_crashed", task=task.get_name(), exc_info=error)

    async def settle(self) -> None:
        """Wait until no task runs, those included that start while waiting."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    async def close(self) -> None:
        """Cancel what runs and wait for its end."""
        for task in self._tasks:
            task.cancel()
        await self.settle()


async def together(*works: Coroutine[Any, Any, None]) -> None:
    """Run all at the same time; the first failure cancels the others and is raised once they have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def first(*works: Coroutine[Any, Any, T]) -> T:
    """Run all at the same time and return the result of the one that ends first, in the order given when several did.

    The others are cancelled, and have ended when this returns.
    """
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(task for task in tasks if task.done()).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def to_the_end(task: asyncio.Task[T]) -> T:
    """Wait for a task that must not be interrupted. A cancellation of the caller is raised after the task's end."""
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()


async def in_thread(work: Callable[[], T]) -> T:
    """Run blocking work in a thread. A cancelled call ends only when the work is over, unlike `asyncio.to_thread`."""
    return await to_the_end(asyncio.create_task(asyncio.to_thread(work)))
