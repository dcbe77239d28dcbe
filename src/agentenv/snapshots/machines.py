"""Machines that are saved into snapshots, and what it takes to load one: layers, state, kernel, initramfs.

Brings together the repository of snapshots, the layer store, the disks and the facts of this node. It never touches a
VMM: whoever calls has stopped the machine and written its state, and loads it afterwards.
"""

from __future__ import annotations

import asyncio
import hashlib
import platform
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

import structlog

from agentenv import ids
from agentenv.errors import LayerError, SnapshotError, SnapshotMismatchError, SnapshotNotFoundError, StorageError
from agentenv.guest.assets import GuestAssets
from agentenv.snapshots.compatibility import NodeFacts, features_digest, mismatches
from agentenv.snapshots.manifest import (
    HIDDEN_PREFIX,
    Environment,
    LayerReference,
    MachineShape,
    SnapshotKind,
    SnapshotManifest,
    StateFile,
)
from agentenv.snapshots.service import AsyncDraft, SnapshotService
from agentenv.storage.layers import LayerStore, StoredLayer
from agentenv.storage.memory import pack_memory
from agentenv.vmm.base import VmmFacts
from agentenv.vmm.process import finish_in_thread

log = structlog.get_logger(__name__)

MOST_MEMORY_LAYERS = 32
"""A stack of this depth is not put upon: the next image is stored whole, so that loading it stays quick."""
_TRIES = 5


