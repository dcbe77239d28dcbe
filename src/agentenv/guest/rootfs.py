"""The root file system of the `base` template: Debian from a package mirror, written into an ext4 image.

Needs root (mmdebstrap makes files of many owners), a Debian mirror, and no container registry. Where the image lies and
when it is made again is the concern of `assets.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from agentenv.errors import AssetError, InsufficientStorageError

Progress = Callable[[str, str, float | None], None]
"""Called with a phase, a detail, and the done share of the phase (0 to 1) or None."""

RECIPE_VERSION = 1
"""Raised whenever `_finish` changes what the image holds."""

SUITE = "bookworm"
DEFAULT_ARCHIVE = "http://deb.debian.org/debian"
DEFAULT_SECURITY = "http://deb.debian.org/debian-security"
DEBIAN_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")

PACKAGES: tuple[str, ...] = (
    "bash",
    "ca-certificates",
    "curl",
    "file",
    "g++",
    "gcc",
    "git",
    "iproute2",
    "iputils-ping",
    "less",
    "libc6-dev",
    "make",
    "nano",
    "netbase",
    "nodejs",
    "openssl",
    "procps",
    "psmisc",
    "python-is-python3",
    "python3",
    "python3-pip",
    "python3-venv",
    "rsync",
    "sudo",
    "tzdata",
    "unzip",
    "wget",
    "xz-utils",
    "zip",
    "zstd",
)

_NEEDED_FREE_BYTES = 2 * 1024**3
_USER = "user"
_USER_ID = 1000
_NAMESPACE = uuid.UUID("6f6fb5c5-6c1f-4a0e-9b0c-6b5a5b2f9a11")

# What mmdebstrap prints when a step begins, and the share of the whole that is done by then (measured).
_STEPS: tuple[tuple[str, str, float], ...] = (
    ("running apt-get update", "reading package lists", 0.02),
    ("downloading packages", "downloading packages", 0.08),
    ("extracting archives", "unpacking the essential packages", 0.2),
    ("installing essential packages", "installing the essential packages", 0.25),
    ("installing remaining packages", "installing packages", 0.4),
    ("cleaning package lists", "cleaning up", 0.98),
)


@dataclass(frozen=True, slots=True)
class Mirror:
    """Where Debian packages come from."""

    archive: str
    security: str


@dataclass(frozen=True, slots=True)
class RootfsRecipe:
    """All that decides what the image holds; `digest` names it."""

    disk_mib: int
    suite: str = SUITE
    packages: tuple[str, ...] = PACKAGES
    version: int = RECIPE_VERSION

    def digest(self) -> str:
        """sha256 over the recipe, hex. Mirrors do not count: they hold the same packages."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def host_mirror(root: Path = Path("/")) -> Mirror:
    """The mirror that this host itself uses when it runs Debian, else Debian's own.

    Only http and https mirrors count: those of other kinds cannot be assumed to hold the suite.

    Args:
        root: where to look for `/etc/os-release` and `/etc/apt`.
    """
    release = _os_release(root / "etc/os-release")
    if release.get("ID") != "debian":
        return Mirror(DEFAULT_ARCHIVE, DEFAULT_SECURITY)
    codename = release.get("VERSION_CODENAME", "")
    archive = security = None
    for uri, suite, components in _apt_sources(root / "etc/apt"):
        if "main" not in components or not uri.startswith(("http://", "https://")):
            continue
        if suite == codename:
            archive = archive or uri
        elif suite == f"{codename}-security":
            security = security or uri
    return Mirror(archive or DEFAULT_ARCHIVE, security or DEFAULT_SECURITY)


def _os_release(path: Path) -> Mapping[str, str]:
    try:
        text = path.read_text()
    except OSError:
        return {}
    pairs = (line.partition("=") for line in text.splitlines() if "=" in line)
    return {key: value.strip("\"'") for key, _, value in pairs}


