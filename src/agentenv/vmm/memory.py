"""Guest memory files: where they lie while a machine runs, how they are made, and which of them nobody owns.

A memory file is named after its machine in a directory that belongs to one home alone, so that its owner is known
from its name even when a server died before it noted anything. Every plain function blocks: call it in a thread.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Collection
from pathlib import Path

from agentenv.config import MIB, Settings
from agentenv.errors import (
    AgentEnvError,
    CapacityError,
    ConfigurationError,
    InsufficientStorageError,
    StorageError,
    VmmError,
)
from agentenv.storage.memory import copy_memory
from agentenv.vmm.host import filesystem_is_tmpfs
from agentenv.vmm.process import finish_in_thread

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108
_ENOUGH_BYTES = 1024 * MIB
"""A /dev/shm smaller than this (containers often have 64 MiB) cannot hold guests, which would die by SIGBUS."""
_SUFFIX = ".mem"
_NO_SECOND_NAME = frozenset({errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK})


def choose_memory_dir(settings: Settings) -> Path:
    """The directory of this home's guest memory files: on tmpfs where there is one with room, else in the home.

    On a disk the kernel would write the memory of running guests back all day.
    """
    owner = hashlib.sha256(str(settings.home).encode()).hexdigest()[:12]
    if settings.vmm.memory_dir is not None:
        return settings.vmm.memory_dir / f"aenv-{owner}"
    try:
        room = os.statvfs(_SHARED_MEMORY)
        roomy = room.f_blocks * room.f_frsize >= _ENOUGH_BYTES and os.access(_SHARED_MEMORY, os.W_OK)
    except OSError:
        roomy = False
    if roomy and filesystem_is_tmpfs(_SHARED_MEMORY):
        return _SHARED_MEMORY / f"aenv-{owner}"
    return settings.paths.run / "memory"


def prepare_memory_dir(directory: Path) -> None:
    """Make the directory, for its owner only.

    Raises:
        ConfigurationError: it cannot be made, or somebody else put something in its place (/dev/shm is open to all).
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise ConfigurationError(
            f"cannot make the directory for guest memory {directory}: {error.strerror}; set vmm.memory_dir"
        ) from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise ConfigurationError(
            f"{directory} is not a directory that only this user can open; remove it or set vmm.memory_dir"
        )


def memory_path(directory: Path, machine_id: str) -> Path:
    """Where a machine's memory lies while it runs."""
    return directory / f"{machine_id}{_SUFFIX}"


def create_memory_file(path: Path, size_bytes: int) -> None:
    """Make an empty (sparse) memory file.

    Raises:
        CapacityError: the file system could not hold this guest's memory, even alone.
        InsufficientStorageError: it is full.
        VmmError: the file exists or cannot be made.
    """
    try:
        room = os.statvfs(path.parent)
        if room.f_bavail * room.f_frsize < size_bytes:
            raise CapacityError(
                f"{path.parent} has {room.f_bavail * room.f_frsize // MIB} MiB free, the guest needs "
                f"{size_bytes // MIB} MiB; kill sandboxes or set vmm.memory_dir"
            )
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, size_bytes)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise _not_made(path, error) from error


def check_memory_file(path: Path, size_bytes: int) -> None:
    """Refuse a file that is not the whole memory of a guest of this size.

    Raises:
        VmmError: it is missing, no regular file, or of another size.
    """
    try:
        found = path.lstat()
    except OSError as error:
        raise VmmError(f"cannot use the memory file {path}: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise VmmError(f"the memory file {path} is no regular file")
    if found.st_size != size_bytes:
        raise VmmError(f"the memory file {path} has {found.st_size} bytes, the machine's memory {size_bytes}")


async def copy_memory_file(source: Path, destination: Path) -> None:
    """Copy a memory file that nobody writes to into a new sparse one. A failure or cancellation leaves nothing.

    Raises:
        InsufficientStorageError: no room for the copy.
        VmmError: `destination` exists or cannot be written, or `source` cannot be read.
    """
    try:
        await copy_memory(source, destination)
    except StorageError as error:
        raise VmmError(f"cannot copy the memory file {source}: {error.message}") from error


async def share_memory_file(source: Path, destination: Path) -> None:
    """Give a memory file a second name; on another file system, make a copy, as `copy_memory_file` does.

    Raises:
        InsufficientStorageError: no room for a copy.
        VmmError: `destination` exists or cannot be made, or `source` is missing.
    """

    def link() -> bool:
        try:
            os.link(source, destination, follow_symlinks=False)
        except OSError as error:
            if error.errno in _NO_SECOND_NAME:
                return False
            raise _not_made(destination, error) from error
        return True

    linked = await finish_in_thread(link, lambda made: destination.unlink() if made else None)
    if not linked:
        await copy_memory_file(source, destination)


def _not_made(path: Path, error: OSError) -> AgentEnvError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return InsufficientStorageError(f"no room for the memory file {path}: {error.strerror}")
    return VmmError(f"cannot make the memory file {path}: {error.strerror}")


def file_bytes(path: Path) -> int:
    """Bytes that a sparse file takes up; 0 when it is gone."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:
        return 0


def remove_stray_memory(directory: Path, kept: Collection[str | None]) -> list[Path]:
    """Remove every memory file in the directory whose path is not in `kept`, and return their paths.

    Only for the one server that holds the home, while it starts no machine.

    Raises:
        VmmError: one cannot be removed.
    """
    if not directory.is_dir():
        return []
    strays = [path for path in sorted(directory.glob(f"*{_SUFFIX}")) if str(path) not in kept]
    for path in strays:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise VmmError(f"cannot remove the memory file {path}: {error.strerror}") from error
    return strays
