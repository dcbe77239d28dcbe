"""The named snapshots of this node as callers see them: list, find, tree, delete.

Taking them and going on from them is done elsewhere; here it is only seen to that none is deleted that a sandbox needs.
"""

from __future__ import annotations

from agentenv.config import MIB
from agentenv.errors import InvalidRequestError, SnapshotNotFoundError, TemplateNotFoundError
from agentenv.orchestrator.live import LiveSandbox
from agentenv.orchestrator.model import PauseMode, SandboxState, SnapshotInfo, SnapshotNode
from agentenv.orchestrator.parts import OperationParts
from agentenv.orchestrator.tasks import to_the_end
from agentenv.snapshots import accounting
from agentenv.templates.snapshots import Published
from agentenv.templates.store import parse_reference

_NEEDED_IN = {
    SandboxState.PAUSED: "is paused in it",
    SandboxState.RESUMING: "is being started from it",
    SandboxState.STARTING: "is being started from it",
}


class Shelf:
    """See `Orchestrator` for every method."""

    def __init__(self, parts: OperationParts) -> None:
        self._parts = parts

    async def list(self, *, sandbox_id: str | None, name: str | None) -> tuple[SnapshotInfo, ...]:
        """All of a sandbox, or of a name, the oldest first."""
        wanted = None if name is None else parse_reference(name)

        def fits(published: Published) -> bool:
            if sandbox_id not in (None, published.manifest.sandbox_id):
                return False
            names = (given.partition(":") for given in published.manifest.names)
            return wanted is None or any(alias == wanted.name and wanted.tag in (None, tag) for alias, _, tag in names)

        return tuple(info_of(published) for published in await self._parts.catalog.list() if fits(published))

    async def find(self, reference: str) -> SnapshotInfo:
        """Find one by anything that names it."""
        try:
            return info_of(await self._parts.catalog.find(reference))
        except TemplateNotFoundError as error:
            raise SnapshotNotFoundError(reference.strip()[:200]) from error

    async def delete(self, reference: str) -> None:
        """Delete what a reference is about, see `SnapshotCatalog.ids_called`, if no sandbox needs any of it.

        Once begun it comes to its end.
        """
        parts = self._parts
        try:
            snapshot_ids = await parts.catalog.ids_called(reference)
        except TemplateNotFoundError as error:
            raise SnapshotNotFoundError(reference.strip()[:200]) from error
        for live in parts.live:
            if _needed_by(live) in snapshot_ids:
                raise InvalidRequestError(
                    f"snapshot '{reference}' cannot be deleted: sandbox {live.sandbox.id} {_NEEDED_IN[live.state]}"
                )
        # From here on none begins to need them.
        fresh = tuple(name for name in snapshot_ids if name not in parts.deleting)
        parts.deleting.update(fresh)
        await to_the_end(parts.operations.spawn(self._delete(reference, fresh), f"delete snapshot {reference[:200]}"))

    async def _delete(self, reference: str, snapshot_ids: tuple[str, ...]) -> None:
        gone = 0
        try:
            # The oldest first: whatever cuts this short, the name stays with the latest.
            for snapshot_id in snapshot_ids:
                try:
                    await self._parts.catalog.delete(snapshot_id)
                except SnapshotNotFoundError:
                    gone += 1
        finally:
            self._parts.deleting.difference_update(snapshot_ids)
        if gone == len(snapshot_ids):  # somebody else was faster
            raise SnapshotNotFoundError(reference.strip()[:200])

    async def tree(self, sandbox_id: str | None) -> tuple[SnapshotNode, ...]:
        """The roots of the family tree."""
        roots = await self._parts.catalog.tree(sandbox_id)
        usage = {one.snapshot_id: one for one in (await self._parts.catalog.usage()).snapshots}
        published = {one.snapshot_id: one for one in await self._parts.catalog.list()}
        # Not recursive: a line of checkpoints may be thousands long.
        order: list[accounting.SnapshotNode] = list(roots)
        for node in order:
            order.extend(node.children)
        made: dict[str, SnapshotNode] = {}
        for node in reversed(order):
            found, cost = published.get(node.snapshot_id), usage.get(node.snapshot_id)
            made[node.snapshot_id] = SnapshotNode(
                id=node.snapshot_id,
                snapshot=None if node.manifest is None or found is None else info_of(found),
                exclusive_bytes=0 if cost is None else cost.exclusive_bytes,
                shared_bytes=0 if cost is None else cost.shared_bytes,
                children=tuple(made[child.snapshot_id] for child in node.children),
            )
        return tuple(made[root.snapshot_id] for root in roots)


def info_of(published: Published) -> SnapshotInfo:
    """A snapshot as callers see it."""
    manifest = published.manifest
    return SnapshotInfo(
        id=manifest.snapshot_id,
        reference=published.reference,
        names=published.names,
        template_id=published.template_id,
        sandbox_id=manifest.sandbox_id,
        parent_id=manifest.parent_id,
        created_at=manifest.created_at,
        kind=PauseMode(manifest.kind.value),
        vcpus=manifest.machine.vcpus,
        memory_mib=manifest.machine.memory_mib,
        disk_mib=-(-manifest.machine.disk_bytes // MIB),
        agent_version=manifest.agent_version,
    )


def _needed_by(live: LiveSandbox) -> str | None:
    """The snapshot that a sandbox is lost without."""
    if live.state is SandboxState.STARTING:
        return live.starting_from
    return live.sandbox.snapshot_id if live.state in (SandboxState.PAUSED, SandboxState.RESUMING) else None
