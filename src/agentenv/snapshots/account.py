"""A running account of what all snapshots take, so that a capture's check of the budget does not read every manifest.

Counts each layer once, and the states. Knows no files: it is told which snapshots there are.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable

from agentenv.snapshots.manifest import LayerReference, SnapshotManifest


class Account:
    """Safe for threads. Sizes in bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, SnapshotManifest] = {}
        self._users: Counter[LayerReference] = Counter()
        self._total = 0

    def update(self, names: Iterable[str], read: Callable[[str], SnapshotManifest | None]) -> int:
        """Take in what is new and forget what is gone. Returns the total.

        Args:
            names: of all snapshots that there are.
            read: gives the manifest of a new one; None leaves it out this time.
        """
        with self._lock:
            present = set(names)
            for name in self._known.keys() - present:
                self._remove(self._known.pop(name))
            for name in present - self._known.keys():
                manifest = read(name)
                if manifest is not None:
                    self._known[name] = manifest
                    self._add(manifest)
            return self._total

    def added_by(self, layers: Iterable[LayerReference]) -> int:
        """What layers would add that no snapshot has yet."""
        with self._lock:
            return sum(layer.size for layer in set(layers) if layer not in self._users)

    def _add(self, manifest: SnapshotManifest) -> None:
        self._total += sum(layer.size for layer in manifest.layers if layer not in self._users)
        self._users.update(manifest.layers)
        self._total += 0 if manifest.state is None else manifest.state.size

    def _remove(self, manifest: SnapshotManifest) -> None:
        for layer in manifest.layers:
            self._users[layer] -= 1
            if not self._users[layer]:
                del self._users[layer]
                self._total -= layer.size
        self._total -= 0 if manifest.state is None else manifest.state.size
