"""Routes of the E2B API that clients call and this version does not offer: each says so with 501, none hangs or lies.

When a feature lands, its rows leave this table. What takes the rest of a path for an id comes after them.
"""

from __future__ import annotations

from typing import NoReturn

from fastapi import FastAPI, Request

from agentenv.api.sandboxes import visible_sandbox
from agentenv.api.services import SandboxService
from agentenv.errors import NotImplementedYetError

_FEATURES: dict[str, tuple[tuple[str, str], ...]] = {
    "changing the network of a running sandbox": (("PUT", "/sandboxes/{sandbox_id:segment}/network"),),
    "tags of templates": (
        ("POST", "/templates/tags"),
        ("DELETE", "/templates/tags"),
        ("GET", "/templates/{template_id:segment}/tags"),
        ("GET", "/templates/{template_id:segment}/tags/count"),
        ("GET", "/templates/{template_id:segment}/tags/exists"),
        ("GET", "/templates/{template_id:segment}/tags/groups"),
        ("GET", "/templates/{template_id:segment}/tags/{tag:segment}/assignments"),
    ),
    "building templates": (
        ("POST", "/v3/templates"),
        ("POST", "/v2/templates"),
        ("POST", "/templates"),
        ("POST", "/templates/{template_id:segment}"),
        ("POST", "/v2/templates/{template_id:segment}/builds/{build_id:segment}"),
        ("POST", "/templates/{template_id:segment}/builds/{build_id:segment}"),
        ("GET", "/templates/{template_id:segment}/builds/{build_id:segment}/status"),
        ("GET", "/templates/{template_id:segment}/builds/{build_id:segment}/logs"),
        ("GET", "/templates/{template_id:segment}/files/{files_hash:segment}"),
        ("PUT", "/templates/{template_id:segment}/files/{files_hash:segment}"),
    ),
    "managing templates": (
        ("GET", "/v2/templates"),
        ("PATCH", "/v2/templates/{template_id:segment}"),
        ("PATCH", "/templates/{template_id:segment}"),
        ("GET", "/default-templates"),
    ),
    "volumes": (
        ("GET", "/volumes"),
        ("POST", "/volumes"),
        ("GET", "/volumes/{volume_id:segment}"),
        ("DELETE", "/volumes/{volume_id:segment}"),
        ("GET", "/volumecontent/{volume_id:segment}/path"),
        ("PATCH", "/volumecontent/{volume_id:segment}/path"),
        ("DELETE", "/volumecontent/{volume_id:segment}/path"),
        ("GET", "/volumecontent/{volume_id:segment}/dir"),
        ("POST", "/volumecontent/{volume_id:segment}/dir"),
        ("GET", "/volumecontent/{volume_id:segment}/file"),
        ("PUT", "/volumecontent/{volume_id:segment}/file"),
    ),
    "secrets": (
        ("GET", "/secrets"),
        ("POST", "/secrets"),
        ("GET", "/secrets/{secret:segment}"),
        ("POST", "/secrets/{secret:segment}"),
        ("DELETE", "/secrets/{secret:segment}"),
    ),
    "teams": (("GET", "/teams"), ("GET", "/teams/{team_id:segment}/metrics")),
    "managing API keys": (
        ("GET", "/api-keys"),
        ("POST", "/api-keys"),
        ("PATCH", "/api-keys/{key_id:segment}"),
        ("DELETE", "/api-keys/{key_id:segment}"),
        ("POST", "/access-tokens"),
        ("DELETE", "/access-tokens/{token_id:segment}"),
    ),
    "nodes": (("GET", "/nodes"), ("GET", "/nodes/{node_id:segment}"), ("POST", "/nodes/{node_id:segment}")),
}


def add_unsupported_routes(app: FastAPI, service: SandboxService) -> None:
    """Add the routes to the application, after those that work, so that these win."""
    for feature, routes in _FEATURES.items():
        for method, path in routes:
            _add(app, service, feature, method, path)


def _add(app: FastAPI, service: SandboxService, feature: str, method: str, path: str) -> None:
    async def refuse(request: Request) -> NoReturn:
        sandbox_id = request.path_params.get("sandbox_id")
        if sandbox_id is not None:
            visible_sandbox(service, sandbox_id)
        raise NotImplementedYetError(f"{feature}: not supported by this version of AgentENV yet")

    app.router.add_route(path, refuse, methods=[method], include_in_schema=False)
