"""The log of one sandbox: our own events (`log.jsonl` in its directory) and what its guest wrote to the console.

The console is the guest's: any root in there may write anything to it. So it is parsed, never trusted.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import structlog

from agentenv.errors import StorageError
from agentenv.orchestrator.model import LogEntry
from agentenv.orchestrator.tasks import in_thread

_log = structlog.get_logger(__name__)

FILE_NAME = "log.jsonl"
LEVELS = ("debug", "info", "warn", "error")
_ALIASES = {"trace": "debug", "warning": "warn", "fatal": "error", "critical": "error", "panic": "error"}
_KERNEL_LINE = re.compile(r"\[\s*(\d{1,9}\.\d{6})\] ?(.*)")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class LogQuery:
    """Which entries are wanted. `level` is the lowest one; `search` is a part of the message, case-sensitive."""

    start: datetime | None = None
    end: datetime | None = None
    limit: int = 1000
    level: str | None = None
    backward: bool = False
    search: str | None = None

    def wants(self, entry: LogEntry) -> bool:
        """Whether an entry passes every filter."""
        return (
            (self.start is None or entry.timestamp >= self.start)
            and (self.end is None or entry.timestamp <= self.end)
            and (self.level is None or _severity(entry.level) >= _severity(self.level))
            and (self.search is None or self.search in entry.message)
        )


async def append(directory: Path, entry: LogEntry) -> None:
    """Add one of our events. A log that cannot be written stops nothing: that is logged instead."""
    line = json.dumps(
        {
            "timestamp": entry.timestamp.isoformat(),
            "level": entry.level,
            "logger": entry.logger,
            "message": entry.message,
            **entry.fields,
        }
    )

    def write() -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(directory / FILE_NAME, flags, 0o600)
        try:
            os.write(descriptor, line.encode() + b"\n")
        finally:
            os.close(descriptor)

    try:
        await in_thread(write)
    except OSError as error:
        _log.warning("sandbox_log_not_written", directory=str(directory), error=error.strerror)


async def read(directory: Path, console: Path | None, born: datetime, query: LogQuery) -> list[LogEntry]:
    """Entries of both sources in the order of time; the newest first when the query says `backward`.

    Args:
        directory: of the sandbox.
        console: its serial console; None when it has none.
        born: when the sandbox came to be, for lines without a time of their own.
        query: what is wanted.

    Raises:
        StorageError: a file exists but cannot be read.
    """
    return await in_thread(lambda: _read(directory, console, born, query))


def _read(directory: Path, console: Path | None, born: datetime, query: LogQuery) -> list[LogEntry]:
    own = list(parse(_lines(directory / FILE_NAME), born, raw_logger="orchestrator"))
    first = min((entry.timestamp for entry in own), default=born)
    guest = [] if console is None else list(parse(_lines(console), first, raw_logger="kernel"))
    # Stable: lines of one source with equal times keep their order.
    entries = sorted(own + guest, key=lambda entry: entry.timestamp)
    if query.backward:
        entries.reverse()
    return list(islice(filter(query.wants, entries), max(0, query.limit)))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_bytes().decode("utf-8", "replace").split("\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"cannot read the log {path}: {error.strerror}") from error


def parse(lines: Iterable[str], born: datetime, raw_logger: str) -> Iterator[LogEntry]:
    """Turn lines into entries. A line that is no JSON log line is a message of `raw_logger` at level info.

    Its time is the kernel's stamp counted from `born`, where it has one, and never before that of the line above.
    """
    latest = born
    for line in lines:
        text = _ESCAPE.sub("", line).strip()
        if not text:
            continue
        entry = _structured(text, latest)
        if entry is None:
            stamped = _KERNEL_LINE.fullmatch(text)
            moment = born + timedelta(seconds=float(stamped.group(1))) if stamped else latest
            message = stamped.group(2) if stamped else text
            entry = LogEntry(max(latest, moment), "info", raw_logger, message)
        latest = entry.timestamp
        yield entry


def _structured(text: str, latest: datetime) -> LogEntry | None:
    if not text.startswith("{"):
        return None
    try:
        values: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not isinstance(values.get("message"), str):
        return None
    level = str(values.pop("level", "info")).lower()
    level = _ALIASES.get(level, level)
    return LogEntry(
        timestamp=_timestamp(values.pop("timestamp", None)) or latest,
        level=level if level in LEVELS else "info",
        logger=str(values.pop("logger", "envd")),
        message=values.pop("message"),
        fields={key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()},
    )


def _timestamp(value: object) -> datetime | None:
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value)
        return (moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _severity(level: str) -> int:
    return LEVELS.index(level) if level in LEVELS else LEVELS.index("info")
