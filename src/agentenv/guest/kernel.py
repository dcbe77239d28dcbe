"""The guest kernel: fetch Debian's or Ubuntu's package, unpack it to an ELF `vmlinux`, pick its modules.

Nothing is installed on the host. This file knows package tools and file formats; where the results lie is the concern
of `assets.py`.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import shutil
import struct
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentenv.errors import AssetError

KERNEL_PACKAGES: tuple[str, ...] = (
    "linux-image-6.12-cloud-amd64",
    "linux-image-cloud-amd64",
    "linux-image-virtual-hwe-24.04",
    "linux-image-virtual",
    "linux-image-kvm",
    "linux-image-amd64",
    "linux-image-generic",
)
"""Packages to try, best first: Debian 12 backported cloud kernel, Debian 13 cloud, Ubuntu, then the big ones."""

MINIMUM_KERNEL = (6, 1)
"""Older kernels lack cgroup and io_uring features that the agent and the disks use."""

KERNEL_ARGUMENTS: tuple[str, ...] = (
    "cryptomgr.notests",
    "initcall_blacklist=jent_mod_init,load_system_certificate_list",
    "nowatchdog",
    "rcupdate.rcu_cpu_stall_suppress=1",
)
"""Kernel command line words for every guest, whatever the VMM and the acceleration.

The first two leave out self-tests, a second jitter collector, and certificates that only prove the distribution's
signatures of modules, which here come with the kernel: together about a fifth of the CPU time of an emulated boot. The
others keep the kernel from reporting stalls, which is what a pause of the whole machine looks like from inside.
"""

BOOT_MODULES: tuple[str, ...] = (
    "virtio_mmio",
    "virtio_blk",
    "crc32c_generic",
    "ext4",
    "virtio_net",
    "virtio-rng",
    "button",
    "evdev",
    "tcp_diag",
)
"""What must be loaded before the root disk, the network and the power button are there, and for closing connections
when a saved guest lives again. What they depend on is found in the modules themselves."""

OPTIONAL_MODULES = frozenset({"crc32c_generic", "virtio-rng", "button", "evdev", "tcp_diag"})
"""Boot modules that a kernel may lack."""

_ELF_MAGIC = b"\x7fELF"
_MODULE_SUFFIXES = (".ko", ".ko.xz", ".ko.zst", ".ko.gz")


@dataclass(frozen=True, slots=True)
class KernelPackage:
    """A package as the host's package index has it."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class Module:
    """A kernel module, uncompressed."""

    name: str
    content: bytes


def find_package(candidates: Sequence[str] = KERNEL_PACKAGES) -> KernelPackage:
    """Find the concrete kernel package of the best candidate that the host's package index knows.

    Meta-packages are followed to the image they depend on.

    Raises:
        AssetError: apt is missing, or no candidate is available in a recent enough version.
    """
    if shutil.which("apt-cache") is None:
        raise AssetError(
            "making the guest kernel needs apt (Debian or Ubuntu); elsewhere set kernel.path to an ELF vmlinux "
            "and kernel.modules to its modules"
        )
    refused: list[str] = []
    for candidate in candidates:
        package = _resolve(candidate)
        if package is None:
            refused.append(f"{candidate}: not available")
        elif (release := _release_of(package.name)) is None or release < MINIMUM_KERNEL:
            refused.append(f"{candidate}: {package.name} is too old")
        else:
            return package
    raise AssetError(
        "no guest kernel package is available (run `apt-get update`, or set kernel.path). Tried: " + "; ".join(refused)
    )


def _resolve(name: str) -> KernelPackage | None:
    for _ in range(4):
        fields = _show(name)
        if fields is None:
            return None
        image = re.search(r"\blinux-image-(?:unsigned-)?\d[\w.+~-]*", fields.get("Depends", ""))
        if image is None or _release_of(name) is not None:
            return KernelPackage(name, fields["Version"])
        name = image.group()
    return None


def _show(name: str) -> dict[str, str] | None:
    result = subprocess.run(
        ["apt-cache", "show", "--no-all-versions", name], capture_output=True, text=True, check=False
    )
    if result.returncode != 0:
        return None
    fields: dict[str, str] = {}
    for line in result.stdout.splitlines():
        key, separator, value = line.partition(": ")
        if separator and not line.startswith(" "):
            fields.setdefault(key, value)
    return fields if "Version" in fields else None


