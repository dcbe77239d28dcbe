"""Files that are there whole or not at all, and a lock between processes. No knowledge of what the files mean."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def write_bytes(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file so that readers see the old or the new one, whatever happens in between.

    Raises:
        OSError: the disk refused; the old file is still there.
    """
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(draft).chmod(mode)
        Path(draft).replace(path)
    except BaseException:
        Path(draft).unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Mapping[str, object]) -> None:
    """`write_bytes` of an object as JSON, keys sorted.

    Raises:
        OSError: the disk refused; the old file is still there.
    """
    write_bytes(path, json.dumps(content, indent=2, sort_keys=True).encode() + b"\n")


@contextmanager
def exclusive_lock(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a lock file; it is released when the process ends, however that happens. The file itself stays.

    Args:
        path: the lock file, made where it is missing.
        waiting: called once when another process holds it, before waiting for it.

    Raises:
        OSError: the file cannot be made or locked.
    """
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
