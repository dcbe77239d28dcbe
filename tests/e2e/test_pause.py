"""Real sandboxes through pauses: processes, files, servers, the clock; expiry and traffic; servers that stop or die."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import http.client
import secrets
import threading
import time
import urllib.error
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from e2b import Sandbox

from harness.leftovers import leftovers_of
from harness.server import RunningServer

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.timeout(900)]

COUNT = "n=0; while :; do n=$((n+1)); echo $n > /tmp/count.new; mv /tmp/count.new /tmp/count; sleep 0.1; done"


@pytest.fixture(scope="module")
def own_server() -> Iterator[RunningServer]:
    with RunningServer() as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_left(own_server: RunningServer) -> Iterator[None]:
    """Each test kills what it made; then nothing of it is on the host."""
    yield
    for sandbox in own_server.api("GET", "/v2/sandboxes")[1]:
        own_server.api("DELETE", f"/sandboxes/{sandbox['sandboxID']}")
    found = leftovers_of(own_server.home)
    assert [line for line in found if not line.startswith(("slot", "namespace", "block daemon", "socket"))] == []
    assert [path for path in (own_server.home / "snapshots").iterdir() if path.is_dir()] == []


def _sdk(server: RunningServer) -> dict[str, Any]:
    """Options that bind the SDK to this server."""
    return {"api_url": server.url, "sandbox_url": server.url, "api_key": server.api_key}


def _info(server: RunningServer, sandbox: Sandbox) -> dict[str, Any]:
    status, info, _ = server.api("GET", f"/sandboxes/{sandbox.sandbox_id}")
    assert status == 200
    return dict(info)


def _get(server: RunningServer, sandbox: Sandbox, port: int, path: str = "/", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        connection.request("GET", path, headers={"Host": f"{port}-{sandbox.sandbox_id}.aenv.localhost", **headers})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _until(condition: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        threading.Event().wait(0.05)


def _until_it_counts(sandbox: Sandbox, counted: int) -> None:
    _until(lambda: int(sandbox.files.read("/tmp/count")) > counted, "the count stands still")


def test_three_pauses_keep_processes_files_servers_and_the_clock(own_server: RunningServer) -> None:
    sandbox = Sandbox.create(timeout=900, metadata={"kept": "yes"}, envs={"KEPT": "too"}, **_sdk(own_server))
    before = _info(own_server, sandbox)
    counting = sandbox.commands.run(COUNT, background=True, timeout=0)
    sandbox.commands.run("cd /tmp && exec python3 -m http.server 8080", background=True, timeout=0)
    _until(lambda: sandbox.files.exists("/tmp/count"), "nothing counts")
    _until(lambda: _get(own_server, sandbox, 8080, "/count")[0] == 200, "no server in the guest")
    written: dict[str, str] = {}
    lives = set()
    for cycle in range(3):
        content = secrets.token_bytes(3_000_000)
        sandbox.files.write(f"/home/user/file-{cycle}", content)  # not synced: it is in the guest's memory
        written[f"/home/user/file-{cycle}"] = hashlib.sha256(content).hexdigest()
        counted = int(sandbox.files.read("/tmp/count"))

        assert sandbox.pause() is True
        assert sandbox.pause() is False, "it is paused already"
        paused = _info(own_server, sandbox)
        assert (paused["state"], paused["pauseMode"]) == ("paused", "full")
        assert abs((datetime.fromisoformat(paused["endAt"]) - datetime.now(UTC)).total_seconds()) < 60
        assert [line for line in leftovers_of(own_server.home) if "qemu" in line or line.startswith("memory")] == []
        assert sandbox.is_running() is False
        assert _get(own_server, sandbox, 8080)[0] == 502

        sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=600, **_sdk(own_server))
        asked = time.time()
        guest = float(sandbox.commands.run("date +%s.%N").stdout)
        answered = time.time()
        assert asked - 0.5 <= guest <= answered + 0.5
        assert counting.pid in [process.pid for process in sandbox.commands.list()]
        _until_it_counts(sandbox, counted)
        assert int(sandbox.files.read("/tmp/count")) < counted + 1000
        sums = sandbox.commands.run("sha256sum /home/user/file-*").stdout.split()
        assert dict(zip(sums[1::2], sums[0::2], strict=True)) == written
        assert _get(own_server, sandbox, 8080, "/count")[0] == 200, "the server in the guest goes on"
        lives.add(sandbox.commands.run("cat /run/aenv/generation; hostname; echo $KEPT").stdout)
    assert len(lives) == 3
    assert {life.split()[0] for life in lives} == {"2", "3", "4"}
    after = _info(own_server, sandbox)
    same = ("sandboxID", "envdAccessToken", "metadata", "startedAt", "templateID", "cpuCount", "memoryMB")
    assert [after[name] for name in same] == [before[name] for name in same]
    assert (after["state"], "pauseMode" in after) == ("running", False)
    assert sandbox.kill() is True


def test_without_memory_the_disk_is_flushed_and_it_boots(own_server: RunningServer) -> None:
    sandbox = Sandbox.create(timeout=900, **_sdk(own_server))
    content = secrets.token_bytes(1_000_000)
    sandbox.files.write("/home/user/unsynced", content)
    sandbox.commands.run("sleep 1000", background=True, timeout=0)
    assert sandbox.pause(keep_memory=False) is True
    assert _info(own_server, sandbox)["pauseMode"] == "filesystem"
    again = Sandbox.connect(sandbox.sandbox_id, **_sdk(own_server))
    assert bytes(again.files.read("/home/user/unsynced", format="bytes")) == content
    assert again.commands.list() == []
    # A full pause, resumed without its memory: the same, though nobody flushed the disk but the pause itself.
    again.commands.run("echo kept > /home/user/small; sync")
    assert again.pause() is True
    booted = Sandbox.connect(sandbox.sandbox_id, on_resume="reboot", **_sdk(own_server))
    assert booted.files.read("/home/user/small") == "kept\n"
    assert booted.kill() is True
    assert own_server.api("POST", f"/sandboxes/{sandbox.sandbox_id}/pause")[0] == 404


def test_paused_at_its_end_and_woken_by_traffic(own_server: RunningServer) -> None:
    sandbox = Sandbox.create(timeout=900, lifecycle={"on_timeout": "pause", "auto_resume": True}, **_sdk(own_server))
    sandbox.commands.run("cd /tmp && echo hello > page && exec python3 -m http.server 8080", background=True, timeout=0)
    _until(lambda: _get(own_server, sandbox, 8080, "/page") == (200, b"hello\n"), "no server in the guest")
    token = _info(own_server, sandbox)["envdAccessToken"]
    sandbox.set_timeout(0)
    _until(lambda: "pauseMode" in _info(own_server, sandbox), "it was not paused")
    assert _info(own_server, sandbox)["lifecycle"] == {"onTimeout": "pause", "autoResume": True}
    assert _get(own_server, sandbox, 49983, "/health")[0] == 502, "no token, no waking"
    assert _get(own_server, sandbox, 49983, "/health", **{"X-Access-Token": "wrong"})[0] == 502
    assert _info(own_server, sandbox)["state"] == "paused"

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: _get(own_server, sandbox, 8080, "/page"), range(8)))
    assert answers == 8 * [(200, b"hello\n")]
    assert sandbox.commands.run("cut -d ' ' -f 1 /run/aenv/generation").stdout == "2\n", "one resume for all of them"
    assert _info(own_server, sandbox)["state"] == "running"

    assert sandbox.pause() is True
    assert _get(own_server, sandbox, 49983, "/health", **{"X-Access-Token": token})[0] in (200, 204)
    assert sandbox.kill() is True


def test_paused_one_survives_servers(own_server: RunningServer) -> None:
    sandbox = Sandbox.create(timeout=900, **_sdk(own_server))
    sandbox.commands.run(COUNT, background=True, timeout=0)
    _until(lambda: sandbox.files.exists("/tmp/count"), "nothing counts")
    assert sandbox.pause() is True
    before = _info(own_server, sandbox)
    for end in (own_server.terminate, own_server.kill):
        end()
        own_server.start()
        assert _info(own_server, sandbox) == before
    status, listed, _ = own_server.api("GET", "/v2/sandboxes?state=paused")
    assert (status, [one["sandboxID"] for one in listed]) == (200, [sandbox.sandbox_id])
    assert own_server.api("POST", f"/sandboxes/{sandbox.sandbox_id}/resume", {"timeout": 60})[0] == 201
    assert own_server.api("POST", f"/sandboxes/{sandbox.sandbox_id}/resume", {"timeout": 60})[0] == 409
    counted = int(sandbox.files.read("/tmp/count"))
    _until_it_counts(sandbox, counted)
    assert sandbox.kill() is True


@pytest.mark.parametrize("delay_s", [0.05, 0.3, 0.6, 1.0])
def test_server_that_dies_while_it_pauses(own_server: RunningServer, delay_s: float) -> None:
    """Wherever it dies: before it runs on, after it is paused; in both cases all that it did is there."""
    sandbox = Sandbox.create(timeout=900, **_sdk(own_server))
    sandbox.commands.run(COUNT, background=True, timeout=0)
    _until(lambda: sandbox.files.exists("/tmp/count"), "nothing counts")
    counted = int(sandbox.files.read("/tmp/count"))

    def pause() -> None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, OSError):
            own_server.api("POST", f"/sandboxes/{sandbox.sandbox_id}/pause", {})

    pausing = threading.Thread(target=pause)
    pausing.start()
    threading.Event().wait(delay_s)
    own_server.kill()
    pausing.join()
    own_server.start()
    assert _info(own_server, sandbox)["state"] in ("running", "paused")
    again = Sandbox.connect(sandbox.sandbox_id, **_sdk(own_server))
    _until_it_counts(again, counted)
    assert again.pause() is True
    assert Sandbox.connect(sandbox.sandbox_id, **_sdk(own_server)).kill() is True


def test_command_line(own_server: RunningServer) -> None:
    started = own_server.aenv("start", "--auto-pause", "-t", "900")
    sandbox_id = started.stdout.decode().strip()
    assert own_server.aenv("exec", sandbox_id, "--", "sh", "-c", "echo kept > /tmp/file").returncode == 0
    assert own_server.aenv("pause", sandbox_id).stdout.decode().split() == [sandbox_id]
    again = own_server.aenv("pause", sandbox_id)
    assert (again.returncode, b"already paused" in again.stderr) == (1, True)
    assert "paused" in own_server.aenv("ls").stdout.decode()
    assert own_server.aenv("resume", "-t", "60", sandbox_id).stdout.decode().split() == [sandbox_id]
    assert own_server.aenv("exec", sandbox_id, "--", "cat", "/tmp/file").stdout == b"kept\n"
    assert own_server.aenv("rm", sandbox_id).returncode == 0
