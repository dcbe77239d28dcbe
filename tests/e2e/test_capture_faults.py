"""Captures that go wrong: the server killed at every step, disks that are full. Each sandbox is as before or as after.

One sandbox lives through all deaths of one operation. Its ticker tells whether it went on from where it was.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from e2b import Sandbox

from harness.fragile import FRAGILE, Steps
from harness.leftovers import memory_directory_of
from harness.sandboxes import (
    SMALL,
    delete_snapshots,
    dying,
    info_of,
    kill_all,
    lives,
    remains_of_sandboxes,
    sdk,
    start_ticking,
    ticks,
    until,
    until_it_ticks,
)
from harness.server import BUILT_HOME, RunningServer
from harness.storage import home_with_little_room

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.timeout(900)]

MOST_STEPS = 60
STARTS = ("journal.note_", "disks.create", "vmm.load", "waiting.load")
"""Steps of every start from a saved state: the server dies at them once, in a resume."""
TICKS = "/dev/shm/ticks"
"""In the guest's memory, so that it ticks on when its disk does not take anything."""


class Victim:
    """A server that dies where it is told to, and a sandbox of it that counts."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.steps = Steps(server.home)
        self.sandbox = Sandbox.create(timeout=3000, **sdk(server))
        self.ticker = start_ticking(self.sandbox)
        self.path = f"/sandboxes/{self.sandbox.sandbox_id}"

    def deaths(self, operation: Callable[[], object], passing: Collection[str] = ()) -> Iterator[str]:
        """Let the server die at each step of an operation in turn; gives the step, when the next server is up.

        Ends when the operation comes to its own end. Steps that begin like one of `passing` are none.
        """
        for number in range(MOST_STEPS):
            self.steps.clear()
            self.steps.die_at(number, passing)
            with dying():
                operation()
            if self.steps.spare():
                return
            step = self.steps.read()[-1]
            self.server.kill()
            self.server.start()
            yield step
        raise AssertionError(f"more than {MOST_STEPS} steps: {self.steps.read()}")

    @property
    def info(self) -> dict[str, Any]:
        return info_of(self.server, self.sandbox.sandbox_id)

    def call(self, method: str, path: str, body: object = None) -> Any:
        status, answer, _ = self.server.api(method, path, body)
        assert status < 300, answer
        return answer

    def snapshots(self) -> set[str]:
        return {one["snapshotID"] for one in self.call("GET", "/snapshots")}

    def check_leftovers(self, step: str) -> None:
        """Nothing but the sandbox and the named snapshots is on the host; drafts and copies of memory are gone."""
        sandbox_id = self.sandbox.sandbox_id
        strange = [line for line in remains_of_sandboxes(self.server) if sandbox_id not in line]
        assert strange == [], f"after {step}"
        memory = [path.name for path in memory_directory_of(self.server.home).glob("*") if "warm-" not in path.name]
        assert memory in ([], [f"{sandbox_id}.mem"]), f"after {step}"
        for directory in (self.server.home / "snapshots").iterdir():
            assert not directory.is_dir() or (directory / "manifest.json").exists(), f"a draft is left after {step}"

    def check_it_runs_on(self, step: str, counted: int) -> None:
        assert self.info["state"] == "running", f"after {step}"
        until_it_ticks(self.sandbox, counted)


@pytest.fixture
def victim() -> Iterator[Victim]:
    with RunningServer(config=SMALL, program=FRAGILE) as server:
        made = Victim(server)
        yield made
        kill_all(server)
        delete_snapshots(server)
        assert remains_of_sandboxes(server) == []
        assert [path for path in (server.home / "snapshots").iterdir() if path.is_dir()] == []


def test_server_killed_at_every_step_of_a_pause_and_of_a_resume(victim: Victim) -> None:
    """It runs on or is paused, with all that it did; a resume that was cut short is asked for again."""
    seen: list[str] = []
    for step in victim.deaths(lambda: victim.call("POST", f"{victim.path}/pause", {})):
        seen.append(step)
        paused = victim.info["state"] == "paused"
        victim.check_leftovers(step)
        if paused:
            victim.call("POST", f"{victim.path}/connect", {"timeout": 3000})
        victim.check_it_runs_on(step, ticks(victim.sandbox))
        assert victim.ticker in [process.pid for process in victim.sandbox.commands.list()]
    assert {"draft.commit", "journal.finish_pause"} <= set(seen)
    seen.clear()
    for step in victim.deaths(lambda: victim.call("POST", f"{victim.path}/connect", {"timeout": 3000})):
        seen.append(step)
        victim.check_leftovers(step)
        if victim.info["state"] == "running":  # it was, but nobody heard of it
            victim.check_it_runs_on(step, ticks(victim.sandbox))
            victim.call("POST", f"{victim.path}/pause", {})
    assert {"journal.begin_resume", "journal.finish_start"} <= set(seen)
    victim.check_it_runs_on("all", ticks(victim.sandbox))


def test_server_killed_at_every_step_of_a_snapshot(victim: Victim) -> None:
    """It is there whole, and answers, or it was never there; the source runs on in its one life."""
    seen = []
    for step in victim.deaths(lambda: victim.call("POST", f"{victim.path}/snapshots", {})):
        seen.append(step)
        counted = ticks(victim.sandbox)
        victim.check_it_runs_on(step, counted)
        victim.check_leftovers(step)
        for reference in victim.snapshots():
            assert seen.count(step) == 1
            victim.call("DELETE", f"/templates/{reference.replace(':', '%3A')}")
    assert len(lives(victim.sandbox)) == 1, "the source began a new life"
    assert {f"machine.save_state {victim.sandbox.sandbox_id}", "draft.commit"} <= set(seen)
    (made,) = victim.snapshots()
    copy = Sandbox.create(made, timeout=600, **sdk(victim.server))
    assert victim.ticker in [process.pid for process in copy.commands.list()]


def test_server_killed_at_every_step_of_a_fork(victim: Victim) -> None:
    """The source runs on in its one life, with whatever of its children was answered for: none."""
    seen = []
    for step in victim.deaths(lambda: victim.call("POST", f"{victim.path}/fork", {"count": 1, "timeout": 600}), STARTS):
        seen.append(step.split()[0])
        victim.check_it_runs_on(step, ticks(victim.sandbox))
        for child in victim.call("GET", "/v2/sandboxes"):
            if child["sandboxID"] != victim.sandbox.sandbox_id:
                # One that was up already when the answer was cut off is a whole sandbox.
                one = Sandbox.connect(child["sandboxID"], **sdk(victim.server))
                assert victim.ticker in [process.pid for process in one.commands.list()], f"after {step}"
                assert one.kill() is True
        victim.check_leftovers(step)
    assert len(lives(victim.sandbox)) == 1, "the source began a new life"
    assert {"machine.pause", "machine.copy_memory", "journal.begin_start", "journal.finish_start"} <= set(seen)
    assert len(victim.call("GET", "/v2/sandboxes")) == 2


def test_server_killed_at_every_step_of_a_roll_back(victim: Victim) -> None:
    """It is as before until the step that commits it; from there on the next server brings it to its target."""
    target = victim.call("POST", f"{victim.path}/snapshots", {"name": "target"})["snapshotID"]
    victim.sandbox.files.write("/tmp/after", "x")
    back = False
    seen = []
    for step in victim.deaths(lambda: victim.call("POST", f"{victim.path}/rollback", {"snapshotID": target}), STARTS):
        seen.append(step.split()[0])
        until(lambda: victim.info["state"] == "running", f"it does not run after {step}")
        is_back = not victim.sandbox.files.exists("/tmp/after")
        assert is_back or not back, f"committed before, yet as before after {step}"
        back = is_back
        assert victim.ticker in [process.pid for process in victim.sandbox.commands.list()]
        until_it_ticks(victim.sandbox, ticks(victim.sandbox))
        victim.check_leftovers(step)
        victim.sandbox.files.write("/tmp/after", "x")
    assert not victim.sandbox.files.exists("/tmp/after")
    assert {"machine.kill", "disks.remove", "journal.finish_start"} <= set(seen)
    assert victim.snapshots() == {target}


@pytest.fixture
def memory_room(tmp_path: Path) -> Iterator[Path]:
    """A file system for guest memory, in which some guests fit."""
    mount = tmp_path / "memory"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=500m", "tmpfs", mount], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


@pytest.fixture
def small_home(tmp_path: Path, memory_room: Path) -> Iterator[Path]:
    home = tmp_path / "home"
    config = f'{SMALL}min_free_disk_mib = 0\n[vmm]\nmemory_dir = "{memory_room}"\n'
    with home_with_little_room(BUILT_HOME, home, 300, config):
        yield home


def test_full_disks_during_captures(small_home: Path, memory_room: Path) -> None:
    """First that of the home, on which the image does not fit, then that of guest memory, on which no copy would.

    Some room is left, so that the guest itself lacks nothing. A pause needs no memory, it gives some back.
    """
    with RunningServer(small_home) as server:
        sandbox = Sandbox.create(timeout=900, **sdk(server))
        ticker = start_ticking(sandbox, TICKS)
        path = f"/sandboxes/{sandbox.sandbox_id}"
        snapshot = (f"{path}/snapshots", {})
        image = (snapshot, (f"{path}/snapshots", {"name": "named"}), (f"{path}/pause", {}))
        copy = (snapshot, (f"{path}/fork", {"count": 2}))
        for full, left_mib, refused, expected in ((small_home, 6, image, 507), (memory_room, 24, copy, 503)):
            ballast = full / "ballast"
            size = shutil.disk_usage(full).free - (left_mib << 20)
            subprocess.run(["fallocate", "-l", str(size), str(ballast)], check=True)
            before = _files(full)
            for where, body in refused:
                status, answer, _ = server.api("POST", where, body)
                assert (status, answer["code"]) == (expected, expected), (where, answer)
                assert info_of(server, sandbox.sandbox_id)["state"] == "running"
                until_it_ticks(sandbox, ticks(sandbox, TICKS), TICKS)
                assert _files(full) == before, f"a part of {where} is left"
            if full is memory_room:
                assert sandbox.pause() is True
            ballast.unlink()
        sandbox.connect(timeout=900)
        until_it_ticks(sandbox, ticks(sandbox, TICKS), TICKS)
        assert server.api("GET", "/snapshots")[1] == []
        assert [row["sandboxID"] for row in server.api("GET", "/v2/sandboxes")[1]] == [sandbox.sandbox_id]

        made = sandbox.create_snapshot()
        assert sandbox.pause() is True
        assert sandbox.kill() is True
        again = Sandbox.create(made.snapshot_id, timeout=600, **sdk(server))
        assert ticker in [process.pid for process in again.commands.list()]
        until_it_ticks(again, ticks(again, TICKS), TICKS)
        kill_all(server)
        delete_snapshots(server)
        assert remains_of_sandboxes(server) == []


def _files(directory: Path) -> set[str]:
    """What may be left of a capture below a home, or a directory of memory files."""
    found = {str(path.relative_to(directory)) for path in directory.rglob("*")}
    return {name for name in found if "warm-" not in name and not name.startswith(("layers/", "disks/", "run/"))}
