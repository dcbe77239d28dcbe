"""Disks on file systems that can reflink, and on one that is really full: mounted from a file, so this needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.errors import InsufficientStorageError
from agentenv.storage.file_disks import DiskStore, free_bytes
from agentenv.vmm.base import DiskFormat

pytestmark = pytest.mark.root

MIB = 1024 * 1024
MAKERS = {"btrfs": ("mkfs.btrfs", "-q"), "xfs": ("mkfs.xfs", "-q", "-m", "reflink=1"), "ext4": ("mkfs.ext4", "-q")}


@pytest.fixture
def mounted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of the kind that the test asks for."""
    command = MAKERS[request.param]
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    image, mount = tmp_path / "image", tmp_path / "mount"
    with image.open("wb") as file:
        file.truncate((64 if request.param == "ext4" else 400) * MIB)
    mount.mkdir()
    subprocess.run([*command, image], check=True)
    subprocess.run(["mount", "-o", "loop", image, mount], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", mount], check=True)


def write_template(mount: Path, data_bytes: int) -> Path:
    template = mount / "template.raw"
    with template.open("wb") as file:
        file.write(os.urandom(data_bytes))
        file.truncate(data_bytes + 16 * MIB)
        os.fsync(file.fileno())
    return template


def make_directory(mount: Path, name: str) -> Path:
    directory = mount / name
    directory.mkdir()
    return directory


@pytest.mark.parametrize("mounted", ["btrfs", "xfs"], indirect=True)
async def test_a_reflink_costs_nothing_and_is_independent(mounted: Path) -> None:
    template = write_template(mounted, 32 * MIB)
    store = DiskStore(frozenset(DiskFormat))
    before = free_bytes(mounted)
    made = [await store.create(template, make_directory(mounted, f"sandbox{number}")) for number in range(10)]
    os.sync()
    assert before - free_bytes(mounted) < 8 * MIB, "ten disks of 32 MiB were copied"
    assert {(disk.format, disk.path.name) for disk in made} == {(DiskFormat.RAW, "disk.raw")}
    content = template.read_bytes()
    with made[0].path.open("r+b") as file:
        file.write(b"changed")
    assert template.read_bytes() == content
    assert made[1].path.read_bytes() == content
    assert made[0].path.read_bytes() == b"changed" + content[7:]
    await store.remove(made[0].path.parent)
    assert list(made[0].path.parent.iterdir()) == []


@pytest.mark.parametrize("mounted", ["ext4"], indirect=True)
async def test_a_file_system_that_is_full(mounted: Path) -> None:
    template = write_template(mounted, 24 * MIB)
    directory = make_directory(mounted, "sandbox")
    ballast = mounted / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free_bytes(mounted) - 8 * MIB)
    store = DiskStore(frozenset({DiskFormat.RAW}))
    with pytest.raises(InsufficientStorageError, match="no space left"):
        await store.create(template, directory)
    assert list(directory.iterdir()) == []
    ballast.unlink()
    disk = await store.create(template, directory)
    assert disk.path.read_bytes() == template.read_bytes()
