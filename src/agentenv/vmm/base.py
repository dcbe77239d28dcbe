"""The contract of a virtual machine monitor. One file per VMM implements it; nothing above knows which one runs.

A `Vmm` starts machines; a `Machine` is one running (or paused) VM, owned by a process that outlives the server. What is
needed to find that process again after a restart of the server is its `MachineRecord`, which the orchestrator journals.
This file must not know any VMM, network or storage detail beyond the data below.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class DiskFormat(StrEnum):
    """How a disk is reached."""

    RAW = "raw"
    """A file with the bytes of the disk."""
    NBD = "nbd"
    """A unix socket that serves the disk as its default NBD export, and may be gone for a while."""


@dataclass(frozen=True, slots=True)
class Disk:
    """A block device of a machine.

    `path` may be absolute, or relative to the machine's directory. That of an NBD disk must be relative: the VMM
    connects again when it sees no other directory any more.
    """

    path: Path
    format: DiskFormat = DiskFormat.RAW
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class NetworkInterface:
    """A tap device in a network namespace that becomes the guest's `eth0`."""

    namespace: Path
    """Path of the namespace (`/run/netns/...`)."""
    tap: str
    mac: str


@dataclass(frozen=True, slots=True)
class GuestNetwork:
    """What the guest's init configures: the same in every guest, so that a state loads in any slot."""

    address: str
    """CIDR form, `169.254.0.21/30`."""
    gateway: str
    dns: str
    mtu: int


@dataclass(frozen=True, slots=True)
class MachineConfig:
    """All that a VMM needs to boot or load a machine."""

    machine_id: str
    """The sandbox id; becomes the hostname at boot."""
    directory: Path
    """Working directory of the VMM process, owned by this machine alone: sockets, logs, state, pid."""
    kernel: Path
    initramfs: Path
    vcpus: int
    memory_mib: int
    disks: tuple[Disk, ...]
    """The first disk is the root file system."""
    interface: NetworkInterface | None
    """None: a machine without network, as the probe uses."""
    guest_network: GuestNetwork
    extra_arguments: tuple[str, ...] = ()
    """More words for the kernel command line."""


@dataclass(frozen=True, slots=True)
class MachineRecord:
    """What finds a machine's process again. The orchestrator journals it as JSON (`dataclasses.asdict`)."""

    vmm: str
    version: str
    pid: int
    start_time: int
    """Field 22 of /proc/PID/stat in clock ticks: tells a reused pid from ours."""
    directory: str
    memory_file: str | None
    """A file outside `directory` that holds guest memory, removed with the machine."""
    kernel: str | None = None
    """What it was started with, whatever guests boot from since. None: found again by its process alone."""
    initramfs: str | None = None


@dataclass(frozen=True, slots=True)
class MachineStats:
    """What the host sees of a machine. Sizes in bytes, times in seconds."""

    cpu_time_s: float
    resident_bytes: int
    memory_file_bytes: int


@dataclass(frozen=True, slots=True)
class MachineExit:
    """How a machine ended."""

    exit_code: int | None
    """None when it was not our child (adopted after a restart), so that the code is unknown."""
    reason: str
    """For people: last line of the serial log or of the VMM's standard error."""


@dataclass(frozen=True, slots=True)
class VmmFacts:
    """What a saved state depends on: one that was saved under other facts does not load, or runs wrong."""

    vmm: str
    version: str
    acceleration: str
    """`kvm` or `tcg`."""
    boot_mode: str
    """How the VMM builds a machine, in its own words."""
    cpu_model: str
    """Of the CPU that guests see."""
    cpu_features: frozenset[str]
    """What guests may use of the host's CPU; empty where the VMM makes up a CPU that is the same everywhere."""
    tsc_khz: int
    """Rate of the time-stamp counter that guests count with, measured anew by each server; 0 when unknown."""


class Machine(Protocol):
    """One VM. Methods raise `VmmError`; after the VM ended, every call but `wait` and `kill` does."""

    @property
    def record(self) -> MachineRecord: ...

    async def pause(self) -> None:
        """Stop the vCPUs. Idempotent."""

    async def resume(self) -> None:
        """Let the vCPUs run again. Idempotent."""

    async def save_state(self, destination: Path) -> None:
        """Write the device state of a paused machine to a file. Guest memory stays in its memory file."""

    async def copy_memory(self, destination: Path) -> None:
        """Copy what is not zero of a paused machine's memory to a new sparse file (mode 0600).

        It cannot be resumed meanwhile. On failure or cancellation nothing of the file is left.
        """

    async def release_memory(self, destination: Path) -> None:
        """End a paused machine, whose memory file becomes `destination`: at once on the same file system, else copied.

        On failure or cancellation before its process was ended nothing has changed; after that, the file is there.
        """

    async def shutdown(self, timeout_s: float) -> None:
        """Ask the guest to power off, kill it after the timeout. The process is gone when this returns."""

    async def kill(self) -> None:
        """End the process at once and reap it; remove its memory file and sockets. Idempotent."""

    async def stats(self) -> MachineStats: ...

    async def wait(self) -> MachineExit:
        """Return when the process has ended, for whatever reason. May be awaited by several tasks."""

    def console_log(self) -> Path:
        """The capped file with the guest's serial output."""


class Vmm(Protocol):
    """A VMM that works on this host."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...

    @property
    def acceleration(self) -> str:
        """`kvm` or `tcg`."""

    def facts(self) -> VmmFacts: ...

    def prepare_memory(self, machine_id: str) -> Path:
        """Where to put the memory of a machine that is going to be loaded; also of a copy, under an id of its own.

        Blocking; the file itself is not made. One that no machine owns is removed when the next server starts.
        """

    def prepare_directory(self, machine_id: str, directory: Path) -> None:
        """Give an empty directory the owner, group and mode that the machine's process needs in it. Blocking.

        To be called before sockets of disks are made there, which get the same owner and group.
        """

    async def boot(self, config: MachineConfig) -> Machine:
        """Start a machine from its kernel. Returns when the VMM process runs and its vCPUs were started.

        On failure or cancellation nothing of it is left.
        """

    async def load(self, config: MachineConfig, state: Path, memory: Path) -> Machine:
        """Start a machine from a saved state and a copy of its memory file (which becomes this machine's own).

        The disks' content and the network behind the interface may be others than when it was saved. Returns with the
        machine paused; the caller resumes it. On failure or cancellation nothing is left, the memory file neither.
        """

    async def adopt(self, record: MachineRecord) -> Machine | None:
        """Take over a machine that an earlier server process started. None when that process is gone."""

    async def close(self) -> None:
        """Let go of every machine without ending any: the server stops, its machines go on. Idempotent."""
