"""The official Python SDK: commands and terminals."""

from __future__ import annotations

import threading
import time

import pytest
from e2b import (
    AuthenticationException,
    CommandExitException,
    InvalidArgumentException,
    NotFoundException,
    PtySize,
    Sandbox,
    SandboxException,
    TimeoutException,
)

pytestmark = pytest.mark.vm


def test_foreground(sandbox: Sandbox) -> None:
    result = sandbox.commands.run("echo out; echo err >&2")
    assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 0)


def test_exit_code_is_raised(sandbox: Sandbox) -> None:
    with pytest.raises(CommandExitException) as raised:
        sandbox.commands.run("echo before; exit 42")
    assert raised.value.exit_code == 42
    assert raised.value.stdout == "before\n"


def test_environment_cwd_and_user(sandbox: Sandbox) -> None:
    result = sandbox.commands.run(
        "echo $SANDBOX_VARIABLE; echo $OWN; pwd; id -un; echo $E2B_SANDBOX $E2B_SANDBOX_ID",
        envs={"OWN": "ünïcode value"},
        cwd="/usr/lib",
        user="root",
    )
    assert result.stdout.splitlines() == [
        "from create",
        "ünïcode value",
        "/usr/lib",
        "root",
        f"true {sandbox.sandbox_id}",
    ]
    assert sandbox.commands.run("pwd; id -un; sudo id -un").stdout.split() == ["/home/user", "user", "root"]


def test_request_environment_beats_the_sandbox(sandbox: Sandbox) -> None:
    result = sandbox.commands.run("echo $SANDBOX_VARIABLE", envs={"SANDBOX_VARIABLE": "from request"})
    assert result.stdout == "from request\n"


def test_unknown_user_and_cwd(sandbox: Sandbox) -> None:
    with pytest.raises(AuthenticationException):
        sandbox.commands.run("true", user="nobody-of-this-name")
    with pytest.raises(InvalidArgumentException):
        sandbox.commands.run("true", cwd="/no/such/directory")


def test_callbacks_stream_in_order(sandbox: Sandbox) -> None:
    seen: list[str] = []
    sandbox.commands.run("for i in $(seq 50); do echo $i; done", on_stdout=seen.append)
    assert "".join(seen).split() == [str(number) for number in range(1, 51)]


def test_large_output_is_complete(sandbox: Sandbox) -> None:
    result = sandbox.commands.run("head -c 3000000 /dev/zero | tr '\\0' x", timeout=120)
    assert len(result.stdout) == 3_000_000
    assert set(result.stdout) == {"x"}


def test_utf8_split_over_chunks(sandbox: Sandbox) -> None:
    result = sandbox.commands.run("python3 -c \"print('ä€😀' * 20000, end='')\"", timeout=120)
    assert result.stdout == "ä€😀" * 20000


def test_timeout_kills(sandbox: Sandbox) -> None:
    with pytest.raises(TimeoutException):
        sandbox.commands.run("echo $$ > /tmp/timeout-pid; exec sleep 100", timeout=4)
    pid = sandbox.files.read("/tmp/timeout-pid").strip()
    gone = sandbox.commands.run(f"while [ -d /proc/{pid} ]; do sleep 0.1; done; echo gone", timeout=60)
    assert gone.stdout == "gone\n"


