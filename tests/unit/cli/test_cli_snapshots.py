"""The commands snapshot, snapshots, fork, rollback, du and gc against a control plane over a fake service."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from agentenv.cli.output import size_text, span
from agentenv.errors import InsufficientStorageError, TooManyRequestsError
from agentenv.orchestrator.model import PauseMode
from unit.api.api_fakes import FakeService, make_sandbox, make_snapshot
from unit.cli.conftest import Command


@pytest.fixture(autouse=True)
def sandbox_id(service: FakeService) -> str:
    return service.add(make_sandbox("isource", started_at=datetime.now(UTC))).id


def test_snapshot_prints_what_to_start_from(aenv: Command, service: FakeService) -> None:
    assert aenv("snapshot", "isource", "--name", "ready").out == "ready:default\n"
    assert aenv("snapshot", "isource", "--no-memory").out == "tsnap2:default\n"
    assert [taken.kind for taken in service.taken] == [PauseMode.FULL, PauseMode.FILESYSTEM]
    shown = json.loads(aenv("snapshot", "isource", "-o", "json").out)
    assert (shown["snapshotID"], shown["buildID"]) == ("tsnap3:default", service.taken[2].id)


def test_failures_are_one_line(aenv: Command, service: FakeService) -> None:
    for command in (["snapshot", "inone"], ["rollback", "inone", "x"], ["fork", "inone"]):
        failed = aenv(*command)
        assert failed.code == 1
        assert failed.out == ""
        assert failed.err.startswith('aenv: Sandbox "inone" ')
        assert failed.err.count("\n") == 1
    assert "alias" in aenv("snapshot", "isource", "--name", "no good").err
    service.fail_with = InsufficientStorageError("the disk is full")
    assert aenv("snapshot", "isource").err == "aenv: the disk is full\n"
    assert aenv("fork", "isource", "-n", "0").code == 2
    assert aenv("fork", "isource", "-n", "101").code == 2
    assert aenv("snapshot", "../x").err == "aenv: '../x' is not a sandbox id\n"


def test_lists_go_over_all_pages(aenv: Command, service: FakeService) -> None:
    service.taken = [make_snapshot(number, sandbox_id=f"i{number % 2}") for number in range(1, 151)]
    assert len(json.loads(aenv("snapshots").out)) == 150
    assert len(json.loads(aenv("snapshots", "--sandbox", "i1").out)) == 75
    table = aenv("snapshots", "-o", "table").out.splitlines()
    assert table[0].split() == ["SNAPSHOT", "TAKEN", "MODE", "OF", "SANDBOX", "BUILD"]
    assert table[1].startswith("tsnap150:default ")
    assert len(table) == 151


def test_the_tree_is_drawn(aenv: Command, service: FakeService) -> None:
    root = make_snapshot(1, name="root:default", sandbox_id="isource")
    left = make_snapshot(2, name="left:default", sandbox_id="isource", parent=root)
    leaf = make_snapshot(3, name="leaf:default", sandbox_id="isource", parent=left)
    right = make_snapshot(4, name="right:default", sandbox_id="isource", parent=root, kind=PauseMode.FILESYSTEM)
    below = make_snapshot(5, name="below:default", sandbox_id="isource", parent=right)
    other = make_snapshot(6, name="other:default", sandbox_id="iother")
    service.taken = [root, left, leaf, right, below, other]
    aenv("rollback", "isource", "leaf:default")
    lines = aenv("snapshots", "--tree", "--sandbox", "isource", "-o", "table").out.splitlines()
    assert [line.split("  ")[0].rstrip() for line in lines] == [
        "SNAPSHOT",
        "root:default",
        "├ left:default",
        "│ └ leaf:default",
        "└ right:default",
        "",
        "other:default",
    ]
    assert "└ below:default" in lines[5]
    assert "leaf:default  <- here" in lines[3]
    assert all("1000 B" in line and "50 B" in line and " ago" in line for line in lines[1:])
    assert "filesystem" in lines[4]
    assert [node["buildID"] for node in json.loads(aenv("snapshots", "--tree").out)] == [
        snapshot.id for snapshot in service.taken
    ]


def test_deleted_places_and_long_chains_are_drawn(aenv: Command, service: FakeService) -> None:
    service.taken = [make_snapshot(1)]
    for number in range(2, 400):
        service.taken.append(make_snapshot(number, parent=service.taken[-1]))
    lines = aenv("snapshots", "--tree", "-o", "table").out.splitlines()
    assert len(lines) == 400
    assert lines[-1].startswith(" " * 2 * 397 + "└ tsnap399:default")


def test_snapshots_rm(aenv: Command, service: FakeService) -> None:
    aenv("snapshot", "isource", "--name", "a:v1")
    aenv("snapshot", "isource")
    removed = aenv("snapshots", "rm", "a:v1", "nope/nope", "tsnap2:default")
    assert removed.code == 1
    assert removed.out == "a:v1\ntsnap2:default\n"
    assert removed.err == "aenv: nope/nope: snapshot 'nope/nope' not found\n"
    assert service.taken == []


@pytest.mark.parametrize("empty", ["", " "])
def test_snapshots_rm_refuses_empty_names_before_it_deletes(aenv: Command, service: FakeService, empty: str) -> None:
    aenv("snapshot", "isource", "--name", "a:v1")
    refused = aenv("snapshots", "rm", "a:v1", empty)
    assert (refused.code, refused.out) == (2, "")
    assert refused.err == "aenv: the name of a snapshot is empty; nothing was deleted\n"
    assert len(service.taken) == 1


def test_a_template_is_no_snapshot(aenv: Command) -> None:
    assert "base: 'base' is a template, not a snapshot, and cannot be deleted" in aenv("snapshots", "rm", "base").err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("fork", "copies of one with autoPause are paused"),
        ("snapshot", "team1/x and team2/x are one name"),
        ("rollback", "killed or reached its end of life, which it did not"),
    ],
)
def test_the_help_says_what_surprises(aenv: Command, command: str, words: str) -> None:
    assert words in " ".join(aenv(command, "--help").out.split())


def test_fork_prints_ids_and_counts_failures(aenv: Command, service: FakeService) -> None:
    done = aenv("fork", "isource", "-n", "3", "-t", "60")
    assert done.code == 0
    assert set(done.out.split()) == set(service.sandboxes) - {"isource"}
    assert len(done.out.split()) == 3
    assert done.err == ""
    assert service.calls[-1] == ("fork", (3, 60))
    service.fork_failures = {number: TooManyRequestsError("all places are taken") for number in (0, 2)}
    partly = aenv("fork", "isource", "-n", "3")
    assert partly.code == 1
    assert len(partly.out.split()) == 1
    assert partly.err == "aenv: 2 of 3 copies did not start: all places are taken\n"
    results = json.loads(aenv("fork", "isource", "-n", "3", "-o", "json").out)
    assert [set(result) for result in results] == [{"error"}, {"sandbox"}, {"error"}]
    assert "envdAccessToken" not in results[1]["sandbox"]


def test_a_fork_whose_answer_breaks_off(
    aenv: Command, service: FakeService, monkeypatch: pytest.MonkeyPatch, server: str
) -> None:
    async def fork(sandbox_id: str, *, count: int, timeout_s: int, on_result: Any) -> None:
        on_result(make_sandbox("ifirst"))
        raise RuntimeError("broken")

    monkeypatch.setattr(service, "fork", fork)
    broken = aenv("fork", "isource", "-n", "2")
    assert (broken.code, broken.out) == (1, "ifirst\n")
    assert broken.err == f"aenv: the server at {server} closed the connection amid its answer\n"


def test_rollback(aenv: Command, service: FakeService) -> None:
    aenv("snapshot", "isource", "--name", "ready")
    assert aenv("rollback", "isource", "ready:default").out == "isource\n"
    assert service.get("isource").checkpoint_id == service.taken[0].id
    assert "not found" in aenv("rollback", "isource", "nope").err
    assert "snapshotID is empty" in aenv("rollback", "isource", "").err


def test_disk_space(aenv: Command) -> None:
    assert json.loads(aenv("du").out)["snapshotsBytes"] == 5
    lines = aenv("du", "-o", "table").out.splitlines()
    assert [line.rsplit(" B", 1)[0].split()[-1] for line in lines] == ["8", "6", "5", "4", "7", "3", "1"]
    assert aenv("gc", "-o", "table").out == "removed 3 layers, 4.0 KiB\n"
    assert json.loads(aenv("gc").out) == {"layers": 3, "bytes": 4096}


def test_start_without_the_memory(aenv: Command, service: FakeService) -> None:
    assert aenv("start", "base", "--no-memory").code == 0
    assert aenv("start", "base").code == 0
    assert [request.memory for request in service.created] == [False, True]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 1024**2, "5.0 MiB"), (3 * 1024**4, "3.0 TiB")],
)
def test_sizes_for_people(size: int, text: str) -> None:
    assert size_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-5, "0s"), (59, "59s"), (61, "1m 01s"), (3600, "1h 00m"), (90_000, "25h 00m"), (200_000, "2d 07h")],
)
def test_spans_for_people(seconds: int, text: str) -> None:
    assert span(timedelta(seconds=seconds)) == text
