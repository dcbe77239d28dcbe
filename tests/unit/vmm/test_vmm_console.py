"""Logs stay below their cap while somebody appends, and say why a machine ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from agentenv.vmm import console
from agentenv.vmm.console import CAP_BYTES, KEEP_BYTES, LogKeeper, cap_log, exit_reason, last_lines


def test_a_log_is_cut_under_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    writer = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    line = b"z" * 99 + b"\n"
    os.write(writer, b"first\n" + line * (CAP_BYTES // 100 + 1) + b"newest\n")
    assert cap_log(path)
    os.write(writer, b"after the cut\n")
    os.close(writer)
    data = path.read_bytes()
    assert len(data) <= KEEP_BYTES + 100
    lines = data.splitlines()
    assert lines[-2:] == [b"newest", b"after the cut"]
    assert lines[0] == line[:-1], "it does not begin with a whole line"


def test_a_small_or_missing_log_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "console.log"
    assert not cap_log(path)
    path.write_bytes(b"x" * CAP_BYTES)
    assert not cap_log(path)
    assert path.stat().st_size == CAP_BYTES


async def test_the_keeper_cuts_what_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "_PERIOD_S", 0.001)
    cut = asyncio.Event()
    loop = asyncio.get_running_loop()
    real = cap_log

    def watched(path: Path) -> bool:
        done = real(path)
        if done:
            loop.call_soon_threadsafe(cut.set)
        return done

    monkeypatch.setattr(console, "cap_log", watched)
    kept, left = tmp_path / "kept", tmp_path / "left"
    for path in (kept, left):
        path.write_bytes(b"line\n" * (CAP_BYTES // 5 + 1))
    keeper = LogKeeper()
    keeper.add(left)
    keeper.remove(left)
    keeper.add(tmp_path / "missing")
    keeper.add(kept)
    async with asyncio.timeout(20):
        await cut.wait()
    await keeper.close()
    await keeper.close()
    assert kept.stat().st_size <= KEEP_BYTES
    assert left.stat().st_size > CAP_BYTES


def test_last_lines_of_binary_noise(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"\xff\xfe one\r\n\r\n\x1b[0mtwo\n" + b"\n" * 100 + b"three")
    assert last_lines(path, 2) == ["[0mtwo", "three"]
    assert last_lines(tmp_path / "missing", 3) == []


def _line(level: str, message: str, logger: str = "init") -> str:
    return json.dumps({"timestamp": "2026-01-01T00:00:00Z", "level": level, "logger": logger, "message": message})


@pytest.mark.parametrize(
    ("guest", "errors", "code", "expected"),
    [
        ("a\n[ 1.0] reboot: Power down\n", "", 0, "[ 1.0] reboot: Power down"),
        (
            "[ 1.0] Kernel panic - not syncing: no init\n[ 1.1] Rebooting\n",
            "",
            0,
            "Kernel panic - not syncing: no init",
        ),
        ("a\n", "qemu: no such disk\n", 1, "qemu: no such disk"),
        ("a\n", "", -signal.SIGKILL, "ended by signal 9"),
        ("last words\n", "", None, "last words"),
        ("", "", 0, "without a word"),
        (f"{_line('error', 'no disk')}\n[ 61.0] reboot: Power down\n", "", 0, "no disk"),
        (f"{_line('error', 'agent died')}\n{_line('info', 'shutting down')}\n[ 9.0] off\n", "", 0, "[ 9.0] off"),
        (f"{_line('error', 'failed', 'envd')}\n{{not json\n[ 9.0] off\n", "", 0, "[ 9.0] off"),
    ],
)
def test_why_a_machine_ended(tmp_path: Path, guest: str, errors: str, code: int | None, expected: str) -> None:
    (tmp_path / "console.log").write_text(guest)
    (tmp_path / "vmm.log").write_text(errors)
    assert expected in exit_reason(tmp_path / "console.log", tmp_path / "vmm.log", code)