def test_background_list_connect_and_kill(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("sleep 1000", background=True, timeout=0)
    assert handle.pid in [process.pid for process in sandbox.commands.list()]
    again = sandbox.commands.connect(handle.pid)
    assert again.pid == handle.pid
    assert sandbox.commands.kill(handle.pid) is True
    with pytest.raises(CommandExitException) as raised:
        again.wait()
    assert "killed" in (raised.value.error or "")
    assert sandbox.commands.kill(handle.pid) is False
    assert handle.pid not in [process.pid for process in sandbox.commands.list()]


def test_leave_and_come_back(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run(
        "while [ ! -e /tmp/go ]; do sleep 0.1; done; echo after; exit 7", background=True, timeout=0
    )
    handle.disconnect()
    again = sandbox.commands.connect(handle.pid, timeout=0)
    sandbox.files.write("/tmp/go", "")
    with pytest.raises(CommandExitException) as raised:
        again.wait()
    assert raised.value.exit_code == 7
    assert raised.value.stdout == "after\n"


def test_connect_to_unknown_pid(sandbox: Sandbox) -> None:
    with pytest.raises(NotFoundException):
        sandbox.commands.connect(4_000_000)


def test_stdin(sandbox: Sandbox) -> None:
    handle = sandbox.commands.run("read -r line; echo got $line", background=True, stdin=True)
    sandbox.commands.send_stdin(handle.pid, "some text\n")
    assert handle.wait().stdout == "got some text\n"


def test_stdin_is_closed_unless_asked_for(sandbox: Sandbox) -> None:
    assert sandbox.commands.run("cat; echo end").stdout == "end\n"


def test_close_stdin(sandbox: Sandbox) -> None:
    if not hasattr(sandbox.commands, "close_stdin"):
        pytest.skip("this release has no close_stdin")
    handle = sandbox.commands.run("wc -c", background=True, stdin=True)
    sandbox.commands.send_stdin(handle.pid, "12345")
    sandbox.commands.close_stdin(handle.pid)
    assert handle.wait().stdout.strip() == "5"


def test_stream_input(sandbox: Sandbox) -> None:
    if not hasattr(sandbox.commands, "stream_input"):
        pytest.skip("this release has no stream_input")
    handle = sandbox.commands.run("md5sum", background=True, stdin=True, timeout=120)
    sandbox.commands.stream_input(handle.pid, (f"{number}\n" for number in range(2000)))
    sandbox.commands.close_stdin(handle.pid)
    expected = sandbox.commands.run("seq 0 1999 | md5sum").stdout
    assert handle.wait().stdout == expected


def test_many_at_once_keep_their_exit_codes(sandbox: Sandbox) -> None:
    codes: dict[int, int] = {}

    def run(code: int) -> None:
        try:
            codes[code] = sandbox.commands.run(f"exit {code}", timeout=120).exit_code
        except CommandExitException as error:
            codes[code] = error.exit_code

    threads = [threading.Thread(target=run, args=(code,)) for code in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == {code: code for code in range(20)}


def test_terminal(sandbox: Sandbox) -> None:
    output = bytearray()
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=120)
    sandbox.pty.send_stdin(terminal.pid, b"stty size; tty; echo $TERM\n")
    sandbox.pty.resize(terminal.pid, PtySize(rows=40, cols=132))
    sandbox.pty.send_stdin(terminal.pid, b"stty size; exit 5\n")
    with pytest.raises(CommandExitException) as raised:
        terminal.wait(on_pty=output.extend)
    assert raised.value.exit_code == 5
    text = output.decode()
    assert "24 80" in text or "40 132" in text
    assert "40 132" in text
    assert "/dev/pts/" in text
    assert "xterm-256color" in text


def test_terminal_interrupt_and_kill(sandbox: Sandbox) -> None:
    terminal = sandbox.pty.create(PtySize(rows=24, cols=80), timeout=120)
    seen = bytearray()

    def wait_for(text: bytes) -> None:
        for _stdout, _stderr, output in terminal:
            seen.extend(output or b"")
            if text in seen:
                return

    sandbox.pty.send_stdin(terminal.pid, b"sh -c 'echo begun-$((1+1)); exec sleep 987654'\n")
    wait_for(b"begun-2")
    sandbox.pty.send_stdin(terminal.pid, b"\x03")
    sandbox.pty.send_stdin(terminal.pid, b"echo still-$((40+2))\n")
    again = sandbox.pty.connect(terminal.pid, timeout=120)
    assert again.pid == terminal.pid
    assert sandbox.commands.run("while pgrep -f 'sleep 98765[4]'; do sleep 0.1; done", timeout=60).exit_code == 0
    assert sandbox.pty.kill(terminal.pid) is True
    with pytest.raises(CommandExitException):
        again.wait()
    assert sandbox.pty.kill(terminal.pid) is False


def test_error_of_a_dead_sandbox(endpoint: str) -> None:
    created = Sandbox.create(timeout=300)
    assert created.is_running() is True
    assert created.kill() is True
    assert created.is_running() is False
    with pytest.raises(SandboxException):
        created.commands.run("true")
    assert created.kill() is False


def test_expiry_ends_a_running_command(endpoint: str) -> None:
    created = Sandbox.create(timeout=300)
    handle = created.commands.run("sleep 1000", background=True, timeout=0)
    created.set_timeout(2)
    begun = time.monotonic()
    with pytest.raises((SandboxException, TimeoutException)):
        handle.wait()
    assert created.is_running() is False
    assert time.monotonic() - begun < 120
