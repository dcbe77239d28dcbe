"""The guest agent under fire: fork bombs, memory hogs, kill -9 of everything, a thousand commands, endless output."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from e2b import CommandExitException, Sandbox, SandboxException, TimeoutException

from harness.server import RunningServer

pytestmark = [pytest.mark.vm, pytest.mark.root]


@pytest.fixture
def victim(server: RunningServer) -> Iterator[Sandbox]:
    sandbox = Sandbox.create(timeout=900, api_url=server.url, sandbox_url=server.url, api_key=server.api_key)
    yield sandbox
    sandbox.kill()


def _alive(sandbox: Sandbox) -> None:
    assert sandbox.is_running() is True
    assert sandbox.commands.run("echo alive", timeout=60).stdout == "alive\n"


def _attack(sandbox: Sandbox, command: str, **options: object) -> None:
    """Run something that may well be killed, cut off or time out."""
    with suppress(CommandExitException, TimeoutException, SandboxException):
        sandbox.commands.run(command, **options)  # type: ignore[call-overload]


def test_kill_everything(victim: Sandbox) -> None:
    _attack(victim, "kill -9 -1", timeout=30)
    _alive(victim)
    # As root it reaches the agent too: init starts it again, with the tokens it had.
    _attack(victim, "kill -9 -1", user="root", timeout=30)
    _alive(victim)


def test_memory_hog(victim: Sandbox) -> None:
    with pytest.raises((CommandExitException, TimeoutException)):
        victim.commands.run('python3 -c "b = [bytearray(1 << 20) for _ in range(100000)]"', timeout=120)
    _alive(victim)
    assert victim.commands.run("cat /proc/1/comm").exit_code == 0


def test_fork_bomb(victim: Sandbox) -> None:
    bomb = victim.commands.run(
        "python3 -c 'import os\nwhile True:\n    try: os.fork()\n    except OSError: pass'", background=True, timeout=20
    )
    assert victim.is_running() is True
    victim.commands.kill(bomb.pid)
    _alive(victim)


def test_a_thousand_commands_keep_their_exit_codes(victim: Sandbox) -> None:
    """In the guest, by one client of the agent, so that the host's client is not what is measured."""
    script = r"""
import base64, json, os, struct, threading, urllib.request
token = os.environ["TOKEN"]
wrong = []
def run(number):
    code = number % 251
    kill = number % 10 == 9
    text = "kill -TERM $$" if kill else f"exit {code}"
    payload = json.dumps({"process": {"cmd": "/bin/sh", "args": ["-c", text]}, "stdin": False}).encode()
    request = urllib.request.Request("http://127.0.0.1:49983/process.Process/Start",
        data=struct.pack(">BI", 0, len(payload)) + payload,
        headers={"Content-Type": "application/connect+json", "X-Access-Token": token})
    body = urllib.request.urlopen(request, timeout=280).read()
    end = None
    while body:
        flags, size = struct.unpack(">BI", body[:5])
        message = json.loads(body[5:5 + size] or b"{}")
        end = message.get("event", {}).get("end", end)
        body = body[5 + size:]
    got = (end.get("exitCode", 0), end["status"])
    if got != ((-1, "signal: terminated") if kill else (code, f"exit status {code}")):
        wrong.append((number, got))
gate = threading.Semaphore(100)
def bounded(number):
    with gate:
        run(number)
threads = [threading.Thread(target=bounded, args=(number,)) for number in range(1000)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("wrong:", wrong)
"""
    victim.files.write("/tmp/thousand.py", script)
    token = victim._envd_access_token
    result = victim.commands.run("python3 /tmp/thousand.py", envs={"TOKEN": token or ""}, timeout=290)
    assert result.stdout == "wrong: []\n"


def test_orphans_are_reaped(victim: Sandbox) -> None:
    victim.commands.run("for i in $(seq 50); do (setsid sleep 0.1 &) ; done; sleep 3", timeout=60)
    zombies = victim.commands.run("ps -eo stat= | grep -c '^Z' || true").stdout
    assert zombies == "0\n"


def test_output_that_nobody_reads(victim: Sandbox) -> None:
    handle = victim.commands.run("head -c 200000000 /dev/zero; touch /tmp/written", background=True, timeout=0)
    handle.disconnect()
    done = victim.commands.run("until [ -e /tmp/written ]; do sleep 0.2; done; echo done", timeout=120)
    assert done.stdout == "done\n"
    rss_kib = int(
        victim.commands.run(
            "grep -h VmRSS /proc/$(pgrep -o aenv-guest || pgrep -of agent)/status | tr -dc 0-9", user="root"
        ).stdout
    )
    assert rss_kib < 64 * 1024


def test_gigabyte_through_the_port_and_back(victim: Sandbox, server: RunningServer) -> None:
    """Streams more than the guest has memory, both ways, and compares sums."""
    size = 600 * 1024 * 1024
    block = bytes(range(256)) * 4096
    expected = hashlib.md5()

    def stream() -> Iterator[bytes]:
        for _ in range(size // len(block)):
            expected.update(block)
            yield block

    victim.files.write("/home/user/big", stream(), request_timeout=0)
    assert victim.files.get_info("/home/user/big").size == size
    got = hashlib.md5()
    for chunk in victim.files.read("/home/user/big", format="stream", request_timeout=0):
        got.update(chunk)
    assert got.hexdigest() == expected.hexdigest()
    status = Path(f"/proc/{server.pid}/status").read_text().splitlines()
    rss_kib = int(next(line for line in status if line.startswith("VmHWM")).split()[1])
    assert rss_kib < 400 * 1024, "the server holds no bodies"
