"""The templates of this node: a `template.json` each, which says what it is and of which layers its disk is made.

The layers are in the layer store, where the template is their owner. Finding, listing and registering only; building
templates is not done here. Names from clients are looked up, never
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
from typing import Any, Protocol

import structlog

from agentenv import durable
from agentenv.config import HomePaths, SandboxSettings, Settings
from agentenv.errors import AgentEnvError, AssetError, InvalidRequestError, TemplateNotFoundError
from agentenv.storage.layers import LayerStore

MANIFEST = "template.json"
LOCK = ".lock"
"""Held in a template's directory while it is made."""
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
    layers: tuple[str, ...]
    """Digests of the layers of its disk, bottom first; the layer store has them."""
    vcpus: int
    memory_mib: int
    disk_mib: int
    default_user: str = "user"
    default_workdir: str | None = None
    """None: the user's home."""
    env: Mapping[str, str] = field(default_factory=dict)
    source: str | None = None
    """Digest of the recipe that it was made by; None when no recipe made it."""
    snapshot_id: str | None = None
    """The snapshot that sandboxes of it go on from; None: they boot."""
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


def owner_of(template_id: str) -> str:
    """The name under which a template owns layers in the layer store."""
    return f"template:{template_id}"


def template_from(content: Mapping[str, Any], defaults: SandboxSettings) -> Template:
    """Read what a manifest says.

    Raises:
        KeyError, TypeError, ValueError: it is no manifest of this version.
    """
    if "layers" not in content and "rootfs" in content:
        raise ValueError("it is of an older form; run `make setup`")
    return Template(
        template_id=content["template_id"],
        names=tuple(content["names"]),
        layers=tuple(content["layers"]),
        vcpus=content.get("vcpus") or defaults.vcpus,
        memory_mib=content.get("memory_mib") or defaults.memory_mib,
        disk_mib=content["disk_mib"],
        default_user=content.get("default_user", "user"),
        default_workdir=content.get("default_workdir"),
        env=content.get("env", {}),
        source=content.get("source"),
        created_at=datetime.fromisoformat(content["created_at"]),
    )


class SnapshotTemplates(Protocol):
    """Snapshots that are templates. `templates.snapshots.SnapshotCatalog` is the real one."""

    async def resolve(self, reference: str) -> Template:
        """Find one, or raise `TemplateNotFoundError`."""

    async def templates(self) -> tuple[Template, ...]:
        """One for each template id, by id."""


class TemplateStore:
    """Templates below `$AENV_HOME/templates`, and snapshots. Safe to use while another process registers one.

    Args:
        paths, settings: of the node.
        layers: where the templates' layers are.
        snapshots: those that are templates, too; None: none are.
    """

    def __init__(
        self, paths: HomePaths, settings: Settings, layers: LayerStore, snapshots: SnapshotTemplates | None = None
    ) -> None:
        self._directory = paths.templates
        self._settings = settings
        self._layers = layers
        self._snapshots = snapshots

    async def resolve(self, reference: str) -> Template:
        """Find a template by id or `[namespace/]alias[:tag]`.

        A node without teams has one namespace, so any is accepted. Only snapshots have tags but `default`, and builds.

        Raises:
            InvalidRequestError: the reference is malformed.
            TemplateNotFoundError: nothing has that name or tag.
            SnapshotError: it is the id of a snapshot that is damaged.
        """
        wanted = parse_reference(reference)
        if wanted.tag is None:
            for template in await asyncio.to_thread(self._list):
                if wanted.name == template.template_id or wanted.name in template.names:
                    return template
        if self._snapshots is not None:
            return await self._snapshots.resolve(reference)
        raise TemplateNotFoundError(reference.strip()[:200])

    async def list(self) -> tuple[Template, ...]:
        """All usable templates, by id, snapshots after the others. Unreadable ones are logged and left out."""
        own = await asyncio.to_thread(self._list)
        return own if self._snapshots is None else (*own, *await self._snapshots.templates())

    async def taken(self) -> frozenset[str]:
        """Ids and names of the templates that are no snapshots: no snapshot may be called so."""
        return await asyncio.to_thread(self._taken)

    def find(self, template_id: str) -> Template | None:
        """The template of exactly this id, read at once (blocking)."""
        return next((template for template in self._list() if template.template_id == template_id), None)

    def register(self, template: Template, *, follow_defaults: bool = False) -> None:
        """Write a template down, replacing the one of the same id, and make it the owner of its layers.

        Whatever interrupts it, the template that is written down keeps its layers.

        Args:
            template: what to write.
            follow_defaults: do not fix vCPUs and memory; sandboxes get what the settings say when they are created.

        Raises:
            AssetError: the id is malformed, it has no layers, or the disk refuses.
            LayerError: one of its layers is not in the layer store.
        """
        directory = self._directory / template.template_id
        if not _NAME.fullmatch(template.template_id) or not all(_NAME.fullmatch(name) for name in template.names):
            raise AssetError(f"template {template.template_id!r}: ids and names are made of a-z, 0-9, _ and -")
        if not template.layers:
            raise AssetError(f"template {template.template_id} has no layers")
        content = {
            "template_id": template.template_id,
            "names": list(template.names),
            "layers": list(template.layers),
            "source": template.source,
            "vcpus": None if follow_defaults else template.vcpus,
            "memory_mib": None if follow_defaults else template.memory_mib,
            "disk_mib": template.disk_mib,
            "default_user": template.default_user,
            "default_workdir": template.default_workdir,
            "env": dict(template.env),
            "created_at": template.created_at.isoformat(),
        }
        owner = owner_of(template.template_id)
        before = self._layers.references(owner)
        self._layers.set_references(owner, list(dict.fromkeys([*before, *template.layers])))
        try:
            directory.mkdir(parents=True, exist_ok=True)
            durable.write_json(directory / MANIFEST, content)
        except OSError as error:
            raise AssetError(f"template {template.template_id} cannot be written: {error.strerror}") from error
        self._layers.set_references(owner, template.layers)

    def _taken(self) -> frozenset[str]:
        # Those that cannot be read have at least the name of their directory.
        directories = (manifest.parent.name for manifest in self._directory.glob(f"*/{MANIFEST}"))
        names = (name for template in self._list() for name in (template.template_id, *template.names))
        return frozenset((*directories, *names))

    def _list(self) -> tuple[Template, ...]:
        templates = []
        for manifest in sorted(self._directory.glob(f"*/{MANIFEST}")):
            try:
                templates.append(self._read(manifest))
            except (AgentEnvError, OSError, ValueError, KeyError, TypeError) as error:
                _log.warning("template_unreadable", path=str(manifest), error=str(error))
        return tuple(templates)

    def _read(self, manifest: Path) -> Template:
        template = template_from(json.loads(manifest.read_text()), self._settings.sandbox)
        for digest in template.layers:
            self._layers.get(digest)
        return template
