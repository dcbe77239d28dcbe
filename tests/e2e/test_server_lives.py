"""Sandboxes outlive the server: graceful stops, kill -9 in the middle of things, expiry while nobody was there."""

from __future__ import annotations

import json
import select
import subprocess
import threading
import urllib.error
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
from e2b import CommandExitException, Sandbox

from harness.leftovers import leftovers_of, memory_directory_of
from harness.server import AENV, RunningServer

pytestmark = [pytest.mark.vm, pytest.mark.root]


@pytest.fixture
def own_server() -> Iterator[RunningServer]:
    with RunningServer() as running:
        yield running
    assert leftovers_of(running.home) == []


def _sdk(server: RunningServer) -> dict[str, str]:
    """Options that bind the SDK to this server."""
    return {"api_url": server.url, "sandbox_url": server.url, "api_key": server.api_key}


def _wait_until(moment: datetime) -> None:
    while (left := (moment - datetime.now(UTC)).total_seconds()) > 0:
        select.select([], [], [], left)


@pytest.mark.parametrize("how", ["terminate", "kill"])
def test_running_sandbox_survives_and_is_adopted(own_server: RunningServer, how: str) -> None:
    sandbox = Sandbox.create(timeout=600, metadata={"kept": "yes"}, **_sdk(own_server))
    command = sandbox.commands.run("while [ ! -e /tmp/go ]; do sleep 0.1; done; exit 23", background=True, timeout=0)
    before = own_server.api("GET", f"/sandboxes/{sandbox.sandbox_id}")[1]

    getattr(own_server, how)()
    with pytest.raises(urllib.error.URLError):
        own_server.api("GET", "/health")
    own_server.start()

    after = own_server.api("GET", f"/sandboxes/{sandbox.sandbox_id}")[1]
    assert after == before, "id, tokens, metadata, start and end are the same"
    again = Sandbox.connect(sandbox.sandbox_id, **_sdk(own_server))
    assert command.pid in [process.pid for process in again.commands.list()]
    attached = again.commands.connect(command.pid, timeout=0)
    again.files.write("/tmp/go", "")
    with pytest.raises(CommandExitException) as raised:
        attached.wait()
    assert raised.value.exit_code == 23, "the command that ran through the restart kept its exit code"
    assert again.kill() is True


def test_killed_while_creating(own_server: RunningServer) -> None:
    def create() -> None:
        with pytest.raises((urllib.error.URLError, ConnectionError, OSError)):
            own_server.api("POST", "/v2/sandboxes", {"templateID": "base"})

    for _ in range(2):
        creating = threading.Thread(target=create)
        creating.start()
        sandboxes = own_server.home / "sandboxes"
        while not list(sandboxes.glob("*/*")):
            pass  # the create has begun to take things when its directory has a file
        own_server.kill()
        creating.join()
        own_server.start()
        assert own_server.api("GET", "/v2/sandboxes")[1] == []
        assert list(sandboxes.iterdir()) == []
        assert [line for line in leftovers_of(own_server.home) if "qemu" in line] == []
    sandbox = Sandbox.create(timeout=60, **_sdk(own_server))
    assert sandbox.commands.run("echo works").stdout == "works\n"


def test_expired_while_nobody_was_there(own_server: RunningServer) -> None:
    sandbox = Sandbox.create(timeout=3, **_sdk(own_server))
    end_at = datetime.fromisoformat(own_server.api("GET", f"/sandboxes/{sandbox.sandbox_id}")[1]["endAt"])
    own_server.kill()
    _wait_until(end_at)
    own_server.start()
    assert own_server.api("GET", f"/sandboxes/{sandbox.sandbox_id}")[0] == 404


def test_a_virtual_machine_that_dies_is_noticed(own_server: RunningServer) -> None:
    sandbox = Sandbox.create(timeout=600, **_sdk(own_server))
    sandbox.commands.run("echo b > /proc/sysrq-trigger", user="root", background=True, timeout=0)
    while own_server.api("GET", f"/sandboxes/{sandbox.sandbox_id}")[0] != 404:
        pass
    assert sandbox.is_running() is False
    assert [line for line in leftovers_of(own_server.home) if "qemu" in line] == []


def test_second_server_on_one_home_is_refused(own_server: RunningServer) -> None:
    second = subprocess.run(
        [str(AENV), "serve", "--listen", "127.0.0.1:0"],
        env=own_server.environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert second.returncode != 0
    assert len(second.stderr.strip().splitlines()) == 1
    assert str(own_server.pid) in second.stderr
    assert own_server.api("GET", "/health")[0] == 200


def test_idempotent_create_after_a_crash_is_not_repeated(own_server: RunningServer) -> None:
    headers = {"Idempotency-Key": "same-key-1"}
    body = {"templateID": "base", "timeout": 300}
    first = own_server.api("POST", "/v2/sandboxes", body, headers)
    assert first[0] == 201
    own_server.kill()
    own_server.start()
    again = own_server.api("POST", "/v2/sandboxes", body, headers)
    assert (again[0], again[1]["sandboxID"]) == (201, first[1]["sandboxID"])
    other = own_server.api("POST", "/v2/sandboxes", {**body, "timeout": 301}, headers)
    assert (other[0], other[1]["error_code"]) == (422, "idempotency_request_mismatch")
    assert len(own_server.api("GET", "/v2/sandboxes")[1]) == 1


def test_drain_ends_everything(own_server: RunningServer) -> None:
    Sandbox.create(timeout=600, **_sdk(own_server))
    assert own_server.terminate() == 0
    assert [line for line in leftovers_of(own_server.home) if "qemu" in line], "a graceful stop leaves it running"
    drained = subprocess.Popen(
        [str(AENV), "serve", "--listen", "127.0.0.1:0", "--drain"], env=own_server.environment, stdout=subprocess.PIPE
    )
    assert drained.stdout is not None
    drained.stdout.readline()
    drained.terminate()
    assert drained.wait(timeout=60) == 0
    assert leftovers_of(own_server.home) == []
    assert not memory_directory_of(own_server.home).exists()
    own_server.start()
    assert json.dumps(own_server.api("GET", "/v2/sandboxes")[1]) == "[]"
