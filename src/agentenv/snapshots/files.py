"""The directory of one snapshot: its manifest, its state file, and the lock that says who uses it. Knows no layers.

A snapshot exists from the moment that its manifest has its name, until the manifest is removed. Whoever makes it holds
the lock alone, whoever loads it shares it, and a directory without manifest goes as soon as nobody holds its lock.
Locks end with their process. Everything here blocks.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentenv import durable
from agentenv.errors import AgentEnvError, InsufficientStorageError, SnapshotError, SnapshotNotFoundError
from agentenv.snapshots.encoding import LARGEST_MANIFEST, decode, encode
from agentenv.snapshots.manifest import SNAPSHOT_ID, SnapshotManifest, StateFile

MANIFEST_NAME = "manifest.json"
STATE_NAME = "state"
LOCK_NAME = "lock"
LARGEST_STATE = 4 * 1024**3
"""Bytes. States are some 100 KB; more than this is not one."""
_CHUNK = 1 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class SnapshotDirectory:
    """One directory below that of all snapshots.

    Args:
        parent: that of all.
        snapshot_id: checked, since it may come from a client.
    """

    def __init__(self, parent: Path, snapshot_id: str) -> None:
        if SNAPSHOT_ID.fullmatch(snapshot_id) is None:
            raise SnapshotNotFoundError(snapshot_id[:80])
        self.snapshot_id = snapshot_id
        self.path = parent / snapshot_id
        self.manifest_path = self.path / MANIFEST_NAME
        self.state_path = self.path / STATE_NAME

    def exists(self) -> bool:
        """Whether there is a snapshot, sound or not."""
        try:
            return self.manifest_path.is_file()
        except OSError as error:
            raise worded(error, f"cannot look for {self.manifest_path}") from error

    def signature(self) -> tuple[int, ...] | None:
        """What tells this manifest from one that took its place; None when there is none."""
        return _signature(str(self.manifest_path))

    def read(self) -> SnapshotManifest:
        """Read the manifest.

        Raises:
            SnapshotNotFoundError: there is none.
            SnapshotError: it cannot be read, or is damaged.
        """
        try:
            with self.manifest_path.open("rb") as file:
                content = file.read(LARGEST_MANIFEST + 1)
        except FileNotFoundError as error:
            raise SnapshotNotFoundError(self.snapshot_id) from error
        except OSError as error:
            raise worded(error, f"cannot read {self.manifest_path}") from error
        manifest = decode(content, str(self.manifest_path))
        if manifest.snapshot_id != self.snapshot_id:
            raise SnapshotError(
                f"{self.manifest_path} is damaged: field 'snapshot_id' is '{manifest.snapshot_id}', not that of its "
                "directory"
            )
        return manifest

    def write_manifest(self, manifest: SnapshotManifest) -> None:
        """Make the snapshot exist, on stable storage.

        Raises:
            InsufficientStorageError, SnapshotError: it does not exist.
        """
        content = encode(manifest)
        try:
            # All else first: what has a manifest is whole.
            if manifest.state is not None:
                _sync_file(self.path / manifest.state.name)
            sync_directory(self.path.parent)
            sync_directory(self.path)
            durable.write_bytes(self.manifest_path, content, mode=0o600)
            sync_directory(self.path)
        except OSError as error:
            with suppress(OSError):
                self.manifest_path.unlink(missing_ok=True)
            raise worded(error, f"cannot write {self.manifest_path}") from error

    def remove_manifest(self) -> None:
        """End the snapshot's existence.

        Raises:
            SnapshotNotFoundError: there was none.
        """
        try:
            self.manifest_path.unlink()
            sync_directory(self.path)
        except FileNotFoundError as error:
            raise SnapshotNotFoundError(self.snapshot_id) from error
        except OSError as error:
            raise worded(error, f"cannot remove {self.manifest_path}") from error

    def take_state(self, source: Path) -> StateFile:
        """Copy the state that a VMM has written; `write_manifest` brings it to stable storage. The VMM may still have
        its own file open.

        Raises:
            InsufficientStorageError, SnapshotError: it is not there.
        """
        try:
            reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not stat.S_ISREG(os.fstat(reading).st_mode):
                    raise SnapshotError(f"the state {source} is no regular file")
                writing = os.open(self.state_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                try:
                    size, digest = _copy(reading, writing, source)
                finally:
                    os.close(writing)
            finally:
                os.close(reading)
        except OSError as error:
            raise worded(error, f"cannot copy the state {source} to {self.state_path}") from error
        if size == 0:
            raise SnapshotError(f"the state {source} is empty")
        return StateFile(STATE_NAME, size, digest)

    def state_problem(self, state: StateFile, *, read: bool) -> str | None:
        """What is wrong with the state file, in words.

        Args:
            state: what it must be.
            read: also compare its bytes, not only its size.
        """
        path = self.path / state.name
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != state.size:
                    return f"the state file {path} has {size} bytes instead of {state.size}"
                if read and f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}" != state.digest:
                    return f"the state file {path} is damaged: its bytes have another digest"
        except FileNotFoundError:
            return f"the state file {path} is missing"
        except OSError as error:
            return f"the state file {path} cannot be read: {error.strerror}"
        return None

    def disk_bytes(self) -> int:
        """What its files take on the disk."""
        total = 0
        for name in (MANIFEST_NAME, STATE_NAME):
            try:
                total += (self.path / name).lstat().st_blocks * 512
            except FileNotFoundError:
                continue
            except OSError as error:
                raise worded(error, f"cannot look at {self.path / name}") from error
        return total

    @contextmanager
    def created(self) -> Iterator[Callable[[], None]]:
        """Make the directory and hold its lock alone; at the end it goes unless the snapshot exists.

        To be entered under the repository's lock, so that nobody finds the directory before it is locked. Gives what
        ends the lock once the snapshot exists.
        """
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError as error:
            raise SnapshotError(f"there is a snapshot {self.snapshot_id} already") from error
        except OSError as error:
            raise worded(error, f"cannot make {self.path}") from error
        descriptor = -1
        try:
            try:
                descriptor = self._open_lock(create=True)
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise worded(error, f"cannot use {self.path}") from error
            yield lambda: fcntl.flock(descriptor, fcntl.LOCK_UN)
        finally:
            try:
                # Once it existed it may have been deleted while somebody loads it: then that one clears away.
                if not self.exists() and (descriptor < 0 or _is_lockable(descriptor)):
                    remove_tree(self.path)
            finally:
                if descriptor >= 0:
                    os.close(descriptor)

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Keep the files while the context lasts. The snapshot may cease to exist meanwhile; see `remove_if_left`.

        Raises:
            SnapshotNotFoundError: it does not exist.
        """
        try:
            descriptor = self._open_lock(create=False)
        except FileNotFoundError as error:
            raise SnapshotNotFoundError(self.snapshot_id) from error
        except OSError as error:
            raise worded(error, f"cannot use {self.path}") from error
        try:
            # Whoever holds it alone while there is a manifest does so for a moment.
            if not self.exists():
                raise SnapshotNotFoundError(self.snapshot_id)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if not self.exists():
                raise SnapshotNotFoundError(self.snapshot_id)
            yield
        finally:
            os.close(descriptor)

    def remove_if_left(self) -> bool:
        """Remove the directory if no snapshot exists in it and nobody holds its lock. Returns whether it is gone.

        To be called under the repository's lock.
        """
        if self.exists():
            return False
        try:
            descriptor = self._open_lock(create=False)
        except FileNotFoundError:
            # Made by somebody who was killed at once, or removed by half.
            return remove_tree(self.path)
        except OSError as error:
            raise worded(error, f"cannot use {self.path}") from error
        try:
            return _is_lockable(descriptor) and remove_tree(self.path)
        finally:
            os.close(descriptor)

    def _open_lock(self, *, create: bool) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
        return os.open(self.path / LOCK_NAME, flags, 0o600)


