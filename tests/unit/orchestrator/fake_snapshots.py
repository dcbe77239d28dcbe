"""Snapshots of the fake host: saved machines, machines that are held while they are captured, and their catalog."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

from agentenv.errors import InvalidRequestError, SnapshotError, SnapshotNotFoundError, TemplateNotFoundError
from agentenv.snapshots import accounting
from agentenv.snapshots.machines import Capture, LoadableMachine
from agentenv.snapshots.manifest import (
    HIDDEN_PREFIX,
    Environment,
    LayerReference,
    SnapshotKind,
    SnapshotManifest,
    StateFile,
)
from agentenv.templates.snapshots import Naming, Published

if TYPE_CHECKING:
    from fakes import Script, World

_LAYER = LayerReference("sha256:" + 64 * "c", 1)


@dataclass(frozen=True)
class FakeSnapshot:
    """What a snapshot holds, and its manifest."""

    manifest: SnapshotManifest
    content: int | None
    written: int
    damaged: bool = False


def _manifest(world: World, capture: Capture) -> SnapshotManifest:
    full = capture.memory is not None
    return SnapshotManifest(
        snapshot_id=capture.snapshot_id,
        created_at=world.clock.now(),
        kind=SnapshotKind.FULL if full else SnapshotKind.FILESYSTEM,
        architecture="x86_64",
        sandbox_id=capture.sandbox_id,
        template_id=capture.template_id,
        machine=capture.machine,
        agent_version=capture.agent_version,
        disk_layers=(LayerReference("sha256:" + 64 * "d", 1),),
        default_user=capture.default_user,
        default_workdir=capture.default_workdir,
        env=capture.env,
        metadata=capture.metadata,
        parent_id=capture.parent_id,
        names=capture.names,
        own_template_id=capture.own_template_id,
        memory_layers=(_LAYER,) if full else (),
        state=StateFile("state", 1, _LAYER.digest) if full else None,
        environment=Environment("fake", "1", "tcg", "fake", "max", _LAYER.digest, 0, "6", _LAYER.digest, _LAYER.digest),
        agent_responsive=capture.agent_responsive,
        agent_token=capture.memory.agent_token if capture.memory is not None else None,
    )


class FakeCaptured:
    """A machine that is held; what it wrote until then is in the draft."""

    def __init__(self, world: World, script: Script, capture: Capture) -> None:
        self._world, self._script, self._capture = world, script, capture

    async def loadable(self) -> LoadableMachine:
        await self._script.at("captured.loadable")
        capture = self._capture
        if capture.memory is None:
            return LoadableMachine(capture.machine, (capture.snapshot_id,))
        return LoadableMachine(
            capture.machine,
            (capture.snapshot_id,),
            memory_image=capture.memory.image,
            state=Path(capture.snapshot_id) / "state",
            agent_token=capture.memory.agent_token,
        )

    async def commit(self) -> SnapshotManifest:
        await self._script.at("captured.commit")
        draft = self._world.drafts[self._capture.snapshot_id]
        memory = self._capture.memory
        content = None if memory is None else int(memory.image.read_text())
        self._world.snapshots[self._capture.snapshot_id] = replace(draft, content=content)
        await self._script.at("captured.commit done")
        return draft.manifest


class FakeSaved:
    """Snapshots of the world. A disk's layers are named by the snapshot alone."""

    def __init__(self, world: World, script: Script) -> None:
        self._world, self._script = world, script
        self.captures: list[Capture] = []

    def _check(self, capture: Capture) -> None:
        world, sandbox_id = self._world, capture.sandbox_id
        assert world.vms[sandbox_id].paused, "saved while it ran"
        assert sandbox_id in world.disks
        if capture.memory is not None:
            assert capture.memory.state.read_text() == sandbox_id
        self.captures.append(capture)

    async def save(self, capture: Capture) -> SnapshotManifest:
        await self._script.at("saved.save")
        self._check(capture)
        world, sandbox_id = self._world, capture.sandbox_id
        full = capture.memory is not None
        if capture.memory is not None:
            assert capture.memory.image == Path(f"/memory/{sandbox_id}")
        manifest = _manifest(world, capture)
        world.snapshots[capture.snapshot_id] = FakeSnapshot(
            manifest, world.content[sandbox_id] if full else None, world.written[sandbox_id]
        )
        await self._script.at("saved.save done")
        return manifest

    @asynccontextmanager
    async def capture(self, capture: Capture) -> AsyncIterator[FakeCaptured]:
        await self._script.at("saved.capture")
        self._check(capture)
        world = self._world
        if capture.memory is not None:
            assert capture.memory.image.parent == world.home / "memory", "the image of a machine that runs on"
        world.drafts[capture.snapshot_id] = FakeSnapshot(
            _manifest(world, capture), None, world.written[capture.sandbox_id]
        )
        try:
            await self._script.at("saved.capture done")
            yield FakeCaptured(world, self._script, capture)
        finally:
            if not self._script.dead:
                del world.drafts[capture.snapshot_id]
                await self._script.at("saved.capture over")

    async def get(self, snapshot_id: str) -> SnapshotManifest:
        await self._script.at("saved.get")
        try:
            found = self._world.snapshots[snapshot_id]
        except KeyError:
            raise SnapshotNotFoundError(snapshot_id) from None
        if found.damaged:
            raise SnapshotError("field 'kind' is damaged")
        return found.manifest

    async def delete(self, snapshot_id: str) -> None:
        await self._script.at("saved.delete")
        assert snapshot_id not in self._world.leased
        self._world.snapshots.pop(snapshot_id, None)
        await self._script.at("saved.delete done")

    async def hidden(self) -> Sequence[str]:
        await self._script.at("saved.hidden")
        return tuple(name for name in self._world.snapshots if name.startswith(HIDDEN_PREFIX))

    @asynccontextmanager
    async def load(self, snapshot_id: str, *, memory: bool) -> AsyncIterator[LoadableMachine]:
        await self._script.at("saved.load")
        manifest = await self.get(snapshot_id)
        self._world.leased.append(snapshot_id)
        try:
            if memory and manifest.kind is SnapshotKind.FULL:
                yield LoadableMachine(
                    manifest.machine,
                    (snapshot_id,),
                    memory_layers=(Path(snapshot_id),),
                    state=Path(snapshot_id) / "state",
                    agent_token=manifest.agent_token,
                )
            else:
                yield LoadableMachine(manifest.machine, (snapshot_id,))
        finally:
            self._world.leased.remove(snapshot_id)

    async def write(self, saved: LoadableMachine, out: Path) -> None:
        assert not out.exists()
        await self.fill(saved, out)

    async def fill(self, saved: LoadableMachine, out: Path) -> None:
        await self._script.at("unpack")
        if saved.memory_image is not None:
            assert not saved.memory_layers
            out.write_text(saved.memory_image.read_text())
        else:
            (snapshot_id,) = saved.memory_layers
            assert str(snapshot_id) in self._world.leased
            out.write_text(str(self._world.snapshots[str(snapshot_id)].content))
        await self._script.at("unpack done")


