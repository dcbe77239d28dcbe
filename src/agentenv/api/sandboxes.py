"""Routes of a sandbox's life: create, connect, list, info, kill, timeouts, pause (E2B contract §2.2.1-2.2.9).

Each route reads its input, calls the service once, and shows the result.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Header, Query, Request, Response

from agentenv.api.disconnect import while_client_waits
from agentenv.api.listing import (
    Filters,
    list_page,
    parse_metadata_filter,
    parse_states,
    parse_template_filter,
    shown_state,
)
from agentenv.api.models import (
    ConnectBody,
    CreateBody,
    LegacyConnectBody,
    ListedSandbox,
    PauseBody,
    RefreshBody,
    ResumeBody,
    SandboxHandle,
    SandboxInfo,
    TimeoutBody,
)
from agentenv.api.paging import Order
from agentenv.api.params import check_timeout, parse_time
from agentenv.api.requests import create_request
from agentenv.api.services import SandboxService
from agentenv.api.views import handle_view, info_view, list_view
from agentenv.config import SandboxSettings
from agentenv.errors import SandboxNotFoundError
from agentenv.ids import parse_sandbox_id
from agentenv.orchestrator.model import Sandbox

LEGACY_TIMEOUT_S = 15
"""What the older create route gives a sandbox, and the least that a refresh gives."""


def visible_sandbox(service: SandboxService, text: str) -> Sandbox:
    """Find the sandbox of an id as a client sent it.

    Raises:
        InvalidRequestError: the text is no id.
        SandboxNotFoundError: there is none that clients may see.
    """
    sandbox = service.get(parse_sandbox_id(text))
    if shown_state(sandbox) is None:
        raise SandboxNotFoundError(sandbox.id)
    return sandbox


def add_sandbox_routes(app: FastAPI, service: SandboxService, limits: SandboxSettings, domain: str) -> None:
    """Add the routes to the application."""

    async def create(
        request: Request, body: CreateBody, default_timeout_s: int, idempotency_key: str | None
    ) -> SandboxHandle:
        wish = create_request(
            body,
            default_timeout_s=default_timeout_s,
            max_timeout_s=limits.max_timeout_s,
            idempotency_key=idempotency_key,
        )
        return handle_view(await while_client_waits(request, service.create(wish)), domain)

    async def connect(sandbox_id: str, timeout_s: int, memory: bool | None, response: Response) -> SandboxHandle:
        check_timeout(timeout_s, limits.max_timeout_s)
        sandbox, resumed = await service.connect(parse_sandbox_id(sandbox_id), timeout_s, memory=memory)
        response.status_code = 201 if resumed else 200
        return handle_view(sandbox, domain)

    @app.post("/v2/sandboxes", status_code=201, response_model_exclude_none=True, tags=["sandboxes"])
    async def create_sandbox(
        request: Request, body: CreateBody, idempotency_key: Annotated[str | None, Header()] = None
    ) -> SandboxHandle:
        """Start a sandbox; when the answer comes, its agent is ready."""
        return await create(request, body, limits.default_timeout_s, idempotency_key)

    @app.post("/sandboxes", status_code=201, response_model_exclude_none=True, tags=["sandboxes"])
    async def create_sandbox_legacy(
        request: Request, body: CreateBody, idempotency_key: Annotated[str | None, Header()] = None
    ) -> SandboxHandle:
        """As the v2 route, for older SDKs; without a timeout the sandbox lives 15 seconds."""
        return await create(request, body, LEGACY_TIMEOUT_S, idempotency_key)

    @app.post("/v2/sandboxes/{sandbox_id:segment}/connect", response_model_exclude_none=True, tags=["sandboxes"])
    async def connect_sandbox(sandbox_id: str, response: Response, body: ConnectBody | None = None) -> SandboxHandle:
        """Extend a running sandbox (200) or resume a paused one (201). Never shortens its life."""
        body = body or ConnectBody()
        timeout_s = limits.default_timeout_s if body.timeout is None else body.timeout
        return await connect(sandbox_id, timeout_s, body.memory, response)

    @app.post("/sandboxes/{sandbox_id:segment}/connect", response_model_exclude_none=True, tags=["sandboxes"])
    async def connect_sandbox_legacy(sandbox_id: str, response: Response, body: LegacyConnectBody) -> SandboxHandle:
        """As the v2 route, for older SDKs."""
        return await connect(sandbox_id, body.timeout, body.memory, response)

    @app.get("/v2/sandboxes", response_model_exclude_none=True, tags=["sandboxes"])
    async def list_sandboxes(
        response: Response,
        metadata: str | None = None,
        state: Annotated[list[str] | None, Query(description="running, paused, or both joined by a comma")] = None,
        order: Order = Order.DESC,
        started_after: Annotated[str | None, Query(alias="startedAfter")] = None,
        template: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 100,
        next_token: Annotated[str | None, Query(alias="nextToken")] = None,
    ) -> list[ListedSandbox]:
        """List sandboxes, newest first. The header X-Next-Token, when present, leads to the next page."""
        filters = Filters(
            states=parse_states(state or []),
            metadata=parse_metadata_filter(metadata),
            template=parse_template_filter(template),
            started_after=parse_time("startedAfter", started_after),
        )
        page = list_page(service.list(), filters, order=order, limit=limit, token=next_token or None)
        if page.next_token is not None:
            response.headers["X-Next-Token"] = page.next_token
        if page.total_running is not None:
            response.headers["X-Total-Running"] = str(page.total_running)
        return [list_view(sandbox) for sandbox in page.items]

    @app.get("/sandboxes", response_model_exclude_none=True, tags=["sandboxes"])
    async def list_running_sandboxes(response: Response, metadata: str | None = None) -> list[ListedSandbox]:
        """List running sandboxes, all at once."""
        filters = Filters(states=frozenset({"running"}), metadata=parse_metadata_filter(metadata))
        page = list_page(service.list(), filters)
        response.headers["X-Total-Running"] = str(len(page.items))
        return [list_view(sandbox) for sandbox in page.items]

    @app.get("/sandboxes/{sandbox_id:segment}", response_model_exclude_none=True, tags=["sandboxes"])
    async def get_sandbox(sandbox_id: str) -> SandboxInfo:
        """Show one sandbox."""
        return info_view(visible_sandbox(service, sandbox_id), domain)

    @app.delete("/sandboxes/{sandbox_id:segment}", status_code=204, tags=["sandboxes"])
    async def kill_sandbox(sandbox_id: str) -> None:
        """End a sandbox and remove all that belongs to it."""
        await service.kill(parse_sandbox_id(sandbox_id))

    @app.post("/sandboxes/{sandbox_id:segment}/pause", status_code=204, tags=["sandboxes"])
    async def pause_sandbox(sandbox_id: str, body: PauseBody | None = None) -> None:
        """Save a sandbox and end its VM. It costs disk space only, until it is connected to, or killed."""
        body = body or PauseBody()
        await service.pause(
            parse_sandbox_id(sandbox_id),
            memory=body.memory is not False,
            require_healthy=body.require_healthy_guest is True,
        )

    @app.post(
        "/sandboxes/{sandbox_id:segment}/resume",
        status_code=201,
        response_model_exclude_none=True,
        tags=["sandboxes"],
    )
    async def resume_sandbox(sandbox_id: str, body: ResumeBody | None = None) -> SandboxHandle:
        """Resume a paused sandbox, for older SDKs; one that runs is refused (409)."""
        body = body or ResumeBody()
        timeout_s = LEGACY_TIMEOUT_S if body.timeout is None else body.timeout
        check_timeout(timeout_s, limits.max_timeout_s)
        sandbox = await service.resume(
            parse_sandbox_id(sandbox_id), timeout_s, auto_pause=body.auto_pause, memory=body.memory
        )
        return handle_view(sandbox, domain)

    @app.post("/sandboxes/{sandbox_id:segment}/timeout", status_code=204, tags=["sandboxes"])
    async def set_sandbox_timeout(sandbox_id: str, body: TimeoutBody) -> None:
        """Let a sandbox expire so many seconds from now, sooner or later than before; zero or less: now."""
        await service.set_timeout(parse_sandbox_id(sandbox_id), body.timeout)

    @app.post("/sandboxes/{sandbox_id:segment}/refreshes", status_code=204, tags=["sandboxes"])
    async def refresh_sandbox(sandbox_id: str, body: RefreshBody | None = None) -> None:
        """Let a sandbox live at least so many seconds from now (at least 15)."""
        duration_s = body.duration if body is not None and body.duration is not None else LEGACY_TIMEOUT_S
        duration_s = min(max(duration_s, LEGACY_TIMEOUT_S), limits.max_timeout_s)
        await service.refresh(parse_sandbox_id(sandbox_id), duration_s)
