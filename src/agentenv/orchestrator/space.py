"""What takes up the disk of this node, and how to get back what nobody uses.

Adds up what the layer store knows and what lies in the directories of snapshots and disks; one query and one walk for
each, so that ten thousand snapshots take no longer than a look at their directories. Decides nothing about sandboxes.
"""

from __future__ import annotations

import os
import stat

from agentenv.config import MIB, Settings
from agentenv.errors import StorageError
from agentenv.orchestrator.model import CollectedSpace, SpaceReport
from agentenv.orchestrator.ports import HostProbe
from agentenv.orchestrator.tasks import in_thread
from agentenv.snapshots.manifest import HIDDEN_PREFIX
from agentenv.snapshots.ports import OWNER_PREFIX, owner_of
from agentenv.storage.layers import LayerStore
from agentenv.templates.store import owner_of as owner_of_template

_BLOCK_BYTES = 512
"""Unit of `st_blocks`, on every file system."""


class NodeSpace:
    """The real `ports.Space`.

    Args:
        settings: of the node.
        layers: its layer store.
        host: what the host has left.
    """

    def __init__(self, settings: Settings, layers: LayerStore, host: HostProbe) -> None:
        self._paths = settings.paths
        self._budget_mib = settings.snapshots.budget_mib
        self._layers = layers
        self._host = host

    async def report(self) -> SpaceReport:
        """What takes up space.

        Raises:
            StorageError: the layer store or a directory cannot be read.
        """
        return await in_thread(self._report)

    async def collect(self) -> CollectedSpace:
        """Remove the layers that nobody uses. Never one that somebody takes at this moment.

        Raises:
            StorageError: a layer cannot be removed.
        """
        removed = await in_thread(self._layers.collect_garbage)
        return CollectedSpace(len(removed.removed), removed.freed_bytes)

    def _report(self) -> SpaceReport:
        store = self._layers.usage()
        hidden, named = self._files_of_snapshots()
        owner_of_hidden = owner_of(HIDDEN_PREFIX)
        return SpaceReport(
            layers_bytes=store.size_bytes,
            garbage_bytes=store.unreferenced_bytes,
            templates_bytes=self._layers.owned_bytes(owner_of_template("")),
            snapshots_bytes=named + self._layers.owned_bytes(OWNER_PREFIX, without=owner_of_hidden),
            paused_bytes=hidden + self._layers.owned_bytes(owner_of_hidden),
            disks_bytes=sum(size for _, size in _sizes_in(self._paths.disks)),
            budget_bytes=None if self._budget_mib is None else self._budget_mib * MIB,
            free_bytes=self._host.free_disk_bytes(),
        )

    def _files_of_snapshots(self) -> tuple[int, int]:
        """What the own files of hidden and of named snapshots take up."""
        sizes = _sizes_in(self._paths.snapshots)
        hidden = sum(size for name, size in sizes if name.startswith(HIDDEN_PREFIX))
        return hidden, sum(size for _, size in sizes) - hidden


def _sizes_in(directory: str | os.PathLike[str]) -> list[tuple[str, int]]:
    """What each entry of a directory takes up on the disk, with all that is below it."""
    sizes = []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                try:
                    found = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # what is there may go at any moment
                    continue
                if stat.S_ISDIR(found.st_mode):
                    sizes.append((entry.name, sum(size for _, size in _sizes_in(entry.path))))
                else:
                    sizes.append((entry.name, found.st_blocks * _BLOCK_BYTES))
    except FileNotFoundError:
        return sizes
    except OSError as error:
        raise StorageError(f"cannot look into {os.fspath(directory)}: {error.strerror}") from error
    return sizes
