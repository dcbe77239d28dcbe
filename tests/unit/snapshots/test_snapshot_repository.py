"""The repository over the real layer store: commits, deletions, leases, the tree, costs, the budget, verification."""

from __future__ import annotations

import os
import random
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshots_samples import BEGINNING, Node, digest_of, manifest, reference

from agentenv.errors import InsufficientStorageError, LayerError, SnapshotError, SnapshotNotFoundError
from agentenv.snapshots.accounting import SnapshotNode, family_tree
from agentenv.snapshots.manifest import LayerReference, SnapshotKind
from agentenv.snapshots.repository import LocalSnapshots


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def _another(node: Node, budget_mib: int | None = None) -> LocalSnapshots:
    """The repository as another process sees it."""
    return LocalSnapshots(node.directory, node.layers, budget_mib=budget_mib)


def test_a_committed_snapshot_is_there_whole(node: Node) -> None:
    made = node.capture("one", memory=(b"m1", b"m2"), disk=(b"d1",), state=b"devices")
    for repository in (node.snapshots, _another(node)):
        assert repository.get("one") == made
        assert repository.list() == (made,)
    assert node.layers.references("snapshot:one") == tuple(map(digest_of, (b"m1", b"m2", b"d1")))
    with node.snapshots.lease("one") as lease:
        assert lease.manifest == made
        assert [layer.path.read_bytes() for layer in lease.memory_layers] == [b"m1", b"m2"]
        assert [layer.path.read_bytes() for layer in lease.disk_layers] == [b"d1"]
        assert lease.state is not None and lease.state.read_bytes() == b"devices"
    assert node.snapshots.verify("one") == ()
    for path in node.directory.rglob("*"):
        assert path.stat().st_mode & 0o077 == 0 or path.name == ".lock", f"{path} can be read by others"
    assert node.directory.stat().st_mode & 0o777 == 0o700


def test_a_file_system_has_no_state(node: Node) -> None:
    with node.snapshots.draft("fs") as draft:
        layer = node.add_layer(b"disk", draft.owner)
        draft.commit(manifest("fs", kind=SnapshotKind.FILESYSTEM, disk_layers=(layer,)))
    with node.snapshots.lease("fs") as lease:
        assert lease.state is None and lease.memory_layers == ()


def test_without_a_commit_nothing_is_left(node: Node) -> None:
    source = node.home / "state"
    source.write_bytes(b"x")
    with pytest.raises(ZeroDivisionError), node.snapshots.draft("one") as draft:
        node.add_layer(b"layer", draft.owner)
        draft.take_state(source)
        assert node.snapshots.list() == ()
        with pytest.raises(SnapshotNotFoundError):
            node.snapshots.get("one")
        with pytest.raises(SnapshotNotFoundError), node.snapshots.lease("one"):
            pass
        with pytest.raises(SnapshotNotFoundError):
            node.snapshots.delete("one")
        # Another process that starts now leaves it alone.
        assert _another(node).recover().removed == ()
        assert (node.directory / "one" / "state").exists()
        raise ZeroDivisionError
    assert not (node.directory / "one").exists()
    assert node.layers.owners_with_prefix("snapshot:") == ()
    node.layers.collect_garbage()
    assert node.stored() == set()
    with pytest.raises(SnapshotError, match="is over"):
        draft.commit(manifest("one"))


def test_a_commit_that_fails_leaves_nothing(node: Node) -> None:
    source = node.home / "state"
    source.write_bytes(b"state")
    with pytest.raises(LayerError, match="not in the store"), node.snapshots.draft("one") as draft:
        node.add_layer(b"memory", draft.owner)
        draft.commit(manifest("one", state=draft.take_state(source)))
    for wrong, message in (
        (manifest("two"), "the manifest is of two"),
        (manifest("one", kind=SnapshotKind.FILESYSTEM), "another state than was taken"),
    ):
        with pytest.raises(SnapshotError, match=message), node.snapshots.draft("one") as draft:
            draft.take_state(source)
            draft.commit(wrong)
    assert node.snapshots.list() == () and not (node.directory / "one").exists()
    assert node.layers.owners_with_prefix("snapshot:") == ()


