"""What commands print of texts that strangers chose, and onto an output that takes nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.cli.output import OutputFormat, print_fields, print_rows, shown

AENV = Path(sys.executable).parent / "aenv"
HOSTILE = "[/bold]\x1b]0;title\x07\nnext"
ESCAPED = "[/bold]\\x1b]0;title\\x07\\nnext"


def test_tables_show_markup_and_control_characters_and_obey_none(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"name": HOSTILE, "metadata": {HOSTILE: HOSTILE}, "nothing": None}
    print_rows([row], {"name": "NAME", "metadata": "METADATA"}, OutputFormat.TABLE)
    print_fields(row, OutputFormat.TABLE)
    printed = capsys.readouterr().out
    assert printed.count(ESCAPED) == 6
    assert f"{ESCAPED}={ESCAPED}" in printed
    assert "\x1b" not in printed


def test_what_is_printable_stays_as_it_is() -> None:
    assert shown("Größe \\[x] 100 %") == "Größe \\[x] 100 %"
    assert shown(["a", 1, None]) == "a, 1, "


@pytest.mark.parametrize("command", [["version"], ["home"], ["doctor"], ["doctor", "--json"]])
def test_an_output_that_takes_nothing_is_one_line_and_an_exit_code(command: list[str]) -> None:
    with Path("/dev/full").open("wb") as full:
        run = subprocess.run([AENV, *command], stdout=full, stderr=subprocess.PIPE, check=False)
    assert run.returncode == 1
    assert run.stderr.decode().strip().splitlines()[-1] == "aenv: standard output: No space left on device"
    assert "Traceback" not in run.stderr.decode()
