"""What commands print: tables for people, JSON for programs. Nothing else writes to standard output."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentenv.cli.connection import CommandError


class OutputFormat(StrEnum):
    TABLE = "table"
    JSON = "json"


OutputOption = Annotated[
    OutputFormat | None,
    typer.Option("-o", "--output", help="table or json. Default: table on a terminal, json when piped."),
]


def wants_json(choice: OutputFormat | None) -> bool:
    """Whether to print JSON: as chosen, else when standard output is not a terminal."""
    if choice is None:
        return sys.stdout is None or not sys.stdout.isatty()
    return choice is OutputFormat.JSON


def shown(value: object) -> str:
    """One line for people. Names, tags and metadata come from strangers: a terminal must not obey them."""
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{shown(key)}={shown(item)}" for key, item in value.items())
    if isinstance(value, list):
        return ", ".join(shown(item) for item in value)
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in str(value)
    )


def instant(text: str) -> datetime:
    """A time as the API writes it."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def span(duration: timedelta) -> str:
    """A duration for people, of two units at most; none is below zero."""
    minutes, seconds = divmod(max(0, int(duration.total_seconds())), 60)
    hours, minutes = divmod(minutes, 60)
    days, day_hours = divmod(hours, 24)
    if days > 1:
        return f"{days}d {day_hours:02}h"
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {seconds:02}s" if minutes else f"{seconds}s"


def ago(text: str) -> str:
    """How long ago a time of the API was."""
    return f"{span(datetime.now(UTC) - instant(text))} ago"


def size_text(size: int) -> str:
    """A number of bytes for people."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{size} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def write(text: str) -> None:
    """Write to standard output at once, so that an output that takes nothing is an error of the command.

    Raises:
        CommandError: standard output is closed, or takes nothing (a full disk).
        BrokenPipeError: nobody reads it any more.
    """
    if sys.stdout is None:  # how Python shows a closed descriptor
        raise CommandError("standard output is closed")
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        # What is still buffered would fail once more when Python ends.
        with suppress(io.UnsupportedOperation):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise CommandError(f"standard output: {error.strerror}") from error


def print_json(value: object) -> None:
    write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], choice: OutputFormat | None) -> None:
    """Print rows as JSON whole, or as a table of the columns (key in the row → heading)."""
    if wants_json(choice):
        print_json(list(rows))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate(columns.values()):
        table.add_column(heading, overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*(Text(shown(row.get(key))) for key in columns))
    print_table(table)


def print_fields(fields: Mapping[str, Any], choice: OutputFormat | None) -> None:
    """Print one object: JSON, or a line per field."""
    if wants_json(choice):
        print_json(fields)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in fields.items():
        table.add_row(key, Text(shown(value)))
    print_table(table)


def print_table(table: Table) -> None:
    """Print a table. Texts of strangers belong into it as `Text(shown(…))`."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    text = io.StringIO()
    # A table that goes into a pipe is not folded to some terminal's width.
    Console(file=text, force_terminal=terminal, width=None if terminal else 10_000).print(table)
    write(text.getvalue())
