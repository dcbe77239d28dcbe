"""What lies in `disks/<id>/`: the note of what a disk is, its upper, and layers captured from it that are on their way
into the store. Everything here blocks. Layers and devices are not known here.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from agentenv import durable
from agentenv.errors import InvalidRequestError, StorageError
from agentenv.storage.layer_files import worded

RECORD_NAME = "disk.json"
UPPER_NAMES = ("upper.data", "upper.index")
_DISK_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,63}")
_CAPTURED = re.compile(r"captured-([0-9]{1,18})")


@dataclass(frozen=True, slots=True)
class DiskRecord:
    """What the references and the daemon do not say of a disk."""

    directory: str
    """Where its socket is."""
    virtual_size: int
    """Bytes; 0 is that of the layers."""
    base_layers: int
    """So many layers, from the bottom, it was made from: they are shared, and stay as they are."""


class DiskRecords:
    """The directories of all disks.

    Args:
        directory: exists only after `prepare`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory.absolute()

    def prepare(self) -> None:
        """Make the directory of all disks (0700)."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise worded(error, f"cannot make {self._directory}") from error

    def path(self, disk_id: str) -> Path:
        """Directory of one disk.

        Raises:
            InvalidRequestError: the id cannot be one.
        """
        if not _DISK_ID.fullmatch(disk_id):
            raise InvalidRequestError(f"{disk_id[:80]!r} cannot be the id of a disk")
        return self._directory / disk_id

    def owns(self, path: Path) -> bool:
        """Whether a directory is that of a disk."""
        return path.parent == self._directory or path.parent.resolve() == self._directory.resolve()

    def ids(self) -> frozenset[str]:
        """Disks that have a directory."""
        try:
            return frozenset(path.name for path in self._directory.iterdir() if _DISK_ID.fullmatch(path.name))
        except OSError as error:
            raise worded(error, f"cannot look into {self._directory}") from error

    def exists(self, disk_id: str) -> bool:
        """Whether a disk has a directory."""
        return self.path(disk_id).is_dir()

    def make(self, disk_id: str, record: DiskRecord) -> Path:
        """Make the directory of a disk that does not exist yet, with its note.

        Raises:
            StorageError: it exists.
        """
        directory = self.path(disk_id)
        try:
            directory.mkdir(mode=0o700)
        except FileExistsError as error:
            raise StorageError(f"the disk {disk_id} exists already, in {directory}") from error
        except OSError as error:
            raise worded(error, f"cannot make {directory}") from error
        try:
            content = {
                "directory": record.directory,
                "virtual_size": record.virtual_size,
                "base_layers": record.base_layers,
            }
            durable.write_json(directory / RECORD_NAME, content)
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise worded(error, f"cannot write the note of disk {disk_id}") from error
        return directory

    def read(self, disk_id: str) -> DiskRecord:
        """What a disk is.

        Raises:
            StorageError: there is no such disk, or its note is damaged.
        """
        path = self.path(disk_id) / RECORD_NAME
        try:
            content = json.loads(path.read_bytes())
            return DiskRecord(
                directory=str(content["directory"]),
                virtual_size=int(content["virtual_size"]),
                base_layers=int(content["base_layers"]),
            )
        except (FileNotFoundError, NotADirectoryError) as error:
            raise StorageError(f"there is no disk {disk_id} ({path} is missing)") from error
        except OSError as error:
            raise worded(error, f"cannot read {path}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(f"{path} is damaged; remove the sandbox that the disk belongs to") from error

    def captured(self, disk_id: str) -> tuple[Path, ...]:
        """Captured layers that still lie beside the upper, oldest first."""
        try:
            found = [(int(match[1]), path) for path in self.path(disk_id).iterdir() if (match := _captured(path))]
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise worded(error, f"cannot look into {self.path(disk_id)}") from error
        return tuple(path for _, path in sorted(found))

    def next_captured(self, disk_id: str) -> Path:
        """A name for the next captured layer."""
        names = [int(match[1]) for path in self.captured(disk_id) if (match := _captured(path))]
        return self.path(disk_id) / f"captured-{max(names, default=0) + 1}"

    def upper_bytes(self, disk_id: str) -> int:
        """Bytes that a disk's upper takes up on the host."""
        total = 0
        for name in UPPER_NAMES:
            path = self.path(disk_id) / name
            try:
                total += path.stat().st_blocks * 512
            except FileNotFoundError:
                continue
            except OSError as error:
                raise worded(error, f"cannot look at {path}") from error
        return total

    def remove(self, disk_id: str) -> None:
        """Remove a disk's directory and all in it. Idempotent."""
        directory = self.path(disk_id)
        try:
            shutil.rmtree(directory)
        except FileNotFoundError:
            return
        except OSError as error:
            raise worded(error, f"cannot remove {directory}") from error


def _captured(path: Path) -> re.Match[str] | None:
    return _CAPTURED.fullmatch(path.name)