def _apt_sources(directory: Path) -> Iterator[tuple[str, str, list[str]]]:
    """Enabled binary package sources as (URI, suite, components); both forms of sources.list(5)."""
    extra = directory / "sources.list.d"
    for path in [directory / "sources.list", *sorted(extra.glob("*.list"))]:
        for line in _read_lines(path):
            match = re.match(r"deb\s+(?:\[[^]]*\]\s*)?(\S+)\s+(\S+)\s*(.*)", line)
            if match:
                yield match.group(1).rstrip("/"), match.group(2), match.group(3).split("#")[0].split()
    for path in sorted(extra.glob("*.sources")):
        for stanza in re.split(r"\n\s*\n", "\n".join(_read_lines(path))):
            fields: dict[str, list[str]] = {}
            key = ""
            for line in stanza.splitlines():
                if line.startswith("#"):
                    continue
                if line[:1].isspace():
                    fields.setdefault(key, []).extend(line.split())
                elif ":" in line:
                    key, _, value = line.partition(":")
                    key = key.strip().lower()
                    fields[key] = value.split()
            if "deb" not in fields.get("types", []) or fields.get("enabled") == ["no"]:
                continue
            for uri in fields.get("uris", []):
                for suite in fields.get("suites", []):
                    yield uri.rstrip("/"), suite, fields.get("components", [])


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def build_rootfs(recipe: RootfsRecipe, scratch: Path, destination: Path, progress: Progress) -> None:
    """Make the image. Takes a minute or two, most of it installing packages.

    Args:
        recipe: what to make.
        scratch: an empty directory for the unpacked tree, on a file system with some 2 GiB free; emptied again.
        destination: the image file; the caller moves it to its final name.
        progress: told what happens.

    Raises:
        AssetError: not root, a tool is missing, or the mirror or a package failed (with the tool's last lines).
        InsufficientStorageError: too little room.
    """
    if os.geteuid() != 0:
        raise AssetError("making the base root file system needs root: run `sudo make setup`")
    for tool, package in (("mmdebstrap", "mmdebstrap"), ("mke2fs", "e2fsprogs")):
        if _which(tool) is None:
            raise AssetError(f"`{tool}` is missing: install it (`apt-get install {package}`)")
    if not DEBIAN_KEYRING.exists():
        raise AssetError("Debian's signing keys are missing: `apt-get install debian-archive-keyring`")
    if shutil.disk_usage(scratch).free < _NEEDED_FREE_BYTES:
        raise InsufficientStorageError(f"making the base root file system needs 2 GiB free in {scratch}")
    tree = scratch / "tree"
    try:
        _bootstrap(recipe, tree, host_mirror(), progress)
        progress("root file system", "adding the user", 0.98)
        _finish(recipe, tree)
        progress("root file system", "writing the image", 0.99)
        write_ext4(tree, destination, recipe.disk_mib, recipe.digest())
    finally:
        shutil.rmtree(tree, ignore_errors=True)


