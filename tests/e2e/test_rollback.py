"""Real sandboxes that are put back to snapshots of their own: files, processes, identity; and wrong targets."""

from __future__ import annotations

import hashlib
import secrets
import time
import uuid
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from e2b import Sandbox

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
    with RunningServer(config=SMALL) as running:
        yield running
        kill_all(running)
        delete_snapshots(running)
        assert remains_of_sandboxes(running) == []
        assert [path for path in (running.home / "snapshots").iterdir() if path.is_dir()] == []


def _snapshot(server: RunningServer, sandbox: Sandbox, **body: object) -> str:
    status, made, _ = server.api("POST", f"/sandboxes/{sandbox.sandbox_id}/snapshots", body)
    assert status == 201, made
    return str(made["snapshotID"])


def _roll_back(server: RunningServer, sandbox: Sandbox, reference: str) -> tuple[int, Any]:
    return server.api("POST", f"/sandboxes/{sandbox.sandbox_id}/rollback", {"snapshotID": reference})[:2]


def test_back_and_on_again(own_server: RunningServer) -> None:
    sandbox = Sandbox.create(timeout=900, metadata={"kept": "yes"}, envs={"KEPT": "too"}, **sdk(own_server))
    before = info_of(own_server, sandbox.sandbox_id)
    content = secrets.token_bytes(500_000)
    sandbox.files.write("/home/user/kept", content)  # not synced
    ticker = start_ticking(sandbox)
    counted = ticks(sandbox)
    first = _snapshot(own_server, sandbox)
    counted_after = ticks(sandbox)

    sandbox.files.write("/home/user/kept", "spoilt")
    sandbox.commands.run("rm /tmp/ticker.py; echo later > /home/user/later; sync")
    later = start_ticking(sandbox, "/tmp/later")
    second = _snapshot(own_server, sandbox, name="second")
    assert sandbox.commands.kill(ticker) is True

    status, answer = _roll_back(own_server, sandbox, first)
    assert (status, answer["sandboxID"], answer["envdAccessToken"]) == (
        200,
        sandbox.sandbox_id,
        before["envdAccessToken"],
    )
    # The client that it had goes on with it: same id, same token, a new life.
    asked = time.time()
    done = sandbox.commands.run("cat /run/aenv/generation; hostname; echo $KEPT; date +%s.%N").stdout.split()
    assert (done[0], done[2], done[3]) == ("2", sandbox.sandbox_id, "too")
    assert asked - 0.5 <= float(done[4]) <= time.time() + 0.5
    assert hashlib.sha256(sandbox.files.read("/home/user/kept", format="bytes")).digest() == (
        hashlib.sha256(content).digest()
    )
    assert not sandbox.files.exists("/home/user/later")
    running = [process.pid for process in sandbox.commands.list()]
    assert ticker in running
    assert later not in running
    began = count_of_life(sandbox, 2)
    assert counted <= began <= counted_after + BEFORE_IT_IS_TOLD, "it does not go on from the instant"
    assert lives(sandbox)[-1][0] == done[1]
    until_it_ticks(sandbox, began)
    after = info_of(own_server, sandbox.sandbox_id)
    same = ("sandboxID", "envdAccessToken", "metadata", "startedAt", "templateID", "state", "memoryMB")
    assert [after[name] for name in same] == [before[name] for name in same]
    ends = [datetime.fromisoformat(info["endAt"]) for info in (before, after)]
    assert abs((ends[1] - ends[0]).total_seconds()) < 60, "the time that it has is kept"

    # Forward on the other branch, and from there through a pause.
    assert _roll_back(own_server, sandbox, second)[0] == 200
    assert sandbox.files.read("/home/user/later") == "later\n"
    assert sandbox.files.read("/home/user/kept") == "spoilt"
    assert {ticker, later} <= {process.pid for process in sandbox.commands.list()}
    assert sandbox.pause() is True
    status, answer = _roll_back(own_server, sandbox, first)
    assert (status, "paused" in answer["message"]) == (409, True), answer
    again = Sandbox.connect(sandbox.sandbox_id, **sdk(own_server))
    assert again.files.read("/home/user/later") == "later\n"
    until_it_ticks(again, ticks(again))
    assert again.commands.run("cut -d ' ' -f 1 /run/aenv/generation").stdout == "4\n"
    # One that was rolled back to twice is still what it was.
    third = _snapshot(own_server, again, memory=False)
    assert _roll_back(own_server, again, first)[0] == 200
    assert bytes(again.files.read("/home/user/kept", format="bytes")) == content

    # The snapshots are a tree: both others came of the first life.
    status, tree, _ = own_server.api("GET", f"/snapshots/tree?sandboxID={sandbox.sandbox_id}")
    assert status == 200
    assert all(reference in str(tree) for reference in (first, second, third))

    # Without its memory it boots.
    assert _roll_back(own_server, again, third)[0] == 200
    assert again.files.read("/home/user/later") == "later\n"
    assert again.commands.list() == []
    assert again.kill() is True


def test_wrong_targets_change_nothing(own_server: RunningServer) -> None:
    sandbox, other = (Sandbox.create(timeout=900, **sdk(own_server)) for _ in range(2))
    ticker = start_ticking(sandbox)
    foreign = _snapshot(own_server, other)
    own = _snapshot(own_server, sandbox)
    status, answer = _roll_back(own_server, sandbox, foreign)
    assert (status, other.sandbox_id in answer["message"]) == (400, True), answer
    for unknown in (str(uuid.uuid4()), "nothing-of-this-name", "nothing:v1"):
        assert _roll_back(own_server, sandbox, unknown)[0] == 404, unknown
    assert _roll_back(own_server, sandbox, "base")[0] in (400, 404), "a template that is no snapshot"
    for body in ({}, {"snapshotID": ""}, {"snapshotID": 5}, {"snapshotID": "../../etc"}, []):
        status, answer, _ = own_server.api("POST", f"/sandboxes/{sandbox.sandbox_id}/rollback", body)
        assert (status, answer["code"]) in ((400, 400), (404, 404)), body
    assert own_server.api("POST", "/sandboxes/i0000000000000000000/rollback", {"snapshotID": own})[0] == 404

    # Nothing happened to it: same life, same process, it counts on.
    assert sandbox.commands.run("cut -d ' ' -f 1 /run/aenv/generation").stdout == "1\n"
    assert ticker in [process.pid for process in sandbox.commands.list()]
    until_it_ticks(sandbox, ticks(sandbox))
    assert sandbox.kill() is True
    assert _roll_back(own_server, sandbox, own)[0] == 404
    assert other.kill() is True
