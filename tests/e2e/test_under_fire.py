"""The guest agent under fire: fork bombs, memory hogs, kill -9 of everything, a thousand commands, endless output."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
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
    deadline = time.monotonic() + 30
    while not victim.is_running():
        assert time.monotonic() < deadline, "init did not start the agent again"
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


def test_a_thousand_commands_keep_their_exit_codes(victim: Sandbox, server: RunningServer) -> None:
    """A hundred at any moment, through the port; every tenth ends by a signal."""
    headers = {
        "E2b-Sandbox-Id": victim.sandbox_id,
        "E2b-Sandbox-Port": "49983",
        "X-Access-Token": server.api("GET", f"/sandboxes/{victim.sandbox_id}")[1]["envdAccessToken"],
        "Content-Type": "application/connect+json",
    }

    async def run(session: aiohttp.ClientSession, number: int) -> tuple[int, str]:
        text = "kill -TERM $$" if number % 10 == 9 else f"exit {number % 251}"
        payload = json.dumps({"process": {"cmd": "/bin/sh", "args": ["-c", text]}, "stdin": False}).encode()
        frame = struct.pack(">BI", 0, len(payload)) + payload
        async with session.post(f"{server.url}/process.Process/Start", data=frame, headers=headers) as answer:
            body = await answer.read()
        end: dict[str, Any] = {}
        while body:
            size = struct.unpack(">I", body[1:5])[0]
            end = json.loads(body[5 : 5 + size] or b"{}").get("event", {}).get("end", end)
            body = body[5 + size :]
        return end.get("exitCode", 0), end["status"]

    async def run_all() -> list[tuple[int, str]]:
        connector = aiohttp.TCPConnector(limit=100)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
            return await asyncio.gather(*(run(session, number) for number in range(1000)))

    ends = asyncio.run(run_all())
    expected = [
        (-1, "signal: terminated") if number % 10 == 9 else (number % 251, f"exit status {number % 251}")
        for number in range(1000)
    ]
    assert ends == expected


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


def test_big_file_through_the_port_and_back(victim: Sandbox, server: RunningServer) -> None:
    """Streams both ways, compares sums, and looks at what the server and the agent held in memory."""
    size = 256 * 1024 * 1024
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
