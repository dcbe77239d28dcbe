"""Writes what happens to the disks of running sandboxes into their logs. Decides nothing: the VMM halts the guests."""

from __future__ import annotations

import structlog

from agentenv.orchestrator import logbook
from agentenv.orchestrator.live import LiveSandboxes
from agentenv.orchestrator.model import LogEntry
from agentenv.orchestrator.ports import Clock
from agentenv.orchestrator.tasks import OwnedTasks
from agentenv.storage.disks import DiskEvent

_log = structlog.get_logger(__name__)
_QUIET_S = 60.0
"""A full file system is news once a minute, not with every write that it refuses."""
_MEANINGS = {
    "no_space": "the host's file system is full; the sandbox is halted until there is room",
    "io_error": "the host could not read or write the disk",
    "failed": "the disk could not be opened again; the sandbox waits for it",
}


class DiskEvents:
    """Takes events of a `DiskStore`."""

    def __init__(self, live: LiveSandboxes, clock: Clock) -> None:
        self._live = live
        self._clock = clock
        self._tasks = OwnedTasks()
        self._noted: dict[tuple[str, str], float] = {}

    def note(self, event: DiskEvent) -> None:
        """Log an event, unless its like was logged just now. Never fails."""
        now = self._clock.monotonic()
        self._noted = {key: moment for key, moment in self._noted.items() if now - moment < _QUIET_S}
        if (event.disk_id, event.kind) in self._noted:
            return
        self._noted[event.disk_id, event.kind] = now
        _log.warning("disk_event", sandbox=event.disk_id, kind=event.kind, error=event.message)
        live = self._live.find(event.disk_id)
        if live is not None:
            level = "warn" if event.kind == "no_space" else "error"
            message = f"{_MEANINGS[event.kind]} ({event.message})" if event.message else _MEANINGS[event.kind]
            entry = LogEntry(self._clock.now(), level, "storage", message)
            self._tasks.spawn(logbook.append(live.holdings.directory, entry), f"log a disk event of {event.disk_id}")

    async def close(self) -> None:
        """Finish what is being written."""
        await self._tasks.settle()
