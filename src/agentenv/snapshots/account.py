"""A running account of what all snapshots take, so that a check of the budget does not go through all of them.

Counts each layer once, and the states. Knows no files: it watches the index.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterable

from agentenv.snapshots.manifest import LayerReference, SnapshotManifest


class Account:
    """Safe for threads. Sizes in bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: Counter[LayerReference] = Counter()
        self._sizes: dict[str, int] = {}
        """Of the layers that have users, by digest."""
        self._total = 0

    def total(self, free: Collection[str] = ()) -> int:
        """What all of them take, but for the layers with the digests `free`."""
        with self._lock:
            return self._total - sum(self._sizes.get(digest, 0) for digest in set(free))

    def added_by(self, layers: Iterable[LayerReference], free: Collection[str] = ()) -> int:
        """What layers would add that no snapshot has yet, and that are not among `free`."""
        with self._lock:
            new = (layer for layer in set(layers) if layer not in self._users and layer.digest not in free)
            return sum(layer.size for layer in new)

    def added(self, manifest: SnapshotManifest) -> None:
        """Count a snapshot."""
        with self._lock:
            self._total += sum(layer.size for layer in manifest.layers if layer not in self._users)
            self._users.update(manifest.layers)
            self._sizes.update((layer.digest, layer.size) for layer in manifest.layers)
            self._total += 0 if manifest.state is None else manifest.state.size

    def removed(self, manifest: SnapshotManifest) -> None:
        """Count a snapshot no more."""
        with self._lock:
            for layer in manifest.layers:
                self._users[layer] -= 1
                if not self._users[layer]:
                    del self._users[layer]
                    self._sizes.pop(layer.digest, None)
                    self._total -= layer.size
            self._total -= 0 if manifest.state is None else manifest.state.size