class FakeCatalog:
    """The named snapshots of the world. A reference is a name, `<template id>:default`, or an id."""

    def __init__(self, world: World, script: Script) -> None:
        self._world, self._script = world, script

    def _published(self) -> list[Published]:
        named = [one for name, one in self._world.snapshots.items() if not name.startswith(HIDDEN_PREFIX)]
        latest = {name: one.manifest.snapshot_id for one in named for name in one.manifest.names}
        found = []
        for one in named:
            manifest = one.manifest
            own = tuple(name for name in manifest.names if latest[name] == manifest.snapshot_id)
            tag = manifest.snapshot_id if manifest.names else "default"
            found.append(Published(manifest, own[0] if own else f"{manifest.own_template_id}:{tag}", own))
        return found

    async def list(self) -> Sequence[Published]:
        await self._script.at("catalog.list")
        return tuple(one for one in self._published() if not self._world.snapshots[one.snapshot_id].damaged)

    async def find(self, reference: str) -> Published:
        await self._script.at("catalog.find")
        for one in self._published():
            if {reference, f"{reference}:default"} & {one.reference, one.snapshot_id, *one.names}:
                if self._world.snapshots[one.snapshot_id].damaged:
                    raise SnapshotError("field 'kind' is damaged")
                return one
        raise TemplateNotFoundError(reference)

    async def ids_called(self, reference: str) -> Sequence[str]:
        if reference in self._world.snapshots:
            return (reference,)
        found = await self.find(reference)
        wanted = {reference, f"{reference}:default"}
        called = [one.snapshot_id for one in self._published() if wanted & set(one.manifest.names)]
        return called or (found.snapshot_id,)

    async def tree(self, sandbox_id: str | None = None) -> Sequence[accounting.SnapshotNode]:
        await self._script.at("catalog.tree")
        manifests = [one.manifest for one in self._published()]
        return accounting.family_tree(one for one in manifests if sandbox_id in (None, one.sandbox_id))

    async def usage(self) -> accounting.UsageReport:
        await self._script.at("catalog.usage")
        usages = tuple(accounting.SnapshotUsage(one.snapshot_id, 10, 20) for one in self._published())
        return accounting.UsageReport(usages, 0, 0, 0, None)

    async def name(self, name: str | None, taken: Collection[str]) -> Naming:
        await self._script.at("catalog.name")
        if name is None:
            return Naming(uuid4().hex, ())
        alias, _, tag = name.partition(":")
        if alias in taken or not alias.isalnum():
            raise InvalidRequestError(f"bad name {name}")
        return Naming(f"template-{alias}", (f"{alias}:{tag or 'default'}",))

    async def delete(self, snapshot_id: str) -> None:
        await self._script.at("catalog.delete")
        if self._world.snapshots.pop(snapshot_id, None) is None:
            raise SnapshotNotFoundError(snapshot_id)
        await self._script.at("catalog.delete done")
