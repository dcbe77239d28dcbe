"""Real sandboxes through pauses: processes, files, servers, the clock; expiry and traffic; servers that stop or die."""

from __future__ import annotations

import concurrent.futures
import hashlib
import secrets
import time
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from e2b import Sandbox

from harness.sandboxes import get, info_of, kill_all, remains_of_sandboxes, sdk, until
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
    kill_all(own_server)
    assert remains_of_sandboxes(own_server) == []
    assert [path for path in (own_server.home / "snapshots").iterdir() if path.is_dir()] == []


def _until_it_counts(sandbox: Sandbox, counted: int) -> None:
    until(lambda: int(sandbox.files.read("/tmp/count")) > counted, "the count stands still")


def test_three_pauses_keep_processes_files_servers_and_the_clock(own_server: RunningServer) -> None:
    sandbox = Sandbox.create(timeout=900, metadata={"kept": "yes"}, envs={"KEPT": "too"}, **sdk(own_server))
    before = info_of(own_server, sandbox.sandbox_id)
    counting = sandbox.commands.run(COUNT, background=True, timeout=0)
    sandbox.commands.run("cd /tmp && exec python3 -m http.server 8080", background=True, timeout=0)
    until(lambda: sandbox.files.exists("/tmp/count"), "nothing counts")
    until(lambda: get(own_server, sandbox.sandbox_id, 8080, "/count")[0] == 200, "no server in the guest")
    written: dict[str, str] = {}
    lives = set()
    for cycle in range(3):
        content = secrets.token_bytes(3_000_000)
        sandbox.files.write(f"/home/user/file-{cycle}", content)  # not synced: it is in the guest's memory
        written[f"/home/user/file-{cycle}"] = hashlib.sha256(content).hexdigest()
        counted = int(sandbox.files.read("/tmp/count"))

        assert sandbox.pause() is True
        assert sandbox.pause() is False, "it is paused already"
        paused = info_of(own_server, sandbox.sandbox_id)
        assert (paused["state"], paused["pauseMode"]) == ("paused", "full")
        assert abs((datetime.fromisoformat(paused["endAt"]) - datetime.now(UTC)).total_seconds()) < 60
        assert [one for one in remains_of_sandboxes(own_server) if one.startswith(("process", "memory"))] == []
        assert sandbox.is_running() is False
        assert get(own_server, sandbox.sandbox_id, 8080)[0] == 502

        sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=600, **sdk(own_server))
        asked = time.time()
        guest = float(sandbox.commands.run("date +%s.%N").stdout)
        answered = time.time()
        assert asked - 0.5 <= guest <= answered + 0.5
        assert counting.pid in [process.pid for process in sandbox.commands.list()]
        _until_it_counts(sandbox, counted)
        assert int(sandbox.files.read("/tmp/count")) < counted + 1000
        sums = sandbox.commands.run("sha256sum /home/user/file-*").stdout.split()
        assert dict(zip(sums[1::2], sums[0::2], strict=True)) == written
        assert get(own_server, sandbox.sandbox_id, 8080, "/count")[0] == 200, "the server in the guest goes on"
        lives.add(sandbox.commands.run("cat /run/aenv/generation; hostname; echo $KEPT").stdout)
    assert len(lives) == 3
    assert {life.split()[0] for life in lives} == {"2", "3", "4"}
    after = info_of(own_server, sandbox.sandbox_id)
    same = ("sandboxID", "envdAccessToken", "metadata", "startedAt", "templateID", "cpuCount", "memoryMB")
    assert [after[name] for name in same] == [before[name] for name in same]
    assert (after["state"], "pauseMode" in after) == ("running", False)
    assert sandbox.kill() is True


