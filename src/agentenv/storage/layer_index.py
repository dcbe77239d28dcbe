"""The index of a layer store: which layers there are, who references them, and what is under way. One SQLite file.

`locked` and `writing` hold the one write lock between all processes: files of the store only appear, change their
name or go while it is held, so that what the index says of them cannot change meanwhile. This file touches no layer.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import AgentEnvError, ConfigurationError, InsufficientStorageError, StorageError
from agentenv.storage.layer_tools import LayerFacts
from agentenv.vmm.process import read_start_time

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE layers (
        digest TEXT PRIMARY KEY,
        size INTEGER NOT NULL,           -- bytes, as all sizes here
        uuid TEXT,
        parent_uuid TEXT,
        virtual_size INTEGER NOT NULL
    ) STRICT, WITHOUT ROWID;
    CREATE TABLE layer_references (
        owner TEXT NOT NULL,
        position INTEGER NOT NULL,       -- 0 is the bottom of a stack
        digest TEXT NOT NULL REFERENCES layers (digest),
        PRIMARY KEY (owner, position)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX layer_references_by_digest ON layer_references (digest);
    CREATE TABLE leases (
        name TEXT NOT NULL,              -- of a file in incoming/, or nothing but a name
        digest TEXT NOT NULL,            -- a layer that is kept, or empty
        pid INTEGER NOT NULL,            -- the lease ends with this process
        start_time INTEGER NOT NULL,
        boot_id TEXT NOT NULL,
        PRIMARY KEY (name, digest)
    ) STRICT, WITHOUT ROWID;
    CREATE INDEX leases_by_digest ON leases (digest);
    """,
)
"""One script per schema version; the version is `PRAGMA user_version`. Scripts that were released never change."""
_BUSY_TIMEOUT_S = 60
_COLUMNS = "digest, size, uuid, parent_uuid, virtual_size"
_FREE = (
    "NOT EXISTS (SELECT 1 FROM layer_references WHERE layer_references.digest = layers.digest) "
    "AND NOT EXISTS (SELECT 1 FROM leases WHERE leases.digest = layers.digest)"
)

_own_leases: set[str] = set()
"""Names of this process's leases that are in use. A lease may outlive its use: a full disk refuses to delete it."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts and sizes in bytes of a set of layers."""

    layers: int
    size_bytes: int


