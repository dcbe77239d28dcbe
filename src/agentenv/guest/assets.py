"""Assets of a node: guest kernel, its boot modules, initramfs, and the block daemon, below `$AENV_HOME/assets`.

`build_assets` makes what changed, `load_assets` finds what is there. Files have their content in their names and are
never written again, so a running server keeps using what it loaded.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv import durable
from agentenv.config import Settings
from agentenv.errors import AssetError, SnapshotError
from agentenv.guest import kernel
from agentenv.guest.initramfs import build_initramfs
from agentenv.guest.rootfs import Progress
from agentenv.snapshots.encoding import decode

MANIFEST = "assets.json"
_LAYOUT = 1
"""Raised when the content of the initramfs or of the kernel directory changes for the same inputs."""
_KEPT = {"initramfs-*": 3, "vmlinux-*": 2, "aenv-blockd-*": 3}
"""How many files of a kind stay, the newest first: a running server may use an older one."""
_MEND = "run `make setup`"


@dataclass(frozen=True, slots=True)
class GuestAssets:
    """What every guest boots from, and the program that serves its disk."""

    kernel: Path
    """ELF `vmlinux`."""
    kernel_version: str
    """As `uname -r` says it in the guest."""
    initramfs: Path
    guest_version: str
    """What `aenv-guest --version` says."""
    blockd: Path
    """The block daemon's program."""


def load_assets(settings: Settings) -> GuestAssets:
    """Find the assets that `build_assets` made.

    Raises:
        AssetError: there are none, or some are missing or damaged.
    """
    directory = settings.paths.assets
    manifest = _read_manifest(directory)
    if manifest is None:
        raise AssetError(f"there are no guest assets in {directory}: {_MEND}")
    try:
        assets = GuestAssets(
            kernel=directory / manifest["kernel"]["file"],
            kernel_version=manifest["kernel"]["version"],
            initramfs=directory / manifest["initramfs"]["file"],
            guest_version=manifest["initramfs"]["guest_version"],
            blockd=directory / manifest["blockd"]["file"],
        )
        sizes = (
            (assets.kernel, manifest["kernel"]["size"]),
            (assets.initramfs, manifest["initramfs"]["size"]),
            (assets.blockd, manifest["blockd"]["size"]),
        )
    except (KeyError, TypeError) as error:
        raise AssetError(f"{directory / MANIFEST} is of another version: {_MEND}") from error
    for path, size in sizes:
        if _size(path) != size:
            raise AssetError(f"the guest asset {path} is missing or damaged: {_MEND}")
    if manifest["kernel"].get("inputs") != _kernel_inputs(settings):
        raise AssetError(f"the guest assets in {directory} were made for another choice of kernel: {_MEND}")
    return assets


def assets_are_current(directory: Path) -> bool:
    """Whether assets were ever made there, in the form of this version. Damage is not looked for: see `load_assets`."""
    try:
        content = json.loads((directory / MANIFEST).read_text())
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True
    return not isinstance(content, dict) or "blockd" in content


def build_assets(settings: Settings, guest_binary: Path, blockd_binary: Path, progress: Progress) -> GuestAssets:
    """Make the assets that are missing or whose inputs changed. Blocking; one builder at a time per home.

    The kernel is fetched once and kept; removing `assets.json` makes the next call fetch the newest one.

    Args:
        settings: `home`, `kernel.path` and `kernel.modules` count.
        guest_binary: the static `aenv-guest` program.
        blockd_binary: the `aenv-blockd` program.
        progress: told what happens.

    Raises:
        AssetError: a package, a tool or a file is missing or damaged; the message says which.
    """
    directory = settings.paths.assets
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with durable.exclusive_lock(
            directory / ".lock", lambda: progress("guest assets", "waiting for another build", None)
        ):
            return _build(settings, guest_binary, blockd_binary, directory, progress)
    except OSError as error:
        raise AssetError(f"cannot write guest assets to {directory}: {error}") from error


