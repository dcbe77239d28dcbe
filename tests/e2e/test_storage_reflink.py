"""The layer store on file systems that can reflink, and on one that is really full: mounted from a file, as root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agentenv.errors import InsufficientStorageError
from agentenv.storage.images import create_layer_from_raw
from agentenv.storage.layers import LayerStore

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


def write_layer(mount: Path, data_bytes: int) -> Path:
    raw, layer = mount / "raw", mount / "layer"
    with raw.open("wb") as file:
        file.write(os.urandom(data_bytes))
    create_layer_from_raw(raw, layer)
    raw.unlink()
    return layer


def free_bytes(mount: Path) -> int:
    os.sync()
    return shutil.disk_usage(mount).free


@pytest.mark.parametrize("mounted", ["btrfs", "xfs"], indirect=True)
def test_a_layer_that_its_owner_keeps_costs_nothing_and_is_independent(mounted: Path) -> None:
    layer = write_layer(mounted, 64 * MIB)
    content = layer.read_bytes()
    with closing(LayerStore(mounted / "layers")) as store:
        before = free_bytes(mounted)
        stored = store.import_file(layer, owner="test", move=False)
        assert before - free_bytes(mounted) < 8 * MIB, "the layer was copied"
        layer.chmod(0o600)
        with layer.open("r+b") as file:
            file.write(b"changed")
        assert stored.path.read_bytes() == content
        store.verify(stored.digest)


@pytest.mark.parametrize("mounted", ["ext4"], indirect=True)
def test_a_file_system_that_is_full(mounted: Path) -> None:
    layer = write_layer(mounted, 16 * MIB)
    with closing(LayerStore(mounted / "layers")) as store:
        ballast = mounted / "ballast"
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, free_bytes(mounted) - 8 * MIB)
        with pytest.raises(InsufficientStorageError):
            store.import_file(layer, owner="test", move=False)
        assert store.list() == ()
        assert [path for path in (mounted / "layers").rglob("*") if path.is_file() and path.stat().st_size > MIB] == []
        ballast.unlink()
        stored = store.import_file(layer, owner="test", move=False)
        assert stored.path.read_bytes() == layer.read_bytes()
