"""The layer store: immutable layers by the sha256 of their bytes, with references that keep them.

The index and its rules are in `layer_index.py`. Everything here blocks: call it in a thread. Several processes may use
one store at the same time, and any of them may be killed at any moment. This file must not know what a layer is for.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from agentenv.errors import AgentEnvError, InsufficientStorageError, LayerError
from agentenv.storage import layer_index
from agentenv.storage.layer_files import bring, is_whole, remove_tree, sync, worded
from agentenv.storage.layer_index import LayerIndex
from agentenv.storage.layer_tools import LayerFacts, LayerTools, NativeLayerTools

log = structlog.get_logger(__name__)

_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MODE = 0o444


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A layer of the store."""

    digest: str
    """`sha256:` and 64 hex digits, of the file as it lies there."""
    size: int
    """Bytes of the file."""
    uuid: str | None
    """Lowercase; None when the layer carries none."""
    parent_uuid: str | None
    virtual_size: int
    """Bytes of the device that it is a layer of."""
    path: Path
    """Absolute, mode 0444. Never write to it."""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """What the store holds."""

    layers: int
    size_bytes: int
    unreferenced_layers: int
    unreferenced_bytes: int
    """What `collect_garbage` would remove now."""


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """What a collection removed."""

    removed: tuple[str, ...]
    """Digests."""
    freed_bytes: int
    leftovers: int
    """Drafts of imports whose process has ended, and files that no import finished."""


