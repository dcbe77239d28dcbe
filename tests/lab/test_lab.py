"""The lab itself: the host is what the other tests take it for, and its harness tells the truth about commands."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lab.host import Lab
from lab.results import CommandFailed


def test_the_host_has_what_tests_need(lab: Lab) -> None:
    release, *rest = lab.shell("uname -r; cut -d' ' -f1 /proc/modules; nproc").split("\n")
    assert release.startswith("6.")
    assert {"kvm_amd", "ublk_drv", "nbd", "tun", "veth"} <= set(rest)
    assert rest[-1] == "2"
    for device in ("/dev/kvm", "/dev/ublk-control", "/dev/nbd0", "/dev/net/tun"):
        lab.run("test", "-c" if device != "/dev/nbd0" else "-b", device)


def test_exit_codes_and_both_streams_come_back(lab: Lab) -> None:
    ended = lab.run("/bin/sh", "-c", "echo out; echo err >&2; exit 7", check=False)
    assert (ended.code, ended.stdout, ended.stderr) == (7, b"out\n", b"err\n")
    with pytest.raises(CommandFailed, match="exit code 7"):
        lab.run("/bin/sh", "-c", "exit 7")


def test_output_is_streamed(lab: Lab) -> None:
    seen: list[tuple[float, bytes]] = []
    lab.shell(
        "echo first; sleep 1; echo second",
        on_output=lambda piece: seen.append((time.monotonic(), piece)),
    )
    assert seen[0][1] == b"first\n"
    assert seen[-1][0] - seen[0][0] > 0.5


def test_a_command_that_takes_too_long_is_killed(lab: Lab) -> None:
    with pytest.raises(CommandFailed):
        lab.run("sleep", "1234.5", timeout_s=1)
    assert lab.run("pgrep", "-fx", "sleep 1234.5", check=False).code == 1


def test_files_go_in_and_out(lab: Lab, tmp_path: Path) -> None:
    content = bytes(range(256)) * 4096
    (tmp_path / "in").write_bytes(content)
    lab.put(tmp_path / "in", "/tmp/lab/copied", 0o751)
    assert lab.shell("stat -c %a /tmp/lab/copied") == "751"
    lab.fetch("/tmp/lab/copied", tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == content
    lab.run("rm", "-r", "/tmp/lab")
