"""The journal: what this node has taken for which sandbox, and how far it got. All SQL of the orchestrator is here.

The rule is that a resource is written down before it is taken and struck out after it was given back, so that whatever
the journal names and no live sandbox owns can be removed. The journal decides nothing.

Power cuts end all VMs, so only what must outlive one is committed durably: outcomes of idempotent creates, and paused
sandboxes. All else must merely outlive the server process, for which SQLite's write-ahead log needs no sync.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path

from agentenv.network.base import Slot
from agentenv.orchestrator import codec
from agentenv.orchestrator.database import Database
from agentenv.orchestrator.model import Sandbox, SandboxState
from agentenv.vmm.base import MachineRecord


class ResourceKind(StrEnum):
    DIRECTORY = "directory"
    DISK = "disk"
    SLOT = "slot"
    MACHINE = "machine"
    MEMORY = "memory"
    SNAPSHOT = "snapshot"
    """A hidden one, that a pause made or makes."""


@dataclass(frozen=True, slots=True)
class Resource:
    """Something on the host that a sandbox takes. `name` finds it: a path, a slot index, a sandbox id."""

    kind: ResourceKind
    name: str


class Outcome(StrEnum):
    """How the create of an idempotency key ended."""

    IN_PROGRESS = "in_progress"
    DONE = "done"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class KeyClaim:
    """An idempotency key and the digest of the body that it came with."""

    key: str
    digest: str


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """What the journal knows of an idempotency key. `sandbox` is what the first caller got, when it is done."""

    claim: KeyClaim
    outcome: Outcome
    sandbox_id: str
    sandbox: Sandbox | None


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One sandbox as it is written down."""

    sandbox: Sandbox
    slot: Slot | None
    machine: MachineRecord | None
    boot_id: str | None
    resources: tuple[Resource, ...]
    intent: tuple[str, str] | None
    """Operation under way and the step that it begun last."""