def _release_of(name: str) -> tuple[int, int] | None:
    """Kernel release in a concrete package's name; None for the name of a meta-package."""
    match = re.match(r"linux-image-(?:unsigned-)?(\d+)\.(\d+)\.\d", name)
    return (int(match.group(1)), int(match.group(2))) if match else None


def fetch_package(package: KernelPackage, directory: Path) -> tuple[Path, ...]:
    """Download a kernel package, and its modules package where that is one of its own (Ubuntu), into a directory.

    Raises:
        AssetError: the download failed; the message has apt's last line.
    """
    names = [package.name]
    modules = re.sub(r"^linux-image-(?:unsigned-)?", "linux-modules-", package.name)
    if _show(modules) is not None:
        names.append(modules)
    _run(
        ["apt-get", "download", "-q", "-o", "APT::Sandbox::User=root", *names],
        directory,
        f"downloading {' '.join(names)}",
    )
    return tuple(sorted(directory.glob("*.deb")))


def unpack_package(packages: Iterable[Path], directory: Path) -> None:
    """Unpack package files into a directory.

    Raises:
        AssetError: a package is damaged, or `dpkg-deb` is missing.
    """
    for package in packages:
        _run(["dpkg-deb", "-x", str(package), str(directory)], directory, f"unpacking {package.name}")


def find_image(directory: Path) -> tuple[Path, str]:
    """The compressed kernel image in an unpacked package, and its release (`uname -r`).

    Raises:
        AssetError: there is no image.
    """
    images = sorted((directory / "boot").glob("vmlinuz-*"))
    if not images:
        raise AssetError("the kernel package holds no boot/vmlinuz-*; set kernel.path to an ELF vmlinux")
    return images[-1], images[-1].name.removeprefix("vmlinuz-")


def find_modules_directory(directory: Path, release: str) -> Path:
    """The directory of modules in an unpacked package.

    Raises:
        AssetError: the package has no modules of that release.
    """
    for parent in ("lib/modules", "usr/lib/modules"):
        if (directory / parent / release).is_dir():
            return directory / parent / release
    raise AssetError(f"the kernel package holds no modules of {release}; set kernel.path and kernel.modules")


def extract_vmlinux(image: bytes) -> bytes:
    """Unpack the ELF kernel inside of a bzImage.

    The payload's place is in the setup header (source: Linux, Documentation/arch/x86/boot.rst: `setup_sects` at 0x1f1,
    `payload_offset` at 0x248 and `payload_length` at 0x24c from protocol 2.08 on). An ELF file is returned as it is.

    Raises:
        AssetError: it is no x86 kernel image, its compression is unknown, or what comes out is no ELF file.
    """
    if image[:4] == _ELF_MAGIC:
        return image
    if len(image) < 0x250 or image[0x202:0x206] != b"HdrS":
        raise AssetError("the kernel image is neither an ELF file nor an x86 bzImage")
    (protocol,) = struct.unpack_from("<H", image, 0x206)
    if protocol < 0x0208:
        raise AssetError("the kernel image is too old to say where its payload is")
    offset, length = struct.unpack_from("<II", image, 0x248)
    start = ((image[0x1F1] or 4) + 1) * 512 + offset
    payload = image[start : start + length]
    if len(payload) != length or length < 8:
        raise AssetError("the kernel image is cut off")
    vmlinux = _decompress_payload(payload)
    if vmlinux[:4] != _ELF_MAGIC:
        raise AssetError("the kernel image's payload is not an ELF file")
    return vmlinux


def release_in(vmlinux: bytes) -> str:
    """The release (`uname -r`) that a kernel's own banner names; `unknown` where it has none."""
    match = re.search(rb"Linux version (\d[\w.+~-]*) ", vmlinux)
    return match.group(1).decode() if match else "unknown"


def _decompress_payload(payload: bytes) -> bytes:
    # All but gzip carry the uncompressed size in four more bytes, which strict decoders refuse.
    body = payload[:-4]
    try:
        if payload.startswith(b"\x1f\x8b"):
            return gzip.decompress(payload)
        if payload.startswith(b"\x28\xb5\x2f\xfd"):
            return _pipe(["zstd", "-dc"], body)
        if payload.startswith(b"\x02\x21\x4c\x18"):
            return _pipe(["lz4", "-dc"], body)
        if payload.startswith(b"\xfd7zXZ\x00"):
            return lzma.decompress(body)
        if payload.startswith(b"BZh"):
            return bz2.decompress(body)
        if payload.startswith(b"\x5d\x00\x00"):
            return lzma.decompress(body, format=lzma.FORMAT_ALONE)
    except (OSError, EOFError, lzma.LZMAError, ValueError) as error:
        raise AssetError(f"the kernel image's payload is damaged: {error}") from error
    raise AssetError(f"the kernel image's payload has an unknown compression ({payload[:6].hex()})")


