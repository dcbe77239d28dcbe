"""Files of the layer store: brought in cheaply, made durable, their errors worded. Knows nothing of the index."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from agentenv.errors import InsufficientStorageError, LayerError, StorageError
from agentenv.storage.copying import copy_sparse, reflink

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP})


def bring(source: Path, draft: Path, *, link: bool) -> bool:
    """Make a draft of a file: a hard link if asked for and possible, else a reflink, else a copy.

    Returns:
        Whether it is a link.
    """
    try:
        if not stat.S_ISREG(source.stat().st_mode):  # opening a pipe would wait for a writer
            raise LayerError(f"{source} is no regular file")
        if link:
            try:
                os.link(source.resolve(), draft)
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
            else:
                return True
        _copy(source, draft)
    except OSError as error:
        raise worded(error, f"cannot take {source} into the layer store") from error
    return False


def _copy(source: Path, draft: Path) -> None:
    reading = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        writing = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if not reflink(reading, writing):
                copy_sparse(reading, writing)
        finally:
            os.close(writing)
    finally:
        os.close(reading)


def remove_tree(path: Path) -> int:
    """Remove a file or a directory with its files; it may be missing.

    Returns:
        Bytes that this gives back: those of files that have no other name.
    """
    try:
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            path.unlink()
            return status.st_blocks * 512 if status.st_nlink == 1 else 0
        freed = sum(remove_tree(entry) for entry in path.iterdir())
        path.rmdir()
    except FileNotFoundError:
        return 0
    return freed


def is_whole(path: Path, size: int) -> bool:
    """Whether a file is there with the size that it must have."""
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def sync(path: Path) -> None:
    """Bring a file, or the names in a directory, to stable storage."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def worded(error: OSError, what: str) -> StorageError | InsufficientStorageError:
    """The error of our tree for one of the operating system's.

    Args:
        error: what was raised.
        what: the beginning of the message: what failed, for which file.
    """
    if error.errno in _FULL:
        return InsufficientStorageError(f"{what}: the file system is full; remove sandboxes or enlarge it")
    if isinstance(error, FileNotFoundError):
        return LayerError(f"{what}: there is no such file")
    return StorageError(f"{what}: {error.strerror or error}")
