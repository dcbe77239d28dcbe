"""Root disks of sandboxes: a writable copy of a template's raw image, as cheap as the host allows.

In this order: a reflink where the file system can; a qcow2 overlay where the VMM opens one; else a copy without the
holes. The template's image must stay in place, unchanged, while an overlay of it exists. Layered storage will replace
this file; it must not know about templates or sandboxes.
"""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import structlog

from agentenv.errors import InsufficientStorageError, StorageError
from agentenv.storage.copying import copy_sparse, reflink
from agentenv.storage.qcow2 import write_overlay
from agentenv.vmm.base import Disk, DiskFormat
from agentenv.vmm.process import finish_in_thread

log = structlog.get_logger(__name__)

RAW_NAME = "disk.raw"
OVERLAY_NAME = "disk.qcow2"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def free_bytes(path: Path) -> int:
    """Bytes that are free for this user on the file system that holds `path`.

    Raises:
        StorageError: the path does not exist or cannot be looked at.
    """
    try:
        status = os.statvfs(path)
    except OSError as error:
        raise StorageError(f"cannot look at the file system of {path}: {error.strerror}") from error
    return status.f_bavail * status.f_frsize


class DiskStore:
    """Makes and removes disks.

    Args:
        formats: what the VMM opens (`Vmm.disk_formats`).
    """

    def __init__(self, formats: frozenset[DiskFormat]) -> None:
        self._formats = formats
        self._without_reflink: set[tuple[int, int]] = set()
        """Pairs of devices (template's, sandbox's) that refused a reflink, so that it is not tried for each disk."""

    async def create(self, template_disk: Path, directory: Path) -> Disk:
        """Make a writable disk in `directory` with the content of `template_disk` (raw). Its path is absolute.

        A failed or cancelled call leaves nothing.

        Raises:
            InsufficientStorageError: the file system is full.
            StorageError: the template's image is missing, or the disk exists or cannot be made.
        """
        return await finish_in_thread(
            lambda: self._create(template_disk, directory), lambda disk: disk.path.unlink(missing_ok=True)
        )

    async def remove(self, directory: Path) -> None:
        """Remove what `create` made in the directory. Idempotent, also when the directory is gone.

        Raises:
            StorageError: it cannot be removed.
        """
        await asyncio.to_thread(_remove, directory)

    async def usage(self, disk: Disk) -> int:
        """Bytes that the disk takes up on the host. Blocks that a reflink shares with the template count, too.

        Raises:
            StorageError: there is no such disk.
        """
        try:
            status = await asyncio.to_thread(os.stat, disk.path)
        except OSError as error:
            raise StorageError(f"cannot look at the disk {disk.path}: {error.strerror}") from error
        return status.st_blocks * 512

    def _create(self, template_disk: Path, directory: Path) -> Disk:
        try:
            source = os.open(template_disk, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(f"cannot open the template's disk {template_disk}: {error.strerror}") from error
        try:
            disk = self._try_reflink(source, directory)
            if disk is None and DiskFormat.QCOW2 in self._formats:
                disk = _make_overlay(source, template_disk, directory)
            return disk or _make_copy(source, directory)
        except OSError as error:
            if error.errno in _FULL:
                raise InsufficientStorageError(
                    f"no space left for a disk in {directory}; remove sandboxes or enlarge the file system"
                ) from error
            raise StorageError(f"cannot make a disk in {directory}: {error.strerror}") from error
        finally:
            os.close(source)

    def _try_reflink(self, source: int, directory: Path) -> Disk | None:
        devices = (os.fstat(source).st_dev, directory.stat().st_dev)
        if devices in self._without_reflink:
            return None
        path = directory.absolute() / RAW_NAME
        with _NewFile(path) as file:
            if reflink(source, file.descriptor):
                file.keep()
                return Disk(path)
        self._without_reflink.add(devices)
        log.info("reflinks_not_supported", directory=str(directory.parent))
        return None


class _NewFile:
    """A file that is removed again unless `keep` was called."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = False
        self.descriptor = -1

    def __enter__(self) -> _NewFile:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.descriptor = os.open(self._path, flags, 0o600)
        return self

    def keep(self) -> None:
        self._kept = True

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)
        if not self._kept:
            self._path.unlink()


def _make_overlay(source: int, template_disk: Path, directory: Path) -> Disk:
    path = directory.absolute() / OVERLAY_NAME
    with _NewFile(path) as file:
        write_overlay(file.descriptor, template_disk.resolve(), os.fstat(source).st_size)
        file.keep()
    return Disk(path, DiskFormat.QCOW2)


def _make_copy(source: int, directory: Path) -> Disk:
    path = directory.absolute() / RAW_NAME
    with _NewFile(path) as file:
        copy_sparse(source, file.descriptor)
        file.keep()
    return Disk(path)


def _remove(directory: Path) -> None:
    for name in (RAW_NAME, OVERLAY_NAME):
        try:
            (directory / name).unlink(missing_ok=True)
        except NotADirectoryError:
            continue
        except OSError as error:
            raise StorageError(f"cannot remove the disk {directory / name}: {error.strerror}") from error