def read_module(path: Path) -> bytes:
    """A module's ELF file, decompressed.

    Raises:
        AssetError: the file cannot be read, or is no module.
    """
    try:
        data = path.read_bytes()
        if path.name.endswith(".xz"):
            data = lzma.decompress(data)
        elif path.name.endswith(".gz"):
            data = gzip.decompress(data)
        elif path.name.endswith(".zst"):
            data = _pipe(["zstd", "-dc"], data)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise AssetError(f"cannot read the kernel module {path.name}: {error}") from error
    if data[:4] != _ELF_MAGIC:
        raise AssetError(f"the kernel module {path.name} is not an ELF file")
    return data


def module_dependencies(module: bytes) -> tuple[str, ...]:
    """Names that a module's `.modinfo` section lists as `depends`, canonical (with `_`).

    Raises:
        AssetError: the file has no such section.
    """
    for word in _section(module, b".modinfo").split(b"\0"):
        if word.startswith(b"depends="):
            return tuple(_canonical(name) for name in word[8:].decode().split(",") if name)
    return ()


def _section(elf: bytes, wanted: bytes) -> bytes:
    """A section of a little-endian 64-bit ELF file (source: elf(5))."""
    try:
        (table,) = struct.unpack_from("<Q", elf, 0x28)
        size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
        headers = [struct.unpack_from("<IIQQQQ", elf, table + index * size) for index in range(count)]
        names = headers[names_index][4]
        for name, _, _, _, offset, length in headers:
            start = names + name
            if elf[start : elf.index(b"\0", start)] == wanted:
                return elf[offset : offset + length]
    except (struct.error, IndexError, ValueError) as error:
        raise AssetError("a kernel module is damaged") from error
    raise AssetError(f"a kernel module has no {wanted.decode()} section")


def _canonical(name: str) -> str:
    return name.replace("-", "_")


def pick_modules(
    directory: Path, wanted: Sequence[str] = BOOT_MODULES, optional: frozenset[str] = OPTIONAL_MODULES
) -> tuple[Module, ...]:
    """Collect modules and what they depend on, in an order in which they can be loaded.

    Modules that are built into the kernel (`modules.builtin`) are left out.

    Args:
        directory: `/lib/modules/<release>` of the kernel.
        wanted: module names, most urgent first.
        optional: those that may be missing.

    Raises:
        AssetError: a needed module is neither there nor built in.
    """
    files = {
        _canonical(path.name.split(".ko")[0]): path
        for path in sorted(directory.rglob("*.ko*"))
        if path.name.endswith(_MODULE_SUFFIXES)
    }
    builtin_list = directory / "modules.builtin"
    builtin = (
        {_canonical(Path(line).name.split(".ko")[0]) for line in builtin_list.read_text().split()}
        if builtin_list.is_file()
        else set()
    )
    picked: dict[str, Module] = {}

    def visit(name: str, needed_by: tuple[str, ...]) -> None:
        name = _canonical(name)
        if name in picked or name in builtin:
            return
        if name in needed_by:
            raise AssetError(f"the modules {', '.join(needed_by)} in {directory.name} depend on each other")
        if name not in files:
            asked = f" (needed by {needed_by[-1]})" if needed_by else ""
            raise AssetError(
                f"the kernel in {directory.name} lacks the module {name}{asked}; choose another kernel.path"
            )
        content = read_module(files[name])
        for dependency in module_dependencies(content):
            visit(dependency, (*needed_by, name))
        picked[name] = Module(name, content)

    for name in wanted:
        if name in optional and _canonical(name) not in files:
            continue
        visit(name, ())
    return tuple(picked.values())


def _pipe(command: list[str], data: bytes) -> bytes:
    try:
        result = subprocess.run(command, input=data, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise AssetError(f"`{command[0]}` is missing: install it (`apt-get install {command[0]}`)") from error
    if result.returncode != 0:
        raise AssetError(f"`{' '.join(command)}` failed: {result.stderr.decode(errors='replace').strip()}")
    return result.stdout


def _run(command: list[str], directory: Path, purpose: str) -> None:
    try:
        result = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise AssetError(f"{purpose} failed: `{command[0]}` is missing on this host") from error
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines() or [f"exit code {result.returncode}"]
        raise AssetError(f"{purpose} failed: {lines[-1]}")
