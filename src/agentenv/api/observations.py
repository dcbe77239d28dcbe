"""Routes that show what goes on in sandboxes: metrics and logs (E2B contract §2.2.14, §2.2.15)."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from fastapi import FastAPI, Query

from agentenv.api.models import LogPage, Logs, Metric, MetricsBySandbox
from agentenv.api.params import unix_time
from agentenv.api.sandboxes import visible_sandbox
from agentenv.api.services import SandboxService
from agentenv.api.views import log_line_view, log_view, metric_view
from agentenv.errors import InvalidRequestError, SandboxNotFoundError
from agentenv.ids import parse_sandbox_id

MOST_SANDBOXES = 100
MOST_LOG_ENTRIES = 1000
LONGEST_SEARCH = 256


class Direction(StrEnum):
    """Which way to read logs from the cursor."""

    FORWARD = "forward"
    BACKWARD = "backward"


class Level(StrEnum):
    """The least severe level to show."""

    DEBUG = "debug"
    INFO = "info"
    WARN = "warn"
    ERROR = "error"


UnixTime = Annotated[float | None, Query(allow_inf_nan=False)]
LogLimit = Annotated[int, Query(ge=0, le=MOST_LOG_ENTRIES)]


def add_observation_routes(app: FastAPI, service: SandboxService) -> None:
    """Add the routes to the application. Must come before `/sandboxes/{id}`, which would take `metrics` for an id."""

    @app.get("/sandboxes/metrics", tags=["observations"])
    async def get_latest_metrics(sandbox_ids: Annotated[list[str], Query()]) -> MetricsBySandbox:
        """Show the latest reading of each of up to 100 sandboxes, as far as they exist and have one."""
        ids = {parse_sandbox_id(part) for value in sandbox_ids for part in value.split(",") if part}
        if not 1 <= len(ids) <= MOST_SANDBOXES:
            raise InvalidRequestError(f"sandbox_ids must name 1 to {MOST_SANDBOXES} sandboxes")
        latest: dict[str, Metric] = {}
        for sandbox_id in sorted(ids):
            try:
                samples = service.metrics(sandbox_id, None, None)
            except SandboxNotFoundError:
                continue
            if samples:
                latest[sandbox_id] = metric_view(samples[-1])
        return MetricsBySandbox(sandboxes=latest)

    @app.get("/sandboxes/{sandbox_id:segment}/metrics", tags=["observations"])
    async def get_metrics(sandbox_id: str, start: UnixTime = None, end: UnixTime = None) -> list[Metric]:
        """Show readings between two times in seconds since 1970, ascending."""
        sandbox = visible_sandbox(service, sandbox_id)
        if start is not None and end is not None and start > end:
            raise InvalidRequestError("start must not be after end")
        samples = service.metrics(sandbox.id, unix_time("start", start), unix_time("end", end))
        return [metric_view(sample) for sample in samples]

    @app.get("/sandboxes/{sandbox_id:segment}/logs", tags=["observations"])
    async def get_logs(sandbox_id: str, start: UnixTime = None, limit: LogLimit = MOST_LOG_ENTRIES) -> Logs:
        """Show log entries from a time in milliseconds since 1970, oldest first."""
        sandbox = visible_sandbox(service, sandbox_id)
        since = unix_time("start", start, milliseconds=True)
        entries = await service.logs(sandbox.id, start=since, limit=limit) if limit else []
        return Logs(
            logs=[log_line_view(entry) for entry in entries], log_entries=[log_view(entry) for entry in entries]
        )

    @app.get("/v2/sandboxes/{sandbox_id:segment}/logs", tags=["observations"])
    async def get_log_page(
        sandbox_id: str,
        cursor: UnixTime = None,
        limit: LogLimit = MOST_LOG_ENTRIES,
        direction: Direction = Direction.BACKWARD,
        level: Level | None = None,
        search: Annotated[str | None, Query(max_length=LONGEST_SEARCH)] = None,
    ) -> LogPage:
        """Show log entries before (newest first) or after (oldest first) a time in milliseconds since 1970."""
        sandbox = visible_sandbox(service, sandbox_id)
        at = unix_time("cursor", cursor, milliseconds=True)
        backward = direction is Direction.BACKWARD
        entries = (
            await service.logs(
                sandbox.id,
                start=None if backward else at,
                end=at if backward else None,
                limit=limit,
                level=level.value if level is not None else None,
                backward=backward,
                search=search or None,
            )
            if limit
            else []
        )
        return LogPage(logs=[log_view(entry) for entry in entries])
