"""Named snapshots as templates: what each is called, which one a reference means, and under which name a new one goes.

A snapshot is a build of a template; those with the same alias are builds of one. Of several with the same name, the
latest has it. Hidden snapshots, which pauses make, are never seen here. Nothing is stored by this: all follows from the
manifests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from agentenv.config import MIB
from agentenv.snapshots.accounting import SnapshotNode
from agentenv.snapshots.manifest import SnapshotManifest
from agentenv.snapshots.service import SnapshotService
from agentenv.templates.store import Template


@dataclass(frozen=True, slots=True)
class Published:
    """A named snapshot (one without a name, too), as callers may refer to it now."""

    manifest: SnapshotManifest
    reference: str
    """`alias:tag` while it is the latest of that name; `<template id>:default` when it never had one; `<template
    id>:<snapshot id>` when a later one took its name."""
    names: tuple[str, ...]
    """`alias:tag`, those that are still its own."""

    @property
    def snapshot_id(self) -> str:
        return self.manifest.snapshot_id

    @property
    def template_id(self) -> str:
        """Of the template that it is a build of."""
        return self.manifest.own_template_id or self.manifest.snapshot_id


@dataclass(frozen=True, slots=True)
class Naming:
    """What a new snapshot is to be called; for `Capture`."""

    own_template_id: str
    names: tuple[str, ...]


class SnapshotCatalog:
    """See the module. Used from one event loop.

    Args:
        snapshots: all of this node.
        remove: deletes one for good, `SavedMachines.remove`.
    """

    def __init__(self, snapshots: SnapshotService, remove: Callable[[str], Awaitable[None]]) -> None:
        self._snapshots = snapshots
        self._remove = remove

    async def list(self) -> tuple[Published, ...]:
        """All of them, the oldest first. Those that cannot be read are logged and left out."""
        raise NotImplementedError

    async def find(self, reference: str) -> Published:
        """Find one by `[namespace/]alias[:tag]`, `<template id>[:tag]`, either with its id as the tag, or its id alone.

        Raises:
            InvalidRequestError: the reference is malformed.
            TemplateNotFoundError: nothing is called so.
            SnapshotError: it is the id of one that is damaged.
        """
        raise NotImplementedError

    async def id_of(self, reference: str) -> str:
        """The id of what `find` finds; of damaged ones, too, when they are called by their id.

        Raises:
            InvalidRequestError: the reference is malformed.
            TemplateNotFoundError: nothing is called so.
        """
        raise NotImplementedError

    async def builds(self, template_id: str) -> tuple[Published, ...]:
        """All snapshots that are builds of a template, the oldest first; empty when there is no such template."""
        raise NotImplementedError

    async def tree(self, sandbox_id: str | None = None) -> tuple[SnapshotNode, ...]:
        """The roots of the family tree.

        Args:
            sandbox_id: only the snapshots of this sandbox, and what they descend from.
        """
        raise NotImplementedError

    async def name(self, name: str | None, taken: Collection[str]) -> Naming:
        """Say what a new snapshot is to be called. Nothing is reserved: the same name may come twice at once.

        Args:
            name: `[namespace/]alias[:tag]`; None for one without a name.
            taken: ids and names that no snapshot may have, see `TemplateStore.taken`.

        Raises:
            InvalidRequestError: the name is malformed, or belongs to something else.
        """
        raise NotImplementedError

    async def delete(self, snapshot_id: str) -> None:
        """Delete one, a damaged one, too. The space of its layers comes back a little later.

        Raises:
            SnapshotNotFoundError: there is none of this id.
            AgentEnvError: it cannot be deleted.
        """
        raise NotImplementedError

    async def resolve(self, reference: str) -> Template:
        """What sandboxes are created from by a reference; see `find`."""
        return to_template(await self.find(reference))

    async def templates(self) -> tuple[Template, ...]:
        """One for each template id, by id: the build that the template id alone means."""
        raise NotImplementedError


def to_template(published: Published) -> Template:
    """A snapshot as what sandboxes are created from, whether it has memory or not."""
    manifest = published.manifest
    return Template(
        template_id=published.template_id,
        names=tuple(dict.fromkeys(name.partition(":")[0] for name in manifest.names)),
        layers=tuple(layer.digest for layer in manifest.disk_layers),
        vcpus=manifest.machine.vcpus,
        memory_mib=manifest.machine.memory_mib,
        disk_mib=-(-manifest.machine.disk_bytes // MIB),
        default_user=manifest.default_user,
        default_workdir=manifest.default_workdir,
        env=manifest.env,
        snapshot_id=manifest.snapshot_id,
        created_at=manifest.created_at,
    )
