"""The `aenv` command against a real server: every command once, exit codes, pipes, copies, a terminal, errors."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.server import AENV, RunningServer

pytestmark = [pytest.mark.vm, pytest.mark.root]


@pytest.fixture(scope="module")
def sandbox(server: RunningServer) -> Iterator[str]:
    made = server.aenv("start", "base", "--timeout", "900", "-m", "made=by-cli", "-e", "GREETING=hi")
    assert made.returncode == 0, made.stderr
    sandbox_id = made.stdout.decode().strip()
    yield sandbox_id
    assert server.aenv("rm", sandbox_id).returncode == 0


def test_ls_and_info(server: RunningServer, sandbox: str) -> None:
    rows = json.loads(server.aenv("ls", "-m", "made=by-cli").stdout)
    assert [row["sandboxID"] for row in rows] == [sandbox]
    assert sandbox in server.aenv("ls", "-o", "table").stdout.decode()
    info = json.loads(server.aenv("info", sandbox).stdout)
    assert info["state"] == "running"
    assert "envdAccessToken" not in info


def test_exec_passes_output_and_exit_code(server: RunningServer, sandbox: str) -> None:
    done = server.aenv("exec", sandbox, "sh", "-c", "echo $GREETING; echo wrong >&2; exit 17")
    assert (done.returncode, done.stdout, done.stderr) == (17, b"hi\n", b"wrong\n")
    assert server.aenv("exec", sandbox, "sh", "-c", "kill -TERM $$").returncode == 143


def test_exec_options(server: RunningServer, sandbox: str) -> None:
    done = server.aenv(
        "exec", "--user", "root", "--cwd", "/usr", "-e", "A=b c", sandbox, "sh", "-c", "id -un; pwd; echo $A"
    )
    assert done.stdout.decode().splitlines() == ["root", "/usr", "b c"]


def test_exec_interactive_takes_a_pipe(server: RunningServer, sandbox: str) -> None:
    data = os.urandom(300_000)
    done = server.aenv("exec", "-i", sandbox, "cat", data=data)
    assert done.stdout == data
    assert server.aenv("exec", sandbox, "cat", data=data).stdout == b""


def test_cp_files_and_directories(server: RunningServer, sandbox: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "script.sh").write_text("#!/bin/sh\necho ran\n")
    (tree / "script.sh").chmod(0o755)
    (tree / "sub" / "data").write_bytes(os.urandom(100_000))
    (tree / "link").symlink_to("sub/data")
    assert server.aenv("cp", str(tree), f"{sandbox}:copied").returncode == 0
    assert server.aenv("exec", sandbox, "/home/user/copied/script.sh").stdout == b"ran\n"
    assert server.aenv("cp", f"{sandbox}:copied", str(tmp_path / "back")).returncode == 0
    assert (tmp_path / "back" / "sub" / "data").read_bytes() == (tree / "sub" / "data").read_bytes()
    assert (tmp_path / "back" / "link").is_symlink()
    assert server.aenv("cp", str(tree / "script.sh"), f"{sandbox}:/tmp/").returncode == 0
    assert server.aenv("exec", sandbox, "/tmp/script.sh").stdout == b"ran\n"
    assert server.aenv("cp", f"{sandbox}:/tmp/script.sh", str(tmp_path / "one")).returncode == 0
    assert (tmp_path / "one").read_text() == (tree / "script.sh").read_text()
    missing = server.aenv("cp", f"{sandbox}:/no/such", str(tmp_path / "x"))
    assert missing.returncode == 1
    assert len(missing.stderr.decode().strip().splitlines()) == 1


def test_cp_keeps_modes_and_refuses_what_is_no_file(server: RunningServer, sandbox: str, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    key.chmod(0o600)
    assert server.aenv("cp", str(key), f"{sandbox}:/root/key").returncode == 0
    assert server.aenv("exec", "-u", "root", sandbox, "stat", "-c", "%a", "/root/key").stdout == b"600\n"
    os.mkfifo(tmp_path / "fifo")
    refused = server.aenv("cp", str(tmp_path / "fifo"), f"{sandbox}:/tmp/")
    assert refused.returncode == 1
    assert b"neither a file nor a directory" in refused.stderr


def _running(server: RunningServer, sandbox: str, pattern: str) -> bool:
    return server.aenv("exec", sandbox, "pgrep", "-f", pattern).returncode == 0


def test_a_closed_pipe_ends_the_command(server: RunningServer, sandbox: str) -> None:
    with subprocess.Popen(
        [str(AENV), "exec", sandbox, "--", "yes", "pipe-mark"],
        env={**server.environment, "AENV_API_URL": server.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"pipe-mark\n"
        process.stdout.close()
        assert process.wait(timeout=120) == 141
        assert process.stderr.read() == b""
    assert not _running(server, sandbox, "[p]ipe-mark")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 143), (signal.SIGTERM, 143), (signal.SIGHUP, 137)])
def test_signals_end_the_command(server: RunningServer, sandbox: str, number: signal.Signals, code: int) -> None:
    with subprocess.Popen(
        [str(AENV), "exec", sandbox, "sh", "-c", "echo begun; exec sleep 765432"],
        env={**server.environment, "AENV_API_URL": server.url},
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(number)
        assert process.wait(timeout=120) == code
    assert not _running(server, sandbox, "sleep 76543[2]")


def test_shell_is_a_terminal(server: RunningServer, sandbox: str) -> None:
    child, terminal = pty.fork()
    if child == 0:
        os.execve(
            str(AENV), ["aenv", "shell", sandbox], {**server.environment, "AENV_API_URL": server.url, "TERM": "xterm"}
        )
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
        seen = bytearray()

        def read_until(text: bytes) -> None:
            while text not in seen:
                seen.extend(os.read(terminal, 4096))

        read_until(b"$ ")
        os.write(terminal, b"stty size; echo mark-$((1+1))\n")
        read_until(b"mark-2")
        assert b"33 101" in seen
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 44, 99, 0, 0))
        seen.clear()
        os.write(terminal, b"until stty size | grep -q '44 99'; do sleep 0.1; done; echo resized-$((1+2)); exit 6\n")
        read_until(b"resized-3")
    finally:
        _, status = os.waitpid(child, 0)
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 6


def test_timeout_and_logs(server: RunningServer, sandbox: str) -> None:
    assert server.aenv("timeout", sandbox, "800").returncode == 0
    entries = [json.loads(line) for line in server.aenv("logs", sandbox).stdout.splitlines()]
    assert entries
    assert {entry["level"] for entry in entries} <= {"debug", "info", "warn", "error"}


def test_snapshots_and_what_goes_on_from_them(server: RunningServer, sandbox: str) -> None:
    def run(*arguments: str) -> str:
        done = server.aenv(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.decode()

    run("exec", sandbox, "sh", "-c", "echo before > state && sync")
    made: list[str] = []
    try:
        assert run("snapshot", sandbox, "--name", "cli:v1") == "cli:v1\n"
        run("exec", sandbox, "sh", "-c", "echo after > state")
        made += run("fork", sandbox, "-n", "2", "--timeout", "600").split()
        assert len(set(made)) == 2
        made.append(run("start", "cli:v1").strip())
        made.append(run("start", "cli:v1", "--no-memory").strip())
        states = [run("exec", one, "cat", "state") for one in made]
        assert states == ["after\n", "after\n", "before\n", "before\n"]
        assert run("rollback", sandbox, "cli:v1") == f"{sandbox}\n"
        assert run("exec", sandbox, "cat", "state") == "before\n"
        later = run("snapshot", sandbox, "--no-memory").strip()
        tree = run("snapshots", "--tree", "--sandbox", sandbox, "-o", "table").splitlines()
        assert tree[1].startswith("cli:v1 ")
        assert f"└ {later}  <- here" in tree[2]
        listed = json.loads(run("snapshots", "--sandbox", sandbox))
        assert [row["mode"] for row in listed] == ["filesystem", "full"]
        assert json.loads(run("du"))["snapshotsBytes"] > 0
        assert run("snapshots", "rm", "cli:v1", later) == f"cli:v1\n{later}\n"
        assert server.aenv("start", "cli:v1").stderr == b"aenv: template 'cli:v1' not found\n"
        assert json.loads(run("snapshots", "--sandbox", sandbox)) == []
        assert set(json.loads(run("gc"))) == {"layers", "bytes"}
        assert run("exec", made[2], "cat", "state") == "before\n", "what came from a snapshot outlives it"
    finally:
        if made:
            assert server.aenv("rm", *made).returncode == 0


def test_errors_are_one_line(server: RunningServer) -> None:
    for arguments in (
        ["info", "i0000000000000000000"],
        ["exec", "../x", "true"],
        ["start", "nope"],
        ["rm"],
        ["cp", "a", "b"],
        ["nonsense"],
    ):
        failed = server.aenv(*arguments)
        assert failed.returncode != 0, arguments
        assert len(failed.stderr.decode().strip().splitlines()) == 1, failed.stderr
    unreachable = subprocess.run(
        [str(AENV), "ls"],
        env={**server.environment, "AENV_API_URL": "http://127.0.0.1:9"},
        capture_output=True,
        timeout=60,
    )
    assert unreachable.returncode == 1
    assert len(unreachable.stderr.decode().strip().splitlines()) == 1


def test_doctor(server: RunningServer) -> None:
    report = json.loads(server.aenv("doctor", "--json").stdout)
    assert report["ok"] is True
    names = {finding["name"] for finding in report["findings"]}
    assert {"root", "qemu", "nft", "virtualization", "guest assets", "base template"} <= names
    assert {"block daemon", "block devices", "layer store"} <= names
