"""One sandbox through ten pauses, by call and by time: nothing that it wrote, counted or talked about is lost.

What a single pause keeps is in `test_pause.py`.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Iterator

import pytest
from e2b import Sandbox

from harness.sandboxes import (
    SMALL,
    get,
    info_of,
    kill_all,
    remains_of_sandboxes,
    sdk,
    start_ticking,
    ticks,
    until,
    until_it_ticks,
)
from harness.server import RunningServer

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.timeout(600)]

CYCLES = 10
DAYS_S = 3 * 24 * 3600

SERVER = """
import socket
listener = socket.create_server(("0.0.0.0", 7000))
print("ready", flush=True)
connection, _ = listener.accept()
while data := connection.recv(64):
    connection.sendall(data)
"""

CLIENT = """
import os, socket, time
connection = socket.create_connection(("127.0.0.1", 7000))
count = 0
while True:
    count += 1
    said = str(count).encode()
    connection.sendall(said)
    heard = connection.recv(64)
    assert heard == said, (heard, said)
    with open("/tmp/said.new", "w") as file:
        file.write(str(count))
    os.replace("/tmp/said.new", "/tmp/said")
    time.sleep(0.1)
"""
"""Talks over one connection for ever; ends when it breaks."""


@pytest.fixture(scope="module")
def own_server() -> Iterator[RunningServer]:
    with RunningServer(config=SMALL) as running:
        yield running
        kill_all(running)
        assert remains_of_sandboxes(running) == []
        assert [path for path in (running.home / "snapshots").iterdir() if path.is_dir()] == []


def _pause(server: RunningServer, sandbox: Sandbox, *, by_time: bool) -> None:
    if by_time:
        sandbox.set_timeout(0)
        until(lambda: "pauseMode" in info_of(server, sandbox.sandbox_id), "it was not paused at its end")
    else:
        assert sandbox.pause() is True


def _resume(server: RunningServer, sandbox: Sandbox, cycle: int) -> None:
    """By each of the ways in turn."""
    if cycle % 3 == 0:
        Sandbox.connect(sandbox.sandbox_id, timeout=900, **sdk(server))
    elif cycle % 3 == 1:
        assert server.api("POST", f"/sandboxes/{sandbox.sandbox_id}/resume", {"timeout": 900})[0] == 201
    else:
        assert get(server, sandbox.sandbox_id, 8080)[0] == 502, "nobody listens there, but it was woken"


def test_ten_pauses(own_server: RunningServer) -> None:
    sandbox = Sandbox.create(timeout=900, lifecycle={"on_timeout": "pause", "auto_resume": True}, **sdk(own_server))
    pid = start_ticking(sandbox)
    sandbox.files.write("/tmp/server.py", SERVER)
    sandbox.files.write("/tmp/client.py", CLIENT)
    for _ in sandbox.commands.run("exec python3 /tmp/server.py", background=True, timeout=0):
        break
    talking = sandbox.commands.run("exec python3 /tmp/client.py", background=True, timeout=0)
    until(lambda: sandbox.files.exists("/tmp/said"), "the client does not talk")

    written: dict[str, str] = {}
    for cycle in range(CYCLES):
        content = secrets.token_bytes(400_000)
        path = f"/home/user/file-{cycle}"
        sandbox.files.write(path, content)  # nobody syncs it: it is in the guest's memory only
        written[path] = hashlib.sha256(content).hexdigest()
        counted, said = ticks(sandbox), ticks(sandbox, "/tmp/said")

        _pause(own_server, sandbox, by_time=cycle % 2 == 1)
        _resume(own_server, sandbox, cycle)

        done = sandbox.commands.run("cut -d ' ' -f 1 /run/aenv/generation; sha256sum /home/user/file-*").stdout.split()
        assert done[0] == str(cycle + 2), "it was started more than once"
        assert dict(zip(done[2::2], done[1::2], strict=True)) == written
        until_it_ticks(sandbox, counted)
        until_it_ticks(sandbox, said, "/tmp/said")
        running = {process.pid for process in sandbox.commands.list()}
        assert {pid, talking.pid} <= running
    assert sandbox.kill() is True


def test_clock_after_a_pause_of_days(own_server: RunningServer) -> None:
    """The guest's clock stands far behind when it is resumed, as if it had slept for long; the host's is left alone."""
    sandbox = Sandbox.create(timeout=900, **sdk(own_server))
    done = sandbox.commands.run(f"date -s @{int(time.time()) - DAYS_S} && date +%s", user="root")
    assert abs(int(done.stdout.split()[-1]) - time.time() + DAYS_S) < 600, "the guest's clock was not moved"
    assert sandbox.pause() is True
    Sandbox.connect(sandbox.sandbox_id, timeout=900, **sdk(own_server))
    asked = time.time()
    guest = float(sandbox.commands.run("date +%s.%N").stdout)
    assert asked - 0.5 <= guest <= time.time() + 0.5
    assert sandbox.kill() is True