def test_without_memory_the_disk_is_flushed_and_it_boots(own_server: RunningServer) -> None:
    sandbox = Sandbox.create(timeout=900, **sdk(own_server))
    content = secrets.token_bytes(1_000_000)
    sandbox.files.write("/home/user/unsynced", content)
    sandbox.commands.run("sleep 1000", background=True, timeout=0)
    assert sandbox.pause(keep_memory=False) is True
    assert info_of(own_server, sandbox.sandbox_id)["pauseMode"] == "filesystem"
    again = Sandbox.connect(sandbox.sandbox_id, **sdk(own_server))
    assert bytes(again.files.read("/home/user/unsynced", format="bytes")) == content
    assert again.commands.list() == []
    # A full pause, resumed without its memory: the same, though nobody flushed the disk but the pause itself.
    again.commands.run("echo kept > /home/user/small; sync")
    assert again.pause() is True
    booted = Sandbox.connect(sandbox.sandbox_id, on_resume="reboot", **sdk(own_server))
    assert booted.files.read("/home/user/small") == "kept\n"
    assert booted.kill() is True
    assert own_server.api("POST", f"/sandboxes/{sandbox.sandbox_id}/pause")[0] == 404


def test_paused_at_its_end_and_woken_by_traffic(own_server: RunningServer) -> None:
    sandbox = Sandbox.create(timeout=900, lifecycle={"on_timeout": "pause", "auto_resume": True}, **sdk(own_server))
    sandbox.commands.run("cd /tmp && echo hello > page && exec python3 -m http.server 8080", background=True, timeout=0)
    until(lambda: get(own_server, sandbox.sandbox_id, 8080, "/page") == (200, b"hello\n"), "no server in the guest")
    token = info_of(own_server, sandbox.sandbox_id)["envdAccessToken"]
    sandbox.set_timeout(0)
    until(lambda: "pauseMode" in info_of(own_server, sandbox.sandbox_id), "it was not paused")
    assert info_of(own_server, sandbox.sandbox_id)["lifecycle"] == {"onTimeout": "pause", "autoResume": True}
    assert get(own_server, sandbox.sandbox_id, 49983, "/health")[0] == 502, "no token, no waking"
    assert get(own_server, sandbox.sandbox_id, 49983, "/health", **{"X-Access-Token": "wrong"})[0] == 502
    assert info_of(own_server, sandbox.sandbox_id)["state"] == "paused"

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: get(own_server, sandbox.sandbox_id, 8080, "/page"), range(8)))
    assert answers == 8 * [(200, b"hello\n")]
    assert sandbox.commands.run("cut -d ' ' -f 1 /run/aenv/generation").stdout == "2\n", "one resume for all of them"
    assert info_of(own_server, sandbox.sandbox_id)["state"] == "running"

    assert sandbox.pause() is True
    assert get(own_server, sandbox.sandbox_id, 49983, "/health", **{"X-Access-Token": token})[0] in (200, 204)
    assert sandbox.kill() is True


def test_paused_one_survives_servers(own_server: RunningServer) -> None:
    sandbox = Sandbox.create(timeout=900, **sdk(own_server))
    sandbox.commands.run(COUNT, background=True, timeout=0)
    until(lambda: sandbox.files.exists("/tmp/count"), "nothing counts")
    assert sandbox.pause() is True
    before = info_of(own_server, sandbox.sandbox_id)
    for end in (own_server.terminate, own_server.kill):
        end()
        own_server.start()
        assert info_of(own_server, sandbox.sandbox_id) == before
    status, listed, _ = own_server.api("GET", "/v2/sandboxes?state=paused")
    assert (status, [one["sandboxID"] for one in listed]) == (200, [sandbox.sandbox_id])
    assert own_server.api("POST", f"/sandboxes/{sandbox.sandbox_id}/resume", {"timeout": 60})[0] == 201
    assert own_server.api("POST", f"/sandboxes/{sandbox.sandbox_id}/resume", {"timeout": 60})[0] == 409
    counted = int(sandbox.files.read("/tmp/count"))
    _until_it_counts(sandbox, counted)
    assert sandbox.kill() is True


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
