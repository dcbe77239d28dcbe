"""Disks of sandboxes: equal to the template, cheap, nothing left after a failure. QEMU's own tools are the judge."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.errors import InsufficientStorageError, StorageError
from agentenv.storage import copying, file_disks
from agentenv.storage.copying import copy_sparse
from agentenv.storage.file_disks import OVERLAY_NAME, RAW_NAME, DiskStore, free_bytes
from agentenv.vmm.base import DiskFormat

MIB = 1024 * 1024
ALL = frozenset({DiskFormat.RAW, DiskFormat.QCOW2})
RAW_ONLY = frozenset({DiskFormat.RAW})
needs_qemu_img = pytest.mark.skipif(shutil.which("qemu-img") is None, reason="needs qemu-img (qemu-utils)")


def make_template(path: Path, size: int = 64 * MIB) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
        for offset in (0, size // 3, size - 4096):
            file.seek(offset)
            file.write(os.urandom(4096))
    return path


def run(*command: object) -> str:
    return subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def no_reflink(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A file system that refuses reflinks; the list counts how often it was asked."""
    asked: list[int] = []

    def refuse(descriptor: int, request: int, argument: int) -> int:
        asked.append(request)
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(copying.fcntl, "ioctl", refuse)
    return asked


@needs_qemu_img
@pytest.mark.parametrize("size", [MIB, 64 * MIB, 256 * MIB, 256 * MIB + 512, 100 * 1024 * MIB, 3 * 1024 * 1024 * MIB])
async def test_an_overlay_is_valid_and_equal(tmp_path: Path, no_reflink: list[int], size: int) -> None:
    template = make_template(tmp_path / "template.raw", size)
    directory = tmp_path / "sandbox"
    directory.mkdir()
    store = DiskStore(ALL)
    disk = await store.create(template, directory)
    assert disk.format is DiskFormat.QCOW2
    assert disk.path == directory / OVERLAY_NAME
    assert await store.usage(disk) <= 32 * 1024
    run("qemu-img", "check", disk.path)
    information = run("qemu-img", "info", "--output=json", disk.path)
    assert f'"virtual-size": {size},' in information
    if size <= 256 * MIB + 512:
        assert "identical" in run("qemu-img", "compare", "-f", "raw", "-F", "qcow2", template, disk.path)
    before = template.stat().st_mtime_ns, template.read_bytes()[:8192] if size <= 64 * MIB else b""
    run("qemu-io", "-c", f"write -P 7 {size - 4096} 4096", "-c", "write -P 8 0 512", disk.path)
    run("qemu-io", "-r", "-c", f"read -P 7 {size - 4096} 4096", "-c", "read -P 8 0 512", disk.path)
    run("qemu-img", "check", disk.path)
    assert before == (template.stat().st_mtime_ns, template.read_bytes()[:8192] if size <= 64 * MIB else b"")


async def test_a_vmm_without_qcow2_gets_a_sparse_copy(tmp_path: Path, no_reflink: list[int]) -> None:
    template = make_template(tmp_path / "template.raw")
    store = DiskStore(RAW_ONLY)
    for name in ("one", "two"):
        directory = tmp_path / name
        directory.mkdir()
        disk = await store.create(template, directory)
        assert (disk.path, disk.format) == (directory / RAW_NAME, DiskFormat.RAW)
        assert disk.path.read_bytes() == template.read_bytes()
        assert await store.usage(disk) < MIB
        await store.remove(directory)
        await store.remove(directory)
        assert list(directory.iterdir()) == []
    assert len(no_reflink) == 1, "a refused reflink is tried again for every disk"


async def test_a_reflink_is_taken_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = make_template(tmp_path / "template.raw")
    directory = tmp_path / "sandbox"
    directory.mkdir()

    def clone(descriptor: int, request: int, argument: int) -> int:
        assert request == 0x40049409
        copy_sparse(argument, descriptor)
        return 0

    monkeypatch.setattr(copying.fcntl, "ioctl", clone)
    disk = await DiskStore(ALL).create(template, directory)
    assert (disk.path.name, disk.format) == (RAW_NAME, DiskFormat.RAW)
    assert disk.path.read_bytes() == template.read_bytes()


@pytest.mark.parametrize("formats", [ALL, RAW_ONLY])
async def test_a_full_disk_leaves_nothing(
    tmp_path: Path, no_reflink: list[int], formats: frozenset[DiskFormat], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = make_template(tmp_path / "template.raw")
    directory = tmp_path / "sandbox"
    directory.mkdir()

    def full(descriptor: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "ftruncate", full)
    with pytest.raises(InsufficientStorageError, match="no space left"):
        await DiskStore(formats).create(template, directory)
    assert list(directory.iterdir()) == []


async def test_what_is_missing_or_in_the_way_is_named(tmp_path: Path, no_reflink: list[int]) -> None:
    template = make_template(tmp_path / "template.raw")
    store = DiskStore(ALL)
    with pytest.raises(StorageError, match="nowhere"):
        await store.create(tmp_path / "nowhere", tmp_path)
    with pytest.raises(StorageError, match="missing"):
        await store.create(template, tmp_path / "missing")
    directory = tmp_path / "sandbox"
    directory.mkdir()
    disk = await store.create(template, directory)
    with pytest.raises(StorageError, match="exists"):
        await store.create(template, directory)
    assert disk.path.exists(), "a refused second call removed the first one's disk"
    await store.remove(tmp_path / "missing")
    with pytest.raises(StorageError):
        free_bytes(tmp_path / "missing")
    assert free_bytes(tmp_path) > 0


async def test_a_cancelled_create_leaves_nothing(
    tmp_path: Path, no_reflink: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    template = make_template(tmp_path / "template.raw")
    directory = tmp_path / "sandbox"
    directory.mkdir()
    loop = asyncio.get_running_loop()
    entered, leave = asyncio.Event(), asyncio.Event()
    real = copy_sparse

    def slow(source: int, destination: int) -> int:
        loop.call_soon_threadsafe(entered.set)
        asyncio.run_coroutine_threadsafe(leave.wait(), loop).result()
        return real(source, destination)

    monkeypatch.setattr(file_disks, "copy_sparse", slow)
    task = asyncio.create_task(DiskStore(RAW_ONLY).create(template, directory))
    await entered.wait()
    task.cancel()
    leave.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert list(directory.iterdir()) == []


pieces = st.lists(st.tuples(st.integers(0, 3 * MIB), st.binary(min_size=1, max_size=9000)), max_size=8)


@pytest.mark.parametrize("kernel_copies", [True, False])
@settings(max_examples=40, deadline=None)
@given(size=st.integers(0, 4 * MIB), written=pieces)
def test_a_sparse_copy_is_equal_and_keeps_holes(
    kernel_copies: bool, size: int, written: list[tuple[int, bytes]]
) -> None:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        if not kernel_copies:

            def refuse(*_: object, **__: object) -> int:
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

            patch.setattr(os, "copy_file_range", refuse)
        source, copy = Path(name, "source"), Path(name, "copy")
        with source.open("wb") as file:
            file.truncate(size)
            for offset, data in written:
                file.seek(offset)
                file.write(data)
        with source.open("rb") as original, copy.open("wb") as target:
            copied = copy_sparse(original.fileno(), target.fileno())
        assert copy.read_bytes() == source.read_bytes()
        assert copied <= source.stat().st_size
        if not written:
            assert copied == 0
