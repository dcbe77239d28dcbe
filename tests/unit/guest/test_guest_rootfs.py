"""Mirrors of the host, the recipe's digest, and images written without root."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from agentenv.errors import AssetError
from agentenv.guest import rootfs
from agentenv.guest.rootfs import Mirror, RootfsRecipe, host_mirror, write_ext4

DEFAULT = Mirror(rootfs.DEFAULT_ARCHIVE, rootfs.DEFAULT_SECURITY)


def _host(root: Path, files: dict[str, str], release: str = 'ID=debian\nVERSION_CODENAME="trixie"\n') -> Path:
    for name, text in {"etc/os-release": release, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_mirrors_of_the_one_line_form(tmp_path: Path) -> None:
    sources = (
        "# deb http://commented.example/debian trixie main\n"
        "deb-src http://source.example/debian trixie main\n"
        "deb cdrom:[disc]/ trixie main\n"
        "deb http://other.example/debian sid main\n"
        "deb [arch=amd64 signed-by=/x] https://mirror.example/debian/ trixie contrib main # ours\n"
        "deb http://second.example/debian trixie main\n"
        "deb https://mirror.example/security trixie-security main\n"
    )
    host = _host(tmp_path, {"etc/apt/sources.list": sources})
    assert host_mirror(host) == Mirror("https://mirror.example/debian", "https://mirror.example/security")


def test_mirrors_of_the_stanza_form(tmp_path: Path) -> None:
    sources = (
        "Types: deb-src\nURIs: http://source.example/\nSuites: trixie\nComponents: main\n\n"
        "Enabled: no\nTypes: deb\nURIs: http://off.example/\nSuites: trixie\nComponents: main\n\n"
        "Types: deb deb-src\n# a comment\nURIs:\n  http://mirror.example/debian/\nSuites: trixie-updates trixie\n"
        "Components: main\nSigned-By:\n -----BEGIN\n .\n\n"
        "Types: deb\nURIs: http://mirror.example/sec\nSuites: trixie-security\nComponents: main\n"
    )
    host = _host(tmp_path, {"etc/apt/sources.list.d/debian.sources": sources})
    assert host_mirror(host) == Mirror("http://mirror.example/debian", "http://mirror.example/sec")


def test_hosts_that_are_not_debian_or_say_nothing_get_the_default(tmp_path: Path) -> None:
    ubuntu = _host(
        tmp_path / "ubuntu",
        {"etc/apt/sources.list": "deb http://archive.example/ubuntu noble main\n"},
        "ID=ubuntu\nVERSION_CODENAME=noble\n",
    )
    assert host_mirror(ubuntu) == DEFAULT
    assert host_mirror(tmp_path / "empty") == DEFAULT
    assert host_mirror(_host(tmp_path / "bare", {})) == DEFAULT


def test_the_digest_follows_the_recipe() -> None:
    recipe = RootfsRecipe(disk_mib=1024)
    assert recipe.digest() == RootfsRecipe(disk_mib=1024).digest()
    others = {
        RootfsRecipe(disk_mib=2048).digest(),
        RootfsRecipe(disk_mib=1024, packages=("bash",)).digest(),
        RootfsRecipe(disk_mib=1024, version=rootfs.RECIPE_VERSION + 1).digest(),
        recipe.digest(),
    }
    assert len(others) == 4


needs_ext4 = pytest.mark.skipif(
    shutil.which("mke2fs", path=os.environ["PATH"] + ":/usr/sbin:/sbin") is None, reason="needs e2fsprogs"
)


def _sbin(*command: str) -> str:
    environment = {**os.environ, "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@needs_ext4
def test_an_image_holds_the_tree_and_stays_sparse(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "etc").mkdir(parents=True)
    (tree / "etc/hello").write_text("hello\n")
    (tree / "etc/hello").chmod(0o640)
    (tree / "link").symlink_to("etc/hello")
    image = tmp_path / "image"
    write_ext4(tree, image, 512, "seed")
    assert image.stat().st_size == 512 * 1024 * 1024
    assert image.stat().st_blocks * 512 < 32 * 1024 * 1024
    assert _sbin("debugfs", "-R", "cat /etc/hello", str(image)) == "hello\n"
    assert "Mode:  0640" in _sbin("debugfs", "-R", "stat /etc/hello", str(image))
    header = _sbin("dumpe2fs", "-h", str(image))
    assert "Reserved block count:     0" in header
    _sbin("e2fsck", "-fn", str(image))
    other = tmp_path / "other"
    write_ext4(tree, other, 512, "seed")
    identity = [line for line in header.splitlines() if "UUID" in line or "Hash Seed" in line]
    assert identity == [
        line for line in _sbin("dumpe2fs", "-h", str(other)).splitlines() if "UUID" in line or "Hash Seed" in line
    ]


@needs_ext4
def test_a_tree_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "big").write_bytes(os.urandom(20 * 1024 * 1024))
    with pytest.raises(AssetError, match="mke2fs"):
        write_ext4(tree, tmp_path / "image", 32, "seed")


def test_without_root_the_message_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(AssetError, match="sudo make setup"):
        rootfs.build_rootfs(RootfsRecipe(disk_mib=512), tmp_path, tmp_path / "image", lambda *_: None)