class LayerIndex:
    """The index file. Safe for threads and for several processes; everything blocks.

    Args:
        path: made when it is missing, mode 0600.
        files: directory of the layers: a missing index beside existing layers is an error.
    """

    def __init__(self, path: Path, files: Path) -> None:
        self._path = path
        self._files = files
        self._lock = threading.RLock()
        self._connection: sqlite3.Connection | None = None

    def close(self) -> None:
        """Close the file; the next use opens it again. Idempotent."""
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                connection.close()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Look at the index; each statement sees what is committed."""
        with self._lock:
            try:
                yield self._open()
            except sqlite3.Error as error:
                raise self._worded(error) from error

    @contextmanager
    def writing(self, *, durable: bool) -> Iterator[sqlite3.Connection]:
        """A transaction under the write lock, committed at the end and rolled back by an error.

        Args:
            durable: the commit is on stable storage at the end of the context.
        """
        with self._lock:
            connection = self._begin(durable=durable)
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException as error:
                self._roll_back(connection)
                if isinstance(error, sqlite3.Error):
                    raise self._worded(error) from error
                raise

    @contextmanager
    def locked(self) -> Iterator[sqlite3.Connection]:
        """Hold the write lock without writing to the index: works on a full disk, too."""
        with self._lock:
            connection = self._begin(durable=False)
            try:
                yield connection
            except sqlite3.Error as error:
                raise self._worded(error) from error
            finally:
                self._roll_back(connection)

    def _begin(self, *, durable: bool) -> sqlite3.Connection:
        try:
            connection = self._open()
            connection.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            raise self._worded(error) from error
        return connection

    def _roll_back(self, connection: sqlite3.Connection) -> None:
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:  # closing it rolls back, too
            self.close()

    def _open(self) -> sqlite3.Connection:
        if self._connection is not None:
            return self._connection
        try:
            # SQLite gives its side files the mode of this one.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise StorageError(f"cannot open the index of layers {self._path}: {error.strerror}") from error
        connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=_BUSY_TIMEOUT_S)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA foreign_keys = ON")
            self._migrate(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return connection

    def _migrate(self, connection: sqlite3.Connection) -> None:
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version == len(MIGRATIONS):
            return
        connection.execute("BEGIN IMMEDIATE")
        # Read again: another process may have been faster.
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version > len(MIGRATIONS):
            raise ConfigurationError(
                f"the index of layers {self._path} has schema {version}, this version knows {len(MIGRATIONS)}; "
                "run the version that wrote it, or a newer one"
            )
        if version == 0 and any(self._files.iterdir()):
            raise StorageError(
                f"the index of layers {self._path} is missing, but there are layers in {self._files}: put the index "
                "back, or remove the layers, sandboxes and templates and run `aenv assets build`"
            )
        for script in MIGRATIONS[version:]:
            for statement in script.split(";"):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
        connection.execute("COMMIT")

    def _worded(self, error: sqlite3.Error) -> AgentEnvError:
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL or _disk_is_full(error, self._path):
            return InsufficientStorageError(
                f"the disk that holds the layers' index {self._path} is full; free some space"
            )
        return StorageError(f"the index of layers {self._path} failed: {error}")


def _disk_is_full(error: sqlite3.Error, path: Path) -> bool:
    """SQLite calls a full disk an I/O error where it is its shared memory file that cannot grow."""
    if not str(getattr(error, "sqlite_errorname", "")).startswith("SQLITE_IOERR"):
        return False
    try:
        status = os.statvfs(path.parent)
    except OSError:
        return False
    return status.f_bavail == 0


def find(connection: sqlite3.Connection, digest: str) -> LayerFacts | None:
    """A layer by its digest."""
    row = connection.execute(f"SELECT {_COLUMNS} FROM layers WHERE digest = ?", (digest,)).fetchone()  # noqa: S608
    return None if row is None else LayerFacts(*row)


def every(connection: sqlite3.Connection) -> Iterator[LayerFacts]:
    """All layers, by digest."""
    for row in connection.execute(f"SELECT {_COLUMNS} FROM layers ORDER BY digest"):  # noqa: S608
        yield LayerFacts(*row)


def put(connection: sqlite3.Connection, facts: LayerFacts) -> None:
    """Add a layer, or write again what is known of it."""
    connection.execute(
        f"INSERT INTO layers ({_COLUMNS}) VALUES (?, ?, ?, ?, ?) ON CONFLICT (digest) DO UPDATE SET size = "  # noqa: S608
        "excluded.size, uuid = excluded.uuid, parent_uuid = excluded.parent_uuid, virtual_size = excluded.virtual_size",
        (facts.digest, facts.size, facts.uuid, facts.parent_uuid, facts.virtual_size),
    )


def forget(connection: sqlite3.Connection, digest: str) -> None:
    """Remove a layer that nobody references."""
    connection.execute("DELETE FROM layers WHERE digest = ?", (digest,))


def is_free(connection: sqlite3.Connection, digest: str) -> bool:
    """Whether a layer is there, and nobody references or leases it."""
    query = f"SELECT 1 FROM layers WHERE digest = ? AND {_FREE}"  # noqa: S608
    return connection.execute(query, (digest,)).fetchone() is not None


def free_layers(connection: sqlite3.Connection) -> tuple[LayerFacts, ...]:
    """Layers that nobody references or leases."""
    return tuple(LayerFacts(*row) for row in connection.execute(f"SELECT {_COLUMNS} FROM layers WHERE {_FREE}"))  # noqa: S608


def totals(connection: sqlite3.Connection, *, free: bool) -> Totals:
    """Number and size of all layers, or of the free ones."""
    condition = _FREE if free else "1"
    query = f"SELECT count(*), coalesce(sum(size), 0) FROM layers WHERE {condition}"  # noqa: S608
    return Totals(*connection.execute(query).fetchone())


def owned_bytes(connection: sqlite3.Connection, prefix: str, without: str | None) -> int:
    """Size of the layers of all owners whose name begins so, each counted once.

    Args:
        connection: of the index.
        prefix: what begins the names; not empty, ASCII.
        without: owners whose names begin so do not count; a longer form of `prefix`.
    """
    ranges = [(prefix, _behind(prefix))]
    if without is not None:
        ranges = [(prefix, without), (_behind(without), _behind(prefix))]
    # The index by digest has the owners in order, so that each layer takes one look, whoever else uses it.
    condition = " OR ".join(
        "EXISTS (SELECT 1 FROM layer_references AS r WHERE r.digest = layers.digest AND r.owner >= ? AND r.owner < ?)"
        for _ in ranges
    )
    query = f"SELECT coalesce(sum(size), 0) FROM layers WHERE {condition}"  # noqa: S608
    return int(connection.execute(query, [end for each in ranges for end in each]).fetchone()[0])


def _behind(prefix: str) -> str:
    """The first text that sorts behind all that begin with a prefix."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def references(connection: sqlite3.Connection, owner: str) -> tuple[str, ...]:
    """What an owner references, in its order."""
    query = "SELECT digest FROM layer_references WHERE owner = ? ORDER BY position"
    return tuple(row[0] for row in connection.execute(query, (owner,)))


