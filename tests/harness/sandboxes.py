"""What many tests do with sandboxes of a running server: calls through the proxy, waiting, programs that count.

Nothing here knows what a test checks.
"""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from typing import Any

from e2b import Sandbox

from harness.leftovers import leftovers_of
from harness.server import RunningServer

SMALL = "[sandbox]\nmemory_mib = 128\nvcpus = 1\n"
"""Settings of the smallest guest that boots."""

TICKER = """
import os, sys, time

path, step = sys.argv[1], float(sys.argv[2])
count, life = 0, ""
while True:
    with open("/run/aenv/generation") as file:
        now = file.read().split()[1]
    if now != life:
        life = now
        with open(path + ".lives", "a") as file:
            file.write(f"{life} {count}\\n")
    count += 1
    with open(path + ".new", "w") as file:
        file.write(str(count))
    os.replace(path + ".new", path)
    print(count, flush=True)
    time.sleep(step)
"""
"""Counts into a file and to standard output; beside it, `.lives` says at which count each life of the machine began."""

BEFORE_IT_IS_TOLD = 50
"""More counts than a ticker makes in a new life before it is told of it, however busy the host is."""


def sdk(server: RunningServer) -> dict[str, Any]:
    """Options that bind the SDK to this server."""
    return {"api_url": server.url, "sandbox_url": server.url, "api_key": server.api_key}


def info_of(server: RunningServer, sandbox_id: str) -> dict[str, Any]:
    status, info, _ = server.api("GET", f"/sandboxes/{sandbox_id}")
    assert status == 200, info
    return dict(info)


def get(server: RunningServer, sandbox_id: str, port: int, path: str = "/", **headers: str) -> tuple[int, bytes]:
    """One request to a port of a sandbox, through the proxy."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        connection.request("GET", path, headers={"Host": f"{port}-{sandbox_id}.aenv.localhost", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def until(condition: Callable[[], object], what: str, timeout_s: float = 120) -> None:
    """Wait for what nobody announces."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.05)


def start_ticking(sandbox: Sandbox, name: str = "/tmp/ticks", step_s: float = 0.1) -> int:
    """Start the ticker as an ordinary user, and wait until it counts. Returns its pid."""
    sandbox.files.write("/tmp/ticker.py", TICKER)
    handle = sandbox.commands.run(f"exec python3 /tmp/ticker.py {name} {step_s}", background=True, timeout=0)
    for _ in handle:
        break
    handle.disconnect()
    return handle.pid


def ticks(sandbox: Sandbox, name: str = "/tmp/ticks") -> int:
    return int(sandbox.files.read(name))


def until_it_ticks(sandbox: Sandbox, beyond: int, name: str = "/tmp/ticks") -> None:
    until(lambda: ticks(sandbox, name) > beyond, "the count stands still")


def lives(sandbox: Sandbox, name: str = "/tmp/ticks") -> list[tuple[str, int]]:
    """The lives that the ticker has seen, and at which count each began."""
    lines = [line.split() for line in sandbox.files.read(f"{name}.lives").splitlines()]
    return [(life, int(count)) for life, count in lines]


def count_of_life(sandbox: Sandbox, number: int, name: str = "/tmp/ticks") -> int:
    """Wait until the ticker has seen so many lives, and return at which count the last began.

    It counts on for a moment before it is told of a new life: see `BEFORE_IT_IS_TOLD`.
    """
    until(lambda: len(lives(sandbox, name)) >= number, "the ticker sees no new life")
    seen = lives(sandbox, name)
    assert len(seen) == number, seen
    return seen[-1][1]


def kill_all(server: RunningServer) -> None:
    """Kill every sandbox of a server."""
    for sandbox in server.api("GET", "/v2/sandboxes")[1]:
        server.api("DELETE", f"/sandboxes/{sandbox['sandboxID']}")


def delete_snapshots(server: RunningServer) -> None:
    """Delete every named snapshot of a server, the oldest first: a name takes all with it that ever had it."""
    for snapshot in reversed(server.api("GET", "/snapshots")[1]):
        assert server.api("DELETE", f"/templates/{snapshot['snapshotID']}")[0] == 204


def remains_of_sandboxes(server: RunningServer) -> list[str]:
    """What is on the host of a running server beyond what it keeps for new sandboxes: slots, processes, a daemon."""
    waiting = ("slot", "namespace", "block daemon", "socket")
    return [line for line in leftovers_of(server.home) if not line.startswith(waiting) and "warm-" not in line]


@contextlib.contextmanager
def dying() -> Iterator[None]:
    """For a request whose server may die before it answers."""
    with contextlib.suppress(urllib.error.URLError, ConnectionError, http.client.HTTPException, TimeoutError):
        yield
