"""A counter in a file by which processes see that one of them has changed something, without looking at all of it.

It is even while nothing changes and odd while somebody is at it, also when that process was killed: then nobody trusts
what he remembers until the next change is complete. Eight bytes, little-endian; a missing or short file counts as 0.
Says nothing of what changed. Everything here blocks.
"""

from __future__ import annotations

import os
from pathlib import Path

_SIZE = 8


class ChangeCounter:
    """See the module.

    Args:
        path: of the file; its other uses, like locks, do not matter here.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> int:
        """What it is now.

        Raises:
            OSError: the file cannot be read.
        """
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return 0
        try:
            return int.from_bytes(os.pread(descriptor, _SIZE, 0), "little")
        finally:
            os.close(descriptor)

    def begin(self) -> int:
        """Make it odd. Only one at a time may be between this and `end`. Returns what it is then.

        Raises:
            OSError: the file cannot be written.
        """
        value = (self.read() + 1) | 1
        self._write(value)
        return value

    def end(self, begun: int) -> int:
        """Make it even. Returns what it is then.

        Raises:
            OSError: the file cannot be written; it stays odd.
        """
        self._write(begun + 1)
        return begun + 1

    def _write(self, value: int) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, value.to_bytes(_SIZE, "little"), 0)
        finally:
            os.close(descriptor)
