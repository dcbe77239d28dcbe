"""Finds out which acceleration really runs guests on this host, by booting a tiny one, and remembers it.

That /dev/kvm opens proves nothing: a host may open it and then crash on, or interpret, a stock kernel. The result is
kept per guest kernel, host kernel, CPU and QEMU in `assets/probe.json`; delete that file to look again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from agentenv.config import Settings
from agentenv.errors import AgentEnvError, AssetError, ConfigurationError
from agentenv.vmm.base import GuestNetwork, MachineConfig
from agentenv.vmm.console import last_lines
from agentenv.vmm.host import measure_tsc_khz, read_qemu_version
from agentenv.vmm.memory import choose_memory_dir, prepare_memory_dir
from agentenv.vmm.probe_guest import MARKER, probe_initramfs
from agentenv.vmm.qemu import QemuVmm
from agentenv.vmm.qemu_command import ERROR_LOG_NAME, Acceleration
from agentenv.vmm.qemu_machine import QemuMachine
from agentenv.vmm.records import find_orphans, reap

log = structlog.get_logger(__name__)

RESULT_NAME = "probe.json"
_DIRECTORY_PREFIX = "probe-"
_KVM = Path("/dev/kvm")
_PVM_MODULE = Path("/sys/module/kvm_pvm")
_MEMORY_MIB = 256
_CPU_LIMIT_S = {"kvm": 8, "tcg": 120}
"""CPU seconds after which the kernel ends the probe's VMM. Unlike a deadline by the clock it does not take a busy host
for a broken one: where KVM works the guest needs less than one, emulated some three."""
_DEADLINE_S = {"kvm": 30.0, "tcg": 300.0}
"""For a guest that hangs without using the CPU."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Whether one acceleration runs guests here."""

    acceleration: str
    """`kvm` or `tcg`."""
    usable: bool
    reason: str
    """Why not, for people; empty when usable."""
    seconds: float
    """From the start of the VMM to its end; 0 when nothing had to be booted to know."""


async def choose_vmm(settings: Settings, kernel: Path, *, fresh: bool = False) -> QemuVmm:
    """The VMM for this host, with the fastest acceleration that works and that the settings allow.

    Args:
        settings: of this node.
        kernel: the guest kernel (ELF).
        fresh: boot the probe's guest again instead of trusting the remembered result.

    Raises:
        ConfigurationError: QEMU is missing, or no acceleration that the settings allow runs guests; says why.
        AssetError: the kernel cannot be read.
    """
    name, reason = await _select(settings, kernel, fresh=fresh)
    memory_dir = choose_memory_dir(settings)
    await asyncio.to_thread(prepare_memory_dir, memory_dir)
    vmm = await _make_vmm(settings, name, memory_dir, reason=reason)
    log.info("vmm_chosen", vmm=vmm.name, version=vmm.version, acceleration=name, reason=reason)
    return vmm


async def _select(settings: Settings, kernel: Path, *, fresh: bool) -> tuple[str, str]:
    """The acceleration to use, and why none of the better ones."""
    wanted = settings.vmm.acceleration
    reasons: list[str] = []
    for name in ("kvm", "tcg") if wanted == "auto" else (wanted,):
        result = await probe_acceleration(settings, kernel, name, fresh=fresh)
        if result.usable:
            return name, "; ".join(reasons)
        reasons.append(f"{name}: {result.reason}")
    raise ConfigurationError("no virtual machine runs on this host. " + "; ".join(reasons))


async def probe_acceleration(settings: Settings, kernel: Path, name: str, *, fresh: bool = False) -> ProbeResult:
    """Whether one acceleration runs the guest kernel here; remembered unless the answer needs no boot.

    Raises:
        ConfigurationError: QEMU is missing or its memory directory is unusable.
        AssetError: the kernel cannot be read.
    """
    version = await asyncio.to_thread(read_qemu_version, settings.vmm.qemu)
    if name == "kvm" and (obstacle := kvm_obstacle(settings)) is not None:
        return ProbeResult(name, usable=False, reason=obstacle, seconds=0.0)
    store = settings.paths.assets / RESULT_NAME
    key = await asyncio.to_thread(_host_key, kernel, version, name)
    if not fresh and (known := await asyncio.to_thread(_remembered, store, key)) is not None:
        return known
    result = await boot_probe_guest(settings, kernel, name)
    await asyncio.to_thread(_remember, store, key, result)
    log.info("acceleration_probed", **asdict(result))
    return result


