"""A running account of what all snapshots take, so that a check of the budget does not go through all of them.

Counts each layer once, and the states. Knows no files: it watches the index.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from agentenv.snapshots.manifest import LayerReference, SnapshotManifest


class Account:
    """Safe for threads. Sizes in bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: Counter[LayerReference] = Counter()
        self._total = 0

    @property
    def total(self) -> int:
        """What all of them take."""
        with self._lock:
            return self._total

    def added_by(self, layers: Iterable[LayerReference]) -> int:
        """What layers would add that no snapshot has yet."""
        with self._lock:
            return sum(layer.size for layer in set(layers) if layer not in self._users)

    def added(self, manifest: SnapshotManifest) -> None:
        """Count a snapshot."""
        with self._lock:
            self._total += sum(layer.size for layer in manifest.layers if layer not in self._users)
            self._users.update(manifest.layers)
            self._total += 0 if manifest.state is None else manifest.state.size

    def removed(self, manifest: SnapshotManifest) -> None:
        """Count a snapshot no more."""
        with self._lock:
            for layer in manifest.layers:
                self._users[layer] -= 1
                if not self._users[layer]:
                    del self._users[layer]
                    self._total -= layer.size
            self._total -= 0 if manifest.state is None else manifest.state.size
