"""Routes about the node's disk space: what takes it up, and giving back what nobody uses. Our own, not E2B's."""

from __future__ import annotations

from fastapi import FastAPI

from agentenv.api.models import CollectedView, SpaceView
from agentenv.api.services import SpaceService
from agentenv.api.views import collected_view, space_view


def add_space_routes(app: FastAPI, service: SpaceService) -> None:
    """Add the routes to the application."""

    @app.get("/node/space", response_model_exclude_none=True, tags=["node"])
    async def get_space() -> SpaceView:
        """Show what takes up the disk of the node."""
        return space_view(await service.space())

    @app.post("/node/space/collect", tags=["node"])
    async def collect_space() -> CollectedView:
        """Remove layers that nothing uses. Safe at any time."""
        return collected_view(await service.collect_garbage())
