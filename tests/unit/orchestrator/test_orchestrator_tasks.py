"""What is logged of tasks that fail: a caller's mistake is no news to the operator."""

from __future__ import annotations

import pytest
import structlog

from agentenv.errors import AgentEnvError, IdempotencyMismatchError, SandboxNotFoundError, StorageError
from agentenv.orchestrator.tasks import OwnedTasks


@pytest.mark.parametrize(
    ("error", "event", "level"),
    [
        (SandboxNotFoundError("ix"), "task_failed", "debug"),
        (IdempotencyMismatchError("another body"), "task_failed", "debug"),
        (StorageError("no disk"), "task_failed", "info"),
        (RuntimeError("a bug"), "task_crashed", "error"),
    ],
)
async def test_the_level_tells_whose_mistake_it_was(error: Exception, event: str, level: str) -> None:
    async def work() -> None:
        raise error

    tasks = OwnedTasks()
    with structlog.testing.capture_logs() as entries:
        task = tasks.spawn(work(), "work")
        await tasks.settle()
    assert [(entry["event"], entry["log_level"]) for entry in entries] == [(event, level)]
    assert task.exception() is error
    assert not isinstance(error, AgentEnvError) or error.message in entries[0]["error"]
