"""Copies of large files that cost as little as the file system allows: reflinks, and copies without the holes.

Everything here blocks: call it in a thread. Errors are plain `OSError`s; the caller knows what the file was for.
"""

from __future__ import annotations

import errno
import fcntl
import os

_FICLONE = 0x40049409
"""ioctl_ficlone(2)."""
_CHUNK_BYTES = 1024 * 1024
_NO_REFLINK = frozenset({errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM})
_NO_KERNEL_COPY = frozenset({errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EBADF})


def reflink(source: int, destination: int) -> bool:
    """Make an empty file share all blocks of another. False when the file system cannot; then nothing has changed."""
    try:
        fcntl.ioctl(destination, _FICLONE, source)
    except OSError as error:
        if error.errno in _NO_REFLINK:
            return False
        raise
    return True


def copy_sparse(source: int, destination: int) -> int:
    """Copy a file's data, not its holes, into an empty file, which gets the same length.

    Args:
        source: descriptor open for reading; its position is not used.
        destination: descriptor of an empty file, open for writing.

    Returns:
        How many bytes were copied.
    """
    size = os.fstat(source).st_size
    os.ftruncate(destination, size)
    copied = 0
    offset = 0
    while offset < size:
        try:
            start = os.lseek(source, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                break
            raise
        end = min(os.lseek(source, start, os.SEEK_HOLE), size)
        _copy_range(source, destination, start, end)
        copied += end - start
        offset = end
    return copied


def _copy_range(source: int, destination: int, start: int, end: int) -> None:
    while start < end:
        try:
            count = os.copy_file_range(source, destination, end - start, offset_src=start, offset_dst=start)
        except OSError as error:
            if error.errno not in _NO_KERNEL_COPY:
                raise
            count = _copy_chunk(source, destination, start, end)
        if count == 0:  # some file systems answer 0 instead of copying
            count = _copy_chunk(source, destination, start, end)
        if count == 0:  # cut short by somebody else meanwhile
            raise OSError(errno.EIO, "the file became shorter while it was copied")
        start += count


def _copy_chunk(source: int, destination: int, start: int, end: int) -> int:
    data = os.pread(source, min(_CHUNK_BYTES, end - start), start)
    return os.pwrite(destination, data, start) if data else 0
