"""The snapshots of this node: `<id>/{manifest.json,state,lock}` below one directory, their layers in the layer store.

Several processes may use one repository at once, and any may be killed at any moment: a snapshot is there whole or not
at all. The order that makes it so: layers are referenced as `snapshot:<id>` (durably), the state file is synced, the
manifest gets its name last; the end goes backwards. What a killed process leaves has no manifest, and `recover` removes
it. Everything here blocks; `service.py` has the faces for the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import structlog

from agentenv import durable
from agentenv.errors import (
    AgentEnvError,
    InsufficientStorageError,
    LayerError,
    SnapshotError,
    SnapshotNotFoundError,
)
from agentenv.snapshots import accounting
from agentenv.snapshots.account import Account
from agentenv.snapshots.accounting import SnapshotNode, UsageReport
from agentenv.snapshots.changes import ChangeCounter
from agentenv.snapshots.files import SnapshotDirectory, signatures, worded
from agentenv.snapshots.index import DamagedSnapshot, Signature, SnapshotIndex, SnapshotObserver
from agentenv.snapshots.manifest import SNAPSHOT_ID, SnapshotManifest, StateFile
from agentenv.snapshots.ports import OWNER_PREFIX, SnapshotLayers, owner_of
from agentenv.storage.layers import StoredLayer

log = structlog.get_logger(__name__)

_LOCK_NAME = ".lock"
_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Recovery:
    """What was mended at the start."""

    removed: tuple[str, ...]
    """Ids of captures and deletions that a killed process left unfinished."""
    dropped: tuple[str, ...]
    """Ids of snapshots that are not there, whose layers were still referenced."""
    referenced: tuple[str, ...]
    """Ids of snapshots whose layers were not referenced as they should be, and now are."""
    damaged: tuple[DamagedSnapshot, ...]


@dataclass(frozen=True, slots=True)
class SnapshotLease:
    """A snapshot that stays loadable while somebody holds this, even when it is deleted meanwhile."""

    manifest: SnapshotManifest
    memory_layers: tuple[StoredLayer, ...]
    """Bottom first."""
    disk_layers: tuple[StoredLayer, ...]
    """Bottom first."""
    state: Path | None
    """The file; never write to it."""


class SnapshotDraft:
    """A snapshot that is being taken. Import its layers for `owner`, give the state, then `commit`."""

    def __init__(self, repository: LocalSnapshots, directory: SnapshotDirectory, release: Callable[[], None]) -> None:
        self._repository = repository
        self._directory = directory
        self._release = release
        self._state: StateFile | None = None
        self._closed = False
        self.snapshot_id = directory.snapshot_id
        self.owner = owner_of(directory.snapshot_id)
        """Whose references the layers have, until and after the commit."""
        self.directory = directory.path
        """For files on the way to the layer store. What is left in it goes with the draft, not with the snapshot."""

    def take_state(self, source: Path) -> StateFile:
        """Copy the state that the VMM wrote. Returns what the manifest must name.

        Raises:
            InsufficientStorageError: the disk is full.
            SnapshotError: it cannot be read or written, is empty or far too large, or one was taken already.
        """
        self._state = self._directory.take_state(source)
        return self._state

    def commit(self, manifest: SnapshotManifest) -> None:
        """Make it a snapshot, durably. After an error there is none, and the draft cannot be used again.

        Raises:
            LayerError: a layer is not in the store.
            InsufficientStorageError: the disk is full, or the budget of snapshots is.
            SnapshotError: the manifest is of another snapshot or state, or cannot be written.
        """
        if self._closed:
            raise SnapshotError(f"the draft of snapshot {self.snapshot_id} is over")
        self._closed = True
        if manifest.snapshot_id != self.snapshot_id:
            raise SnapshotError(f"snapshot {self.snapshot_id}: the manifest is of {manifest.snapshot_id}")
        if manifest.state != self._state:
            raise SnapshotError(f"snapshot {self.snapshot_id}: the manifest names another state than was taken")
        self._repository._commit(self._directory, manifest)
        self._release()

    def close(self) -> None:
        """Refuse a commit from now on."""
        self._closed = True


class LocalSnapshots:
    """See the module.

    Args:
        directory: made (0700) when it is missing: states and manifests are as secret as the machines' memory.
        layers: where their layers are.
        budget_mib: what all snapshots together may take, MiB, each layer counted once. None: no limit.
        free_owners: layers of owners with this prefix do not count: they are there, whatever becomes of snapshots.
    """

    def __init__(
        self,
        directory: Path,
        layers: SnapshotLayers,
        *,
        budget_mib: int | None = None,
        free_owners: str | None = None,
    ) -> None:
        self._directory = directory.absolute()
        self._layers = layers
        self._free_owners = free_owners
        self._budget = None if budget_mib is None else budget_mib * _MIB
        self._account = Account()
        self._index = SnapshotIndex()
        if self._budget is not None:
            self._index.watch(self._account)
        self._counter = ChangeCounter(self._directory / _LOCK_NAME)
        self._seen: int | None = None
        """What the counter was when the index was what there is. None: look at everything."""
        self._begun: int | None = None
        """What the counter is while a thread of ours changes something."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise worded(error, f"cannot make the directory of snapshots {directory}") from error

    @contextmanager
    def draft(self, snapshot_id: str, *, kept: bool = True) -> Iterator[SnapshotDraft]:
        """Begin a snapshot. Without a commit nothing is left of it at the end, references included.

        Args:
            snapshot_id: which.
            kept: whether it is meant to be committed; then a budget that is used up already refuses it at once.

        Raises:
            SnapshotError: the id is malformed, or taken.
            InsufficientStorageError: the disk is full, or the budget is used up already.
        """
        if SNAPSHOT_ID.fullmatch(snapshot_id) is None:
            raise SnapshotError(f"{snapshot_id[:80]!r} cannot be the id of a snapshot")
        if kept:
            self.ensure_room(1)
        directory = SnapshotDirectory(self._directory, snapshot_id)
        with ExitStack() as stack:
            with self._locked():
                release = stack.enter_context(directory.created())
            draft = SnapshotDraft(self, directory, release)
            try:
                yield draft
            finally:
                draft.close()
                self._forget_unfinished(directory, draft.owner)

    def _forget_unfinished(self, directory: SnapshotDirectory, owner: str) -> None:
        try:
            if not directory.exists():
                self._layers.drop(owner)
        except AgentEnvError as error:  # the reason for the end is the news; `recover` drops them
            log.warning("references_not_dropped", owner=owner, error=error.message)

    def ensure_room(self, size: int) -> None:
        """Say early that the budget has no room.

        Args:
            size: bytes that would come on top.

        Raises:
            InsufficientStorageError: it has not; the message says what to do.
        """
        if self._budget is None:
            return
        self.refresh()
        self._require_room(size, self._free_layers())

    def _require_room(self, size: int, free: Collection[str]) -> None:
        assert self._budget is not None  # noqa: S101 - the callers look
        used = self._account.total(free)
        if used + size > self._budget:
            raise InsufficientStorageError(
                f"the snapshots of this node take {used / _MIB:.0f} MiB, and with {size / _MIB:.1f} MiB more they "
                f"would exceed their budget of {self._budget // _MIB} MiB: delete snapshots (`aenv snapshots "
                "--tree` shows what each costs) or paused sandboxes, or raise the budget"
            )

    def get(self, snapshot_id: str) -> SnapshotManifest:
        """Find a snapshot.

        Raises:
            SnapshotNotFoundError: there is none.
            SnapshotError: its manifest is damaged.
        """
        directory = SnapshotDirectory(self._directory, snapshot_id)
        self.refresh()
        known = self._index.find(snapshot_id)
        signature = directory.signature()
        if known is not None and known[0] == signature:
            return known[1]
        if known is not None or signature is not None:  # changed by hand, or just now
            with self._index.lock:
                self._seen = None
        return directory.read()

    def refresh(self) -> None:
        """Take in what other processes changed. Looks at the files of snapshots only when one did.

        What was changed by hand is noticed when somebody asks for that snapshot by its id, or by `scan`.
        """
        with self._index.lock:
            if not self._is_seen(self._count()):
                self.scan()

    def scan(self) -> tuple[tuple[SnapshotManifest, ...], tuple[DamagedSnapshot, ...]]:
        """Look at everything. Returns all snapshots, the oldest first, and those that cannot be read."""
        with self._index.lock:
            count = self._count()
            self._index.compare(self._present(), lambda name: SnapshotDirectory(self._directory, name).read())
            if count == self._begun:
                # What our thread changes now, it takes in itself.
                self._seen = count - 1
            else:
                self._seen = None if count % 2 else count
            return self._index.manifests(), self._index.damaged()

    def watch(self, observer: SnapshotObserver) -> None:
        """Have an observer told of all snapshots: of those that are known now at once, of others by `refresh`."""
        self._index.watch(observer)

    def ids(self) -> tuple[str, ...]:
        """Ids of all snapshots and drafts, in order, those that cannot be read included."""
        return self._names()

    def list(self) -> tuple[SnapshotManifest, ...]:
        """All snapshots that can be read, the oldest first. The others are logged."""
        with self._index.lock:
            self.refresh()
            return self._index.manifests()

    def tree(self) -> tuple[SnapshotNode, ...]:
        """The roots of the family tree of all that are not hidden."""
        return accounting.family_tree(manifest for manifest in self.list() if not manifest.hidden)

    def usage(self) -> UsageReport:
        """What each snapshot costs, hidden ones, too, and all together."""
        return accounting.usage(self.list(), self._layers.owners, self._file_bytes, self._budget)

    def delete(self, snapshot_id: str) -> None:
        """Delete a snapshot, a damaged one, too. Its children stay whole: each references all its layers itself.

        Whoever holds a lease of it can go on; the files go when the last one ends. Its layers go with the layer store's
        next collection, unless others use them.

        Raises:
            SnapshotNotFoundError: there is none.
        """
        directory = SnapshotDirectory(self._directory, snapshot_id)
        with self._changing():
            directory.remove_manifest()
            self._index.remove(snapshot_id)
            self._layers.drop(owner_of(snapshot_id))
            directory.remove_if_left()

    @contextmanager
    def lease(self, snapshot_id: str) -> Iterator[SnapshotLease]:
        """Keep a snapshot's layers and state while it is loaded, against deletions and collections of any process.

        Raises:
            SnapshotNotFoundError: there is none (any more).
            SnapshotError: its manifest or state file is damaged, or a layer is missing or has another size.
        """
        directory = SnapshotDirectory(self._directory, snapshot_id)
        try:
            with directory.shared():
                manifest = self.get(snapshot_id)
                problem = manifest.state and directory.state_problem(manifest.state, read=False)
                if problem:
                    raise SnapshotError(f"snapshot {snapshot_id} is damaged: {problem}")
                with self._leased_layers(manifest) as layers:
                    yield SnapshotLease(
                        manifest,
                        tuple(layers[layer.digest] for layer in manifest.memory_layers),
                        tuple(layers[layer.digest] for layer in manifest.disk_layers),
                        None if manifest.state is None else directory.path / manifest.state.name,
                    )
        finally:
            self._remove_after_lease(directory)

    @contextmanager
    def _leased_layers(self, manifest: SnapshotManifest) -> Iterator[dict[str, StoredLayer]]:
        with ExitStack() as stack:
            try:
                found = stack.enter_context(self._layers.lease([layer.digest for layer in manifest.layers]))
            except LayerError as error:
                # A deletion may have been faster than the lease.
                if not SnapshotDirectory(self._directory, manifest.snapshot_id).exists():
                    raise SnapshotNotFoundError(manifest.snapshot_id) from error
                raise SnapshotError(f"snapshot {manifest.snapshot_id} is damaged: {error.message}") from error
            layers = {layer.digest: layer for layer in found}
            for layer in manifest.layers:
                if layers[layer.digest].size != layer.size:
                    raise SnapshotError(
                        f"snapshot {manifest.snapshot_id} is damaged: layer {layer.digest} has "
                        f"{layers[layer.digest].size} bytes, its manifest says {layer.size}"
                    )
            yield layers

    def _remove_after_lease(self, directory: SnapshotDirectory) -> None:
        """The snapshot may have been deleted while it was in use; then the last user clears away."""
        try:
            if directory.path.exists() and not directory.exists():
                with self._locked():
                    directory.remove_if_left()
        except (AgentEnvError, OSError) as error:  # `recover` does it
            log.warning("snapshot_not_cleared", snapshot=directory.snapshot_id, error=str(error))

    def verify(self, snapshot_id: str) -> tuple[str, ...]:
        """Read all bytes of a snapshot. Returns what is damaged, in words that name the file; empty when it is sound.

        Raises:
            SnapshotNotFoundError: there is none.
        """
        directory = SnapshotDirectory(self._directory, snapshot_id)
        with directory.shared():
            try:
                manifest = directory.read()
            except SnapshotError as error:
                return (error.message,)
            problems = []
            state_problem = manifest.state and directory.state_problem(manifest.state, read=True)
            if state_problem:
                problems.append(state_problem)
            for layer in manifest.layers:
                try:
                    size = self._layers.verify(layer.digest).size
                except LayerError as error:
                    problems.append(error.message)
                else:
                    if size != layer.size:
                        problems.append(f"layer {layer.digest} has {size} bytes, the manifest says {layer.size}")
            return tuple(problems)

    def recover(self) -> Recovery:
        """Clear what killed processes left, and mend references. For the start of a server; safe at any time."""
        removed, dropped, referenced = [], [], []
        # Counts as a change, so that one that was killed within counts no more.
        with self._changing():
            for name in self._names():
                directory = SnapshotDirectory(self._directory, name)
                if not directory.exists() and directory.remove_if_left():
                    removed.append(name)
            present = set(self._names())
            for owner in self._layers.owners_with_prefix(OWNER_PREFIX):
                name = owner.removeprefix(OWNER_PREFIX)
                # A directory without manifest that is still there belongs to a living process.
                if name not in present:
                    self._layers.drop(owner)
                    dropped.append(name)
        found, damaged = self.scan()
        for manifest in found:
            try:
                if self._mend_references(manifest):
                    referenced.append(manifest.snapshot_id)
            except LayerError as error:
                log.warning("snapshot_damaged", snapshot=manifest.snapshot_id, problem=error.message)
                damaged = (*damaged, DamagedSnapshot(manifest.snapshot_id, error.message))
        result = Recovery(tuple(removed), tuple(dropped), tuple(referenced), damaged)
        if removed or dropped or referenced:
            log.info("snapshots_recovered", removed=removed, dropped=dropped, referenced=referenced)
        return result

    def _mend_references(self, manifest: SnapshotManifest) -> bool:
        owner = owner_of(manifest.snapshot_id)
        wanted = tuple(layer.digest for layer in manifest.layers)
        if self._layers.references(owner) == wanted:
            return False
        with self._locked():
            if not SnapshotDirectory(self._directory, manifest.snapshot_id).exists():
                return False
            self._layers.set_references(owner, wanted)
        return True

    def _commit(self, directory: SnapshotDirectory, manifest: SnapshotManifest) -> None:
        with self._changing():
            self._check_budget(directory, manifest)
            self._layers.set_references(
                owner_of(manifest.snapshot_id), tuple(layer.digest for layer in manifest.layers), durable=True
            )
            directory.write_manifest(manifest)
            self._take_in(directory, manifest)

    def _check_budget(self, directory: SnapshotDirectory, manifest: SnapshotManifest) -> None:
        if self._budget is None:
            return
        self.refresh()
        free = self._free_layers()
        self._require_room(self._account.added_by(manifest.layers, free) + directory.disk_bytes(), free)

    def _free_layers(self) -> frozenset[str]:
        """Digests of layers that cost no snapshot anything: they stay, whatever becomes of snapshots."""
        if self._free_owners is None:
            return frozenset()
        owners = self._layers.owners_with_prefix(self._free_owners)
        return frozenset(digest for owner in owners for digest in self._layers.references(owner))

    def _take_in(self, directory: SnapshotDirectory, manifest: SnapshotManifest) -> None:
        """A snapshot that exists from now on; nothing that fails here may say that it does not."""
        try:
            signature = directory.signature()
        except AgentEnvError as error:
            log.warning("snapshot_not_looked_at", snapshot=manifest.snapshot_id, error=error.message)
            signature = None
        with self._index.lock:
            if signature is None:
                self._seen = None
            else:
                self._index.add(manifest, signature)

    def _file_bytes(self, snapshot_id: str) -> int:
        return SnapshotDirectory(self._directory, snapshot_id).disk_bytes()

    def _present(self) -> Iterator[tuple[str, Signature]]:
        return signatures(self._directory, self._names())

    def _count(self) -> int:
        try:
            return self._counter.read()
        except OSError as error:
            raise worded(error, f"cannot look into the directory of snapshots {self._directory}") from error

    def _is_seen(self, count: int) -> bool:
        return self._seen is not None and (self._seen == count or (self._begun == count and self._seen == count - 1))

    def _names(self) -> tuple[str, ...]:
        try:
            return tuple(sorted(path.name for path in self._directory.iterdir() if SNAPSHOT_ID.fullmatch(path.name)))
        except OSError as error:
            raise worded(error, f"cannot look into the directory of snapshots {self._directory}") from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Order what appears in and goes from the directory, between all processes. Held for moments only."""
        with ExitStack() as stack:
            try:
                stack.enter_context(durable.exclusive_lock(self._directory / _LOCK_NAME, lambda: None))
            except OSError as error:
                raise worded(error, f"cannot lock the directory of snapshots {self._directory}") from error
            yield

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Let others know that a snapshot appears or goes. The body keeps the index in step, or fails."""
        with self._locked():
            try:
                begun = self._counter.begin()
            except OSError as error:
                raise worded(error, f"cannot change the directory of snapshots {self._directory}") from error
            with self._index.lock:
                self._begun = begun
            in_step = False
            try:
                yield
                in_step = True
            finally:
                self._end_change(begun, in_step=in_step)

    def _end_change(self, begun: int, *, in_step: bool) -> None:
        with self._index.lock:
            was_seen = self._is_seen(begun)
            self._begun = None
            try:
                count = self._counter.end(begun)
            except OSError as error:  # then all processes look at everything each time, until the next change
                log.warning("snapshot_change_not_counted", error=str(error))
                return
            if was_seen and in_step:
                self._seen = count
