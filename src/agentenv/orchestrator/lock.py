"""One server per home: an exclusive lock that the kernel drops with the process, however that ends.

The file holds the pid of its owner for the message only; whether the lock is held is the kernel's word alone.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from agentenv.errors import ConfigurationError


class ServerLock:
    """The lock `server.lock` in a home directory. Use as a context manager around the life of the server."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock without waiting.

        Raises:
            ConfigurationError: another server has it (the message names its pid), or the file cannot be opened.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Close-on-exec (Python's default) matters: a VMM that inherited the descriptor would hold the lock for us.
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigurationError(f"cannot open the server lock {self._path}: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(descriptor, 32).decode("ascii", "replace").strip()
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                who = f"pid {owner}" if owner else "a process that has not written its pid yet"
                raise ConfigurationError(
                    f"another server ({who}) already uses {self._path.parent}; "
                    "stop it, or set AENV_HOME to another directory"
                ) from error
            raise ConfigurationError(f"cannot lock {self._path}: {error.strerror}") from error
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(descriptor)
            raise ConfigurationError(f"cannot write the server lock {self._path}: {error.strerror}") from error
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back. Idempotent. The file stays: removing it would let two servers lock different files."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> ServerLock:
        self.acquire()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()
