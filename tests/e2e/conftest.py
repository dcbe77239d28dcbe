"""Fixtures of tests that run machines without a server: the kernel, a tiny guest, namespaces with taps."""

from __future__ import annotations

import secrets
import shutil
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agentenv.config import load_settings
from agentenv.errors import AgentEnvError
from agentenv.guest.assets import load_assets
from agentenv.orchestrator.orphans import HostOrphans
from agentenv.vmm.probe_guest import ArchiveEntry, newc_archive
from harness.server import BUILT_HOME
from harness.vmm_lab import Lab


@pytest.fixture(scope="module")
def kernel() -> Path:
    """The kernel that `make setup` made."""
    try:
        return load_assets(load_settings().model_copy(update={"home": BUILT_HOME})).kernel
    except AgentEnvError as error:
        pytest.fail(f"the guest assets are missing, run `make setup`: {error}")


@pytest.fixture(scope="module")
def initramfs(tmp_path_factory: pytest.TempPathFactory, kernel: Path) -> Path:
    directory = tmp_path_factory.mktemp("guest")
    program, archive = directory / "init", directory / "initramfs"
    source = Path(__file__).with_name("vmm_guest.c")
    subprocess.run(["gcc", "-static", "-O1", "-s", "-Wall", "-Werror", "-o", program, source], check=True)
    entries = [ArchiveEntry(name, b"", stat.S_IFDIR | 0o755) for name in ("proc", "dev", "modules")]
    entries.append(ArchiveEntry("init", program.read_bytes()))
    for name in ("mmio", "blk"):
        (module,) = kernel.parent.glob(f"virtio_{name}-*.ko")
        entries.append(ArchiveEntry(f"modules/{name}", module.read_bytes()))
    archive.write_bytes(newc_archive(entries))
    return archive


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[Path, Path]]:
    """Two namespaces, each with a tap of the same name."""
    names = [f"vmmtest-{secrets.token_hex(3)}" for _ in range(2)]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            subprocess.run(["ip", "-n", name, "tuntap", "add", "tap0", "mode", "tap"], check=True)
            subprocess.run(["ip", "-n", name, "link", "set", "tap0", "up"], check=True)
        yield Path("/run/netns") / names[0], Path("/run/netns") / names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.fixture
async def lab(tmp_path: Path, kernel: Path, initramfs: Path, namespaces: tuple[Path, Path]) -> AsyncIterator[Lab]:
    made = Lab(tmp_path, kernel, initramfs, namespaces)
    try:
        yield made
        assert made.leftovers() == []
    finally:
        await made.vmm.close()
        await HostOrphans(made.sandboxes, made.memory_dir).reap([])
        shutil.rmtree(made.memory_dir, ignore_errors=True)


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", mount], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=True)
