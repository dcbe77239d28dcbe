"""The sandboxes that this server owns: their state and what they hold. In memory; the journal is elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

from agentenv.errors import SandboxNotFoundError
from agentenv.orchestrator.launch import Holdings
from agentenv.orchestrator.model import Sandbox, SandboxState
from agentenv.orchestrator.states import VISIBLE, Event, after
from agentenv.snapshots.manifest import HIDDEN_PREFIX


class LiveSandbox:
    """One sandbox. Its state changes by `apply` only, along the table of `states`."""

    def __init__(self, sandbox: Sandbox, holdings: Holdings) -> None:
        self.sandbox = sandbox
        self.holdings = holdings
        self.changing = asyncio.Lock()
        """Held while a caller's change is written down, so that changes do not overtake each other."""
        self.saving = asyncio.Lock()
        """Held while it is saved, up to the end of packing: one snapshot, fork or pause at a time."""
        self.watcher: asyncio.Task[None] | None = None
        """Waits for the end of the VM."""
        self.transition: asyncio.Task[Any] | None = None
        """The pause, resume or roll back that was begun last, or the moment of a capture. A kill cuts it short."""
        self.starting_from: str | None = None
        """The named snapshot that it needs until it runs."""
        self.not_before: datetime | None = None
        """A pause that failed at the end of its time is not tried again before this."""
        self.failed_pauses = 0
        """How many failed since the last that did not."""

    @property
    def state(self) -> SandboxState:
        return self.sandbox.state

    def apply(self, event: Event) -> None:
        """Move to the state that `event` leads to.

        Raises:
            ConflictError: the event is impossible now.
        """
        state = after(self.sandbox.state, event)
        if state is not None:
            self.sandbox = replace(self.sandbox, state=state)


def owned_snapshots(sandbox: Sandbox) -> set[str]:
    """The hidden snapshots that belong to a sandbox: those of its own pauses. A fork goes on from another one's."""
    names = {name for name in (sandbox.snapshot_id, sandbox.pausing_into) if name is not None}
    return {name for name in names if name.startswith(f"{HIDDEN_PREFIX}{sandbox.id}-")}


class LiveSandboxes:
    """All of them, by id."""

    def __init__(self) -> None:
        self._by_id: dict[str, LiveSandbox] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[LiveSandbox]:
        return iter(tuple(self._by_id.values()))

    @property
    def running(self) -> int:
        """How many have a VM, or are about to."""
        return sum(live.state is not SandboxState.PAUSED for live in self._by_id.values())

    def add(self, live: LiveSandbox) -> None:
        self._by_id[live.sandbox.id] = live

    def drop(self, sandbox_id: str) -> None:
        """Forget a sandbox. Idempotent."""
        self._by_id.pop(sandbox_id, None)

    def find(self, sandbox_id: str) -> LiveSandbox | None:
        """A sandbox in whatever state."""
        return self._by_id.get(sandbox_id)

    def visible(self, sandbox_id: str) -> LiveSandbox:
        """A sandbox that callers may know of.

        Raises:
            SandboxNotFoundError: there is none, or it is starting, or being killed.
        """
        live = self._by_id.get(sandbox_id)
        if live is None or live.state not in VISIBLE:
            raise SandboxNotFoundError(sandbox_id)
        return live
