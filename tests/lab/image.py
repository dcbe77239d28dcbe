"""What the emulated host boots from: its kernel, an initramfs with its modules, and its root disk.

Made once per recipe and kept in the build cache (`AENV_CACHE`), not in the tree; the cache may be removed at any time.
Uses the product's own builders as a library. It must not know what tests do in the host.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from agentenv import durable
from agentenv.guest import kernel
from agentenv.guest.initramfs import build_initramfs
from agentenv.guest.rootfs import RootfsRecipe, build_rootfs

PACKAGES: tuple[str, ...] = (
    "e2fsprogs",
    "fio",
    "iproute2",
    "kmod",
    "nbd-client",
    "procps",
    "python3-minimal",
    "socat",
    "strace",
    "util-linux-extra",
)
"""Debian packages of the root disk, beyond the essential ones."""

ROOT_MIB = 3072
MODULES: tuple[str, ...] = (
    "virtio_pci",
    *(name for name in kernel.BOOT_MODULES if name != "virtio_mmio"),
    "irqbypass",
    "kvm",
    "kvm-amd",
    "ublk_drv",
    "nbd",
    "loop",
    "tun",
    "veth",
)
"""Loaded at boot, in this order."""

HOST_MODULES = "/lab/modules"
"""Directory in the emulated host with `nbd.ko` and `ublk_drv.ko`, for tests that remove and load them."""

_LAYOUT = 1
"""Raised whenever the content changes for the same recipe."""


@dataclass(frozen=True, slots=True)
class LabImage:
    """Files that the emulated host boots from; none is ever written to."""

    kernel: Path
    modules: Path
    """Directory of `<name>.ko`, uncompressed, and `order`, their names in load order."""
    root: Path


def cache_directory() -> Path:
    """Where downloads and builds are kept between runs."""
    chosen = os.environ.get("AENV_CACHE")
    if chosen:
        return Path(chosen) / "lab"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "aenv" / "lab"


def prepare_image(directory: Path) -> LabImage:
    """Find the image in the cache, or make it: a minute or two, a Debian mirror, root.

    Raises:
        AssetError: a package, a tool or the mirror failed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    recipe = RootfsRecipe(disk_mib=ROOT_MIB, packages=PACKAGES)
    root = directory / f"root-{recipe.digest()[:16]}.ext4"
    kernel_words = json.dumps([_LAYOUT, kernel.KERNEL_PACKAGES, MODULES])
    kernel_directory = directory / f"kernel-{hashlib.sha256(kernel_words.encode()).hexdigest()[:16]}"
    with durable.exclusive_lock(directory / ".lock", lambda: print("lab: waiting for another build of the image")):
        # The lock is ours, so a scratch directory belongs to a build that was killed.
        for leftover in directory.glob(".build-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        for path, build in ((root, _build_root), (kernel_directory, _build_kernel)):
            if not path.exists():
                scratch = Path(tempfile.mkdtemp(prefix=".build-", dir=directory))
                try:
                    build(scratch).rename(path)
                finally:
                    shutil.rmtree(scratch, ignore_errors=True)
        for pattern, kept in (("root-*", root), ("kernel-*", kernel_directory)):
            _remove_old(directory, pattern, kept)
    return LabImage(kernel_directory / "vmlinux", kernel_directory / "modules", root)


def initramfs_for(image: LabImage, guest_binary: Path) -> bytes:
    """The archive with the given guest program as init: made anew for each run, since the program changes often."""
    names = (image.modules / "order").read_text().split()
    modules = [kernel.Module(name, (image.modules / f"{name}.ko").read_bytes()) for name in names]
    return build_initramfs(guest_binary.read_bytes(), modules)


def _build_root(scratch: Path) -> Path:
    destination = scratch / "root.ext4"
    tree = scratch / "scratch"
    tree.mkdir()
    build_rootfs(
        RootfsRecipe(disk_mib=ROOT_MIB, packages=PACKAGES),
        tree,
        destination,
        lambda phase, detail, done: print(f"lab: {phase}: {detail}"),
    )
    return destination


def _build_kernel(scratch: Path) -> Path:
    package = kernel.find_package()
    print(f"lab: kernel {package.name} {package.version}")
    tree = scratch / "tree"
    tree.mkdir()
    kernel.unpack_package(kernel.fetch_package(package, scratch), tree)
    image, release = kernel.find_image(tree)
    result = scratch / "kernel"
    (result / "modules").mkdir(parents=True)
    (result / "vmlinux").write_bytes(kernel.extract_vmlinux(image.read_bytes()))
    modules = kernel.pick_modules(kernel.find_modules_directory(tree, release), MODULES)
    for module in modules:
        (result / "modules" / f"{module.name}.ko").write_bytes(module.content)
    (result / "modules/order").write_text("\n".join(module.name for module in modules))
    return result


def _remove_old(directory: Path, pattern: str, kept: Path) -> None:
    """Keep the two newest besides the current one: another clone may be running on an older recipe."""
    others = sorted(
        (path for path in directory.glob(pattern) if path != kept), key=lambda path: path.stat().st_mtime, reverse=True
    )
    for path in others[2:]:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
