"""Named snapshots as templates: which one a reference means, and what a new one is called.

What the names mean is decided in `names.py`; snapshots are kept by `agentenv.snapshots`. Hidden snapshots, which pauses
make, are never seen here. Nothing is stored by this: all follows from the manifests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from agentenv import ids
from agentenv.config import MIB
from agentenv.errors import InvalidRequestError, SnapshotError, SnapshotNotFoundError, TemplateNotFoundError
from agentenv.snapshots.accounting import SnapshotNode, UsageReport, family_tree
from agentenv.snapshots.manifest import HIDDEN_PREFIX, UUID
from agentenv.snapshots.service import SnapshotService
from agentenv.templates.names import Published, SnapshotNames, aliases_of
from agentenv.templates.store import DEFAULT_TAG, Template, TemplateReference, parse_reference

__all__ = ["Naming", "Published", "SnapshotCatalog", "to_template"]

_TRIES = 10


@dataclass(frozen=True, slots=True)
class Naming:
    """What a new snapshot is to be called; for `Capture`."""

    own_template_id: str
    names: tuple[str, ...]

    @property
    def reference(self) -> str:
        """What callers refer to it by, until a later one takes its name."""
        return self.names[0] if self.names else f"{self.own_template_id}:{DEFAULT_TAG}"


class SnapshotCatalog:
    """See the module. Used from one event loop.

    Args:
        snapshots: all of this node.
        remove: deletes one for good, `SavedMachines.remove`.
    """

    def __init__(self, snapshots: SnapshotService, remove: Callable[[str], Awaitable[None]]) -> None:
        self._snapshots = snapshots
        self._remove = remove
        self._names = SnapshotNames()
        snapshots.watch(self._names)

    async def list(self) -> tuple[Published, ...]:
        """All of them, the oldest first. Those that cannot be read are logged and left out."""
        await self._snapshots.refresh()
        return self._names.list()

    async def find(self, reference: str) -> Published:
        """Find one by `[namespace/]alias[:tag]`, `<template id>[:tag]`, either with its id as the tag, or its id alone.

        A template id alone means the build with the tag `default` or, when none has it, the latest.

        Raises:
            InvalidRequestError: the reference is malformed.
            TemplateNotFoundError: nothing is called so.
            SnapshotError: it is the id of one that is damaged.
        """
        wanted = parse_reference(reference)
        for _ in range(_TRIES):
            await self._snapshots.refresh()
            found = self._names.find(wanted)
            by_id = _id_in(wanted)
            snapshot_id = by_id if found is None else found.snapshot_id
            if snapshot_id is None:
                break
            # Looks at the file: what was changed by hand is known from then on.
            try:
                await self._snapshots.get(snapshot_id)
            except SnapshotNotFoundError:
                if found is None:
                    break
            except SnapshotError:
                if snapshot_id == by_id:
                    raise
            else:
                if found is not None:
                    return found
        raise TemplateNotFoundError(reference.strip()[:200])

    async def ids_called(self, reference: str) -> tuple[str, ...]:
        """Ids of all that a deletion by a reference is about, the oldest first; damaged ones when called by their id.

        A name is about every snapshot that ever had it: were the one before to have it again, a deletion that is
        repeated would delete another snapshot each time. A template id alone is about all its builds.

        Raises:
            InvalidRequestError: the reference is malformed.
            TemplateNotFoundError: nothing is called so.
        """
        wanted = parse_reference(reference)
        await self._snapshots.refresh()
        found = self._names.ever_called(wanted)
        if found:
            return found
        try:
            return ((await self.find(reference)).snapshot_id,)
        except SnapshotError:
            snapshot_id = _id_in(wanted)
            if snapshot_id is None:
                raise
            return (snapshot_id,)

    async def builds(self, template_id: str) -> tuple[Published, ...]:
        """All builds of a template, by its id or an alias, the oldest first; empty when there is none."""
        await self._snapshots.refresh()
        return self._names.builds(template_id)

    async def tree(self, sandbox_id: str | None = None) -> tuple[SnapshotNode, ...]:
        """The roots of the family tree.

        Args:
            sandbox_id: only the snapshots of this sandbox, and what they descend from.
        """
        published = await self.list()
        return await asyncio.to_thread(_tree, published, sandbox_id)

    async def usage(self) -> UsageReport:
        """What each snapshot costs, hidden ones, too."""
        return await self._snapshots.usage()

    async def name(self, name: str | None, taken: Collection[str]) -> Naming:
        """Say what a new snapshot is to be called. Nothing is reserved: the same name may come twice at once.

        Args:
            name: `[namespace/]alias[:tag]`; None for one without a name.
            taken: ids and names that no snapshot may have, see `TemplateStore.taken`.

        Raises:
            InvalidRequestError: the name is malformed, or belongs to something else.
        """
        if name is None:
            return Naming(ids.new_template_id(), ())
        try:
            wanted = parse_reference(name)
        except InvalidRequestError as error:
            raise InvalidRequestError(
                f"invalid name of a snapshot: {name[:200]!r}; it is alias[:tag], of a-z, 0-9, _ and -, in the tag . too"
            ) from error
        alias, tag = wanted.name, wanted.tag or DEFAULT_TAG
        if UUID.fullmatch(alias) or UUID.fullmatch(tag):
            raise InvalidRequestError(f"invalid name of a snapshot: '{alias}:{tag}' has the form of an id")
        if alias in taken:
            raise InvalidRequestError(f"'{alias}' is a template of this node; give the snapshot another name")
        await self._snapshots.refresh()
        builds = self._names.builds(alias)
        if self._names.is_template_id(alias):
            raise InvalidRequestError(f"'{alias}' is the id of a template; give the snapshot another name")
        # An alias always has the same id, so that captures which begin at once agree without asking each other.
        template_id = builds[-1].template_id if builds else ids.template_id_for(alias)
        return Naming(template_id, (f"{alias}:{tag}",))

    async def delete(self, snapshot_id: str) -> None:
        """Delete one, a damaged one, too. The space of its layers comes back a little later.

        Raises:
            SnapshotNotFoundError: there is none of this id.
            AgentEnvError: it cannot be deleted.
        """
        if snapshot_id.startswith(HIDDEN_PREFIX):
            raise SnapshotNotFoundError(snapshot_id[:80])
        await self._remove(snapshot_id)

    async def resolve(self, reference: str) -> Template:
        """What sandboxes are created from by a reference; see `find`."""
        return to_template(await self.find(reference))

    async def templates(self) -> tuple[Template, ...]:
        """One for each template id, by id: the build that the template id alone means."""
        await self._snapshots.refresh()
        return await asyncio.to_thread(self._templates)

    def _templates(self) -> tuple[Template, ...]:
        found = (self._names.find(TemplateReference(name)) for name in self._names.template_ids())
        return tuple(to_template(published) for published in found if published is not None)


def _id_in(reference: TemplateReference) -> str | None:
    """What may be the id of a snapshot in a reference."""
    text = reference.tag or reference.name
    return text if UUID.fullmatch(text) else None


def _tree(published: tuple[Published, ...], sandbox_id: str | None) -> tuple[SnapshotNode, ...]:
    known = {each.snapshot_id: each.manifest for each in published}
    if sandbox_id is None:
        return family_tree(known.values())
    wanted = {}
    for manifest in known.values():
        if manifest.sandbox_id != sandbox_id:
            continue
        line = manifest
        while line.snapshot_id not in wanted:
            wanted[line.snapshot_id] = line
            parent = known.get(line.parent_id or "")
            if parent is None:
                break
            line = parent
    return family_tree(wanted.values())


def to_template(published: Published) -> Template:
    """A snapshot as what sandboxes are created from, whether it has memory or not."""
    manifest = published.manifest
    return Template(
        template_id=published.template_id,
        names=aliases_of(manifest),
        layers=tuple(layer.digest for layer in manifest.disk_layers),
        vcpus=manifest.machine.vcpus,
        memory_mib=manifest.machine.memory_mib,
        disk_mib=-(-manifest.machine.disk_bytes // MIB),
        default_user=manifest.default_user,
        default_workdir=manifest.default_workdir,
        env=dict(manifest.env),
        snapshot_id=manifest.snapshot_id,
        created_at=manifest.created_at,
    )
