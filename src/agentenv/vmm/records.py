"""Finds what machines left on this host, without any journal: processes, memory files, sockets; and removes it.

Two things in a machine's directory say what belongs to it: `machine.json` (written before anything is taken) names
the memory file, and `vmm.lock` is held open and locked by the VMM process from its fork to its end. So a server that
was killed at any point between "spawn" and "noted the pid" still finds the process on its next start.
Which machines are wanted is the orchestrator's knowledge; this file must not guess it.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path

import structlog

from agentenv.errors import VmmError
from agentenv.vmm.base import MachineRecord
from agentenv.vmm.process import LOCK_NAME, ProcessHandle, is_locked, read_start_time

log = structlog.get_logger(__name__)

INTENT_NAME = "machine.json"
_DELETED = " (deleted)"
_END_TIMEOUT_S = 10.0


def write_intent(directory: Path, vmm: str, version: str, memory_file: Path) -> None:
    """Note what a machine is about to take, before it is taken. Blocking.

    Raises:
        VmmError: it cannot be written.
    """
    record = MachineRecord(
        vmm=vmm, version=version, pid=0, start_time=0, directory=str(directory), memory_file=str(memory_file)
    )
    draft = directory / f"{INTENT_NAME}.new"
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(asdict(record), file)
        draft.replace(directory / INTENT_NAME)
    except OSError as error:
        raise VmmError(f"cannot write {directory / INTENT_NAME}: {error.strerror}") from error


def _read_intent(directory: Path) -> MachineRecord | None:
    try:
        return MachineRecord(**json.loads((directory / INTENT_NAME).read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError) as error:
        log.warning("machine_intent_unreadable", directory=str(directory), error=str(error))
        return None


def _lock_holders(sandboxes_dir: Path) -> dict[Path, list[int]]:
    """Which processes, besides this one, hold the lock file of which directory below `sandboxes_dir` open."""
    root = os.path.realpath(sandboxes_dir)
    holders: dict[Path, list[int]] = {}
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            descriptors = list(os.scandir(f"/proc/{entry.name}/fd"))
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                target = os.readlink(descriptor.path).removesuffix(_DELETED)  # noqa: PTH115
            except OSError:
                continue
            path = Path(target)
            if path.name == LOCK_NAME and str(path.parent.parent) == root:
                holders.setdefault(path.parent, []).append(int(entry.name))
    return holders


def _scan(sandboxes_dir: Path, owned: frozenset[Path]) -> list[MachineRecord]:
    if not sandboxes_dir.is_dir():
        return []
    holders = _lock_holders(sandboxes_dir)
    directories = {Path(os.path.realpath(sandboxes_dir)) / entry.name for entry in os.scandir(sandboxes_dir)}
    records = []
    for directory in sorted(directories | set(holders)):
        if directory in owned:
            continue
        intent = _read_intent(directory)
        memory_file = intent.memory_file if intent is not None else None
        vmm, version = (intent.vmm, intent.version) if intent is not None else ("unknown", "unknown")
        processes = _started(holders.get(directory, []))
        if not processes and is_locked(directory / LOCK_NAME):
            # It may be newer than the look at all processes.
            processes = _started(_lock_holders(sandboxes_dir).get(directory, []))
            if not processes and is_locked(directory / LOCK_NAME):
                raise VmmError(
                    f"a process that this user cannot see runs in {directory}; start the server as its owner"
                )
        records += [
            MachineRecord(vmm, version, pid, start_time, str(directory), memory_file) for pid, start_time in processes
        ]
        if not processes and intent is not None:
            records.append(intent)
    return records


def _started(pids: list[int]) -> list[tuple[int, int]]:
    """Those that still run, with their start times."""
    return [(pid, start_time) for pid in pids if (start_time := read_start_time(pid)) is not None]


async def find_orphans(sandboxes_dir: Path, owned: Collection[Path] = ()) -> list[MachineRecord]:
    """Everything that machines left below `sandboxes_dir`, except in the directories that live sandboxes own.

    A record has pid 0 where only files are left. Pass each to `reap`.

    Args:
        sandboxes_dir: parent of the machines' directories.
        owned: directories of machines that are wanted (adopted before).

    Raises:
        VmmError: a VMM runs there that this user may not see.
    """
    resolved = frozenset(Path(os.path.realpath(directory)) for directory in owned)
    return await asyncio.to_thread(_scan, sandboxes_dir, resolved)


def remove_traces(record: MachineRecord, names: Collection[str] = ()) -> None:
    """Remove a machine's memory file and what its VMM made in its directory; logs and the lock file stay.

    Idempotent, blocking.

    Args:
        record: the machine.
        names: more files in its directory to remove.

    Raises:
        VmmError: a file cannot be removed.
    """
    directory = Path(record.directory)
    paths = [directory / name for name in (*names, INTENT_NAME)]
    if record.memory_file is not None:
        paths.insert(0, Path(record.memory_file))
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except NotADirectoryError:
            continue
        except OSError as error:
            raise VmmError(f"cannot remove {path}: {error.strerror}") from error


async def reap(record: MachineRecord, socket_names: Collection[str] = ("qmp.sock",)) -> None:
    """End a machine's process, if it still is the one of the record, wait for its end and remove its traces.

    The directory itself is left to its owner. Idempotent.

    Raises:
        VmmError: the process does not end, or a file cannot be removed.
    """
    process = ProcessHandle.adopt(record.pid, record.start_time)
    if process is not None:
        process.kill()
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await process.wait()
        except TimeoutError as error:
            raise VmmError(f"process {record.pid} in {record.directory} does not end") from error
        finally:
            process.detach()
        log.info("machine_reaped", pid=record.pid, directory=record.directory)
    await asyncio.to_thread(remove_traces, record, socket_names)