class LayerStore:
    """Layers below one directory: `sha256/<64 hex>`, `index.db`, `incoming/`.

    A reference is (owner, digest). Owners are words like `template:base` or `disk:<id>`; a layer without a reference
    is removed by the next `collect_garbage`.

    Args:
        directory: made when it is missing.
        tools: reads layers; the compiled module unless a test brings its own.
    """

    def __init__(self, directory: Path, tools: LayerTools | None = None) -> None:
        self._directory = directory.absolute()
        self._files = self._directory / "sha256"
        self._incoming = self._directory / "incoming"
        self._tools: LayerTools = tools if tools is not None else NativeLayerTools()
        self._index = LayerIndex(self._directory / "index.db", self._files)
        try:
            for path in (self._directory, self._files, self._incoming):
                path.mkdir(mode=0o755, parents=True, exist_ok=True)
        except OSError as error:
            raise worded(error, f"cannot make the layer store {directory}") from error

    @property
    def directory(self) -> Path:
        """Where it is, absolute."""
        return self._directory

    @property
    def tools(self) -> LayerTools:
        """What reads and merges layers."""
        return self._tools

    def close(self) -> None:
        """Close the index. Idempotent."""
        self._index.close()

    def import_file(self, path: Path, *, owner: str, digest: str | None = None, move: bool = True) -> StoredLayer:
        """Verify a layer file and put it into the store, referenced by `owner` (after its other references) at once.

        Args:
            path: the file, plain or wrapped.
            owner: who keeps it.
            digest: what the file must have; None takes what it has.
            move: the file is given away: linked, then removed. Otherwise it stays and is copied (a reflink where the
                file system can), so that later changes of it do not reach the store.

        Raises:
            LayerError: it is no sealed layer, is damaged, or has another digest.
            InsufficientStorageError: the file system is full; nothing is left of it.
            StorageError: it cannot be read or written.
        """
        layer = self._import(path, owner, digest, link=move, read_all=True)
        if move:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise worded(error, f"{path} is in the layer store, but cannot be removed") from error
        return layer

    def link_file(self, path: Path, *, owner: str) -> StoredLayer:
        """Like `import_file` for a layer that this node has just made: linked, not copied, and the file stays.

        Nobody may write to the file any more. Its blocks are hashed, but not decoded.

        Raises:
            LayerError: it is no sealed layer.
            InsufficientStorageError: the file system is full; nothing is left of it.
            StorageError: it cannot be read or written.
        """
        return self._import(path, owner, None, link=True, read_all=False)

    def link_from(self, other: LayerStore, digest: str, *, owner: str) -> StoredLayer:
        """Take over a layer of another store: a hard link on the same file system, else a verified copy.

        Raises:
            LayerError: the other store does not have it, or it is damaged.
            InsufficientStorageError: the file system is full.
            StorageError: it cannot be read or written.
        """
        source = other.get(digest)
        facts = LayerFacts(source.digest, source.size, source.uuid, source.parent_uuid, source.virtual_size)
        with self.draft() as draft:
            if not bring(source.path, draft, link=True):
                self._check(draft, source.path, digest, read_all=False)
            return self._admit(draft, facts, owner)

    @contextmanager
    def draft(self) -> Iterator[Path]:
        """A path in the store's file system to write a layer to, for `import_file(…, move=True)`.

        The file is removed at the end of the context, or once this process has ended. It does not exist yet.
        """
        name = secrets.token_hex(16)
        # A directory of its own: whoever writes the file may need another one beside it meanwhile.
        directory = self._incoming / name
        try:
            with self._index.writing(durable=False) as connection:
                layer_index.add_lease(connection, name, ())
            try:
                directory.mkdir(mode=0o700)
            except OSError as error:
                raise worded(error, f"cannot make a draft in the layer store {self._directory}") from error
            yield directory / "layer"
        finally:
            try:
                remove_tree(directory)
            except OSError as error:  # a collection tries again
                log.warning("draft_not_removed", path=str(directory), error=str(error))
            self._end_lease(name)

    @contextmanager
    def lease(self, digests: Sequence[str]) -> Iterator[tuple[StoredLayer, ...]]:
        """Keep layers while the context lasts (or this process lives), with no owner.

        Raises:
            LayerError: one is not in the store, or its file is missing.
        """
        name = secrets.token_hex(16)
        try:
            with self._index.writing(durable=False) as connection:
                layers = tuple(self._stored(layer_index.find(connection, digest), digest) for digest in digests)
                layer_index.add_lease(connection, name, sorted(set(digests)))
            yield layers
        finally:
            self._end_lease(name)

    def get(self, digest: str) -> StoredLayer:
        """Find a layer. A look at its file is part of it, reading the bytes is not: see `verify`.

        Raises:
            LayerError: it is not in the store, or its file was removed or changed its size (named in the message).
        """
        with self._index.reading() as connection:
            return self._stored(layer_index.find(connection, digest), digest)

    def list(self) -> tuple[StoredLayer, ...]:
        """All layers, by digest, without a look at their files."""
        with self._index.reading() as connection:
            return tuple(self._named(facts) for facts in layer_index.every(connection))

    def set_references(self, owner: str, digests: Sequence[str], *, durable: bool = True) -> None:
        """Replace all references of an owner, atomically. An empty sequence drops them.

        Args:
            owner: whose.
            digests: in the owner's order (bottom first for stacks).
            durable: on stable storage when this returns. Otherwise a power cut may undo it, a killed process not.

        Raises:
            LayerError: a digest is not in the store, or its file is missing; nothing was changed.
        """
        with self._index.writing(durable=durable) as connection:
            for digest in digests:
                self._stored(layer_index.find(connection, digest), digest)
            layer_index.set_references(connection, owner, digests)

    def move_references(self, source: str, target: str, digests: Sequence[str]) -> None:
        """Make `digests` the references of `target` and drop those of `source`, in one step.

        Raises:
            LayerError: a digest is not in the store; nothing was changed.
        """
        with self._index.writing(durable=True) as connection:
            for digest in digests:
                self._stored(layer_index.find(connection, digest), digest)
            layer_index.set_references(connection, target, digests)
            layer_index.set_references(connection, source, ())

    def references(self, owner: str) -> tuple[str, ...]:
        """What an owner references, in its order; empty for an unknown one."""
        with self._index.reading() as connection:
            return layer_index.references(connection, owner)

    def owners(self, digest: str) -> tuple[str, ...]:
        """Who references a layer, sorted."""
        with self._index.reading() as connection:
            return layer_index.owners(connection, digest)

    def owners_with_prefix(self, prefix: str) -> tuple[str, ...]:
        """All owners whose name begins with `prefix`, sorted."""
        with self._index.reading() as connection:
            return layer_index.owners_with_prefix(connection, prefix)

    def drop(self, owner: str) -> None:
        """Drop all references of an owner. Idempotent."""
        with self._index.reading() as connection:
            if not layer_index.references(connection, owner):
                return
        with self._index.writing(durable=False) as connection:
            layer_index.set_references(connection, owner, ())

    def usage(self) -> StoreUsage:
        """How much the store holds."""
        with self._index.reading() as connection:
            total = layer_index.totals(connection, free=False)
            free = layer_index.totals(connection, free=True)
        return StoreUsage(total.layers, total.size_bytes, free.layers, free.size_bytes)

    def owned_bytes(self, prefix: str, *, without: str | None = None) -> int:
        """Size of the layers that owners with a prefix reference, each counted once.

        Args:
            prefix: what begins their names, like `template:`.
            without: owners whose names begin so do not count; a longer form of `prefix`.
        """
        with self._index.reading() as connection:
            return layer_index.owned_bytes(connection, prefix, without)

    def collect_garbage(self) -> GarbageReport:
        """Remove what nobody references or leases, and what killed processes left. Safe at any time."""
        report = self._clear_leftovers()
        with self._index.reading() as connection:
            candidates = layer_index.free_layers(connection)
        removed = [facts for facts in candidates if self._remove_free(facts.digest)]
        for facts in removed:
            log.info("layer_removed", digest=facts.digest, size=facts.size)
        return replace(
            report,
            removed=tuple(facts.digest for facts in removed),
            freed_bytes=report.freed_bytes + sum(facts.size for facts in removed),
        )

    def verify(self, digest: str) -> StoredLayer:
        """Read a layer's bytes again.

        Raises:
            LayerError: its digest or its structure is not right any more; the message names the file and its owners.
        """
        with self.lease([digest]) as (layer,):
            try:
                found = self._tools.verify(layer.path)
            except LayerError as error:
                raise LayerError(self._damaged(layer.path, digest, error.message)) from error
            if found != digest:
                raise LayerError(self._damaged(layer.path, digest, f"its bytes have the digest {found}"))
            return layer

    def recover(self) -> GarbageReport:
        """Remove what killed imports and collections left; layers stay. For the start of a server."""
        report = self._clear_leftovers()
        with self._index.reading() as connection:
            free = layer_index.free_layers(connection)
        rows = 0
        for facts in free:
            # A collection that was killed between the file and its row.
            if not self._path(facts.digest).exists() and self._remove_free(facts.digest):
                rows += 1
                log.info("layer_leftover_removed", path=str(self._path(facts.digest)))
        return replace(report, leftovers=report.leftovers + rows)

    def _clear_leftovers(self) -> GarbageReport:
        """Remove files that no row and no living process knows, and leases of dead ones."""
        freed, leftovers = 0, 0
        with self._index.locked() as connection:
            dead = frozenset(layer_index.dead_leases(connection))
            in_use = layer_index.leases(connection) - dead
            known = {facts.digest for facts in layer_index.every(connection)}
            strays = [path for path in self._entries(self._incoming) if path.name not in in_use]
            strays += [path for path in self._entries(self._files) if f"sha256:{path.name}" not in known]
            for path in strays:
                try:
                    freed += remove_tree(path)
                except OSError as error:
                    raise worded(error, f"cannot remove the leftover {path} of the layer store") from error
                leftovers += 1
                log.info("layer_leftover_removed", path=str(path))
        if dead:
            with self._index.writing(durable=False) as connection:
                layer_index.end_dead_leases(connection)
        return GarbageReport((), freed, leftovers)

    def _import(self, path: Path, owner: str, digest: str | None, *, link: bool, read_all: bool) -> StoredLayer:
        with self.draft() as draft:
            bring(path, draft, link=link)
            facts = self._check(draft, path, digest, read_all=read_all)
            return self._admit(draft, facts, owner)

    def _check(self, draft: Path, source: Path, digest: str | None, *, read_all: bool) -> LayerFacts:
        """Verify a draft; errors name the file that it came from."""
        try:
            facts = self._tools.inspect(draft)
            if digest is not None and facts.digest != digest:
                raise LayerError(f"its digest is {facts.digest}, not {digest}")
            if read_all and self._tools.verify(draft) != facts.digest:
                raise LayerError("it was changed while it was imported")
        except LayerError as error:
            message = error.message.replace(str(draft), str(source))
            raise LayerError(f"{source} is not taken into the layer store: {message}") from error
        return facts

    def _admit(self, draft: Path, facts: LayerFacts, owner: str) -> StoredLayer:
        """Give a checked draft its name in the store, in one step with its row and its reference."""
        path = self._path(facts.digest)
        try:
            draft.chmod(_MODE)
            sync(draft)
            with self._index.writing(durable=True) as connection:
                known = layer_index.find(connection, facts.digest)
                if known is None or not is_whole(path, facts.size):
                    # A killed collection or a careless hand left a row without a file: this one takes its place.
                    draft.replace(path)
                    sync(self._files)
                    layer_index.put(connection, facts)
                held = layer_index.references(connection, owner)
                if facts.digest not in held:
                    layer_index.set_references(connection, owner, (*held, facts.digest))
        except BaseException as error:
            self._remove_stray(facts.digest)
            if isinstance(error, OSError):
                raise worded(error, f"cannot put layer {facts.digest} into the store {self._directory}") from error
            raise
        return self._named(facts)

    def _remove_stray(self, digest: str) -> None:
        """Remove the file of a layer that the index does not know."""
        try:
            with self._index.locked() as connection:
                if layer_index.find(connection, digest) is None:
                    self._path(digest).unlink(missing_ok=True)
        except (AgentEnvError, OSError) as error:  # a collection finds it
            log.warning("layer_leftover_not_removed", digest=digest, error=str(error))

    def _remove_free(self, digest: str) -> bool:
        path = self._path(digest)
        gone = False
        # One transaction each, so that nobody waits for more than the removal of one file.
        for _ in range(2):
            try:
                with self._index.writing(durable=False) as connection:
                    if not gone and not layer_index.is_free(connection, digest):
                        return False
                    # The file goes first: its room may be what the commit needs on a full disk. A row that is left
                    # without a file is free, and goes with `recover`.
                    path.unlink(missing_ok=True)
                    gone = True
                    layer_index.forget(connection, digest)
            except InsufficientStorageError:
                continue
            except OSError as error:
                raise worded(error, f"cannot remove layer {path}") from error
            return True
        return gone

    def _end_lease(self, name: str) -> None:
        layer_index.leave_lease(name)
        try:
            with self._index.writing(durable=False) as connection:
                layer_index.end_lease(connection, name)
        except AgentEnvError as error:  # a collection ends it
            log.warning("lease_not_ended", name=name, error=error.message)

    def _stored(self, facts: LayerFacts | None, digest: str) -> StoredLayer:
        if facts is None:
            raise LayerError(f"layer {digest[:80]} is not in the store {self._directory}; import or build it again")
        path = self._path(digest)
        try:
            size = path.stat().st_size
        except FileNotFoundError as error:
            raise LayerError(self._damaged(path, digest, "the file is missing")) from error
        except OSError as error:
            raise worded(error, f"cannot look at layer {path}") from error
        if size != facts.size:
            raise LayerError(self._damaged(path, digest, f"the file has {size} bytes instead of {facts.size}"))
        return self._named(facts)

    def _damaged(self, path: Path, digest: str, what: str) -> str:
        owners = ", ".join(self.owners(digest)) or "nobody"
        return (
            f"layer {path} is damaged: {what}; it is used by {owners}. Import the same layer again to mend it, or "
            "remove its users and build them again"
        )

    def _named(self, facts: LayerFacts) -> StoredLayer:
        return StoredLayer(
            digest=facts.digest,
            size=facts.size,
            uuid=facts.uuid,
            parent_uuid=facts.parent_uuid,
            virtual_size=facts.virtual_size,
            path=self._path(facts.digest),
        )

    def digest_of(self, path: Path) -> str | None:
        """The digest that a path of this store stands for, None for any other path."""
        digest = f"sha256:{path.name}"
        ours = path.parent == self._files or path.parent.resolve() == self._files.resolve()
        return digest if ours and _DIGEST.fullmatch(digest) else None

    def _path(self, digest: str) -> Path:
        match = _DIGEST.fullmatch(digest)
        if match is None:
            raise LayerError(f"{digest[:80]!r} is no digest of a layer")
        return self._files / match.group(1)

    def _entries(self, directory: Path) -> tuple[Path, ...]:
        try:
            return tuple(directory.iterdir())
        except OSError as error:
            raise worded(error, f"cannot look into the layer store {directory}") from error