def _build(
    settings: Settings, guest_binary: Path, blockd_binary: Path, directory: Path, progress: Progress
) -> GuestAssets:
    # The lock is ours, so a scratch directory belongs to a build that was killed.
    for leftover in directory.glob(".build-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    binary = _read_program("guest program", guest_binary)
    blockd = _read_program("block daemon", blockd_binary)

    manifest = _read_manifest(directory) or {}
    kernel_part = manifest.get("kernel", {})
    if kernel_part.get("inputs") != _kernel_inputs(settings) or not _kernel_is_whole(directory, kernel_part):
        kernel_part = _make_kernel(settings, directory, progress)
    initramfs_part = manifest.get("initramfs", {})
    inputs = _digest(str(_LAYOUT), hashlib.sha256(binary).hexdigest(), *_module_files(kernel_part))
    if initramfs_part.get("inputs") != inputs or _size(directory / initramfs_part["file"]) != initramfs_part["size"]:
        progress("guest assets", "writing the initramfs", 0.9)
        modules = [kernel.Module(name, (directory / file).read_bytes()) for name, file in kernel_part["modules"]]
        initramfs_part = {**_make_initramfs(binary, modules, directory), "inputs": inputs}
        initramfs_part["guest_version"] = _version_of("guest program", guest_binary)
    blockd_part = manifest.get("blockd", {})
    digest = hashlib.sha256(blockd).hexdigest()
    if blockd_part.get("sha256") != digest or _size(directory / blockd_part["file"]) != len(blockd):
        version = _version_of("block daemon", blockd_binary)
        blockd_part = {"file": f"aenv-blockd-{version}-{digest[:12]}", "sha256": digest, "size": len(blockd)}
        durable.write_bytes(directory / blockd_part["file"], blockd, mode=0o755)
    wanted = {"kernel": kernel_part, "initramfs": initramfs_part, "blockd": blockd_part}
    if wanted != manifest:
        durable.write_json(directory / MANIFEST, wanted)
        _remove_old(directory, wanted, _saved_digests(settings.paths.snapshots))
    progress("guest assets", f"kernel {kernel_part['version']}", 1.0)
    return load_assets(settings)


def _make_kernel(settings: Settings, directory: Path, progress: Progress) -> dict[str, Any]:
    chosen = settings.kernel.path
    inputs = _kernel_inputs(settings)
    scratch = Path(tempfile.mkdtemp(prefix=".build-", dir=directory))
    try:
        if chosen is not None:
            progress("guest assets", f"reading the kernel {chosen}", 0.1)
            vmlinux = kernel.extract_vmlinux(_read_kernel(chosen))
            version = kernel.release_in(vmlinux)
            modules = kernel.pick_modules(settings.kernel.modules) if settings.kernel.modules is not None else ()
        else:
            progress("guest assets", "looking for a kernel package", 0.0)
            package = kernel.find_package()
            progress("guest assets", f"downloading {package.name} {package.version}", 0.1)
            packages = kernel.fetch_package(package, scratch)
            progress("guest assets", "unpacking the kernel", 0.5)
            tree = scratch / "tree"
            tree.mkdir()
            kernel.unpack_package(packages, tree)
            image, version = kernel.find_image(tree)
            vmlinux = kernel.extract_vmlinux(image.read_bytes())
            progress("guest assets", "choosing the boot modules", 0.8)
            modules = kernel.pick_modules(kernel.find_modules_directory(tree, version))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    digest = hashlib.sha256(vmlinux).hexdigest()
    file = f"vmlinux-{version}-{digest[:12]}"
    durable.write_bytes(directory / file, vmlinux)
    module_files = []
    for module in modules:
        module_files.append([module.name, f"{module.name}-{hashlib.sha256(module.content).hexdigest()[:12]}.ko"])
        durable.write_bytes(directory / module_files[-1][1], module.content)
    return {
        "file": file,
        "inputs": inputs,
        "modules": module_files,
        "size": len(vmlinux),
        "version": version,
    }


def _read_kernel(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise AssetError(f"cannot read the kernel.path {path}: {error.strerror}") from error


def _make_initramfs(binary: bytes, modules: Sequence[kernel.Module], directory: Path) -> dict[str, Any]:
    content = build_initramfs(binary, modules)
    digest = hashlib.sha256(content).hexdigest()
    file = f"initramfs-{digest[:16]}"
    durable.write_bytes(directory / file, content)
    return {"file": file, "size": len(content), "sha256": digest}


def _read_program(what: str, binary: Path) -> bytes:
    try:
        return binary.read_bytes()
    except OSError as error:
        raise AssetError(f"cannot read the {what} {binary}: {error.strerror}; {_MEND}") from error


def _version_of(what: str, binary: Path) -> str:
    """What a program says to `--version`: the version alone, or its own name before it."""
    try:
        result = subprocess.run(
            [str(binary.absolute()), "--version"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise AssetError(f"the {what} {binary} does not run on this host: {error}") from error
    match = re.fullmatch(r"(?:aenv-[a-z]+ )?([\w.+-]{1,64})", result.stdout.strip())
    if result.returncode != 0 or match is None:
        raise AssetError(f"the {what} {binary} does not say its version; {_MEND}")
    return match[1]


def _kernel_inputs(settings: Settings) -> str:
    """What decides about kernel and modules, as a digest. A chosen file counts by size and time, to stay quick."""
    words = [str(_LAYOUT), *kernel.KERNEL_PACKAGES, *kernel.BOOT_MODULES]
    if settings.kernel.path is not None:
        with suppress(OSError):
            status = settings.kernel.path.stat()
            words += [str(settings.kernel.path), str(status.st_size), str(status.st_mtime_ns)]
        words.append(str(settings.kernel.modules))
    return _digest(*words)


def _digest(*words: str) -> str:
    return hashlib.sha256("\0".join(words).encode()).hexdigest()


def _kernel_is_whole(directory: Path, part: dict[str, Any]) -> bool:
    try:
        modules_there = all((directory / file).is_file() for file in _module_files(part))
        return modules_there and _size(directory / part["file"]) == part["size"]
    except (KeyError, TypeError, ValueError):
        return False


def _module_files(part: dict[str, Any]) -> list[str]:
    return [file for _, file in part["modules"]]


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _read_manifest(directory: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict) or not all(isinstance(part, dict) for part in content.values()):
        return None
    return content


def _saved_digests(snapshots: Path) -> frozenset[str]:
    """Digests (hex) of kernels and initramfs that saved machines need in order to be loaded."""
    digests = set()
    for path in snapshots.glob("*/manifest.json"):
        try:
            environment = decode(path.read_bytes(), str(path)).environment
        except (OSError, SnapshotError):  # gone meanwhile, or damaged: no machine is loaded from it
            continue
        if environment is not None:
            digests |= {environment.kernel_digest, environment.initramfs_digest}
    return frozenset(digest.removeprefix("sha256:") for digest in digests)


def _remove_old(directory: Path, manifest: dict[str, Any], saved: Collection[str]) -> None:
    """Drop what neither the manifest nor a saved machine names any more, but for the newest few of `_KEPT`."""
    named = {part["file"] for part in manifest.values()} | set(_module_files(manifest["kernel"]))
    old = [path for path in directory.glob("*.ko") if path.name not in named]
    for pattern, kept in _KEPT.items():
        newest_first = sorted(directory.glob(pattern), key=lambda path: path.stat().st_mtime, reverse=True)
        old += [
            path
            for path in newest_first[kept:]
            # The name ends with the begin of the digest.
            if path.name not in named and not any(digest.startswith(path.name.rsplit("-", 1)[-1]) for digest in saved)
        ]
    for path in old:
        path.unlink()
