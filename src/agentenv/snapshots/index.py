"""All manifests of a node in memory, in order of their age, kept up to date by differences. Knows no files.

Manifests never change and are read once. Whoever counts or names snapshots watches the index instead of going through
all of them each time.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

import structlog

from agentenv.errors import SnapshotError, SnapshotNotFoundError
from agentenv.snapshots.manifest import SnapshotManifest

log = structlog.get_logger(__name__)

Signature = tuple[int, ...]
"""Tells one file from another that took its place."""
Age = tuple[datetime, str]


def age_of(manifest: SnapshotManifest) -> Age:
    """What snapshots are sorted by, the oldest first."""
    return manifest.created_at, manifest.snapshot_id


class SnapshotObserver(Protocol):
    """Is told of every snapshot that appears or goes, one at a time, from any thread. Must be quick and never fail."""

    def added(self, manifest: SnapshotManifest) -> None: ...

    def removed(self, manifest: SnapshotManifest) -> None: ...


@dataclass(frozen=True, slots=True)
class DamagedSnapshot:
    """A snapshot whose manifest cannot be read. Its layers are kept: it may be mended, or deleted."""

    snapshot_id: str
    problem: str


class SnapshotIndex:
    """Safe for threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held by whoever compares the index with what there is, so that nothing is taken in meanwhile."""
        self._known: dict[str, tuple[Signature, SnapshotManifest]] = {}
        self._damaged: dict[str, tuple[Signature, DamagedSnapshot]] = {}
        self._order: list[Age] = []
        self._sorted: tuple[SnapshotManifest, ...] | None = None
        self._observers: list[SnapshotObserver] = []

    def watch(self, observer: SnapshotObserver) -> None:
        """Have an observer told of all snapshots that are here, and of all that come and go."""
        with self.lock:
            for manifest in self.manifests():
                observer.added(manifest)
            self._observers.append(observer)

    def manifests(self) -> tuple[SnapshotManifest, ...]:
        """All of them, the oldest first."""
        with self.lock:
            if self._sorted is None:
                self._sorted = tuple(self._known[name][1] for _, name in self._order)
            return self._sorted

    def damaged(self) -> tuple[DamagedSnapshot, ...]:
        """Those that cannot be read, by id."""
        with self.lock:
            return tuple(snapshot for _, (_, snapshot) in sorted(self._damaged.items()))

    def find(self, snapshot_id: str) -> tuple[Signature, SnapshotManifest] | None:
        """One that can be read."""
        with self.lock:
            return self._known.get(snapshot_id)

    def add(self, manifest: SnapshotManifest, signature: Signature) -> None:
        """Take one in, in place of what had its id."""
        with self.lock:
            self.remove(manifest.snapshot_id)
            self._known[manifest.snapshot_id] = (signature, manifest)
            insort(self._order, age_of(manifest))
            self._sorted = None
            for observer in self._observers:
                observer.added(manifest)

    def remove(self, snapshot_id: str) -> None:
        """Forget one, if it is known."""
        with self.lock:
            self._damaged.pop(snapshot_id, None)
            known = self._known.pop(snapshot_id, None)
            if known is None:
                return
            del self._order[bisect_left(self._order, age_of(known[1]))]
            self._sorted = None
            for observer in self._observers:
                observer.removed(known[1])

    def compare(self, present: Iterable[tuple[str, Signature]], read: Callable[[str], SnapshotManifest]) -> None:
        """Take in what is new and forget what is gone. What cannot be read is logged, once.

        Args:
            present: ids of all snapshots that there are, and what their files are.
            read: gives the manifest of a new one; raises `SnapshotNotFoundError` or `SnapshotError`.
        """
        with self.lock:
            left = self._known.keys() | self._damaged.keys()
            for name, signature in present:
                left.discard(name)
                known = self._known.get(name) or self._damaged.get(name)
                if known is not None and known[0] == signature:
                    continue
                self._read(name, signature, read)
            for name in left:
                self.remove(name)

    def _read(self, name: str, signature: Signature, read: Callable[[str], SnapshotManifest]) -> None:
        try:
            manifest = read(name)
        except SnapshotNotFoundError:
            self.remove(name)
        except SnapshotError as error:
            self.remove(name)
            self._damaged[name] = (signature, DamagedSnapshot(name, error.message))
            log.warning("snapshot_damaged", snapshot=name, problem=error.message)
        else:
            self.add(manifest, signature)
