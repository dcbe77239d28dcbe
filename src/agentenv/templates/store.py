"""The templates of this node: one directory each, with a `template.json` that says what it is.

Finding, listing and registering only; building templates is not done here. Names from clients are looked up, never
joined to paths.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from agentenv import durable
from agentenv.config import HomePaths, Settings
from agentenv.errors import AssetError, InvalidRequestError, TemplateNotFoundError

MANIFEST = "template.json"
DEFAULT_TAG = "default"

_log = structlog.get_logger(__name__)
_NAME = re.compile(r"[a-z0-9_-]{1,128}")
_TAG = re.compile(r"[a-z0-9_.-]{1,128}")


@dataclass(frozen=True, slots=True)
class Template:
    """What a sandbox is created from."""

    template_id: str
    names: tuple[str, ...]
    """Aliases, the main one first."""
    rootfs: Path
    """Raw ext4 image, never written again once it is registered."""
    vcpus: int
    memory_mib: int
    disk_mib: int
    default_user: str = "user"
    default_workdir: str | None = None
    """None: the user's home."""
    env: Mapping[str, str] = field(default_factory=dict)
    created_at: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass(frozen=True, slots=True)
class TemplateReference:
    """A parsed `[namespace/]alias[:tag]`, or a template id."""

    name: str
    namespace: str | None = None
    tag: str | None = None
    """None for no tag and for `default`, which mean the same."""


def parse_reference(text: str) -> TemplateReference:
    """Normalise (trim, lowercase) and split a template reference (E2B contract, 2.1.5).

    Raises:
        InvalidRequestError: the text cannot name a template.
    """
    namespace, slash, rest = text.strip().lower().rpartition("/")
    name, colon, tag = rest.partition(":")
    if not _NAME.fullmatch(name) or (slash and not _NAME.fullmatch(namespace)) or (colon and not _TAG.fullmatch(tag)):
        raise InvalidRequestError(f"invalid template reference: {text[:200]!r}")
    return TemplateReference(name, namespace or None, None if tag in ("", DEFAULT_TAG) else tag)


class TemplateStore:
    """Templates below `$AENV_HOME/templates`. Safe to use while another process registers one."""

    def __init__(self, paths: HomePaths, settings: Settings) -> None:
        self._directory = paths.templates
        self._settings = settings

    async def resolve(self, reference: str) -> Template:
        """Find a template by id or `[namespace/]alias[:tag]`.

        A node without teams has one namespace, so any is accepted; it has no tags but `default`.

        Raises:
            InvalidRequestError: the reference is malformed.
            TemplateNotFoundError: nothing has that name or tag.
        """
        wanted = parse_reference(reference)
        if wanted.tag is None:
            for template in await self.list():
                if wanted.name == template.template_id or wanted.name in template.names:
                    return template
        raise TemplateNotFoundError(reference.strip()[:200])

    async def list(self) -> tuple[Template, ...]:
        """All usable templates, by id. Unreadable ones are logged and left out."""
        return await asyncio.to_thread(self._list)

    def find(self, template_id: str) -> Template | None:
        """The template of exactly this id, read at once (blocking)."""
        return next((template for template in self._list() if template.template_id == template_id), None)

    def register(self, template: Template, *, follow_defaults: bool = False) -> None:
        """Write a template down, replacing the one of the same id. Its image must be inside of its directory.

        Args:
            template: what to write.
            follow_defaults: do not fix vCPUs and memory; sandboxes get what the settings say when they are created.

        Raises:
            AssetError: the image is elsewhere or missing, the id is malformed, or the disk refuses.
        """
        directory = self._directory / template.template_id
        if not _NAME.fullmatch(template.template_id) or not all(_NAME.fullmatch(name) for name in template.names):
            raise AssetError(f"template {template.template_id!r}: ids and names are made of a-z, 0-9, _ and -")
        if template.rootfs.parent != directory or not template.rootfs.is_file():
            raise AssetError(f"template {template.template_id}: there is no image {template.rootfs} in {directory}")
        content = {
            "template_id": template.template_id,
            "names": list(template.names),
            "rootfs": template.rootfs.name,
            "vcpus": None if follow_defaults else template.vcpus,
            "memory_mib": None if follow_defaults else template.memory_mib,
            "disk_mib": template.disk_mib,
            "default_user": template.default_user,
            "default_workdir": template.default_workdir,
            "env": dict(template.env),
            "created_at": template.created_at.isoformat(),
        }
        try:
            durable.write_json(directory / MANIFEST, content)
        except OSError as error:
            raise AssetError(f"template {template.template_id} cannot be written: {error.strerror}") from error

    def _list(self) -> tuple[Template, ...]:
        templates = []
        for manifest in sorted(self._directory.glob(f"*/{MANIFEST}")):
            try:
                templates.append(self._read(manifest))
            except (OSError, ValueError, KeyError, TypeError) as error:
                _log.warning("template_unreadable", path=str(manifest), error=str(error))
        return tuple(templates)

    def _read(self, manifest: Path) -> Template:
        content: dict[str, Any] = json.loads(manifest.read_text())
        rootfs = manifest.parent / Path(content["rootfs"]).name
        if not rootfs.is_file():
            raise ValueError(f"the image {rootfs.name} is missing; run `make setup`")
        sandbox = self._settings.sandbox
        return Template(
            template_id=content["template_id"],
            names=tuple(content["names"]),
            rootfs=rootfs,
            vcpus=content.get("vcpus") or sandbox.vcpus,
            memory_mib=content.get("memory_mib") or sandbox.memory_mib,
            disk_mib=content["disk_mib"],
            default_user=content.get("default_user", "user"),
            default_workdir=content.get("default_workdir"),
            env=content.get("env", {}),
            created_at=datetime.fromisoformat(content["created_at"]),
        )
