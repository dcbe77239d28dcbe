"""Unpacking kernels, choosing modules, finding packages."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import struct
import subprocess
from pathlib import Path

import elf_samples
import pytest

from agentenv.errors import AssetError
from agentenv.guest import kernel


def _with_size(compressed: bytes, plain: bytes) -> bytes:
    return compressed + struct.pack("<I", len(plain))


@pytest.mark.parametrize("compression", ["zstd", "gzip", "xz", "bzip2", "lzma"])
def test_vmlinux_comes_out_of_every_compression(compression: str) -> None:
    plain = elf_samples.vmlinux()
    if compression == "zstd":
        if shutil.which("zstd") is None:
            pytest.skip("needs zstd")
        packed = subprocess.run(["zstd", "-qc"], input=plain, capture_output=True, check=True).stdout
        payload = _with_size(packed, plain)
    elif compression == "gzip":
        payload = gzip.compress(plain)
    elif compression == "xz":
        payload = _with_size(lzma.compress(plain), plain)
    elif compression == "bzip2":
        payload = _with_size(bz2.compress(plain), plain)
    else:
        payload = _with_size(lzma.compress(plain, format=lzma.FORMAT_ALONE), plain)
    assert kernel.extract_vmlinux(elf_samples.bzimage(payload)) == plain


def test_an_elf_kernel_is_taken_as_it_is() -> None:
    assert kernel.extract_vmlinux(elf_samples.vmlinux()) == elf_samples.vmlinux()
    assert kernel.release_in(elf_samples.vmlinux("6.1.2-x+y")) == "6.1.2-x+y"
    assert kernel.release_in(b"\x7fELF") == "unknown"


@pytest.mark.parametrize(
    ("image", "says"),
    [
        (b"", "neither"),
        (b"MZ" + bytes(2000), "neither"),
        (elf_samples.bzimage(b"unknown compression"), "unknown compression"),
        (elf_samples.bzimage(gzip.compress(b"no kernel")), "not an ELF"),
        (elf_samples.bzimage(gzip.compress(bytes(4000))[:-12]), "damaged"),
        (elf_samples.bzimage(gzip.compress(elf_samples.vmlinux()))[:1620], "cut off"),
    ],
)
def test_damaged_images_are_refused_with_a_reason(image: bytes, says: str) -> None:
    with pytest.raises(AssetError, match=says):
        kernel.extract_vmlinux(image)


def _modules(directory: Path, dependencies: dict[str, str], builtin: str = "") -> Path:
    (directory / "kernel").mkdir(parents=True)
    for name, depends in dependencies.items():
        packed = lzma.compress(elf_samples.module(depends, name=name))
        (directory / "kernel" / f"{name}.ko.xz").write_bytes(packed)
    (directory / "modules.builtin").write_text(builtin)
    return directory


def test_modules_come_after_what_they_depend_on(tmp_path: Path) -> None:
    directory = _modules(
        tmp_path / "6.99", {"virtio_net": "net_failover", "net_failover": "failover", "failover": "", "virtio-rng": ""}
    )
    picked = kernel.pick_modules(directory, ("virtio-rng", "virtio_net", "failover"), frozenset())
    assert [module.name for module in picked] == ["virtio_rng", "failover", "net_failover", "virtio_net"]
    assert all(module.content.startswith(b"\x7fELF") for module in picked)


def test_builtin_modules_are_left_out_even_as_dependencies(tmp_path: Path) -> None:
    directory = _modules(tmp_path / "6.99", {"a": "b-c,d", "d": ""}, "kernel/fs/b_c.ko\nkernel/ext4.ko\n")
    picked = kernel.pick_modules(directory, ("ext4", "a"), frozenset())
    assert [module.name for module in picked] == ["d", "a"]


def test_a_missing_module_is_named_with_who_needs_it(tmp_path: Path) -> None:
    directory = _modules(tmp_path / "6.99", {"a": "gone"})
    with pytest.raises(AssetError, match=r"6\.99 lacks the module gone \(needed by a\)"):
        kernel.pick_modules(directory, ("a",), frozenset())
    assert kernel.pick_modules(directory, ("not-there",), frozenset({"not-there"})) == ()


def test_circular_dependencies_end(tmp_path: Path) -> None:
    directory = _modules(tmp_path / "6.99", {"a": "b", "b": "a"})
    with pytest.raises(AssetError, match="depend on each other"):
        kernel.pick_modules(directory, ("a",), frozenset())


def test_uncompressed_modules_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "x.ko"
    path.write_bytes(elf_samples.module("a,b-c"))
    assert kernel.module_dependencies(kernel.read_module(path)) == ("a", "b_c")
    path.write_bytes(b"text")
    with pytest.raises(AssetError, match=r"x\.ko is not an ELF"):
        kernel.read_module(path)
    with pytest.raises(AssetError, match="damaged"):
        kernel.module_dependencies(elf_samples.module("a")[:100])


_APT_CACHE = """#!/bin/sh
for name in "$@"; do :; done
case "$name" in
{cases}
*) exit 100 ;;
esac
"""


def _package_index(directory: Path, monkeypatch: pytest.MonkeyPatch, packages: dict[str, str]) -> None:
    """Put an `apt-cache` first in the path that knows these packages (name to `Depends`)."""
    cases = "\n".join(
        f"{name}) printf 'Package: {name}\\nVersion: 1-{name}\\nDepends: {depends}\\n' ;;"
        for name, depends in packages.items()
    )
    script = directory / "apt-cache"
    script.write_text(_APT_CACHE.format(cases=cases))
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")


def test_meta_packages_lead_to_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = "linux-image-6.12.1+deb12-cloud-amd64"
    _package_index(
        tmp_path, monkeypatch, {"linux-image-6.12-cloud-amd64": f"kmod, {image} (= 1)", image: "linux-image-9.9.9"}
    )
    assert kernel.find_package() == kernel.KernelPackage(image, f"1-{image}")


def test_a_meta_package_that_leads_to_no_image_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = "linux-image-6.8.0-31-generic"
    _package_index(
        tmp_path,
        monkeypatch,
        {"linux-image-virtual": "something-else", "linux-image-generic": f"{image}, firmware", image: "kmod"},
    )
    assert kernel.find_package().name == image


def test_old_kernels_are_passed_over_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = "linux-image-5.15.0-1-generic", "linux-image-6.8.0-1-generic"
    _package_index(
        tmp_path,
        monkeypatch,
        {"linux-image-virtual": old, old: "", "linux-image-generic": new, new: ""},
    )
    assert kernel.find_package().name == new
    _package_index(tmp_path, monkeypatch, {"linux-image-virtual": old, old: ""})
    with pytest.raises(AssetError, match=rf"apt-get update.*{old} is too old"):
        kernel.find_package()


def test_without_apt_the_message_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(AssetError, match=r"kernel\.path"):
        kernel.find_package()
