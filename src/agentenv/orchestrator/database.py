"""One SQLite connection on a thread of its own: schema, transactions, errors. Knows nothing of sandboxes.

Operations that wait at the same time are committed together, so that a burst of creates costs one commit, not one each.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from agentenv.errors import AgentEnvError, ConfigurationError, InsufficientStorageError, StorageError

T = TypeVar("T")

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE sandboxes (
        id TEXT PRIMARY KEY,
        state TEXT NOT NULL,
        end_at INTEGER NOT NULL,      -- microseconds since 1970, as all times here
        life INTEGER NOT NULL,
        sandbox TEXT NOT NULL,        -- JSON of all fields; the columns beside it win
        reason TEXT,
        slot TEXT,                    -- JSON of the network slot
        machine TEXT,                 -- JSON of the machine record
        boot_id TEXT                  -- boot of the host that the machine record belongs to
    ) STRICT;
    CREATE TABLE resources (
        sandbox_id TEXT NOT NULL,
        kind TEXT NOT NULL,           -- directory, disk, slot, machine, memory
        name TEXT NOT NULL,
        PRIMARY KEY (sandbox_id, kind, name)
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE intents (
        sandbox_id TEXT PRIMARY KEY,
        operation TEXT NOT NULL,      -- create, kill
        step TEXT NOT NULL,           -- the step that was begun last
        noted_at INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE idempotency (
        key TEXT PRIMARY KEY,
        digest TEXT NOT NULL,
        outcome TEXT NOT NULL,        -- in_progress, done, unknown
        sandbox_id TEXT NOT NULL,
        sandbox TEXT,                 -- JSON of what the first caller was given
        claimed_at INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX idempotency_by_sandbox ON idempotency (sandbox_id);
    """,
)
"""One script per schema version; the version is `PRAGMA user_version`. Scripts that were released never change."""


@dataclass(slots=True)
class _Operation:
    work: Callable[[sqlite3.Connection], Any]
    durable: bool
    future: asyncio.Future[Any]


class Database:
    """Runs functions on the connection, each in a transaction, in the order in which they were submitted."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._operations: queue.SimpleQueue[_Operation | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False

    async def open(self) -> None:
        """Open or make the file (mode 0600) and bring its schema up to date.

        Raises:
            ConfigurationError: the file was written by a newer version.
            StorageError: the file cannot be opened, or is not a journal.
        """
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[None] = loop.create_future()
        self._thread = threading.Thread(target=self._serve, args=(loop, opened), name="journal", daemon=True)
        self._thread.start()
        await opened

    async def close(self) -> None:
        """Finish what was submitted and close the file. Idempotent."""
        self._closed = True
        if self._thread is not None:
            self._operations.put(None)
            await asyncio.to_thread(self._thread.join)
            self._thread = None

    async def run(self, work: Callable[[sqlite3.Connection], T], *, durable: bool = False) -> T:
        """Run `work` in a transaction.

        A cancelled caller does not undo it. With `durable` the commit has reached the disk when this returns; without,
        it outlives the process, but a power cut may undo it.

        Raises:
            InsufficientStorageError: the disk is full.
            StorageError: anything else of SQLite's.
        """
        if self._closed or self._thread is None:
            raise StorageError("the journal is closed")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._operations.put(_Operation(work, durable, future))
        return await future

    def _serve(self, loop: asyncio.AbstractEventLoop, opened: asyncio.Future[None]) -> None:
        try:
            connection = self._connect()
        except AgentEnvError as error:
            loop.call_soon_threadsafe(_settle, [(opened, None, error)])
            return
        loop.call_soon_threadsafe(_settle, [(opened, None, None)])
        closing = False
        while not closing:
            batch: list[_Operation] = []
            operation = self._operations.get()
            while operation is not None:
                batch.append(operation)
                try:
                    operation = self._operations.get_nowait()
                except queue.Empty:
                    break
            closing = operation is None
            if batch:
                outcomes = self._transact(connection, batch)
                try:
                    loop.call_soon_threadsafe(_settle, outcomes)
                except RuntimeError:  # the loop is closed: nobody waits for an answer any more
                    break
        connection.close()

    def _connect(self) -> sqlite3.Connection:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # It holds tokens. SQLite gives its side files the mode of this one.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            connection = sqlite3.connect(self._path, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise StorageError(f"cannot open the journal {self._path}: {error}") from error
        try:
            connection.execute("PRAGMA busy_timeout = 5000")
            connection.execute("PRAGMA journal_mode = WAL")
            self._migrate(connection)
        except sqlite3.Error as error:
            connection.close()
            raise self._worded(error) from error
        except AgentEnvError:
            connection.close()
            raise
        return connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > len(MIGRATIONS):
            raise ConfigurationError(
                f"the journal {self._path} has schema {version}, this version knows {len(MIGRATIONS)}; "
                "run the version that wrote it, or a newer one"
            )
        for number, script in enumerate(MIGRATIONS[version:], start=version + 1):
            connection.executescript(f"BEGIN IMMEDIATE; {script}; PRAGMA user_version = {number}; COMMIT;")

    def _transact(
        self, connection: sqlite3.Connection, batch: Sequence[_Operation]
    ) -> list[tuple[asyncio.Future[Any], Any, BaseException | None]]:
        try:
            level = "FULL" if any(operation.durable for operation in batch) else "NORMAL"
            connection.execute(f"PRAGMA synchronous = {level}")
            connection.execute("BEGIN IMMEDIATE")
            results = [operation.work(connection) for operation in batch]
            connection.execute("COMMIT")
        except BaseException as error:  # handed to the waiting caller, which would hang otherwise
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if len(batch) > 1:  # the fault of one is not the fault of all
                return [outcome for operation in batch for outcome in self._transact(connection, [operation])]
            worded = self._worded(error) if isinstance(error, sqlite3.Error) else error
            return [(batch[0].future, None, worded)]
        return [(operation.future, result, None) for operation, result in zip(batch, results, strict=True)]

    def _worded(self, error: sqlite3.Error) -> AgentEnvError:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
            return InsufficientStorageError(f"the disk that holds the journal {self._path} is full; free some space")
        return StorageError(f"the journal {self._path} failed: {error}")


def _settle(outcomes: Sequence[tuple[asyncio.Future[Any], Any, BaseException | None]]) -> None:
    for future, result, error in outcomes:
        if future.done():  # its caller was cancelled
            continue
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)