def set_references(connection: sqlite3.Connection, owner: str, digests: Sequence[str]) -> None:
    """Replace what an owner references."""
    connection.execute("DELETE FROM layer_references WHERE owner = ?", (owner,))
    connection.executemany(
        "INSERT INTO layer_references (owner, position, digest) VALUES (?, ?, ?)",
        [(owner, position, digest) for position, digest in enumerate(digests)],
    )


def owners(connection: sqlite3.Connection, digest: str) -> tuple[str, ...]:
    """Who references a layer, sorted."""
    query = "SELECT DISTINCT owner FROM layer_references WHERE digest = ? ORDER BY owner"
    return tuple(row[0] for row in connection.execute(query, (digest,)))


def owners_with_prefix(connection: sqlite3.Connection, prefix: str) -> tuple[str, ...]:
    """All owners whose name begins so, sorted."""
    query = "SELECT DISTINCT owner FROM layer_references WHERE substr(owner, 1, ?) = ? ORDER BY owner"
    return tuple(row[0] for row in connection.execute(query, (len(prefix), prefix)))


def add_lease(connection: sqlite3.Connection, name: str, digests: Sequence[str]) -> None:
    """Note that this process uses a draft (`digests` is empty) or layers."""
    _own_leases.add(name)
    pid = os.getpid()
    holder = (pid, read_start_time(pid), _boot_id())
    connection.executemany(
        "INSERT INTO leases (name, digest, pid, start_time, boot_id) VALUES (?, ?, ?, ?, ?)",
        [(name, digest, *holder) for digest in (digests or ("",))],
    )


def end_lease(connection: sqlite3.Connection, name: str) -> None:
    """Forget a lease."""
    connection.execute("DELETE FROM leases WHERE name = ?", (name,))


def leave_lease(name: str) -> None:
    """Say that this process does not use a lease any more; it goes with the next `end_dead_leases`."""
    _own_leases.discard(name)


def end_dead_leases(connection: sqlite3.Connection) -> None:
    """Forget the leases whose process has ended, or has left them."""
    for name in dead_leases(connection):
        end_lease(connection, name)


def dead_leases(connection: sqlite3.Connection) -> tuple[str, ...]:
    """Leases that nobody uses any more."""
    rows = connection.execute("SELECT DISTINCT name, pid, start_time, boot_id FROM leases").fetchall()
    return tuple(name for name, pid, start_time, boot_id in rows if not _in_use(name, pid, start_time, boot_id))


def leases(connection: sqlite3.Connection) -> frozenset[str]:
    """Names of all leases."""
    return frozenset(row[0] for row in connection.execute("SELECT name FROM leases"))


def _in_use(name: str, pid: int, start_time: int, boot_id: str) -> bool:
    if boot_id != _boot_id() or read_start_time(pid) != start_time:
        return False
    return pid != os.getpid() or name in _own_leases


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
