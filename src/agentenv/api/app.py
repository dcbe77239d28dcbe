"""Puts the control plane together: one ASGI application for everything that is not sandbox traffic."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import ASGIApp

from agentenv import __version__
from agentenv.api.body import json_route
from agentenv.api.control_plane import ControlPlane
from agentenv.api.errors import add_error_handlers
from agentenv.api.models import ErrorBody
from agentenv.api.observations import add_observation_routes
from agentenv.api.sandboxes import add_sandbox_routes
from agentenv.api.services import NodeService
from agentenv.api.snapshots import add_snapshot_routes
from agentenv.api.space import add_space_routes
from agentenv.api.templates import TemplateService, add_template_deletion, add_template_routes
from agentenv.api.unsupported import add_unsupported_routes
from agentenv.config import Settings

AGENT_VERSION = "0.6.7"
"""The version of the agent contract that `crates/guest` implements; SDKs switch features by it (E2B contract §1.6)."""


def create_app(
    service: NodeService,
    templates: TemplateService,
    settings: Settings,
    api_key: str,
    *,
    domain: str,
    agent_version: str = AGENT_VERSION,
) -> ASGIApp:
    """Make the control plane (E2B contract §2).

    Args:
        service: the node, normally the orchestrator.
        templates: what sandboxes are created from.
        settings: limits of bodies and timeouts.
        api_key: the key that every call but `/health` and the API's description needs.
        domain: what clients are told as `domain`: sandboxes are at `{port}-{id}.{domain}`.
        agent_version: what the guest agents report.
    """
    app = FastAPI(
        title="AgentENV",
        summary="Sandboxes for AI agents, compatible with the E2B API",
        version=__version__,
        redirect_slashes=False,
        redoc_url=None,
        swagger_ui_oauth2_redirect_url=None,
        responses={"default": {"model": ErrorBody, "description": "Every answer that is not a success"}},
    )
    app.router.route_class = json_route(settings.api.max_body_bytes)
    add_error_handlers(app)

    @app.api_route("/health", methods=["GET", "HEAD"], tags=["health"], include_in_schema=False)
    async def health() -> dict[str, str]:
        return {"status": "ok", "version": __version__}

    add_observation_routes(app, service)
    add_sandbox_routes(app, service, settings.sandbox, domain)
    add_snapshot_routes(app, service, settings.sandbox, domain)
    add_template_routes(app, templates, service, agent_version)
    add_space_routes(app, service)
    add_unsupported_routes(app, service)
    add_template_deletion(app, templates, service)
    return ControlPlane(app, api_key)
