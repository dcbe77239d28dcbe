"""What the HTTP surface needs from below, as protocols: `api` calls them and never sees how they are done.

No implementation lives here; `orchestrator.Orchestrator` is the one that the server uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from agentenv.orchestrator.model import CreateRequest, LogEntry, MetricSample, Sandbox


class SandboxService(Protocol):
    """Sandboxes of this node. Every method raises errors of `agentenv.errors` only."""

    async def create(self, request: CreateRequest) -> Sandbox:
        """Start a sandbox and return when its agent is ready, or return what the same idempotency key made before."""
        ...

    async def connect(self, sandbox_id: str, timeout_s: int, *, memory: bool | None = None) -> tuple[Sandbox, bool]:
        """Extend a running sandbox or resume a paused one; the flag says whether it was resumed."""
        ...

    async def resume(
        self, sandbox_id: str, timeout_s: int, *, auto_pause: bool | None = None, memory: bool | None = None
    ) -> Sandbox:
        """Resume a paused sandbox."""
        ...

    async def pause(self, sandbox_id: str, *, memory: bool = True, require_healthy: bool = False) -> None:
        """Pause a running sandbox; when this returns it can be resumed."""
        ...

    def get(self, sandbox_id: str) -> Sandbox:
        """Return one sandbox."""
        ...

    def list(self) -> Sequence[Sandbox]:
        """Return all sandboxes, in any order."""
        ...

    async def kill(self, sandbox_id: str) -> None:
        """End a sandbox; when this returns it is gone."""
        ...

    async def set_timeout(self, sandbox_id: str, timeout_s: int) -> None:
        """Let a running sandbox expire `timeout_s` seconds from now; zero or less: now."""
        ...

    async def refresh(self, sandbox_id: str, duration_s: int) -> None:
        """Let a running sandbox live at least `duration_s` seconds from now."""
        ...

    def metrics(self, sandbox_id: str, start: datetime | None, end: datetime | None) -> Sequence[MetricSample]:
        """Return readings between the two times, ascending."""
        ...

    async def logs(
        self,
        sandbox_id: str,
        *,
        start: datetime | None = None,
        end: datetime | None = None,
        limit: int = 1000,
        level: str | None = None,
        backward: bool = False,
        search: str | None = None,
    ) -> Sequence[LogEntry]:
        """Return log lines: ascending from `start`, or descending from `end` when `backward`."""
        ...