class Journal:
    """Typed operations on the journal file. Every method raises `StorageError` or `InsufficientStorageError`."""

    def __init__(self, path: Path) -> None:
        self._database = Database(path)

    async def open(self) -> None:
        """See `Database.open`."""
        await self._database.open()

    async def close(self) -> None:
        """Finish what was submitted. Idempotent."""
        await self._database.close()

    async def begin_start(
        self, sandbox: Sandbox, resources: Iterable[Resource], claim: KeyClaim | None, now: datetime
    ) -> None:
        """Write down a sandbox that is about to be started, and what will be taken for it."""
        rows = [(sandbox.id, resource.kind, resource.name) for resource in resources]

        def work(db: sqlite3.Connection) -> None:
            db.execute(
                "INSERT INTO sandboxes (id, state, end_at, life, sandbox) VALUES (?, ?, ?, ?, ?)",
                (
                    sandbox.id,
                    sandbox.state,
                    codec.to_micros(sandbox.end_at),
                    sandbox.life,
                    codec.encode_sandbox(sandbox),
                ),
            )
            db.executemany("INSERT INTO resources (sandbox_id, kind, name) VALUES (?, ?, ?)", rows)
            _note_intent(db, sandbox.id, "create", "prepare", now)
            if claim is not None:
                db.execute(
                    "INSERT INTO idempotency (key, digest, outcome, sandbox_id, claimed_at) VALUES (?, ?, ?, ?, ?)",
                    (claim.key, claim.digest, Outcome.IN_PROGRESS, sandbox.id, codec.to_micros(now)),
                )

        await self._database.run(work, durable=claim is not None)

    async def note_slot(self, sandbox_id: str, slot: Slot, now: datetime) -> None:
        """Write down which slot the pool lent."""

        def work(db: sqlite3.Connection) -> None:
            db.execute("UPDATE sandboxes SET slot = ? WHERE id = ?", (codec.encode_slot(slot), sandbox_id))
            db.execute("DELETE FROM resources WHERE sandbox_id = ? AND kind = ?", (sandbox_id, ResourceKind.SLOT))
            db.execute(
                "INSERT OR IGNORE INTO resources (sandbox_id, kind, name) VALUES (?, ?, ?)",
                (sandbox_id, ResourceKind.SLOT, str(slot.index)),
            )
            _note_step(db, sandbox_id, "boot", now)

        await self._database.run(work)

    async def note_machine(self, sandbox_id: str, record: MachineRecord, boot_id: str, now: datetime) -> None:
        """Write down how to find the machine again."""

        def work(db: sqlite3.Connection) -> None:
            db.execute(
                "UPDATE sandboxes SET machine = ?, boot_id = ? WHERE id = ?",
                (codec.encode_record(record), boot_id, sandbox_id),
            )
            if record.memory_file is not None:
                db.execute(
                    "INSERT OR IGNORE INTO resources (sandbox_id, kind, name) VALUES (?, ?, ?)",
                    (sandbox_id, ResourceKind.MEMORY, record.memory_file),
                )
            _note_step(db, sandbox_id, "wait for the agent", now)

        await self._database.run(work)

    async def finish_start(self, sandbox: Sandbox, claim: KeyClaim | None) -> None:
        """Write down that a sandbox runs, and settle its idempotency key in the same transaction."""
        text = codec.encode_sandbox(sandbox)

        def work(db: sqlite3.Connection) -> None:
            _write_sandbox(db, sandbox)
            db.execute("DELETE FROM intents WHERE sandbox_id = ?", (sandbox.id,))
            if claim is not None:
                db.execute(
                    "UPDATE idempotency SET outcome = ?, sandbox = ? WHERE key = ?", (Outcome.DONE, text, claim.key)
                )

        await self._database.run(work, durable=claim is not None)

    async def set_end(self, sandbox_id: str, end_at: datetime) -> None:
        """Move the expiry of a running sandbox."""

        def work(db: sqlite3.Connection) -> None:
            db.execute(
                "UPDATE sandboxes SET end_at = ? WHERE id = ? AND state IN (?, ?)",
                (codec.to_micros(end_at), sandbox_id, SandboxState.RUNNING, SandboxState.CAPTURING),
            )

        await self._database.run(work)

    async def begin_capture(self, sandbox: Sandbox, now: datetime) -> None:
        """Write down that the machine of a sandbox is going to stand still for a moment."""

        def work(db: sqlite3.Connection) -> None:
            _write_sandbox(db, sandbox)
            _note_intent(db, sandbox.id, "capture", "stand still", now)

        await self._database.run(work)

    async def end_capture(self, sandbox: Sandbox) -> None:
        """Write down that it runs on."""

        def work(db: sqlite3.Connection) -> None:
            _write_sandbox(db, sandbox)
            db.execute("DELETE FROM intents WHERE sandbox_id = ?", (sandbox.id,))

        await self._database.run(work)

    async def note_checkpoint(self, sandbox: Sandbox) -> None:
        """Write down that a sandbox goes on from a snapshot that was taken of it, and from no hidden one any more."""

        def work(db: sqlite3.Connection) -> None:
            _write_sandbox(db, sandbox)
            _keep_snapshot(db, sandbox)

        await self._database.run(work)

    async def begin_pause(self, sandbox: Sandbox, now: datetime) -> None:
        """Write down that a sandbox is being paused, and into which hidden snapshot."""

        def work(db: sqlite3.Connection) -> None:
            _write_sandbox(db, sandbox)
            if sandbox.pausing_into is not None:
                db.execute(
                    "INSERT OR IGNORE INTO resources (sandbox_id, kind, name) VALUES (?, ?, ?)",
                    (sandbox.id, ResourceKind.SNAPSHOT, sandbox.pausing_into),
                )
            _note_intent(db, sandbox.id, "pause", "capture", now)

        await self._database.run(work)

    async def abort_pause(self, sandbox: Sandbox) -> None:
        """Write down that a sandbox runs on after all."""

        def work(db: sqlite3.Connection) -> None:
            _write_sandbox(db, sandbox)
            _keep_snapshot(db, sandbox)
            db.execute("DELETE FROM intents WHERE sandbox_id = ?", (sandbox.id,))

        await self._database.run(work)

    async def finish_pause(self, sandbox: Sandbox) -> None:
        """Write down, durably, that a sandbox is paused, and holds nothing but its directory and its snapshot.

        Also for one whose resume failed.
        """

        def work(db: sqlite3.Connection) -> None:
            _write_sandbox(db, sandbox)
            db.execute("UPDATE sandboxes SET slot = NULL, machine = NULL, boot_id = NULL WHERE id = ?", (sandbox.id,))
            db.execute(
                "DELETE FROM resources WHERE sandbox_id = ? AND kind NOT IN (?, ?)",
                (sandbox.id, ResourceKind.DIRECTORY, ResourceKind.SNAPSHOT),
            )
            _keep_snapshot(db, sandbox)
            db.execute("DELETE FROM intents WHERE sandbox_id = ?", (sandbox.id,))

        await self._database.run(work, durable=True)

    async def begin_resume(self, sandbox: Sandbox, resources: Iterable[Resource], now: datetime) -> None:
        """Write down that a paused sandbox is about to be started, and what will be taken for it."""
        rows = [(sandbox.id, resource.kind, resource.name) for resource in resources]

        def work(db: sqlite3.Connection) -> None:
            _write_sandbox(db, sandbox)
            db.executemany("INSERT OR IGNORE INTO resources (sandbox_id, kind, name) VALUES (?, ?, ?)", rows)
            _note_intent(db, sandbox.id, "resume", "prepare", now)

        await self._database.run(work)

    async def begin_roll_back(self, sandbox: Sandbox, now: datetime) -> None:
        """Write down, durably, that a running sandbox goes on from another snapshot, in which it is from now on."""

        def work(db: sqlite3.Connection) -> None:
            _write_sandbox(db, sandbox)
            _keep_snapshot(db, sandbox)
            _note_intent(db, sandbox.id, "roll back", "prepare", now)

        await self._database.run(work, durable=True)

    async def begin_kill(self, sandbox_id: str, reason: str, now: datetime) -> None:
        """Write down that a sandbox must go. There is no way back from here."""

        def work(db: sqlite3.Connection) -> None:
            db.execute(
                "UPDATE sandboxes SET state = ?, reason = ? WHERE id = ?", (SandboxState.KILLING, reason, sandbox_id)
            )
            _note_intent(db, sandbox_id, "kill", "release", now)

        await self._database.run(work)

    async def forget(self, sandbox_id: str) -> None:
        """Strike out a sandbox of which nothing is left on the host. Idempotent.

        An unsettled idempotency key of it is freed, so that the caller may try again.
        """

        def work(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM sandboxes WHERE id = ?", (sandbox_id,))
            db.execute("DELETE FROM resources WHERE sandbox_id = ?", (sandbox_id,))
            db.execute("DELETE FROM intents WHERE sandbox_id = ?", (sandbox_id,))
            db.execute(
                "DELETE FROM idempotency WHERE sandbox_id = ? AND outcome = ?", (sandbox_id, Outcome.IN_PROGRESS)
            )

        await self._database.run(work)

    async def load(self) -> list[JournalEntry]:
        """All sandboxes that are written down."""

        def work(db: sqlite3.Connection) -> list[JournalEntry]:
            resources: dict[str, list[Resource]] = {}
            for owner, kind, name in db.execute("SELECT sandbox_id, kind, name FROM resources ORDER BY kind, name"):
                resources.setdefault(owner, []).append(Resource(ResourceKind(kind), name))
            intents = {
                row[0]: (row[1], row[2]) for row in db.execute("SELECT sandbox_id, operation, step FROM intents")
            }
            rows = db.execute(
                "SELECT id, state, end_at, life, sandbox, reason, slot, machine, boot_id FROM sandboxes ORDER BY id"
            )
            return [
                JournalEntry(
                    sandbox=replace(
                        codec.decode_sandbox(text),
                        state=SandboxState(state),
                        end_at=codec.from_micros(end_at),
                        life=life,
                        reason=reason,
                    ),
                    slot=None if slot is None else codec.decode_slot(slot),
                    machine=None if machine is None else codec.decode_record(machine),
                    boot_id=boot_id,
                    resources=tuple(resources.get(sandbox_id, ())),
                    intent=intents.get(sandbox_id),
                )
                for sandbox_id, state, end_at, life, text, reason, slot, machine, boot_id in rows
            ]

        return await self._database.run(work)

    async def find_key(self, key: str) -> KeyRecord | None:
        """What became of the create that came with this idempotency key."""

        def work(db: sqlite3.Connection) -> KeyRecord | None:
            row = db.execute(
                "SELECT digest, outcome, sandbox_id, sandbox FROM idempotency WHERE key = ?", (key,)
            ).fetchone()
            if row is None:
                return None
            digest, outcome, sandbox_id, text = row
            sandbox = None if text is None else codec.decode_sandbox(text)
            return KeyRecord(KeyClaim(key, digest), Outcome(outcome), sandbox_id, sandbox)

        return await self._database.run(work)

    async def doubt_keys(self) -> None:
        """Mark every unsettled key as unknown, at the start of a server: whoever claimed it died before an answer."""

        def work(db: sqlite3.Connection) -> None:
            db.execute("UPDATE idempotency SET outcome = ? WHERE outcome = ?", (Outcome.UNKNOWN, Outcome.IN_PROGRESS))

        await self._database.run(work, durable=True)

    async def purge_keys(self, before: datetime) -> None:
        """Drop settled keys that were claimed before a moment."""

        def work(db: sqlite3.Connection) -> None:
            db.execute(
                "DELETE FROM idempotency WHERE claimed_at < ? AND outcome != ?",
                (codec.to_micros(before), Outcome.IN_PROGRESS),
            )

        await self._database.run(work)


def _write_sandbox(db: sqlite3.Connection, sandbox: Sandbox) -> None:
    db.execute(
        "UPDATE sandboxes SET state = ?, end_at = ?, life = ?, sandbox = ? WHERE id = ?",
        (sandbox.state, codec.to_micros(sandbox.end_at), sandbox.life, codec.encode_sandbox(sandbox), sandbox.id),
    )


def _keep_snapshot(db: sqlite3.Connection, sandbox: Sandbox) -> None:
    db.execute(
        "DELETE FROM resources WHERE sandbox_id = ? AND kind = ? AND name IS NOT ?",
        (sandbox.id, ResourceKind.SNAPSHOT, sandbox.snapshot_id),
    )


def _note_step(db: sqlite3.Connection, sandbox_id: str, step: str, now: datetime) -> None:
    db.execute(
        "UPDATE intents SET step = ?, noted_at = ? WHERE sandbox_id = ?", (step, codec.to_micros(now), sandbox_id)
    )


def _note_intent(db: sqlite3.Connection, sandbox_id: str, operation: str, step: str, now: datetime) -> None:
    db.execute(
        "INSERT OR REPLACE INTO intents (sandbox_id, operation, step, noted_at) VALUES (?, ?, ?, ?)",
        (sandbox_id, operation, step, codec.to_micros(now)),
    )
