"""Captures and deletions that are killed, or fail, at every step that touches a file: then all is as before, or after.

A step is whatever the interpreter reports to audit hooks for a path below the test's home (files opened, made, renamed,
removed), and each sync. Kills are real ones: a child process ends there, with its locks and leases.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from snapshots_samples import Node, digest_of

from agentenv.errors import AgentEnvError, InsufficientStorageError, SnapshotError

_EVENTS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.chmod", "shutil.rmtree"})
_on_step: Callable[[str], None] | None = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _on_step is not None and event in _EVENTS and isinstance(arguments[0], str | bytes | os.PathLike):
        _on_step(f"{event} {os.fsdecode(arguments[0])}")


sys.addaudithook(_audit)


@pytest.fixture(autouse=True)
def _no_steps() -> Iterator[None]:
    yield
    _watch(None)


def _watch(on_step: Callable[[str], None] | None) -> None:
    global _on_step
    _on_step = on_step


def _home(directory: Path) -> Path:
    """A node with one snapshot, from which another may go on."""
    node = Node(directory)
    node.capture("old", memory=(b"m1",), disk=(b"base",))
    node.layers.close()
    return directory


def _capture(node: Node) -> None:
    node.capture("new", memory=(b"m1", b"m2"), disk=(b"base", b"d2"), state=b"x" * 100, parent="old", age_s=1)


def _delete(node: Node) -> None:
    node.snapshots.delete("old")


def _delete_in_use(node: Node) -> None:
    with node.snapshots.lease("old"):
        node.snapshots.delete("old")


def _dies_at(step: int, home: Path, work: Callable[[Node], None]) -> bool:
    """Run work in a child that ends before a step. Returns whether there was such a step."""
    child = os.fork()
    if child == 0:
        try:
            node = Node(home)
            left = step
            sync = os.fsync

            def on_step(_: str) -> None:
                nonlocal left
                if left == 0:
                    os._exit(9)
                left -= 1

            def fsync(descriptor: Any) -> None:
                on_step("")
                sync(descriptor)

            os.fsync = fsync
            # Trees are removed by names relative to open directories.
            _watch(lambda what: on_step(what) if str(home) in what or "/" not in what else None)
            work(node)
            os._exit(0)
        except BaseException as error:
            os.write(2, repr(error).encode())
        os._exit(1)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9)
    return status == 9


def _assert_tidy(node: Node, *, gone: tuple[str, ...] = ()) -> set[str]:
    """Nothing is there but whole snapshots and what they reference. Returns their ids."""
    node.layers.collect_garbage()
    there = {snapshot.snapshot_id for snapshot in node.snapshots.list()}
    assert {path.name for path in node.directory.iterdir()} == {".lock", *there}
    assert set(node.layers.owners_with_prefix("snapshot:")) == {f"snapshot:{name}" for name in there}
    needed = set()
    for name in there:
        manifest = node.snapshots.get(name)
        assert node.snapshots.verify(name) == ()
        assert node.layers.references(f"snapshot:{name}") == tuple(layer.digest for layer in manifest.layers)
        assert {path.name for path in (node.directory / name).iterdir()} == {"manifest.json", "state", "lock"}
        needed |= {layer.digest for layer in manifest.layers}
    assert node.stored() == needed
    assert not there & set(gone)
    return there


@pytest.mark.parametrize(
    ("work", "before", "after"),
    [(_capture, {"old"}, {"old", "new"}), (_delete, {"old"}, set()), (_delete_in_use, {"old"}, set())],
)
def test_killed_at_any_step_it_is_as_before_or_as_after(
    work: Callable[[Node], None], before: set[str], after: set[str], tmp_path: Path
) -> None:
    original = _home(tmp_path / "original")
    outcomes = []
    killed = True
    while killed:
        home = tmp_path / f"{len(outcomes)}"
        shutil.copytree(original, home)
        killed = _dies_at(len(outcomes), home, work)
        node = Node(home)
        # What is seen before anything is mended is whole, too, and stays so.
        node.layers.collect_garbage()
        assert all(node.snapshots.verify(snapshot.snapshot_id) == () for snapshot in node.snapshots.list())
        node.snapshots.recover()
        outcomes.append(_assert_tidy(node))
        node.layers.close()
        shutil.rmtree(home)
    assert all(outcome in (before, after) for outcome in outcomes)
    assert outcomes[0] == before and outcomes[-1] == after and len(outcomes) > 8
    assert outcomes == sorted(outcomes, key=lambda outcome: outcome == after), "what is done stays done"


def _fails_at(step: int, node: Node, code: int, monkeypatch: pytest.MonkeyPatch) -> tuple[str | None, Exception | None]:
    """Capture with one operating-system failure below the snapshots' directory. Returns where, and the error."""
    left = step
    where: str | None = None

    def on_step(what: str) -> None:
        nonlocal left, where
        if left == 0:
            where = what
        left -= 1
        if where is not None and left == -1:
            raise OSError(code, os.strerror(code))

    sync = os.fsync

    def fsync(descriptor: Any) -> None:
        if str(node.directory) in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            on_step(f"fsync {descriptor}")
        sync(descriptor)

    error: Exception | None = None
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fsync)
        _watch(lambda what: on_step(what) if str(node.directory) in what else None)
        try:
            _capture(node)
        except Exception as caught:
            error = caught
        finally:
            _watch(None)
    return where, error


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failure_at_any_step_is_an_error_that_leaves_nothing(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = Node(_home(tmp_path))
    steps = []
    while True:
        where, error = _fails_at(len(steps), node, code, monkeypatch)
        if where is None:
            break
        steps.append(where)
        if error is None:
            # Only what comes after the commit may fail without failing it.
            assert {snapshot.snapshot_id for snapshot in node.snapshots.list()} == {"old", "new"}
            node.snapshots.delete("new")
            continue
        assert isinstance(error, AgentEnvError), f"{where}: {error!r}"
        assert isinstance(error, InsufficientStorageError if code == errno.ENOSPC else SnapshotError), where
        assert str(node.directory) in error.message or "snapshots" in error.message
        assert _assert_tidy(node) == {"old"}, where
    assert len(steps) > 8
    assert _assert_tidy(node) == {"old", "new"}


def test_two_processes_capture_at_the_same_time(tmp_path: Path) -> None:
    """Each from its own layers and shared ones, while a third collects."""
    home = _home(tmp_path / "home")
    children = []
    for number in range(3):
        child = os.fork()
        if child == 0:
            try:
                node = Node(home)
                for turn in range(8):
                    if number == 2:
                        node.snapshots.recover()
                        node.layers.collect_garbage()
                        continue
                    name = f"s{number}-{turn}"
                    node.capture(name, memory=(b"m1", name.encode()), disk=(b"base",))
                    if turn % 2:
                        node.snapshots.delete(name)
                os._exit(0)
            except BaseException as error:
                os.write(2, repr(error).encode())
            os._exit(1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    node = Node(home)
    assert _assert_tidy(node) == {"old", *(f"s{number}-{turn}" for number in (0, 1) for turn in range(0, 8, 2))}
    assert digest_of(b"s0-0") in node.stored()