def kvm_obstacle(settings: Settings) -> str | None:
    """What makes KVM unusable without having to boot anything, with the way to mend it; None when nothing does."""
    if not _KVM.exists():
        return "/dev/kvm does not exist (load kvm_intel or kvm_amd; in a virtual machine, enable nested virtualization)"
    try:
        os.close(os.open(_KVM, os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return f"/dev/kvm does not open: {error.strerror} (run as root, or join the group that owns it)"
    if _PVM_MODULE.exists() and settings.kernel.path is None:
        return "this host's KVM is kvm_pvm, which only interprets stock kernels (set kernel.path to a PVM guest kernel)"
    return None


async def boot_probe_guest(settings: Settings, kernel: Path, name: str) -> ProbeResult:
    """Boot the probe's guest once and see whether it reached user mode. Nothing is remembered, nothing is left.

    Raises:
        ConfigurationError: QEMU is missing or its memory directory is unusable.
    """
    directory = settings.paths.run / f"{_DIRECTORY_PREFIX}{os.getpid()}-{name}"
    vmm = await _make_vmm(settings, name, directory, cpu_limit_s=_CPU_LIMIT_S[name])
    started = time.monotonic()
    try:
        await _remove_broken_off(settings.paths.run)
        await asyncio.to_thread(_prepare, directory)
        config = MachineConfig(
            machine_id="probe",
            directory=directory,
            kernel=kernel,
            initramfs=directory / "initramfs",
            vcpus=1,
            memory_mib=_MEMORY_MIB,
            disks=(),
            interface=None,
            guest_network=GuestNetwork("", "", "", 0),
        )
        machine = await vmm.boot(config)
        try:
            reason = await _failure(machine, directory, _DEADLINE_S[name])
        finally:
            await machine.kill()
    except ConfigurationError:
        raise
    except AgentEnvError as error:
        reason = _own_words(directory) or str(error)
    finally:
        await vmm.close()
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
    return ProbeResult(name, usable=not reason, reason=reason, seconds=round(time.monotonic() - started, 3))


async def _remove_broken_off(run: Path) -> None:
    """Remove what probes left whose process was killed."""
    for record in await find_orphans(run):
        prober = Path(record.directory).name.removeprefix(_DIRECTORY_PREFIX).partition("-")[0]
        if not Path(f"/proc/{prober}").exists():
            await reap(record)
            await asyncio.to_thread(shutil.rmtree, record.directory, ignore_errors=True)


async def _failure(machine: QemuMachine, directory: Path, deadline_s: float) -> str:
    """Wait for the guest's end and say what went wrong; empty when it did what it should."""
    try:
        async with asyncio.timeout(deadline_s):
            ended = await machine.wait()
    except TimeoutError:
        ended = None
    lines = await asyncio.to_thread(last_lines, machine.console_log(), 40)
    if any(MARKER in line for line in lines):
        return ""
    if ended is not None and ended.exit_code in (-signal.SIGXCPU, -signal.SIGKILL):
        return "a tiny guest used up its CPU time without reaching user mode: guests are interpreted, or hang"
    if ended is None:
        return f"a tiny guest did not reach user mode within {deadline_s:g} s; its console ends with: {lines[-1:]}"
    return _own_words(directory) or f"a tiny guest did not reach user mode: {ended.reason}"


def _own_words(directory: Path) -> str:
    """QEMU's first complaint that is no warning: later ones are consequences."""
    lines = last_lines(directory / ERROR_LOG_NAME, 20)
    serious = [line for line in lines if "warning:" not in line]
    return re.sub(r"^qemu-system-\w+: ", "", serious[0]) if serious else ""


def _prepare(directory: Path) -> None:
    try:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, parents=True)
        (directory / "initramfs").write_bytes(probe_initramfs())
    except OSError as error:
        raise ConfigurationError(f"cannot prepare {directory}: {error.strerror}") from error


async def _make_vmm(
    settings: Settings, acceleration: str, memory_dir: Path, *, reason: str = "", cpu_limit_s: int | None = None
) -> QemuVmm:
    version = await asyncio.to_thread(read_qemu_version, settings.vmm.qemu)
    tsc_khz = await asyncio.to_thread(measure_tsc_khz)
    return QemuVmm(
        qemu=settings.vmm.qemu,
        version=version,
        acceleration=Acceleration(acceleration, tsc_khz),
        memory_dir=memory_dir,
        acceleration_reason=reason,
        cpu_limit_s=cpu_limit_s,
    )


def _host_key(kernel: Path, qemu_version: str, acceleration: str) -> str:
    try:
        with kernel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise AssetError(f"cannot read the guest kernel {kernel}: {error.strerror}; run `aenv setup`") from error
    model = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    facts = (acceleration, digest, platform.release(), qemu_version, model.group(1) if model else "")
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()


def _results(store: Path) -> dict[str, Any]:
    try:
        found = json.loads(store.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # absent or damaged: probed again, and written anew
        return {}
    return found if isinstance(found, dict) else {}


def _remembered(store: Path, key: str) -> ProbeResult | None:
    try:
        return ProbeResult(**_results(store)[key])
    except (KeyError, TypeError):
        return None


def _remember(store: Path, key: str, result: ProbeResult) -> None:
    results = {**_results(store), key: asdict(result)}
    draft = store.with_name(f"{RESULT_NAME}.{os.getpid()}")
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(results, indent=1), encoding="utf-8")
        draft.replace(store)
    except OSError as error:
        # Only costs the next start a few seconds.
        log.warning("probe_result_not_kept", path=str(store), error=str(error))
        draft.unlink(missing_ok=True)


async def describe_acceleration(settings: Settings, kernel: Path | None = None) -> tuple[str, str, str | None]:
    """A finding for `aenv doctor`: level (`ok`, `warn`, `fail`), what was found, and what mends it.

    With a guest kernel the tiny guest is booted, unless its result is remembered; without one only that is told which
    can be known without booting.
    """
    slow = "nothing: emulation works, only slower"
    try:
        version = await asyncio.to_thread(read_qemu_version, settings.vmm.qemu)
        if kernel is not None:
            name, reason = await _select(settings, kernel, fresh=False)
            if name == "kvm":
                return "ok", f"QEMU {version} with KVM", None
            return "warn", f"QEMU {version}, emulation; {reason or 'as the settings say'}", slow
    except AgentEnvError as error:
        return "fail", error.message, "mend what it names, then run `aenv doctor` again"
    if settings.vmm.acceleration == "tcg":
        return "warn", f"QEMU {version}, emulation, as the settings say", "set vmm.acceleration to auto"
    obstacle = kvm_obstacle(settings)
    if obstacle is None:
        return "ok", f"QEMU {version}; /dev/kvm opens, no guest was tried yet", None
    return "warn", f"QEMU {version}, emulation; {obstacle}", slow
