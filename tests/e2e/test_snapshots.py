"""Named snapshots of real sandboxes: what is created from them, what they survive, what is damaged or foreign."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import secrets
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from e2b import Sandbox, SandboxException

from agentenv.snapshots.encoding import decode, encode
from agentenv.snapshots.manifest import SnapshotManifest
from harness.fragile import FRAGILE, Steps
from harness.sandboxes import (
    BEFORE_IT_IS_TOLD,
    SMALL,
    count_of_life,
    delete_snapshots,
    info_of,
    kill_all,
    lives,
    remains_of_sandboxes,
    sdk,
    start_ticking,
    ticks,
    until_it_ticks,
)
from harness.server import RunningServer

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def own_server() -> Iterator[RunningServer]:
    with RunningServer(config=SMALL, program=FRAGILE) as running:
        yield running


@pytest.fixture(autouse=True)
def nothing_left(own_server: RunningServer) -> Iterator[None]:
    """Whatever a test made is deleted; then its space is free again."""
    before = _layers(own_server)
    yield
    kill_all(own_server)
    delete_snapshots(own_server)
    assert remains_of_sandboxes(own_server) == []
    assert [path for path in (own_server.home / "snapshots").iterdir() if path.is_dir()] == []
    assert own_server.aenv("gc").returncode == 0
    assert _layers(own_server) == before


def _layers(server: RunningServer) -> set[str]:
    return {path.name for path in (server.home / "layers" / "sha256").iterdir()}


def _create(server: RunningServer, template: str = "base", **options: Any) -> Sandbox:
    return Sandbox.create(template, timeout=600, **options, **sdk(server))


def _snapshot(server: RunningServer, sandbox: Sandbox, **body: object) -> tuple[int, Any]:
    return server.api("POST", f"/sandboxes/{sandbox.sandbox_id}/snapshots", body)[:2]


def test_two_go_on_from_the_instant_when_their_source_is_gone(own_server: RunningServer) -> None:
    source = _create(own_server, metadata={"of": "source"}, envs={"WHOSE": "source"})
    content = secrets.token_bytes(600_000)
    source.files.write("/home/user/file", content)  # not synced
    ticker = start_ticking(source)
    listening = source.commands.run("touch /tmp/talk && exec tail -f /tmp/talk", background=True, timeout=0)
    counted = ticks(source)
    before = info_of(own_server, source.sandbox_id)
    made = source.create_snapshot()
    counted_after = ticks(source)
    # The source goes on as if nothing had been: the same life, its connections, its end.
    after = info_of(own_server, source.sandbox_id)
    assert uuid.UUID(after.pop("checkpointID"))
    assert after == before
    source.files.write("/tmp/talk", "still here\n")
    assert next(iter(listening))[0] == "still here\n"
    until_it_ticks(source, counted_after)
    assert len(lives(source)) == 1
    source.files.write("/home/user/file", "changed later")
    assert source.kill() is True
    own_server.terminate()
    own_server.start()

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        options = {"metadata": {"of": "copy"}, "envs": {"OWN": "copy"}}
        copies = list(pool.map(lambda _: _create(own_server, made.snapshot_id, **options), range(2)))
    seen = []
    for copy in copies:
        began = count_of_life(copy, 2)
        assert counted <= began <= counted_after + BEFORE_IT_IS_TOLD, "it does not go on from the instant"
        seen.append(lives(copy)[-1][0])
        assert ticker in [process.pid for process in copy.commands.list()]
        assert hashlib.sha256(copy.files.read("/home/user/file", format="bytes")).hexdigest() == (
            hashlib.sha256(content).hexdigest()
        )
        until_it_ticks(copy, began)
        done = copy.commands.run("hostname; cat /etc/machine-id; echo $OWN $E2B_SANDBOX_ID")
        assert done.stdout.split()[0::2] == [copy.sandbox_id, "copy"]
        assert done.stdout.split()[3] == copy.sandbox_id
        info = info_of(own_server, copy.sandbox_id)
        assert info["metadata"] == {"of": "copy"}
        assert (info["cpuCount"], info["memoryMB"]) == (before["cpuCount"], before["memoryMB"])
    assert seen[0] != seen[1]
    tokens = {info_of(own_server, one.sandbox_id)["envdAccessToken"] for one in copies}
    assert len(tokens | {before["envdAccessToken"]}) == 3
    # What one writes the other does not see.
    copies[0].files.write("/home/user/file", "mine")
    assert bytes(copies[1].files.read("/home/user/file", format="bytes")) == content
    # They outlive the snapshot, through a pause, too.
    assert Sandbox.delete_snapshot(made.snapshot_id, **sdk(own_server)) is True
    assert copies[0].pause() is True
    again = Sandbox.connect(copies[0].sandbox_id, **sdk(own_server))
    assert again.files.read("/home/user/file") == "mine"
    assert ticker in [process.pid for process in again.commands.list()]
    with pytest.raises(SandboxException, match="not found"):
        _create(own_server, made.snapshot_id)


def test_without_memory(own_server: RunningServer) -> None:
    source = _create(own_server)
    start_ticking(source)
    content = secrets.token_bytes(300_000)
    source.files.write("/home/user/file", content)  # the snapshot itself must flush it
    status, cold = _snapshot(own_server, source, memory=False)
    assert status == 201
    source.files.write("/home/user/later", "x")
    status, full = _snapshot(own_server, source, name="full")
    assert status == 201
    copy = _create(own_server, cold["snapshotID"])
    assert bytes(copy.files.read("/home/user/file", format="bytes")) == content
    assert not copy.files.exists("/home/user/later")
    assert copy.commands.list() == []
    # The disk alone of one that has memory.
    status, answer, _ = own_server.api("POST", "/v2/sandboxes", {"templateID": full["snapshotID"], "memory": False})
    assert status == 201, answer
    booted = Sandbox.connect(answer["sandboxID"], **sdk(own_server))
    assert booted.commands.list() == []
    assert booted.commands.run("cut -d ' ' -f 1 /run/aenv/generation").stdout == "1\n"


def test_a_name_moves_on_and_its_builds_stay(own_server: RunningServer) -> None:
    source = _create(own_server)
    source.files.write("/tmp/which", "first")
    first = _snapshot(own_server, source, name="prepared:v1")[1]
    assert (first["snapshotID"], first["names"]) == ("prepared:v1", ["prepared:v1"])
    source.files.write("/tmp/which", "second")
    second = _snapshot(own_server, source, name="prepared:v1")[1]
    assert second["snapshotID"] == "prepared:v1"
    unnamed = _snapshot(own_server, source)[1]
    assert unnamed["names"] == []
    assert unnamed["snapshotID"].endswith(":default")

    assert _create(own_server, "prepared:v1").files.read("/tmp/which") == "second"
    listed = own_server.api("GET", "/snapshots")[1]
    assert len(listed) == 3
    references = [one["snapshotID"] for one in listed]
    assert {"prepared:v1", unnamed["snapshotID"]} < set(references)
    (superseded,) = set(references) - {"prepared:v1", unnamed["snapshotID"]}
    assert uuid.UUID(superseded.rpartition(":")[2])
    assert _create(own_server, superseded).files.read("/tmp/which") == "first"
    assert [one["snapshotID"] for one in own_server.api("GET", "/snapshots?name=prepared")[1]].count("prepared:v1") == 1
    of_source = own_server.api("GET", f"/snapshots?sandboxID={source.sandbox_id}")[1]
    assert sorted(one["snapshotID"] for one in of_source) == sorted(references)
    assert own_server.api("GET", "/snapshots?sandboxID=i0000000000000000000")[1] == []

    # A name goes with all that ever had it, so that it is gone afterwards; one without a name stays.
    assert own_server.api("DELETE", f"/templates/{quote('prepared:v1', safe='')}")[0] == 204
    assert own_server.api("DELETE", f"/templates/{quote('prepared:v1', safe='')}")[0] == 404
    assert [one["snapshotID"] for one in own_server.api("GET", "/snapshots")[1]] == [unnamed["snapshotID"]]

    for name in ("Ab c", "a:b:c", "../x", "x" * 300, "base", 5):
        status, answer = _snapshot(own_server, source, name=name)
        assert (status, answer["code"]) == (400, 400), f"name {name!r}: {answer}"
    assert "base" in _snapshot(own_server, source, name="base")[1]["message"]
    assert len(own_server.api("GET", "/snapshots")[1]) == 1
    assert source.commands.run("echo unharmed").stdout == "unharmed\n"


def test_wrong_states(own_server: RunningServer) -> None:
    steps = Steps(own_server.home)
    sandbox = _create(own_server)
    path = f"/sandboxes/{sandbox.sandbox_id}"
    for body in ({"memory": "no"}, {"name": []}, []):
        assert own_server.api("POST", f"{path}/snapshots", body)[0] == 400
    assert own_server.api("POST", "/sandboxes/i0000000000000000000/snapshots", {})[0] == 404
    for unknown in (str(uuid.uuid4()), "no-such-name", "no-such-name:v1"):
        assert own_server.api("GET", f"/snapshots/{quote(unknown, safe='')}")[0] == 404
        assert own_server.api("DELETE", f"/templates/{quote(unknown, safe='')}")[0] == 404
        assert own_server.api("POST", "/v2/sandboxes", {"templateID": unknown})[0] == 404

    # Killed while it is captured: the snapshot fails or is there, the sandbox is gone in both cases.
    captured: list[tuple[int, Any]] = []

    def capture() -> None:
        captured.append(_snapshot(own_server, sandbox))

    with steps.held("machine.save_state", threading.Thread(target=capture).start):
        killing = threading.Thread(target=own_server.api, args=("DELETE", path))
        killing.start()
    killing.join()
    assert own_server.api("GET", path)[0] == 404
    assert remains_of_sandboxes(own_server) == []

    # Deleted while it is resumed.
    sandbox = _create(own_server)
    path = f"/sandboxes/{sandbox.sandbox_id}"
    assert sandbox.pause() is True
    status, answer = _snapshot(own_server, sandbox)
    assert (status, "paused" in answer["message"]) == (404, True), answer
    outcomes: list[int] = []
    step = "journal.note_machine"
    resuming = threading.Thread(
        target=lambda: outcomes.append(own_server.api("POST", f"{path}/connect", {"timeout": 60})[0])
    )
    with steps.held(step, resuming.start):
        killing = threading.Thread(target=own_server.api, args=("DELETE", path))
        killing.start()
    resuming.join()
    killing.join()
    assert outcomes[0] in (200, 201, 404, 409)
    assert own_server.api("GET", path)[0] == 404


def _changed(change: Callable[[SnapshotManifest], SnapshotManifest]) -> Callable[[bytes], bytes]:
    return lambda content: encode(change(decode(content, "the test's")))


def _environment(**changes: Any) -> Callable[[bytes], bytes]:
    def change(manifest: SnapshotManifest) -> SnapshotManifest:
        assert manifest.environment is not None
        return dataclasses.replace(manifest, environment=dataclasses.replace(manifest.environment, **changes))

    return _changed(change)


def _version(content: bytes) -> bytes:
    return json.dumps({**json.loads(content), "version": 2}).encode()


WRONG_MANIFESTS: dict[str, tuple[Callable[[bytes], bytes], int, str]] = {
    "cut off": (lambda content: content[: len(content) // 2], 500, "not JSON"),
    "one byte": (lambda content: content.replace(b'"vcpus": 1', b'"vcpus": 2'), 500, "checksum"),
    "another version": (_version, 500, "version 2"),
    "another CPU": (_environment(cpu_features=f"sha256:{'0' * 64}"), 409, "features"),
    "another clock": (_environment(tsc_khz=1_000), 409, "time-stamp counter"),
    "another VMM": (_environment(vmm_version="0.0.1"), 409, "0.0.1"),
    "another kernel": (_environment(kernel_digest=f"sha256:{'1' * 64}"), 409, "kernel"),
}


def test_damage_and_mismatches_are_named_and_mended(own_server: RunningServer) -> None:
    """Of a paused sandbox and of a named snapshot alike; what is refused changes nothing."""
    sandbox = _create(own_server)
    ticker = start_ticking(sandbox)
    snapshot = _snapshot(own_server, sandbox, name="sound")[1]["snapshotID"]
    assert sandbox.pause() is True
    directories = [path for path in (own_server.home / "snapshots").iterdir() if path.is_dir()]
    (hidden,) = (path for path in directories if sandbox.sandbox_id in path.name)
    (named,) = (path for path in directories if path != hidden)
    path = f"/sandboxes/{sandbox.sandbox_id}"

    def connect() -> tuple[int, Any]:
        return own_server.api("POST", f"{path}/connect", {"timeout": 600})[:2]

    def create() -> tuple[int, Any]:
        return own_server.api("POST", "/v2/sandboxes", {"templateID": named.name})[:2]

    for name, (damage, expected, words) in WRONG_MANIFESTS.items():
        for manifest, attempt in ((hidden / "manifest.json", connect), (named / "manifest.json", create)):
            sound = manifest.read_bytes()
            manifest.write_bytes(damage(sound))
            status, answer = attempt()
            manifest.write_bytes(sound)
            assert (status, words in answer["message"]) == (expected, True), f"{name}: {status} {answer}"
            assert info_of(own_server, sandbox.sandbox_id)["state"] == "paused"

    layers = decode((hidden / "manifest.json").read_bytes(), "hidden").memory_layers
    for broken in (_layer(own_server, layers[-1].digest), hidden / "state"):
        sound = broken.read_bytes()
        broken.chmod(0o600)
        broken.write_bytes(sound[: len(sound) // 2])
        status, answer = connect()
        assert status == 500, answer
        assert broken.name[:12] in answer["message"], answer
        broken.write_bytes(sound)
        assert info_of(own_server, sandbox.sandbox_id)["state"] == "paused"
        assert [line for line in remains_of_sandboxes(own_server) if not line.startswith("directory")] == []

    again = Sandbox.connect(sandbox.sandbox_id, timeout=600, **sdk(own_server))
    assert ticker in [process.pid for process in again.commands.list()]
    assert ticker in [process.pid for process in _create(own_server, snapshot).commands.list()]


def _layer(server: RunningServer, digest: str) -> Path:
    return server.home / "layers" / "sha256" / digest.removeprefix("sha256:")


def test_command_line(own_server: RunningServer) -> None:
    def aenv(*arguments: str, expect: int = 0) -> str:
        done = own_server.aenv(*arguments)
        assert done.returncode == expect, (arguments, done.stdout, done.stderr)
        return (done.stdout if expect == 0 else done.stderr).decode()

    sandbox_id = aenv("start", "-t", "600").strip()
    aenv("exec", sandbox_id, "--", "sh", "-c", "echo kept > /tmp/file")
    reference = aenv("snapshot", sandbox_id, "--name", "cli").split()[0]
    assert reference == "cli:default"
    listed = json.loads(aenv("snapshots", "-o", "json"))
    assert "cli:default" in json.dumps(listed)
    assert "cli" in aenv("snapshots", "--tree")
    aenv("exec", sandbox_id, "--", "rm", "/tmp/file")
    forks = [word for word in aenv("fork", sandbox_id, "-n", "2", "--timeout", "60").split() if word.startswith("i")]
    assert len(set(forks)) == 2
    aenv("rollback", sandbox_id, reference)
    assert aenv("exec", sandbox_id, "--", "cat", "/tmp/file") == "kept\n"
    assert "paused" in aenv("du").lower()
    aenv("rm", sandbox_id, *forks)
    assert "no-such" in aenv("snapshots", "rm", "no-such", expect=1)
    aenv("snapshots", "rm", reference)
    assert json.loads(aenv("snapshots", "-o", "json")) == []
