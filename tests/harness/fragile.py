"""`aenv` as a program that notes each step of its operations, and waits or ends by SIGKILL at one that a test names.

Steps are what the orchestrator writes to the journal, and what it tells the VMM, the disks and the snapshots to do.
Each counts when it begins, so that the one before it is done and its own effect is not there. Files in the home:
`steps` gets a line per step, `die-at` holds how many may still begin and which do not count, and a pipe `hold-<step>`
holds that step until its writer closes it. Run by `RunningServer(program=FRAGILE)`; tests use `Steps`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

FRAGILE = (sys.executable, __file__)
_HOME = Path(os.environ.get("AENV_HOME", "/nowhere"))
_HELD_TIMEOUT_S = 120.0
_STEPS, _DIE_AT = _HOME / "steps", _HOME / "die-at"


def _pipe_of(home: Path, step: str) -> Path:
    return home / f"hold-{step}"


class Steps:
    """What a test knows of a fragile server, and tells it."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._steps, self._die_at = home / "steps", home / "die-at"

    def clear(self) -> None:
        self._steps.write_text("")

    def read(self) -> list[str]:
        """All steps since `clear`: `<kind>.<call> <machine or empty>`."""
        return self._steps.read_text().splitlines()

    def die_at(self, number: int, passing: Collection[str] = ()) -> None:
        """Let the server die at the step of this number from now on, 0 the first.

        Args:
            number: of the step.
            passing: beginnings of steps that do not count.
        """
        self._die_at.write_text(json.dumps([number, *passing]))

    def spare(self) -> bool:
        """Let it live. Returns whether it was still to die."""
        armed = self._die_at.exists()
        self._die_at.unlink(missing_ok=True)
        return armed

    @contextlib.contextmanager
    def held(self, step: str, begin: Callable[[], object]) -> Iterator[None]:
        """Begin something that comes to a step (`<kind>.<call>`), and keep it there while the block runs."""
        pipe = _pipe_of(self._home, step)
        os.mkfifo(pipe)
        too_long = threading.Timer(_HELD_TIMEOUT_S, pipe.read_bytes)
        too_long.start()
        begin()
        with pipe.open("wb"):  # opens when the server reads it
            assert too_long.is_alive(), f"nothing came to {step}"
            too_long.cancel()
            pipe.unlink()
            yield


def _begin(step: str) -> None:
    with _STEPS.open("a") as file:
        file.write(step + "\n")
    try:
        left, *passing = json.loads(_DIE_AT.read_text())
    except FileNotFoundError:
        return
    if step.startswith(tuple(passing)):
        return
    if left > 0:
        _DIE_AT.write_text(json.dumps([left - 1, *passing]))
        return
    _DIE_AT.unlink()
    os.kill(os.getpid(), signal.SIGKILL)


def _noted(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def call(self: Any, *arguments: Any, **options: Any) -> Any:
        record = getattr(self, "record", None)
        pipe = _pipe_of(_HOME, f"{kind}.{function.__name__}")
        if pipe.exists():
            await asyncio.to_thread(pipe.read_bytes)
        _begin(f"{kind}.{function.__name__} {Path(record.directory).name if record is not None else ''}".strip())
        return await function(self, *arguments, **options)

    return call


def _note_steps() -> None:
    from agentenv.orchestrator.journal import Journal
    from agentenv.snapshots.service import AsyncDraft, SnapshotService
    from agentenv.storage.disks import DiskStore
    from agentenv.vmm.qemu import QemuVmm
    from agentenv.vmm.qemu_machine import QemuMachine
    from agentenv.vmm.qemu_waiting import WaitingQemu

    reading = ("open", "close", "load", "find_key", "doubt_keys", "purge_keys", "set_end")
    writing = [
        name
        for name, function in vars(Journal).items()
        if inspect.iscoroutinefunction(function) and not name.startswith("_") and name not in reading
    ]
    for kind, owner, names in (
        ("journal", Journal, writing),
        ("machine", QemuMachine, ["pause", "save_state", "copy_memory", "resume", "kill"]),
        ("vmm", QemuVmm, ["boot", "load"]),
        ("waiting", WaitingQemu, ["load"]),
        ("disks", DiskStore, ["capture", "create", "remove"]),
        ("draft", AsyncDraft, ["take_state", "commit"]),
        ("snapshots", SnapshotService, ["delete"]),
    ):
        for name in names:
            setattr(owner, name, _noted(kind, getattr(owner, name)))


if __name__ == "__main__":
    sys.path.pop(0)  # this directory: its modules are the tests', not the program's
    from agentenv.cli.entry import main

    _note_steps()
    sys.argv[0] = "aenv"
    main()