def signatures(parent: Path, snapshot_ids: Iterable[str]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The signatures of manifests, by id; those that are not there are left out."""
    prefix = str(parent)
    for snapshot_id in snapshot_ids:
        signature = _signature(f"{prefix}/{snapshot_id}/{MANIFEST_NAME}")
        if signature is not None:
            yield snapshot_id, signature


def remove_tree(path: Path) -> bool:
    """Remove a directory with what is in it. Returns whether it was there."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise worded(error, f"cannot remove {path}") from error
    return True


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to stable storage."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def worded(error: OSError, what: str) -> AgentEnvError:
    """The error of our tree for one of the operating system's; `what` begins the message."""
    if error.errno in _FULL:
        return InsufficientStorageError(f"{what}: the file system is full; delete snapshots or enlarge it")
    return SnapshotError(f"{what}: {error.strerror or error}")


def _signature(path: str) -> tuple[int, ...] | None:
    try:
        found = os.stat(path)  # noqa: PTH116 - of thousands at a time
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise worded(error, f"cannot look for {path}") from error
    return (found.st_ino, found.st_mtime_ns, found.st_size) if stat.S_ISREG(found.st_mode) else None


def _is_lockable(descriptor: int) -> bool:
    """Take a lock alone, if nobody else holds it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _copy(reading: int, writing: int, source: Path) -> tuple[int, str]:
    digest = hashlib.sha256()
    size = 0
    while chunk := os.read(reading, _CHUNK):
        size += len(chunk)
        if size > LARGEST_STATE:
            raise SnapshotError(f"the state {source} has more than {LARGEST_STATE} bytes")
        digest.update(chunk)
        view = memoryview(chunk)
        while view:
            view = view[os.write(writing, view) :]
    return size, "sha256:" + digest.hexdigest()