def test_a_draft_is_committed_once(node: Node) -> None:
    with pytest.raises(SnapshotError, match="is over"), node.snapshots.draft("one") as draft:
        layer = node.add_layer(b"disk", draft.owner)
        made = manifest("one", kind=SnapshotKind.FILESYSTEM, disk_layers=(layer,))
        draft.commit(made)
        draft.commit(made)
    assert node.snapshots.get("one") == made
    with pytest.raises(SnapshotError, match="already"), node.snapshots.draft("one"):
        pass
    assert node.snapshots.get("one") == made


@pytest.mark.parametrize("hostile", ["../x", "", ".", "..", "A", "a/b", ".lock", "x" * 65, "a\n", "-a"])
def test_ids_never_become_other_paths(node: Node, hostile: str) -> None:
    for call in (node.snapshots.get, node.snapshots.delete, node.snapshots.verify):
        with pytest.raises(SnapshotNotFoundError):
            call(hostile)
    with pytest.raises(SnapshotNotFoundError), node.snapshots.lease(hostile):
        pass
    with pytest.raises(SnapshotError), node.snapshots.draft(hostile):
        pass


def test_states_that_are_none_are_refused(node: Node) -> None:
    real = node.home / "real"
    real.write_bytes(b"")
    link = node.home / "link"
    link.symlink_to("/etc/passwd")
    pipe = node.home / "pipe"
    os.mkfifo(pipe)
    for source, message in (
        (real, "is empty"),
        (link, "symbolic links"),
        (pipe, "no regular file"),
        (node.home, "no regular file|directory"),
        (node.home / "missing", "No such file"),
    ):
        with pytest.raises(SnapshotError, match=message), node.snapshots.draft("one") as draft:
            draft.take_state(source)
    assert not (node.directory / "one").exists()


def test_deleting_a_parent_never_breaks_a_child(node: Node) -> None:
    node.capture("parent", memory=(b"m1",), disk=(b"base", b"d1"))
    node.capture("child", memory=(b"m1", b"m2"), disk=(b"base", b"d1", b"d2"), parent="parent")
    node.snapshots.delete("parent")
    node.layers.collect_garbage()
    assert node.snapshots.verify("child") == ()
    with node.snapshots.lease("child") as lease:
        assert len(lease.memory_layers) == 2 and len(lease.disk_layers) == 3
    with pytest.raises(SnapshotNotFoundError):
        node.snapshots.delete("parent")
    node.snapshots.delete("child")
    node.layers.collect_garbage()
    assert node.stored() == set() and [path.name for path in node.directory.iterdir()] == [".lock"]


def test_a_snapshot_in_use_stays_loadable_when_it_is_deleted(node: Node) -> None:
    node.capture("one")
    other = _another(node)
    with node.snapshots.lease("one") as first:
        with node.snapshots.lease("one") as second:
            other.delete("one")
            assert other.list() == ()
            with pytest.raises(SnapshotNotFoundError), node.snapshots.lease("one"):
                pass
            other.recover()
            node.layers.collect_garbage()
        for lease in (first, second):
            assert lease.state is not None and lease.state.read_bytes() == b"state"
            assert lease.memory_layers[0].path.read_bytes() == b"memory"
    assert not (node.directory / "one").exists()
    node.layers.collect_garbage()
    assert node.stored() == set()


def test_a_draft_that_is_committed_can_be_loaded_at_once(node: Node) -> None:
    with node.snapshots.draft("one") as draft:
        layer = node.add_layer(b"disk", draft.owner)
        draft.commit(manifest("one", kind=SnapshotKind.FILESYSTEM, disk_layers=(layer,)))
        with _another(node).lease("one") as lease:
            assert lease.disk_layers[0].digest == layer.digest


