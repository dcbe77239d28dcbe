"""Routes that show the templates of this node (E2B contract §2.3.2), snapshots among them, and delete snapshots.

Building templates is not offered yet. Those that the node brought along are what the API calls default templates.
Snapshots that took the same name one after the other are builds of one template. No usage is counted, and nobody is
named as the creator.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Protocol

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from agentenv.api.params import snapshot_reference
from agentenv.api.services import SnapshotService
from agentenv.errors import NotFoundError, NotImplementedYetError, SnapshotNotFoundError
from agentenv.orchestrator.model import SnapshotInfo
from agentenv.templates.store import Template

_CREATED_AT = attrgetter("created_at")
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


def add_template_routes(
    app: FastAPI, templates: TemplateService, snapshots: SnapshotService, agent_version: str
) -> None:
    """Add the routes to the application.

    Args:
        app: where to.
        templates: the node's templates.
        snapshots: those that are templates, too.
        agent_version: what the guest agent of every template reports.
    """

    @app.get("/templates", tags=["templates"])
    async def list_templates() -> list[TemplateView]:
        """List all templates, snapshots among them."""
        builds = _by_template(await snapshots.snapshots())
        return [
            _view(template, builds.get(template.template_id, ()), agent_version) for template in await templates.list()
        ]

    @app.get("/templates/aliases/{alias:segment}", tags=["templates"])
    async def get_alias(alias: str) -> AliasView:
        """Say which template an alias stands for."""
        return AliasView(template_id=(await templates.resolve(alias)).template_id)

    @app.get("/templates/{template_id:segment}", tags=["templates"])
    async def get_template(template_id: str) -> TemplateDetails:
        """Show one template and its builds, newest first."""
        template = await templates.resolve(template_id)
        builds = _by_template(await snapshots.snapshots()).get(template.template_id, [])
        view = _view(template, builds, agent_version)
        shown = [_build_view(uuid.UUID(build.id), build, build.agent_version) for build in builds]
        shown = shown or [_build_view(_build_id(template), template, agent_version)]
        return TemplateDetails(**view.model_dump(), builds=shown)


def add_template_deletion(app: FastAPI, templates: TemplateService, snapshots: SnapshotService) -> None:
    """Add the route to the application. Must come after `/templates/tags`, which it would take for an id."""

    @app.delete("/templates/{template_id:segment}", status_code=204, tags=["templates"])
    async def delete_template(template_id: str) -> None:
        """Delete a snapshot. Other templates cannot be deleted yet."""
        reference = snapshot_reference(template_id)
        try:
            await snapshots.delete_snapshot(reference)
        except NotFoundError:
            try:
                await templates.resolve(reference)
            except NotFoundError:
                raise SnapshotNotFoundError(reference[:200]) from None
            raise NotImplementedYetError(
                f"'{reference[:200]}' is a template, not a snapshot, and cannot be deleted: managing templates is not "
                "supported by this version of AgentENV yet"
            ) from None


def _by_template(snapshots: Iterable[SnapshotInfo]) -> dict[str, list[SnapshotInfo]]:
    """The builds of each template that is made of snapshots, newest first."""
    found: dict[str, list[SnapshotInfo]] = {}
    for snapshot in sorted(snapshots, key=_CREATED_AT, reverse=True):
        found.setdefault(snapshot.template_id, []).append(snapshot)
    return found


def _build_id(template: Template) -> uuid.UUID:
    if template.snapshot_id is not None:
        return uuid.UUID(template.snapshot_id)
    # Files have no build id of their own: the same image has always the same one, another image another.
    return uuid.uuid5(_BUILD_NAMESPACE, f"{template.template_id} {template.created_at.isoformat()}")


def _build_view(build_id: uuid.UUID, made: Template | SnapshotInfo, agent_version: str) -> BuildView:
    return BuildView(
        build_id=build_id,
        created_at=made.created_at,
        updated_at=made.created_at,
        finished_at=made.created_at,
        cpu_count=made.vcpus,
        memory_mb=made.memory_mib,
        disk_size_mb=made.disk_mib,
        envd_version=agent_version,
    )


def _view(template: Template, builds: Sequence[SnapshotInfo], agent_version: str) -> TemplateView:
    names = [name for build in builds for name in build.names]
    return TemplateView(
        template_id=template.template_id,
        build_id=_build_id(template),
        cpu_count=template.vcpus,
        memory_mb=template.memory_mib,
        disk_size_mb=template.disk_mib,
        aliases=list(template.names),
        names=names if builds else list(template.names),
        created_at=min((template.created_at, *(build.created_at for build in builds))),
        updated_at=max((template.created_at, *(build.created_at for build in builds))),
        build_count=len(builds),
        envd_version=agent_version,
        is_default=template.snapshot_id is None,
    )
