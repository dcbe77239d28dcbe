"""One server process on a host in memory, and what must be true of both.

The host is in `fake_world`, the rooms below the orchestrator in `fake_host`, `fake_snapshots` and `fake_warm`.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from fake_host import (
    AGENT_VERSION,
    FakeAgent,
    FakeAssets,
    FakeDisks,
    FakeHost,
    FakeMachine,
    FakeOrphans,
    FakeSlots,
    FakeSpace,
    FakeTemplates,
    FakeVmm,
)
from fake_snapshots import FakeCatalog, FakeSaved
from fake_world import START, FakeClock, FakeVm, Fate, Script, World, eventually, turns

from agentenv.config import NetworkSettings, SandboxSettings, Settings, VmmSettings
from agentenv.orchestrator.database import Database
from agentenv.orchestrator.journal import Journal
from agentenv.orchestrator.launch import interface_of
from agentenv.orchestrator.model import CreateRequest, SandboxState
from agentenv.orchestrator.orchestrator import Orchestrator
from agentenv.snapshots.manifest import HIDDEN_PREFIX
from agentenv.vmm.warm import WarmMachines

T = TypeVar("T")

__all__ = [
    "AGENT_VERSION",
    "START",
    "FakeClock",
    "FakeHost",
    "FakeMachine",
    "FakeVm",
    "Fate",
    "Script",
    "Server",
    "World",
    "eventually",
    "outcome_of",
    "read_journal",
    "turns",
    "wish",
]


class ScriptedDatabase(Database):
    """The real database; its operations are steps too."""

    def __init__(self, path: Path, script: Script) -> None:
        super().__init__(path)
        self._script = script

    async def run(self, work: Callable[[sqlite3.Connection], T], *, durable: bool = False) -> T:
        name = work.__qualname__.split(".")[1]
        await self._script.at(f"journal.{name}")
        result = await super().run(work, durable=durable)
        if self._script.armed is not None and self._script.armed[0] is not Fate.FAIL:  # a commit that reports failure
            await self._script.at(f"journal.{name} done")  # would not be one
        return result


class ScriptedJournal(Journal):
    def __init__(self, path: Path, script: Script) -> None:
        super().__init__(path)
        self._database = ScriptedDatabase(path, script)


class Server:
    """One server process on a world."""

    def __init__(self, world: World, *, warm: int = 0, **sandbox: Any) -> None:
        self.world = world
        self.script = Script()
        self.settings = Settings(
            home=world.home,
            sandbox=SandboxSettings(**sandbox),
            network=NetworkSettings(),
            vmm=VmmSettings(warm_machines=warm),
        )
        self.vmm = FakeVmm(world, self.script)
        self.disks = FakeDisks(world, self.script)
        self.saved = FakeSaved(world, self.script)
        catalog = FakeCatalog(world, self.script)
        slots = FakeSlots(world, self.script)
        self.warm = WarmMachines(
            self.vmm,
            self.settings.paths.sandboxes,
            lend=slots.acquire,
            give_back=slots.release,
            interface_of=interface_of,
            most=warm,
            idle_s=1000,
        )
        self.orchestrator = Orchestrator(
            self.settings,
            vmm=self.vmm,
            slots=slots,
            disks=self.disks,
            templates=FakeTemplates(world, self.script, catalog),
            assets=FakeAssets(),
            agents=lambda host, token: FakeAgent(world, self.script, host, token),
            orphans=FakeOrphans(world, self.script),
            host=FakeHost(world),
            saved=self.saved,
            catalog=catalog,
            space=FakeSpace(),
            memory=self.saved,
            warm=self.warm if warm else None,
            clock=world.clock,
            journal=ScriptedJournal(world.home / "state.db", self.script),
        )
        self._before = asyncio.all_tasks()

    async def start(self) -> Server:
        """Start, and wait until the work that it does by itself is at rest."""
        self.world.drafts.clear()  # as the repository does when a server starts
        await self.orchestrator.start()
        if self.settings.vmm.warm_machines:
            self.warm.start()
        await self.script.reached("journal.purge_keys")
        await self.orchestrator._journal.load()
        return self

    async def __aenter__(self) -> Server:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        if not self.script.dead:
            self.script.armed = None
            self.script.failing.clear()
            for gate in self.script.blocked.values():
                gate.set()
            await self.close()

    async def close(self, *, drain: bool = False) -> None:
        """Stop as a server does."""
        await self.warm.close()
        await self.orchestrator.close(drain=drain)

    async def vanish(self) -> None:
        """The process is gone: whatever it still wanted to do does not happen."""
        self.script.dead = True
        tasks = asyncio.all_tasks() - self._before - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.orchestrator._journal.close()

    async def settle(self) -> None:
        """Wait for operations under way, then let the retries of failed releases come true."""
        await self.orchestrator.settled()
        if self.orchestrator._cleaner.sandbox_ids:
            await self.world.clock.advance(2)
            await eventually(lambda: not self.orchestrator._cleaner.sandbox_ids)

    def check(self, expected: Collection[str] | None = None) -> None:
        """State is true: what the server shows, the host has, and nothing more; the journal says the same."""
        sandboxes = {sandbox.id: sandbox for sandbox in self.orchestrator.list()}
        shown = set(sandboxes)
        if expected is not None:
            assert shown == set(expected)
        world = self.world
        running = {name for name, sandbox in sandboxes.items() if sandbox.state is SandboxState.RUNNING}
        paused = {name for name, sandbox in sandboxes.items() if sandbox.state is SandboxState.PAUSED}
        assert running | paused == shown
        assert set(world.vms) == running
        assert not any(vm.paused for vm in world.vms.values())
        assert world.memory == running
        assert world.disks == running
        assert world.leased == []
        assert world.drafts == {}
        memory = {waiting.memory for waiting in world.waiting}
        assert set((world.home / "memory").glob("*")) == memory, "memory of a machine that was never loaded"
        owned = {
            (name, one.snapshot_id)
            for name, one in sandboxes.items()
            if one.snapshot_id is not None and one.snapshot_id.startswith(f"{HIDDEN_PREFIX}{name}-")
        }
        hidden = {name for name in world.snapshots if name.startswith(HIDDEN_PREFIX)}
        assert hidden == {snapshot_id for _, snapshot_id in owned}
        assert {sandboxes[name].snapshot_id for name in paused} <= set(world.snapshots)
        waiting = {waiting.index for waiting in world.waiting}
        assert {int(vm.record.version) for vm in world.vms.values()} | waiting == set(world.lent)
        waiting_in = {waiting.directory.name for waiting in world.waiting}
        assert {path.name for path in (world.home / "sandboxes").glob("*")} == shown | waiting_in
        assert not list((world.home / "sandboxes").glob("*/state"))
        assert {route.sandbox_id for route in self.orchestrator.routes} == running
        assert {live.sandbox.id for live in self.orchestrator._live} == shown
        rows = read_journal(world.home / "state.db")
        states = {(name, sandbox.state.value) for name, sandbox in sandboxes.items()}
        assert {(row["id"], row["state"]) for row in rows["sandboxes"]} == states
        assert {row["id"] for row in rows["sandboxes"] if row["machine"] is not None} == running
        assert {row["sandbox_id"] for row in rows["resources"]} == shown
        kept = {(row["sandbox_id"], row["name"]) for row in rows["resources"] if row["kind"] == "snapshot"}
        assert kept == owned
        assert rows["intents"] == []
        assert [row for row in rows["idempotency"] if row["outcome"] == "in_progress"] == []


def read_journal(path: Path) -> dict[str, list[dict[str, Any]]]:
    """All rows, past the code under test."""
    with sqlite3.connect(path) as connection:
        connection.row_factory = sqlite3.Row
        tables = ("sandboxes", "resources", "intents", "idempotency")
        rows = {table: [dict(row) for row in connection.execute(f"SELECT * FROM {table}")] for table in tables}
    connection.close()
    return rows


def wish(**changes: Any) -> CreateRequest:
    """A create request."""
    return CreateRequest(**{"template": "base", "timeout_s": 300} | changes)


async def outcome_of(work: Awaitable[T]) -> T | BaseException:
    """The result or the error, cancellation included."""
    try:
        return await work
    except (Exception, asyncio.CancelledError) as error:
        return error
