"""Routes of snapshots, forks and rolling back (E2B contract §2.2.11, §2.2.12; rolling back and the tree are our own).

Each route reads its input, calls the service once, and shows the result. Deleting a snapshot is in `templates`: clients
delete it as the template that it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from operator import attrgetter
from typing import Annotated, Protocol

from fastapi import FastAPI, Query, Request, Response
from starlette.responses import StreamingResponse

from agentenv.api.disconnect import while_client_waits
from agentenv.api.models import (
    ForkBody,
    ForkResult,
    RollbackBody,
    SandboxHandle,
    SnapshotBody,
    SnapshotNodeView,
    SnapshotView,
)
from agentenv.api.paging import page_of
from agentenv.api.params import check_timeout, snapshot_name, snapshot_reference
from agentenv.api.services import SnapshotService
from agentenv.api.views import fork_view, handle_view, snapshot_view, tree_view
from agentenv.config import SandboxSettings
from agentenv.errors import AgentEnvError, InvalidRequestError
from agentenv.ids import parse_sandbox_id
from agentenv.orchestrator.model import Sandbox

JSON_LINES = "application/x-ndjson"

_CREATED_AT = attrgetter("created_at")
_ID = attrgetter("id")

SandboxFilter = Annotated[str | None, Query(alias="sandboxID", description="Only what was taken of this sandbox")]


def add_snapshot_routes(app: FastAPI, service: SnapshotService, limits: SandboxSettings, domain: str) -> None:
    """Add the routes to the application."""

    @app.post(
        "/sandboxes/{sandbox_id:segment}/snapshots",
        status_code=201,
        response_model_exclude_none=True,
        tags=["snapshots"],
    )
    async def take_snapshot(sandbox_id: str, body: SnapshotBody | None = None) -> SnapshotView:
        """Take a snapshot of a running sandbox, which goes on. `snapshotID` can be created from as any template."""
        body = body or SnapshotBody()
        name = None if body.name is None else snapshot_name(body.name)
        taken = await service.snapshot(parse_sandbox_id(sandbox_id), name=name, memory=body.memory is not False)
        return snapshot_view(taken)

    @app.post(
        "/sandboxes/{sandbox_id:segment}/fork",
        status_code=201,
        response_model=list[ForkResult],
        responses={
            201: {"content": {JSON_LINES: {"schema": {"type": "string", "description": "A ForkResult a line"}}}}
        },
        response_model_exclude_none=True,
        tags=["snapshots"],
    )
    async def fork_sandbox(
        request: Request, sandbox_id: str, body: ForkBody | None = None
    ) -> Response | list[ForkResult]:
        """Make copies of a running sandbox, with its processes. It goes on; each copy starts or fails by itself.

        With `Accept: application/x-ndjson` each result comes as a line of its own as soon as it is known.
        """
        body = body or ForkBody()
        timeout_s = limits.default_timeout_s if body.timeout is None else body.timeout
        check_timeout(timeout_s, limits.max_timeout_s)
        count = 1 if body.count is None else body.count
        fork = partial(service.fork, parse_sandbox_id(sandbox_id), count=count, timeout_s=timeout_s)
        if JSON_LINES in request.headers.get("accept", ""):
            return await _as_they_come(request, fork, count, domain)
        return [fork_view(result, domain) for result in await while_client_waits(request, fork())]

    @app.post("/sandboxes/{sandbox_id:segment}/rollback", response_model_exclude_none=True, tags=["snapshots"])
    async def roll_back_sandbox(sandbox_id: str, body: RollbackBody) -> SandboxHandle:
        """Put a running sandbox back to a snapshot that was taken of it. Id, tokens and time to live stay."""
        if not body.snapshot_id.strip():
            raise InvalidRequestError("snapshotID is empty; it names a snapshot that was taken of this sandbox")
        reference = snapshot_reference(body.snapshot_id)
        return handle_view(await service.rollback(parse_sandbox_id(sandbox_id), reference), domain)

    @app.get("/snapshots", response_model_exclude_none=True, tags=["snapshots"])
    async def list_snapshots(
        response: Response,
        sandbox_id: SandboxFilter = None,
        name: Annotated[str | None, Query(description="alias, alias:tag, or ID")] = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 100,
        next_token: Annotated[str | None, Query(alias="nextToken")] = None,
    ) -> list[SnapshotView]:
        """List snapshots, newest first. The header X-Next-Token, when present, leads to the next page."""
        found = await service.snapshots(
            sandbox_id=parse_sandbox_id(sandbox_id) if sandbox_id else None,
            name=snapshot_reference(name) if name else None,
        )
        page = page_of(found, _CREATED_AT, _ID, limit=limit, token=next_token or None)
        if page.next_token is not None:
            response.headers["X-Next-Token"] = page.next_token
        return [snapshot_view(snapshot) for snapshot in page.items]

    @app.get("/snapshots/tree", response_model_exclude_none=True, tags=["snapshots"])
    async def get_snapshot_tree(sandbox_id: SandboxFilter = None) -> list[SnapshotNodeView]:
        """Show which snapshot was taken after which, and what each costs; parents come before their children."""
        return tree_view(await service.snapshot_tree(parse_sandbox_id(sandbox_id) if sandbox_id else None))

    @app.get("/snapshots/{snapshot_id:segment}", response_model_exclude_none=True, tags=["snapshots"])
    async def get_snapshot(snapshot_id: str) -> SnapshotView:
        """Show one snapshot."""
        return snapshot_view(await service.find_snapshot(snapshot_reference(snapshot_id)))


class _Fork(Protocol):
    async def __call__(self, *, on_result: Callable[[Sandbox | AgentEnvError], None]) -> object: ...


async def _as_they_come(request: Request, fork: _Fork, count: int, domain: str) -> Response:
    results: asyncio.Queue[Sandbox | AgentEnvError | None] = asyncio.Queue()
    task = asyncio.create_task(fork(on_result=results.put_nowait))
    task.add_done_callback(lambda _: results.put_nowait(None))

    async def end() -> None:
        # Whoever has all results may leave at once; whoever leaves earlier does not know what was made.
        if known < count:
            task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # it was shown, or nobody is left to see it

    known = 0
    try:
        first = await while_client_waits(request, results.get())
        if first is None:
            task.result()
    except BaseException:
        await end()
        raise

    async def lines() -> AsyncIterator[bytes]:
        nonlocal known
        result = first
        try:
            while result is not None:
                known += 1
                yield fork_view(result, domain).model_dump_json(by_alias=True, exclude_none=True).encode() + b"\n"
                result = await while_client_waits(request, results.get())
            task.result()
        finally:
            await end()

    return StreamingResponse(lines(), status_code=201, media_type=JSON_LINES)
