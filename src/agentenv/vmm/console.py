"""Log files that a VMM process appends to: keeps them below a cap, and reads how a machine ended from them.

QEMU cannot cap a log by itself, and a pipe to this server would break when the server restarts. QEMU appends
(O_APPEND), so the file may be cut under it at any time: what follows is written at the new end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

CAP_BYTES = 4 * 1024 * 1024
"""A log that grew beyond this is cut."""
KEEP_BYTES = 1024 * 1024
"""What is kept of a log that is cut: its newest part."""
_TAIL_BYTES = 16 * 1024
_PERIOD_S = 5.0


class LogKeeper:
    """Caps a changing set of logs every few seconds, from the first `add` to `close`.

    While no server runs nothing is capped; the next one cuts what grew.
    """

    def __init__(self) -> None:
        self._paths: set[Path] = set()
        self._task: asyncio.Task[None] | None = None

    def add(self, path: Path) -> None:
        """Keep this log below the cap from now on. Needs a running event loop."""
        self._paths.add(path)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="vmm-log-keeper")

    def remove(self, path: Path) -> None:
        """Leave this log alone from now on. Idempotent."""
        self._paths.discard(path)

    async def close(self) -> None:
        """Stop. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_PERIOD_S)
            await asyncio.to_thread(self._cap, tuple(self._paths))

    @staticmethod
    def _cap(paths: tuple[Path, ...]) -> None:
        for path in paths:
            try:
                if cap_log(path):
                    log.info("machine_log_cut", path=str(path))
            except OSError as error:
                log.warning("machine_log_not_cut", path=str(path), error=str(error))


def cap_log(path: Path) -> bool:
    """Cut a log that is larger than `CAP_BYTES` to its newest `KEEP_BYTES`, on a line boundary. Blocking.

    Lines that arrive between reading and cutting are lost (microseconds). A missing file is fine.

    Returns:
        Whether it was cut.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    try:
        size = os.fstat(descriptor).st_size
        if size <= CAP_BYTES:
            return False
        kept = os.pread(descriptor, KEEP_BYTES, size - KEEP_BYTES)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, kept[kept.find(b"\n") + 1 :])
        return True
    finally:
        os.close(descriptor)


def last_lines(path: Path, count: int) -> list[str]:
    """The last non-empty lines of a log, oldest first, without control characters. A missing file has none."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            data = file.read()
    except FileNotFoundError:
        return []
    text = data.decode("utf-8", errors="replace")
    lines = ("".join(char for char in line if char.isprintable()).strip() for line in text.splitlines())
    return [line for line in lines if line][-count:]


def exit_reason(console: Path, error_log: Path, exit_code: int | None) -> str:
    """Why a machine ended, for people: from a kernel panic, the VMM's own errors, init's, or the guest's last words."""
    guest = last_lines(console, 40)
    panic = next((line for line in guest if "Kernel panic" in line), None)
    if panic is not None:
        return panic
    if exit_code is not None and exit_code < 0:
        return f"the VMM was ended by signal {-exit_code}"
    if exit_code != 0:
        errors = last_lines(error_log, 1)
        if errors:
            return errors[0]
    return _complaint_of_init(guest) or (guest[-1] if guest else "the machine ended without a word")


def _complaint_of_init(lines: list[str]) -> str | None:
    """What the guest's init gave up over: an error as the last line of any of our programs.

    The kernel's lines after it ("reboot: Power down") are consequences; an error that a line of ours follows was
    survived.
    """
    for line in reversed(lines):
        if not line.startswith("{"):
            continue
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "logger" in entry:
            gave_up = entry["logger"] == "init" and entry.get("level") == "error"
            return str(entry.get("message")) if gave_up else None
    return None
