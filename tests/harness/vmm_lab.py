"""Machines of the VMM room for tests: directories of their own, a tiny guest, and what a machine leaves.

The guest is one static C program as init (`tests/e2e/vmm_guest.c`): a boot needs no disk and no asset but the kernel.
Nothing here knows what a test checks.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import secrets
from pathlib import Path

from agentenv.vmm.base import GuestNetwork, Machine, MachineConfig, NetworkInterface
from agentenv.vmm.host import measure_tsc_khz, read_qemu_version
from agentenv.vmm.qemu import QemuVmm
from agentenv.vmm.qemu_command import Acceleration

QEMU = Path("/usr/bin/qemu-system-x86_64")
MEMORY_MIB = 160
DEADLINE_S = 120.0


class Lab:
    """A QEMU VMM with directories of its own; makes configurations, and knows what a machine leaves."""

    def __init__(self, root: Path, kernel: Path, initramfs: Path, namespaces: tuple[Path, Path]) -> None:
        self.root = root
        self.sandboxes = root / "sandboxes"
        self.sandboxes.mkdir()
        self.memory_dir = Path("/dev/shm") / f"aenv-vmmtest-{secrets.token_hex(4)}"
        self.kernel = kernel
        self.initramfs = initramfs
        self.namespaces = namespaces
        self.vmm = self.new_vmm()

    def new_vmm(self) -> QemuVmm:
        return QemuVmm(
            qemu=QEMU,
            version=read_qemu_version(QEMU),
            acceleration=Acceleration("tcg", measure_tsc_khz()),
            memory_dir=self.memory_dir,
        )

    def config(self, name: str, *words: str, namespace: int = 0) -> MachineConfig:
        directory = self.sandboxes / name
        directory.mkdir(mode=0o700, exist_ok=True)
        return MachineConfig(
            machine_id=name,
            directory=directory,
            kernel=self.kernel,
            initramfs=self.initramfs,
            vcpus=1,
            memory_mib=MEMORY_MIB,
            disks=(),
            interface=NetworkInterface(self.namespaces[namespace], "tap0", "02:fc:00:00:00:05"),
            guest_network=GuestNetwork("169.254.0.21/30", "169.254.0.22", "169.254.0.22", 1400),
            extra_arguments=words,
        )

    def processes(self) -> list[int]:
        """Every process whose working directory is one of our machines'."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if (entry / "cwd").readlink().is_relative_to(self.sandboxes):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def leftovers(self) -> list[str]:
        """What machines left besides logs and their lock."""
        files = [path for path in self.sandboxes.rglob("*") if path.is_file() or path.is_socket()]
        left = [str(path) for path in files if path.name not in ("console.log", "vmm.log", "vmm.lock")]
        memory = [str(path) for path in self.memory_dir.glob("*")] if self.memory_dir.is_dir() else []
        return [*left, *memory, *(f"process {pid}" for pid in self.processes())]


class FileWatch:
    """Wakes up when a file is written to (inotify), so that no test has to guess how long a guest takes."""

    def __init__(self, directory: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._descriptor >= 0
        modified, created = 0x2, 0x100
        assert libc.inotify_add_watch(self._descriptor, os.fsencode(directory), modified | created) >= 0
        self._changed = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._descriptor, self._on_change)

    def _on_change(self) -> None:
        os.read(self._descriptor, 65536)
        self._changed.set()

    async def wait(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)


def text_of(machine: Machine) -> str:
    path = machine.console_log()
    return path.read_text(errors="replace") if path.exists() else ""


def counts_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"count (\d+)\r?\n", text)]


async def counting(machine: Machine, beyond: int, after: int = 0) -> list[int]:
    """Wait until the guest has counted beyond a number, reading its console from a position; all numbers so far."""
    watch = FileWatch(machine.console_log().parent)
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not (found := counts_in(text_of(machine)[after:])) or found[-1] <= beyond:
                await watch.wait()
    finally:
        watch.close()
    return found


async def still_going(machine: Machine, counts: int = 10) -> None:
    """Wait until the guest has counted further by so many; whatever its check finds ends it, and fails the test."""
    last = counts_in(text_of(machine))[-1:] or [0]
    going = asyncio.create_task(counting(machine, last[0] + counts))
    ended = asyncio.create_task(machine.wait())
    try:
        await asyncio.wait([going, ended], return_when=asyncio.FIRST_COMPLETED)
        assert not ended.done(), text_of(machine)[-400:]
        await going
    finally:
        going.cancel()
        ended.cancel()
    assert "disk check" not in text_of(machine)
