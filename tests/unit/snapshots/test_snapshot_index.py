"""What a repository remembers of its snapshots: always what there is, whoever changed it and wherever he was killed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshots_samples import Node, manifest

from agentenv.errors import SnapshotError, SnapshotNotFoundError
from agentenv.snapshots.changes import ChangeCounter
from agentenv.snapshots.index import SnapshotIndex
from agentenv.snapshots.manifest import SnapshotManifest
from agentenv.snapshots.repository import LocalSnapshots


class Watcher:
    """Knows what it was told of."""

    def __init__(self) -> None:
        self.known: dict[str, SnapshotManifest] = {}

    def added(self, manifest: SnapshotManifest) -> None:
        assert manifest.snapshot_id not in self.known
        self.known[manifest.snapshot_id] = manifest

    def removed(self, manifest: SnapshotManifest) -> None:
        assert self.known.pop(manifest.snapshot_id) == manifest


_contents = st.dictionaries(st.sampled_from("abcdef"), st.sampled_from((1, 2, 3, "damaged", "gone")), max_size=6)


@given(st.lists(_contents, max_size=6), st.integers(0, 6))
def test_it_is_what_there_is_after_every_comparison(rounds: list[dict[str, object]], watched_from: int) -> None:
    index, watcher = SnapshotIndex(), Watcher()
    read: list[str] = []
    before: dict[str, object] = {}
    for number, present in enumerate(rounds):
        if number == watched_from:
            index.watch(watcher)

        def reader(name: str, present: dict[str, object] = present) -> SnapshotManifest:
            read.append(name)
            if present[name] == "damaged":
                raise SnapshotError(f"{name} is damaged")
            if present[name] == "gone":
                raise SnapshotNotFoundError(name)
            return manifest(name, agent_version=str(present[name]))

        read.clear()
        index.compare([(name, (hash(content),)) for name, content in present.items()], reader)
        assert sorted(read) == sorted(
            name for name, content in present.items() if content == "gone" or before.get(name) != content
        )
        sound = {name for name, content in present.items() if isinstance(content, int)}
        assert [each.snapshot_id for each in index.manifests()] == sorted(sound)
        assert all(index.find(name) is not None for name in sound)
        assert [each.snapshot_id for each in index.damaged()] == sorted(
            name for name, content in present.items() if content == "damaged"
        )
        before = dict(present)
        if number >= watched_from:
            assert watcher.known == {each.snapshot_id: each for each in index.manifests()}


def test_the_counter_says_that_somebody_is_at_it(tmp_path: Path) -> None:
    counter = ChangeCounter(tmp_path / "counter")
    assert counter.read() == 0
    begun = counter.begin()
    assert begun % 2 == 1 and counter.read() == begun
    assert counter.end(begun) == counter.read() == begun + 1
    killed = counter.begin()
    again = counter.begin()
    assert killed < again and again % 2 == 1
    assert counter.end(again) == again + 1
    (tmp_path / "counter").write_bytes(b"\1")
    assert counter.read() == 1


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def _ids(repository: LocalSnapshots) -> set[str]:
    return {each.snapshot_id for each in repository.list()}


def _in_a_child_that_dies(work: Callable[[], None]) -> None:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("at", ["begin", "end"])
def test_changes_of_the_killed_are_seen(node: Node, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    node.capture("one")
    assert _ids(node.snapshots) == {"one"}

    def die() -> None:
        other = Node(node.home)
        if at == "begin":
            monkeypatch.setattr(LocalSnapshots, "_check_budget", lambda *_: os._exit(9))
        else:
            monkeypatch.setattr(ChangeCounter, "end", lambda *_: os._exit(9))
        other.capture("two")

    _in_a_child_that_dies(die)
    expected = {"one"} if at == "begin" else {"one", "two"}
    assert _ids(node.snapshots) == expected
    assert node.snapshots._count() % 2 == 1
    # While nobody completes a change, everything is looked at each time.
    Node(node.home).snapshots.delete("one")
    assert _ids(node.snapshots) == expected - {"one"}
    node.snapshots.recover()
    assert node.snapshots._count() % 2 == 0 and node.snapshots._is_seen(node.snapshots._count())
    assert _ids(node.snapshots) == expected - {"one"}


def test_a_counter_that_cannot_be_written_costs_time_only(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.capture("one")
    other = Node(node.home)
    assert _ids(other.snapshots) == {"one"}
    with monkeypatch.context() as patched:

        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        patched.setattr(ChangeCounter, "end", full)
        node.capture("two")
    for repository in (node.snapshots, other.snapshots):
        assert _ids(repository) == {"one", "two"}
    node.snapshots.delete("two")
    for repository in (node.snapshots, other.snapshots):
        assert _ids(repository) == {"one"}


def test_a_deletion_that_fails_halfway_is_seen(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.capture("one")
    with monkeypatch.context() as patched:

        def full(*_: object) -> None:
            raise SnapshotError("it cannot be cleared away")

        patched.setattr(node.layers, "drop", full)
        with pytest.raises(SnapshotError):
            node.snapshots.delete("one")
    assert _ids(node.snapshots) == set()
    assert node.snapshots.recover().removed == ("one",)


def test_many_threads_and_processes_see_their_own_changes_at_once(node: Node) -> None:
    """And in the end all of them the same."""
    others = [Node(node.home) for _ in range(2)]
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work(mine: Node, number: int) -> None:
        try:
            start.wait()
            for turn in range(12):
                name = f"s{number}-{turn}"
                mine.capture(name, memory=(name.encode(),))
                assert name in _ids(mine.snapshots)
                if turn % 3 == 0:
                    mine.snapshots.scan()
                if turn % 2:
                    mine.snapshots.delete(name)
                    assert name not in _ids(mine.snapshots)
                    with pytest.raises(SnapshotNotFoundError):
                        mine.snapshots.get(name)
        except BaseException as error:
            failures.append(error)

    nodes = [node, node, *others]
    threads = [threading.Thread(target=work, args=(each, number)) for number, each in enumerate(nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    expected = {f"s{number}-{turn}" for number in range(4) for turn in range(0, 12, 2)}
    for each in nodes:
        assert _ids(each.snapshots) == expected
        assert {snapshot.snapshot_id for snapshot in each.snapshots.scan()[0]} == expected


def test_a_snapshot_that_took_the_place_of_another_is_read(node: Node) -> None:
    node.capture("one", memory=(b"before",))
    other = Node(node.home)
    before = other.snapshots.get("one")
    node.snapshots.delete("one")
    after = node.capture("one", memory=(b"after",))
    assert before != after
    assert other.snapshots.get("one") == node.snapshots.get("one") == after
    assert other.snapshots.list() == node.snapshots.list() == (after,)


def test_hidden_ones_are_in_sums_of_their_own_and_in_no_tree(node: Node) -> None:
    node.capture("named", memory=(b"m" * 100,), disk=(b"b" * 1000,))
    node.capture("pause-i1-0", memory=(b"m" * 100, b"n" * 10), disk=(b"b" * 1000, b"d" * 5), parent="named", age_s=1)
    node.capture("later", memory=(b"o" * 50,), disk=(b"b" * 1000,), parent="named", age_s=2)
    files = {name: node.snapshots._file_bytes(name) for name in ("named", "pause-i1-0", "later")}
    report = node.snapshots.usage()
    assert report.named_bytes == 1150 + files["named"] + files["later"]
    assert report.hidden_bytes == 1115 + files["pause-i1-0"]
    assert report.total_bytes == 1165 + sum(files.values())
    (cost,) = (cost for cost in report.snapshots if cost.snapshot_id == "named")
    assert (cost.exclusive_bytes, cost.shared_bytes) == (files["named"], 1100), "the paused sandbox uses it, too"
    (root,) = node.snapshots.tree()
    assert (root.snapshot_id, [child.snapshot_id for child in root.children]) == ("named", ["later"])