def test_a_snapshot_that_is_deleted_before_its_draft_ends_stays_loadable(node: Node) -> None:
    source = node.home / "source"
    source.write_bytes(b"state")
    with ExitStack() as draft_ends, ExitStack() as lease_ends:
        draft = draft_ends.enter_context(node.snapshots.draft("one"))
        layers = (node.add_layer(b"m", draft.owner),), (node.add_layer(b"d", draft.owner),)
        state = draft.take_state(source)
        draft.commit(manifest("one", memory_layers=layers[0], disk_layers=layers[1], state=state))
        lease = lease_ends.enter_context(_another(node).lease("one"))
        _another(node).delete("one")
        draft_ends.close()
        assert lease.state is not None and lease.state.read_bytes() == b"state"
        lease_ends.close()
        assert not (node.directory / "one").exists()


def test_deletions_race_with_leases(node: Node) -> None:
    """Whoever gets a lease finds all of it, until the end of the lease."""
    repositories = [_another(node) for _ in range(4)]
    failures: list[BaseException] = []
    loaded = []

    def load(repository: LocalSnapshots, start: threading.Barrier, name: str) -> None:
        start.wait()
        try:
            with repository.lease(name) as lease:
                assert lease.state is not None
                contents = [lease.state.read_bytes(), *(layer.path.read_bytes() for layer in lease.memory_layers)]
                assert contents == [b"state", name.encode()]
                loaded.append(name)
        except SnapshotNotFoundError:
            pass
        except BaseException as error:
            failures.append(error)

    def remove(start: threading.Barrier, name: str) -> None:
        start.wait()
        try:
            node.snapshots.delete(name)
            node.layers.collect_garbage()
        except BaseException as error:
            failures.append(error)

    for round_number in range(25):
        name = f"s{round_number}"
        node.capture(name, memory=(name.encode(),))
        start = threading.Barrier(5)
        threads = [threading.Thread(target=load, args=(repository, start, name)) for repository in repositories]
        threads.append(threading.Thread(target=remove, args=(start, name)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert [path.name for path in node.directory.iterdir()] == [".lock"]
    node.layers.collect_garbage()
    assert node.stored() == set()


def test_what_is_damaged_is_named(node: Node) -> None:
    made = node.capture("one", memory=(b"m1",), disk=(b"d1", b"d2"))
    node.capture("sound", memory=(b"m3",), disk=(b"d1",))
    state = node.directory / "one" / "state"
    state.write_bytes(b"STATE")
    (problem,) = node.snapshots.verify("one")
    assert str(state) in problem and "another digest" in problem
    state.write_bytes(b"longer than before")
    with pytest.raises(SnapshotError, match=f"snapshot one is damaged: the state file {state} has 18 bytes"):
        node.snapshots.lease("one").__enter__()
    state.write_bytes(b"state")
    layer = node.layers.get(digest_of(b"d2")).path
    layer.chmod(0o644)
    layer.write_bytes(b"xx")
    (problem,) = node.snapshots.verify("one")
    assert str(layer) in problem
    layer.unlink()
    state.unlink()
    problems = node.snapshots.verify("one")
    assert len(problems) == 2 and str(state) in problems[0] and "missing" in problems[0] and str(layer) in problems[1]
    with pytest.raises(SnapshotError, match=r"state file .* is missing"):
        node.snapshots.lease("one").__enter__()
    state.write_bytes(b"state")
    with pytest.raises(SnapshotError, match=r"snapshot one is damaged: layer .* is damaged: the file is missing"):
        node.snapshots.lease("one").__enter__()
    assert node.snapshots.verify("sound") == ()
    assert node.snapshots.get("one") == made


def test_a_damaged_manifest_keeps_its_layers_until_it_is_deleted(node: Node) -> None:
    node.capture("one", memory=(b"m1",))
    node.capture("two", memory=(b"m2",))
    (node.directory / "one" / "manifest.json").write_bytes(b"{}")
    (node.directory / "two" / "manifest.json").rename(node.directory / "one" / "moved")
    other = _another(node)
    assert other.list() == ()
    found, damaged = other.scan()
    assert found == () and [snapshot.snapshot_id for snapshot in damaged] == ["one"]
    assert str(node.directory / "one" / "manifest.json") in damaged[0].problem
    assert other.verify("one") == (damaged[0].problem,)
    report = other.recover()
    assert report.damaged == damaged and report.removed == ("two",) and report.dropped == ("two",)
    node.layers.collect_garbage()
    assert digest_of(b"m1") in node.stored() and digest_of(b"m2") not in node.stored()
    with pytest.raises(SnapshotError, match="no manifest of a snapshot"), other.lease("one"):
        pass
    (node.directory / "one" / "moved").rename(node.directory / "one" / "manifest.json")
    with pytest.raises(SnapshotError, match="'snapshot_id' is 'two', not that of its directory"):
        _another(node).get("one")
    other.delete("one")
    node.layers.collect_garbage()
    assert node.stored() == set()


def test_recover_mends_references(node: Node) -> None:
    node.capture("one", memory=(b"m1",), disk=(b"d1",))
    node.capture("lost", memory=(b"m2",), disk=(b"d1",))
    node.layers.drop("snapshot:one")
    node.layers.drop("snapshot:lost")
    node.layers.set_references("disk:x", [digest_of(b"m1"), digest_of(b"d1")])
    node.layers.set_references("snapshot:nobody", [digest_of(b"d1")])
    node.layers.collect_garbage()
    report = _another(node).recover()
    assert report.referenced == ("one",) and report.dropped == ("nobody",) and report.removed == ()
    assert [snapshot.snapshot_id for snapshot in report.damaged] == ["lost"]
    assert node.layers.references("snapshot:one") == (digest_of(b"m1"), digest_of(b"d1"))
    again = _another(node).recover()
    assert again.referenced == again.dropped == again.removed == ()


def test_costs_are_counted_over_layers(node: Node) -> None:
    node.layers.set_references("disk:x", [node.add_layer(b"b" * 1000, "template:base").digest])
    node.capture("one", memory=(b"m" * 100,), disk=(b"b" * 1000, b"d" * 10))
    node.capture("two", memory=(b"m" * 100, b"n" * 7), disk=(b"b" * 1000,), parent="one")
    report = node.snapshots.usage()
    files = {name: node.snapshots._file_bytes(name) for name in ("one", "two")}
    assert all(size > 0 for size in files.values())
    costs = {cost.snapshot_id: (cost.exclusive_bytes, cost.shared_bytes) for cost in report.snapshots}
    assert costs == {"one": (10 + files["one"], 1100), "two": (7 + files["two"], 1100)}
    assert report.total_bytes == 1117 + sum(files.values()) and report.budget_bytes is None
    node.snapshots.delete("one")
    (cost,) = node.snapshots.usage().snapshots
    assert (cost.exclusive_bytes, cost.shared_bytes) == (107 + files["two"], 1000)


def test_the_budget_says_what_to_do(tmp_path: Path) -> None:
    node = Node(tmp_path, budget_mib=2)
    half = os.urandom(1 << 20)
    node.capture("one", memory=(half,))
    # What others have already costs nothing.
    node.capture("two", memory=(half,), disk=(b"small",), parent="one")
    with pytest.raises(InsufficientStorageError, match=r"budget of 2 MiB: delete snapshots .*or raise the budget"):
        node.capture("three", memory=(os.urandom(1 << 20),))
    assert [snapshot.snapshot_id for snapshot in node.snapshots.list()] == ["one", "two"]
    assert not (node.directory / "three").exists() and node.layers.references("snapshot:three") == ()
    node.snapshots.ensure_room(1 << 19)
    with pytest.raises(InsufficientStorageError):
        node.snapshots.ensure_room(1 << 20)
    assert node.snapshots.usage().budget_bytes == 2 << 20
    node.snapshots.delete("one")
    node.snapshots.delete("two")
    node.capture("three", memory=(os.urandom(1 << 20),))
    with pytest.raises(InsufficientStorageError), _another(node, budget_mib=0).draft("four"):
        pass


def test_layers_of_templates_cost_no_snapshot_anything(tmp_path: Path) -> None:
    node = Node(tmp_path)
    base = os.urandom(3 << 20)
    node.add_layer(base, "template:base")
    node.snapshots = LocalSnapshots(node.directory, node.layers, budget_mib=1, free_owners="template:")
    node.capture("one", disk=(base, b"small"))
    node.capture("two", disk=(base, os.urandom(1 << 19)))
    with pytest.raises(InsufficientStorageError, match=r"take 1 MiB, and with 0\.8 MiB more"):
        node.capture("three", disk=(base, os.urandom(3 << 18)))
    node.layers.drop("template:base")
    with pytest.raises(InsufficientStorageError, match="take 4 MiB"):
        node.capture("four", disk=(base,))


def _names(nodes: tuple[SnapshotNode, ...]) -> list[object]:
    return [(node.snapshot_id, node.manifest is not None, _names(node.children)) for node in nodes]


def test_the_tree_shows_missing_parents(node: Node) -> None:
    node.capture("root", age_s=5)
    node.capture("older", parent="root", age_s=6)
    node.capture("younger", parent="root", age_s=7)
    node.capture("leaf", parent="older", age_s=8)
    node.capture("first", age_s=1)
    node.snapshots.delete("older")
    assert _names(node.snapshots.tree()) == [
        ("first", True, []),
        ("root", True, [("younger", True, [])]),
        ("older", False, [("leaf", True, [])]),
    ]


@given(st.lists(st.none() | st.integers(0, 11), max_size=10))
def test_every_snapshot_is_in_the_tree_once(parents: list[int | None]) -> None:
    """Also when parents are missing or form circles, which only a hostile hand can write."""
    manifests = [
        manifest(f"s{number}", parent_id=None if parent is None or parent == number else f"s{parent}")
        for number, parent in enumerate(parents)
    ]
    random.shuffle(manifests)
    seen: list[str] = []

    def walk(nodes: tuple[SnapshotNode, ...]) -> None:
        for node in nodes:
            if node.manifest is not None:
                seen.append(node.snapshot_id)
            walk(node.children)

    walk(family_tree(manifests))
    assert sorted(seen) == sorted(item.snapshot_id for item in manifests)


def test_a_long_line_of_checkpoints_is_no_problem() -> None:
    line = [manifest(f"s{number}", parent_id=f"s{number - 1}" if number else None) for number in range(5000)]
    (top,) = family_tree(line)
    depth = 0
    while top.children:
        (top,) = top.children
        depth += 1
    assert depth == 4999


def test_lists_are_by_age(node: Node) -> None:
    for age in (3, 1, 2):
        node.capture(f"s{age}", age_s=age)
    assert [snapshot.snapshot_id for snapshot in node.snapshots.list()] == ["s1", "s2", "s3"]
    assert node.snapshots.list()[0].created_at > BEGINNING


def test_a_layer_of_another_size_is_noticed(node: Node) -> None:
    with node.snapshots.draft("one") as draft:
        layer = node.add_layer(b"disk", draft.owner)
        wrong = LayerReference(layer.digest, 5)
        draft.commit(manifest("one", kind=SnapshotKind.FILESYSTEM, disk_layers=(wrong,)))
    with pytest.raises(SnapshotError, match="has 4 bytes, its manifest says 5"), node.snapshots.lease("one"):
        pass
    assert node.snapshots.verify("one") == (f"layer {reference(b'disk').digest} has 4 bytes, the manifest says 5",)
