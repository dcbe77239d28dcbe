"""Routes that show the templates of this node (E2B contract §2.3.2). Building and managing them is not offered yet.

Every template here is one that the node brought along, which the API calls a default template: its usage counts are
zero and it has no creator.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from agentenv.templates.store import Template

_BUILD_NAMESPACE = uuid.UUID("6f0d7d6e-8b1c-4b7e-9a53-0c9f6d1e2a44")


class TemplateService(Protocol):
    """The templates of this node."""

    async def resolve(self, reference: str) -> Template:
        """Find a template by id or `[namespace/]alias[:tag]`, or raise `TemplateNotFoundError`."""
        ...

    async def list(self) -> Sequence[Template]:
        """Return all templates."""
        ...


class _Shown(BaseModel):
    model_config = ConfigDict(populate_by_name=True, frozen=True)


class TemplateView(_Shown):
    """A template."""

    template_id: str = Field(alias="templateID")
    build_id: uuid.UUID = Field(alias="buildID")
    cpu_count: int = Field(alias="cpuCount")
    memory_mb: int = Field(alias="memoryMB", description="MiB")
    disk_size_mb: int = Field(alias="diskSizeMB", description="MiB")
    public: bool = False
    aliases: list[str]
    names: list[str]
    created_at: datetime = Field(alias="createdAt")
    updated_at: datetime = Field(alias="updatedAt")
    created_by: None = Field(default=None, alias="createdBy")
    last_spawned_at: None = Field(default=None, alias="lastSpawnedAt")
    spawn_count: int = Field(default=0, alias="spawnCount")
    build_count: int = Field(default=0, alias="buildCount")
    envd_version: str = Field(alias="envdVersion")
    build_status: str = Field(default="ready", alias="buildStatus")
    is_default: bool = Field(default=True, alias="isDefault")


class BuildView(_Shown):
    """How a template came to be."""

    build_id: uuid.UUID = Field(alias="buildID")
    status: str = "ready"
    created_at: datetime = Field(alias="createdAt")
    updated_at: datetime = Field(alias="updatedAt")
    finished_at: datetime = Field(alias="finishedAt")
    cpu_count: int = Field(alias="cpuCount")
    memory_mb: int = Field(alias="memoryMB", description="MiB")
    disk_size_mb: int = Field(alias="diskSizeMB", description="MiB")
    envd_version: str = Field(alias="envdVersion")


class TemplateDetails(TemplateView):
    """A template with its builds."""

    builds: list[BuildView]


class AliasView(_Shown):
    """What an alias stands for."""

    template_id: str = Field(alias="templateID")
    public: bool = False


def add_template_routes(app: FastAPI, templates: TemplateService, agent_version: str) -> None:
    """Add the routes to the application.

    Args:
        app: where to.
        templates: the node's templates.
        agent_version: what the guest agent of every template reports.
    """

    @app.get("/templates", tags=["templates"])
    async def list_templates() -> list[TemplateView]:
        """List all templates."""
        return [_view(template, agent_version) for template in await templates.list()]

    @app.get("/templates/aliases/{alias:segment}", tags=["templates"])
    async def get_alias(alias: str) -> AliasView:
        """Say which template an alias stands for."""
        return AliasView(template_id=(await templates.resolve(alias)).template_id)

    @app.get("/templates/{template_id:segment}", tags=["templates"])
    async def get_template(template_id: str) -> TemplateDetails:
        """Show one template and its builds."""
        template = await templates.resolve(template_id)
        view = _view(template, agent_version)
        build = BuildView(
            build_id=view.build_id,
            created_at=template.created_at,
            updated_at=template.created_at,
            finished_at=template.created_at,
            cpu_count=template.vcpus,
            memory_mb=template.memory_mib,
            disk_size_mb=template.disk_mib,
            envd_version=agent_version,
        )
        return TemplateDetails(**view.model_dump(), builds=[build])


def _view(template: Template, agent_version: str) -> TemplateView:
    # Files have no build id of their own: the same image has always the same one, another image another.
    build_id = uuid.uuid5(_BUILD_NAMESPACE, f"{template.template_id} {template.created_at.isoformat()}")
    return TemplateView(
        template_id=template.template_id,
        build_id=build_id,
        cpu_count=template.vcpus,
        memory_mb=template.memory_mib,
        disk_size_mb=template.disk_mib,
        aliases=list(template.names),
        names=list(template.names),
        created_at=template.created_at,
        updated_at=template.created_at,
        envd_version=agent_version,
    )
