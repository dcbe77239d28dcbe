"""Facts about this host that a VMM needs: versions, the rate of the time-stamp counter, what may hold guest memory.

Reads only; nothing is remembered or decided here.
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from agentenv.errors import ConfigurationError

log = structlog.get_logger(__name__)

_MEASURE_S = 0.05
_NEEDED_CAPABILITIES = (0, 5, 6, 7, 18, 19)
"""CAP_CHOWN, CAP_KILL, CAP_SETGID, CAP_SETUID, CAP_SYS_CHROOT, CAP_SYS_PTRACE (to read /proc/PID of another user)."""
MACHINE_UIDS = range(0x6A000000, 0x6B000000)
"""Below 2**31, above what systemd, containers and directory services hand out."""
# rdtsc; shl rdx, 32; or rax, rdx; ret
_RDTSC = bytes.fromhex("0f3148c1e2204809d0c3")


def read_qemu_version(qemu: Path) -> str:
    """Version of a QEMU binary, like `7.2.22`. Blocking.

    Raises:
        ConfigurationError: there is no QEMU there, or it does not run.
    """
    try:
        result = subprocess.run([str(qemu), "--version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(
            f"QEMU does not run ({qemu}: {error}); install it (Debian, Ubuntu: apt-get install qemu-system-x86) "
            "or set vmm.qemu to its path"
        ) from error
    match = re.search(r"version (\d+\.\d+(?:\.\d+)?)", result.stdout)
    if match is None:
        raise ConfigurationError(f"{qemu} does not look like QEMU: {result.stdout[:80]!r}")
    return match.group(1)


def read_cpu() -> tuple[str, frozenset[str]]:
    """Model and feature flags of the host's CPU, as the kernel calls them.

    Raises:
        ConfigurationError: the kernel does not tell.
    """
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = {key: re.search(rf"^{key}\s*:\s*(.*)$", text, re.MULTILINE) for key in ("model name", "flags")}
    model, flags = found["model name"], found["flags"]
    if model is None or flags is None:
        raise ConfigurationError("/proc/cpuinfo names no CPU model and flags")
    return model.group(1), frozenset(flags.group(1).split())


def _cpuinfo_tsc_khz() -> int:
    match = re.search(r"^cpu MHz\s*:\s*([\d.]+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return round(float(match.group(1)) * 1000) if match else 0


def measure_tsc_khz() -> int:
    """Rate of the host's time-stamp counter in kHz, 0 when unknown. Blocking for some 50 ms.

    It is measured against the raw monotonic clock, because `cpu MHz` of /proc/cpuinfo follows the current speed of the
    core on many machines; that value is used only where this process may not have executable memory.
    """
    try:
        page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:
        return _cpuinfo_tsc_khz()
    page.write(_RDTSC)
    anchor = ctypes.c_char.from_buffer(page)
    read_counter = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(anchor))
    start_ns, start_counter = _sample(read_counter)
    threading.Event().wait(_MEASURE_S)
    end_ns, end_counter = _sample(read_counter)
    del read_counter, anchor
    page.close()
    return round((end_counter - start_counter) * 1_000_000 / (end_ns - start_ns))


def _sample(read_counter: Callable[[], int]) -> tuple[int, int]:
    """A time in ns and the counter at that time: the closest of some pairs, since a preempted one is wide."""
    pairs = []
    for _ in range(20):
        before = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        counter = read_counter()
        after = time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)
        pairs.append((after - before, (before + after) // 2, counter))
    _, nanoseconds, counter = min(pairs)
    return nanoseconds, counter


def machine_uid(machine_id: str) -> int:
    """A user id for one machine's process, far above those of accounts, so that one machine cannot touch another."""
    digest = hashlib.sha256(machine_id.encode()).digest()
    return MACHINE_UIDS[0] + int.from_bytes(digest[:4], "big") % len(MACHINE_UIDS)


def may_change_user() -> bool:
    """Whether this process may give another one a machine's user id, and still find and end it afterwards.

    Root can, unless its user namespace is small or a container took capabilities away.
    """
    if os.geteuid() != 0:
        return False
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    if capabilities is None or any(not int(capabilities.group(1), 16) >> bit & 1 for bit in _NEEDED_CAPABILITIES):
        return False
    for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines():
        first, _, count = (int(part) for part in line.split())
        if first <= MACHINE_UIDS[0] and MACHINE_UIDS[-1] < first + count:
            return True
    return False


def filesystem_is_tmpfs(path: Path) -> bool:
    """Whether a directory lies on a tmpfs (by the mount table, the longest mount point above it wins)."""
    target = os.path.realpath(path)
    best, kind = "", ""
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        mount = left.split()[4].encode().decode("unicode_escape")
        inside = target == mount or target.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind == "tmpfs"