def _bootstrap(recipe: RootfsRecipe, tree: Path, mirror: Mirror, progress: Progress) -> None:
    command = [
        "mmdebstrap",
        "--mode=root",
        "--format=directory",
        "--variant=minbase",
        "--architectures=amd64",
        f"--keyring={DEBIAN_KEYRING}",
        f"--include={','.join(recipe.packages)}",
        '--aptopt=APT::Install-Recommends "false"',
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-include=/usr/share/doc/*/copyright",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        recipe.suite,
        str(tree),
        f"deb {mirror.archive} {recipe.suite} main",
        f"deb {mirror.archive} {recipe.suite}-updates main",
        f"deb {mirror.security} {recipe.suite}-security main",
    ]
    # A session of its own, so that everything mmdebstrap started ends with it when we are interrupted.
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env={**os.environ, **_proxy_environment(), "LC_ALL": "C.UTF-8"},
        start_new_session=True,
    )
    last: list[str] = []
    try:
        assert process.stderr is not None  # noqa: S101 - it was asked for above
        for line in process.stderr:
            last = [*last[-9:], line.rstrip()]
            for needle, detail, fraction in _STEPS:
                if needle in line:
                    progress("root file system", detail, fraction)
        code = process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    if code != 0:
        reasons = [line for line in last if line.startswith("E:")] or last
        raise AssetError(f"making the base root file system failed: {' | '.join(reasons[-3:]) or f'exit code {code}'}")


def _proxy_environment() -> dict[str, str]:
    """The proxies of the host's apt, which mmdebstrap does not read by itself."""
    if shutil.which("apt-config") is None:
        return {}
    found: dict[str, str] = {}
    for scheme in ("http", "https"):
        result = subprocess.run(
            ["apt-config", "dump", "--format", "%v%n", f"Acquire::{scheme}::Proxy"],
            capture_output=True,
            text=True,
            check=False,
        )
        value = result.stdout.strip()
        if result.returncode == 0 and value and value != "DIRECT" and f"{scheme}_proxy" not in os.environ:
            found[f"{scheme}_proxy"] = value
    return found


def _finish(recipe: RootfsRecipe, tree: Path) -> None:
    """What the packages do not bring: the user, public package sources, files that every guest makes for itself."""
    _run_tool(["chroot", str(tree), "useradd", "-m", "-u", str(_USER_ID), "-s", "/bin/bash", _USER])
    sudoers = tree / "etc/sudoers.d/90-user"
    _write(sudoers, f"{_USER} ALL=(ALL:ALL) NOPASSWD: ALL\n")
    sudoers.chmod(0o440)
    # The build's mirror may be a private one that guests cannot reach.
    _write(
        tree / "etc/apt/sources.list",
        f"deb {DEFAULT_ARCHIVE} {recipe.suite} main\n"
        f"deb {DEFAULT_ARCHIVE} {recipe.suite}-updates main\n"
        f"deb {DEFAULT_SECURITY} {recipe.suite}-security main\n",
    )
    # One machine, one purpose: `pip install` may use the system's Python.
    _write(tree / "etc/pip.conf", "[global]\nbreak-system-packages = true\n")
    _write(tree / "etc/profile.d/locale.sh", "export LANG=${LANG:-C.UTF-8}\n")
    _write(tree / "etc/fstab", "")
    # Present and empty: every guest gets an id of its own at boot.
    _write(tree / "etc/machine-id", "")
    _write(tree / "etc/hostname", "sandbox\n")
    (tree / "etc/hostname").chmod(0o644)
    for name in ("etc/resolv.conf", "etc/apt/apt.conf.d/99mmdebstrap", "var/lib/dbus/machine-id"):
        (tree / name).unlink(missing_ok=True)
    for directory in ("var/log/apt", "var/cache/ldconfig", "var/cache/debconf"):
        for path in (tree / directory).glob("*"):
            path.unlink()
    for pattern in ("var/log/*.log", "var/cache/apt/*.bin"):
        for path in tree.glob(pattern):
            path.unlink()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def write_ext4(tree: Path, destination: Path, disk_mib: int, seed: str) -> None:
    """Write a directory tree into a sparse ext4 image, without mounting anything.

    Inode tables and journal are zero from the start (holes), so that no guest writes them later; no blocks are reserved
    for root. The same seed gives the same file system id and directory hash.

    Args:
        tree: the directory; owners, modes, links and extended attributes are kept.
        destination: the file to make.
        disk_mib: virtual size in MiB.
        seed: any text.

    Raises:
        AssetError: the tree does not fit, or `mke2fs` failed.
    """
    identity = str(uuid.uuid5(_NAMESPACE, seed))
    with destination.open("wb") as file:
        file.truncate(disk_mib * 1024 * 1024)
    _run_tool(
        [
            _which("mke2fs") or "mke2fs",
            *("-q", "-F", "-t", "ext4", "-L", "root", "-m", "0", "-J", "size=16"),
            *("-U", identity, "-d", str(tree)),
            *("-E", f"lazy_itable_init=0,lazy_journal_init=0,nodiscard,root_owner=0:0,hash_seed={identity}"),
            str(destination),
        ]
    )


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin")


def _run_tool(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except FileNotFoundError as error:
        raise AssetError(f"`{command[0]}` is missing on this host") from error
    if result.returncode != 0:
        lines = (result.stderr or result.stdout).strip().splitlines() or [f"exit code {result.returncode}"]
        raise AssetError(f"`{Path(command[0]).name}` failed: {lines[-1]}")
