"""Removes what VMMs of earlier servers left on this host: the real `ports.OrphanReaper`, by way of `vmm.records`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from agentenv.orchestrator.tasks import in_thread
from agentenv.vmm.base import MachineRecord
from agentenv.vmm.memory import remove_stray_memory
from agentenv.vmm.records import find_orphans, reap


class HostOrphans:
    """Orphans of one home.

    Args:
        sandboxes: the directory whose children are the machines' directories.
        memory_dir: where guest memory files lie; None when these are in the machines' directories.
    """

    def __init__(self, sandboxes: Path, memory_dir: Path | None) -> None:
        self._sandboxes = sandboxes
        self._memory_dir = memory_dir

    async def reap(self, live: Collection[MachineRecord]) -> Sequence[str]:
        """See `ports.OrphanReaper`."""
        owned = [Path(record.directory) for record in live]
        removed = []
        for record in await find_orphans(self._sandboxes, owned):
            await reap(record)
            removed.append(f"machine in {record.directory}" + (f", process {record.pid}" if record.pid > 0 else ""))
        memory_dir = self._memory_dir
        if memory_dir is not None:
            kept = {record.memory_file for record in live}
            for path in await in_thread(lambda: remove_stray_memory(memory_dir, kept)):
                removed.append(f"memory file {path}")
        return removed
