"""What the HTTP surface needs from below, as protocols: `api` calls them and never sees how they are done.

No implementation lives here; `orchestrator.Orchestrator` is the one that the server uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Protocol

from agentenv.errors import AgentEnvError
from agentenv.orchestrator.model import (
    CollectedSpace,
    CreateRequest,
    LogEntry,
    MetricSample,
    Sandbox,
    SnapshotInfo,
    SnapshotNode,
    SpaceReport,
)


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


class SnapshotService(Protocol):
    """Named snapshots, and sandboxes that go on from them. Every method raises errors of `agentenv.errors` only."""

    async def snapshot(self, sandbox_id: str, *, name: str | None = None, memory: bool = True) -> SnapshotInfo:
        """Take a snapshot of a running sandbox, which goes on; when this returns it can be used."""
        ...

    async def fork(
        self,
        sandbox_id: str,
        *,
        count: int,
        timeout_s: int,
        on_result: Callable[[Sandbox | AgentEnvError], None] | None = None,
    ) -> Sequence[Sandbox | AgentEnvError]:
        """Make so many copies of a running sandbox, which goes on; each one is ready, or failed by itself.

        `on_result` is told each as soon as it is known, in whatever order. A cancelled call leaves no copy.
        """
        ...

    async def rollback(self, sandbox_id: str, reference: str) -> Sandbox:
        """Put a running sandbox back to a snapshot of its own; when this returns its agent is ready."""
        ...

    async def snapshots(self, *, sandbox_id: str | None = None, name: str | None = None) -> Sequence[SnapshotInfo]:
        """Return the named snapshots, of one sandbox or of one name, oldest first."""
        ...

    async def find_snapshot(self, reference: str) -> SnapshotInfo:
        """Return one snapshot by anything that names it."""
        ...

    async def delete_snapshot(self, reference: str) -> None:
        """Delete a snapshot; what others share with it stays."""
        ...

    async def snapshot_tree(self, sandbox_id: str | None = None) -> Sequence[SnapshotNode]:
        """Return the roots of the trees of snapshots, of one sandbox or of all."""
        ...


class SpaceService(Protocol):
    """Disk space of this node."""

    async def space(self) -> SpaceReport:
        """Return what takes up the disk."""
        ...

    async def collect_garbage(self) -> CollectedSpace:
        """Remove what nobody uses."""
        ...


class NodeService(SandboxService, SnapshotService, SpaceService, Protocol):
    """All that the HTTP surface asks of a node."""