class CapturedDisks(Protocol):
    """What is needed of `storage.disks.DiskStore`."""

    async def capture(self, disk_id: str, *, sealed: Callable[[], None] | None = None) -> StoredLayer: ...

    async def chain(self, disk_id: str) -> tuple[StoredLayer, ...]: ...

    def collect_soon(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SavedMemory:
    """Memory and devices of a stopped machine, which nobody may change meanwhile."""

    image: Path
    state: Path
    agent_token: str = field(repr=False)
    kernel: Path | None = None
    """What the machine was started with; None: what guests boot from now."""
    initramfs: Path | None = None


@dataclass(frozen=True, slots=True)
class Capture:
    """A stopped machine and what a manifest says of it."""

    snapshot_id: str
    sandbox_id: str
    """Also the id of its disk."""
    template_id: str
    parent_id: str | None
    """The named snapshot that the sandbox went on from last, for the family tree."""
    memory_parent_id: str | None
    """The snapshot, hidden or not, whose memory is likely to be much like this one's."""
    machine: MachineShape
    agent_version: str
    agent_responsive: bool
    default_user: str
    default_workdir: str | None
    env: Mapping[str, str] = field(repr=False)
    metadata: Mapping[str, str]
    memory: SavedMemory | None
    """None: the disk alone is saved."""
    names: tuple[str, ...] = ()
    """`alias:tag`, of named snapshots."""
    own_template_id: str | None = None
    """The template that it is a build of; None for hidden ones."""
    kept: bool = True
    """Whether it is meant to be committed; then a budget that is used up already refuses it before anything is done."""


@dataclass(frozen=True, slots=True)
class LoadableMachine:
    """What a machine is started from. Valid as long as the context that gave it."""

    shape: MachineShape
    disk_layers: tuple[str, ...]
    """Digests, bottom first."""
    memory_layers: tuple[Path, ...] = ()
    """Bottom first; empty when it boots, or when there is an image."""
    memory_image: Path | None = None
    """The memory itself, as a file that nobody may change: of a machine that was captured just now."""
    state: Path | None = None
    """None when it boots."""
    kernel: Path | None = None
    initramfs: Path | None = None
    agent_token: str | None = field(default=None, repr=False)
    """What the saved agent lets callers in with; None when it boots."""


class CapturedMachine:
    """A machine of which all is held: its disk is sealed, its state taken. Made by `SavedMachines.capture`.

    The machine may run on as soon as this is there, unless its own memory file is the image that was captured.
    """

    def __init__(
        self,
        saved: SavedMachines,
        draft: AsyncDraft,
        capture: Capture,
        disk: asyncio.Task[tuple[LayerReference, ...]],
        state: StateFile | None,
    ) -> None:
        self._saved = saved
        self._draft = draft
        self._capture = capture
        self._disk = disk
        self._state = state
        self._over = False
        self.spoiled = False
        """Whether a commit was begun, and failed."""

    async def loadable(self) -> LoadableMachine:
        """What copies of it are started from, here and now.

        Raises:
            AgentEnvError: its disk could not be brought into the store.
        """
        capture = self._capture
        disk = tuple(layer.digest for layer in await asyncio.shield(self._disk))
        if capture.memory is None or self._state is None:
            return LoadableMachine(capture.machine, disk)
        return LoadableMachine(
            capture.machine,
            disk,
            memory_image=capture.memory.image,
            state=self._draft.directory / self._state.name,
            kernel=capture.memory.kernel,
            initramfs=capture.memory.initramfs,
            agent_token=capture.memory.agent_token,
        )

    def close(self) -> None:
        """Refuse a commit from now on."""
        self._over = True

    async def commit(self) -> SnapshotManifest:
        """Make it a snapshot, durably: from here on it outlives the context. Once only, whether it fails or not.

        Raises:
            InsufficientStorageError: a disk is full, or the budget of snapshots is.
            AgentEnvError: of the step that failed.
        """
        if self._over:
            raise SnapshotError(f"the capture of snapshot {self._capture.snapshot_id} is over")
        self._over = self.spoiled = True
        disk = await asyncio.shield(self._disk)
        manifest = await self._saved._commit(self._draft, self._capture, disk, self._state)
        self.spoiled = False
        return manifest


def hidden_id(sandbox_id: str) -> str:
    """Make an id for a hidden snapshot of a sandbox."""
    return f"{HIDDEN_PREFIX}{sandbox_id}-{ids.new_uuid()[:8]}"


class SavedMachines:
    """Used from one event loop.

    Args:
        snapshots: where snapshots are kept.
        layers: where layers are kept.
        disks: those that are captured.
        assets: what guests boot from now; older kernels and initramfs are looked for beside them.
        facts: what the VMM of this node is.
    """

    def __init__(
        self,
        snapshots: SnapshotService,
        layers: LayerStore,
        disks: CapturedDisks,
        assets: GuestAssets,
        facts: Callable[[], VmmFacts],
    ) -> None:
        self._snapshots = snapshots
        self._layers = layers
        self._disks = disks
        self._assets = assets
        self._facts = facts
        self._digests: dict[Path, str] = {}

    async def save(self, capture: Capture) -> SnapshotManifest:
        """Make a snapshot of a stopped machine. It exists, durably, when this returns; else nothing of it is left.

        Raises:
            InsufficientStorageError: a disk is full, or the budget of snapshots is.
            AgentEnvError: of the step that failed.
        """
        async with self.capture(capture) as captured:
            return await captured.commit()

    @asynccontextmanager
    async def capture(self, capture: Capture) -> AsyncIterator[CapturedMachine]:
        """Seal the disk of a stopped machine and take its state. Without a commit nothing of it is left at the end.

        The sealed layer is brought into the store after that; nobody else may capture the disk until `loadable` or
        `commit` returned.

        Raises:
            InsufficientStorageError: a disk is full, or the budget of snapshots is.
            AgentEnvError: of the step that failed.
        """
        captured: CapturedMachine | None = None
        try:
            async with self._snapshots.draft(capture.snapshot_id, kept=capture.kept) as draft:
                sealed = asyncio.Event()
                disk = asyncio.create_task(self._disk_layers(draft, capture.sandbox_id, sealed), name="capture-disk")
                try:
                    state = None if capture.memory is None else await draft.take_state(capture.memory.state)
                    await _first(sealed, disk)
                    captured = CapturedMachine(self, draft, capture, disk, state)
                    try:
                        yield captured
                    finally:
                        captured.close()
                finally:
                    disk.cancel()
                    await asyncio.wait([disk])
        finally:
            if captured is not None and captured.spoiled:
                # Its memory may be packed already, in a layer that nobody references any more.
                self._disks.collect_soon()

    async def _commit(
        self, draft: AsyncDraft, capture: Capture, disk_layers: tuple[LayerReference, ...], state: StateFile | None
    ) -> SnapshotManifest:
        memory_layers: tuple[LayerReference, ...] = ()
        environment: Environment | None = None
        if capture.memory is not None:
            memory_layers = await self._memory_layers(
                draft, capture.memory_parent_id, capture.memory.image, disk_layers
            )
            environment = await asyncio.to_thread(self._environment, capture.memory)
        manifest = SnapshotManifest(
            snapshot_id=capture.snapshot_id,
            created_at=await self._time(capture.names),
            kind=SnapshotKind.FULL if capture.memory is not None else SnapshotKind.FILESYSTEM,
            architecture=platform.machine(),
            sandbox_id=capture.sandbox_id,
            template_id=capture.template_id,
            machine=capture.machine,
            agent_version=capture.agent_version,
            disk_layers=disk_layers,
            default_user=capture.default_user,
            parent_id=capture.parent_id,
            names=capture.names,
            own_template_id=capture.own_template_id,
            default_workdir=capture.default_workdir,
            env=capture.env,
            metadata=capture.metadata,
            environment=environment,
            memory_layers=memory_layers,
            state=state,
            agent_responsive=capture.agent_responsive,
            agent_token=capture.memory.agent_token if capture.memory is not None else None,
        )
        await draft.commit(manifest)
        return manifest

    async def _time(self, names: tuple[str, ...]) -> datetime:
        """Now, but after all with one of these names: the latest has it, also when the clock was set back."""
        now = datetime.now(UTC)
        if not names:
            return now
        others = await self._snapshots.list()
        before = max((other.created_at for other in others if not set(names).isdisjoint(other.names)), default=now)
        return max(now, before + timedelta(microseconds=1))

    async def get(self, snapshot_id: str) -> SnapshotManifest:
        """See `LocalSnapshots.get`."""
        return await self._snapshots.get(snapshot_id)

    async def delete(self, snapshot_id: str) -> None:
        """`remove` that does not mind when there is none."""
        try:
            await self.remove(snapshot_id)
        except SnapshotNotFoundError:
            return

    async def remove(self, snapshot_id: str) -> None:
        """Delete a snapshot; the space of its layers comes back a little later.

        Raises:
            SnapshotNotFoundError: there is none.
            AgentEnvError: it cannot be deleted.
        """
        await self._snapshots.delete(snapshot_id)
        self._disks.collect_soon()

    async def hidden(self) -> tuple[str, ...]:
        """Ids of all hidden snapshots, damaged ones, too."""
        return tuple(name for name in await self._snapshots.ids() if name.startswith(HIDDEN_PREFIX))

    @asynccontextmanager
    async def load(self, snapshot_id: str, *, memory: bool) -> AsyncIterator[LoadableMachine]:
        """Keep all that a machine is started from while the context lasts.

        Args:
            snapshot_id: which.
            memory: whether its memory is wanted, when it has one. Otherwise the machine boots.

        Raises:
            SnapshotNotFoundError: there is none.
            SnapshotError: it is damaged.
            SnapshotMismatchError: this node cannot run it; the message says why.
        """
        async with self._snapshots.lease(snapshot_id) as lease:
            manifest = lease.manifest
            disk_layers = tuple(layer.digest for layer in lease.disk_layers)
            if not memory or manifest.kind is not SnapshotKind.FULL:
                yield LoadableMachine(manifest.machine, disk_layers)
                return
            environment = manifest.environment
            assert environment is not None  # noqa: S101 - the manifest's own rule
            kernels, initramfs = await asyncio.to_thread(self._boot_files)
            facts = self._facts()
            node = NodeFacts(
                architecture=platform.machine(),
                vmm=facts.vmm,
                vmm_version=facts.version,
                acceleration=facts.acceleration,
                boot_mode=facts.boot_mode,
                cpu_model=facts.cpu_model,
                cpu_features=features_digest(facts.cpu_features),
                tsc_khz=facts.tsc_khz,
                kernels={digest: path.name for digest, path in kernels.items()},
                initramfs_digests=frozenset(initramfs),
            )
            if found := mismatches(manifest, node):
                raise SnapshotMismatchError(
                    f"the saved memory cannot be loaded on this node: {'; '.join(found)}; with memory: false it boots "
                    "from the saved disk"
                )
            yield LoadableMachine(
                manifest.machine,
                disk_layers,
                memory_layers=tuple(layer.path for layer in lease.memory_layers),
                state=lease.state,
                kernel=kernels[environment.kernel_digest],
                initramfs=initramfs[environment.initramfs_digest],
                agent_token=manifest.agent_token,
            )

    async def _memory_layers(
        self, draft: AsyncDraft, parent_id: str | None, image: Path, disk_layers: tuple[LayerReference, ...]
    ) -> tuple[LayerReference, ...]:
        out = draft.directory / "memory"
        async with AsyncExitStack() as stack:
            parents = await self._parent_memory(stack, parent_id)
            try:
                await pack_memory(image, [layer.path for layer in parents], out)
            except LayerError as error:
                if not parents:
                    raise
                log.warning("memory_parent_damaged", snapshot=parent_id, error=error.message)
                parents = ()
                await pack_memory(image, (), out)
            packed = await finish_in_thread(lambda: self._layers.link_file(out, owner=draft.owner), lambda _: None)
            await asyncio.to_thread(out.unlink)
            memory_layers = tuple(_reference(layer) for layer in (*parents, packed))
            # While the parent is kept: it may be deleted as soon as it is not.
            digests = dict.fromkeys(layer.digest for layer in (*memory_layers, *disk_layers))
            await asyncio.to_thread(self._layers.set_references, draft.owner, tuple(digests), durable=False)
            return memory_layers

    async def _parent_memory(self, stack: AsyncExitStack, parent_id: str | None) -> tuple[StoredLayer, ...]:
        """The layers that a new one goes upon, kept by `stack`; empty when the new one has to be whole."""
        if parent_id is None:
            return ()
        try:
            parent = await stack.enter_async_context(self._snapshots.lease(parent_id))
        except (SnapshotNotFoundError, SnapshotError) as error:
            log.info("memory_parent_unusable", snapshot=parent_id, error=error.message)
            return ()
        return () if len(parent.memory_layers) >= MOST_MEMORY_LAYERS else parent.memory_layers

    async def _disk_layers(self, draft: AsyncDraft, disk_id: str, sealed: asyncio.Event) -> tuple[LayerReference, ...]:
        """Capture the disk; its layers, referenced by the draft: merges in the background may replace some any time."""
        await self._disks.capture(disk_id, sealed=sealed.set)
        for _ in range(_TRIES):
            chain = await self._disks.chain(disk_id)
            digests = tuple(layer.digest for layer in chain)
            try:
                await asyncio.to_thread(self._layers.set_references, draft.owner, digests, durable=False)
            except LayerError as error:
                log.info("disk_chain_changed", disk=disk_id, error=error.message)
                continue
            return tuple(_reference(layer) for layer in chain)
        raise StorageError(f"the layers of disk {disk_id} change all the time; try again")

    def _environment(self, memory: SavedMemory) -> Environment:
        facts = self._facts()
        kernel, initramfs = memory.kernel or self._assets.kernel, memory.initramfs or self._assets.initramfs
        return Environment(
            vmm=facts.vmm,
            vmm_version=facts.version,
            acceleration=facts.acceleration,
            boot_mode=facts.boot_mode,
            cpu_model=facts.cpu_model,
            cpu_features=features_digest(facts.cpu_features),
            tsc_khz=facts.tsc_khz,
            kernel_version=self._assets.kernel_version if kernel == self._assets.kernel else kernel.name,
            kernel_digest=self._digest(kernel),
            initramfs_digest=self._digest(initramfs),
        )

    def _boot_files(self) -> tuple[dict[str, Path], dict[str, Path]]:
        """Kernels and initramfs of this node by digest, older ones included."""
        directory = self._assets.kernel.parent
        kernels, initramfs = (
            {self._digest(path): path for path in {*directory.glob(pattern), current}}
            for pattern, current in (("vmlinux-*", self._assets.kernel), ("initramfs-*", self._assets.initramfs))
        )
        return kernels, initramfs

    def _digest(self, path: Path) -> str:
        if path not in self._digests:  # such files never change
            try:
                with path.open("rb") as file:
                    self._digests[path] = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
            except OSError as error:
                raise SnapshotError(f"cannot read the guest asset {path}: {error.strerror}") from error
        return self._digests[path]


async def _first(event: asyncio.Event, task: asyncio.Task[object]) -> None:
    """Return when the event is set, or the task has ended well; raise what it raised."""
    waiter = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([waiter, task], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
    if task.done():
        task.result()


def _reference(layer: StoredLayer) -> LayerReference:
    return LayerReference(layer.digest, layer.size)
