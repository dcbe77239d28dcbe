"""What commands print: tables for people, JSON for programs. Nothing else writes to standard output."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table


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
        return not sys.stdout.isatty()
    return choice is OutputFormat.JSON


def console() -> Console:
    """Standard output; a table that goes into a pipe is not folded to some terminal's width."""
    return Console() if sys.stdout.isatty() else Console(width=10_000)


def print_json(value: object) -> None:
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def print_rows(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], choice: OutputFormat | None) -> None:
    """Print rows as JSON whole, or as a table of the columns (key in the row → heading)."""
    if wants_json(choice):
        print_json(list(rows))
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, heading in enumerate(columns.values()):
        table.add_column(heading, overflow="fold", no_wrap=number == 0)
    for row in rows:
        table.add_row(*(_cell(row.get(key)) for key in columns))
    console().print(table)


def print_fields(fields: Mapping[str, Any], choice: OutputFormat | None) -> None:
    """Print one object: JSON, or a line per field."""
    if wants_json(choice):
        print_json(fields)
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for key, value in fields.items():
        table.add_row(key, _cell(value))
    console().print(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={item}" for key, item in value.items())
    return str(value).replace("[", "\\[")
