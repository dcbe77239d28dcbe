"""Starts machines of QEMU's `microvm`: boots them, loads them from a saved state, adopts running ones.

Contract: `base.py`. What a machine can do once its process runs is in `qemu_machine.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import Sequence
from enum import Enum, auto
from pathlib import Path

import structlog

from agentenv.config import MIB
from agentenv.errors import VmmError
from agentenv.vmm.base import DiskFormat, MachineConfig, MachineRecord, VmmFacts
from agentenv.vmm.caretaker import Caretaker
from agentenv.vmm.console import LogKeeper
from agentenv.vmm.host import MACHINE_UIDS, machine_uid, may_change_user, read_cpu
from agentenv.vmm.memory import check_memory_file, create_memory_file, memory_path, prepare_memory_dir
from agentenv.vmm.process import ProcessHandle, finish_in_thread, take_lock
from agentenv.vmm.qemu_command import (
    BOOT_MODE,
    CONSOLE_NAME,
    ERROR_LOG_NAME,
    QMP_NAME,
    Acceleration,
    Confinement,
    InheritedDescriptors,
    QmpCommand,
    attach_commands,
    qemu_arguments,
)
from agentenv.vmm.qemu_machine import QemuMachine
from agentenv.vmm.qemu_waiting import WaitingQemu
from agentenv.vmm.qmp import listen
from agentenv.vmm.records import INTENT_NAME, remove_traces, write_intent
from agentenv.vmm.tap import open_tap

log = structlog.get_logger(__name__)

VMM_NAME = "qemu"


def _user_of(directory: Path, machine_id: str) -> int:
    """User id of the process in a directory: the directory's group, where that is one of ours.

    A process that waited for its machine brought the directory, and what it can open there, with it.
    """
    group = directory.stat().st_gid
    return group if group in MACHINE_UIDS else machine_uid(machine_id)


class _Start(Enum):
    BOOT = auto()
    LOAD = auto()
    WAITING = auto()
    """For a state and disks that are not known yet."""


class QemuVmm:
    """QEMU as the VMM of this host. Make it with `probe.choose_vmm`, which knows what works here."""

    def __init__(
        self,
        *,
        qemu: Path,
        version: str,
        acceleration: Acceleration,
        memory_dir: Path,
        acceleration_reason: str = "",
        cpu_limit_s: int | None = None,
    ) -> None:
        self._cpu_limit_s = cpu_limit_s
        self._qemu = qemu
        self.acceleration_reason = acceleration_reason
        """Why it is not KVM, for people; empty when it is, or when the settings say so."""
        self._version = version
        major, minor = (int(part) for part in version.split(".")[:2])
        self._version_numbers = (major, minor)
        self._acceleration = acceleration
        self.memory_dir = memory_dir
        self._logs = LogKeeper()
        self._machines: set[QemuMachine] = set()
        self._caretaker = Caretaker(lambda: self._machines)

    @property
    def name(self) -> str:
        return VMM_NAME

    @property
    def version(self) -> str:
        return self._version

    @property
    def acceleration(self) -> str:
        """`kvm` or `tcg`."""
        return self._acceleration.name

    def facts(self) -> VmmFacts:
        """What a saved state of this VMM depends on."""
        if self._acceleration.name == "tcg":
            # The same in every QEMU of one version: its emulation has no part of the host's CPU but the counter.
            model, features = "max", frozenset[str]()
        else:
            model, features = read_cpu()
        return VmmFacts(
            vmm=VMM_NAME,
            version=self._version,
            acceleration=self._acceleration.name,
            boot_mode=BOOT_MODE,
            cpu_model=model,
            cpu_features=features,
            tsc_khz=self._acceleration.tsc_khz,
        )

    def prepare_memory(self, machine_id: str) -> Path:
        """Where to put the memory of a machine that is going to be loaded. Blocking; the file itself is not made.

        Raises:
            ConfigurationError: the directory for memory files cannot be made.
        """
        prepare_memory_dir(self.memory_dir)
        return memory_path(self.memory_dir, machine_id)

    def prepare_directory(self, machine_id: str, directory: Path) -> None:
        """Let the machine's process go through a directory that stays root's: its group, and no other right in it.

        Raises:
            VmmError: the directory is missing, or cannot be given to the group.
        """
        if not may_change_user():
            return
        try:
            os.chown(directory, -1, _user_of(directory, machine_id))
            directory.chmod(0o710)
        except OSError as error:
            raise VmmError(f"cannot give the directory {directory} to its machine: {error.strerror}") from error

    async def boot(self, config: MachineConfig) -> QemuMachine:
        """Start a machine from its kernel. On failure or cancellation nothing of it is left but its logs.

        Raises:
            VmmError: QEMU does not start; the message has its own words.
            CapacityError: there is no room for the guest's memory.
        """
        return await self._start(config, None, memory_path(self.memory_dir, config.machine_id))

    async def load(self, config: MachineConfig, state: Path, memory: Path) -> QemuMachine:
        """Start a machine from a saved state and a copy of its memory file, which becomes this machine's own.

        `config` must describe the same devices as the one that the state was saved with; what is behind them (tap,
        namespace, disk) may be another. The machine is paused.

        Raises:
            VmmError: the memory file has another size than the machine's memory, QEMU does not start or does not take
                the state. The memory file is removed then, too.
        """
        return await self._start(config, state, memory)

    async def adopt(self, record: MachineRecord) -> QemuMachine | None:
        """Take over a machine that an earlier server process started. None when that process is gone."""
        if record.vmm != VMM_NAME:
            raise VmmError(f"machine in {record.directory} was started by {record.vmm}, not by QEMU")
        process = ProcessHandle.adopt(record.pid, record.start_time)
        if process is None:
            return None
        if not process.works_in(Path(record.directory)):
            process.detach()
            return None
        machine = QemuMachine(record, process, self._logs)
        self._keep(machine)
        return machine

    async def close(self) -> None:
        """Let go of every machine without ending any; for a server that stops."""
        await self._caretaker.close()
        for machine in self._machines:
            machine.detach()
        self._machines.clear()
        await self._logs.close()
        with contextlib.suppress(OSError):  # it is not empty while machines run
            self.memory_dir.rmdir()

    def _keep(self, machine: QemuMachine) -> None:
        self._machines = {known for known in self._machines if known.running}
        self._machines.add(machine)
        self._caretaker.start()

    async def start_waiting(self, config: MachineConfig) -> WaitingQemu:
        """Start a process that has all of a machine but a disk's content, memory and state, which `load` brings.

        Its directory is made here. Returns when the process answers. On failure or cancellation nothing is left.

        Raises:
            VmmError: a disk is not reached over NBD, or QEMU does not start.
            CapacityError: there is no room for the guest's memory.
        """
        if any(disk.format is not DiskFormat.NBD for disk in config.disks):
            raise VmmError("only disks over NBD can be attached to a machine that was started before")

        def make_directory() -> None:
            try:
                config.directory.mkdir(0o700)
            except OSError as error:
                raise VmmError(f"cannot make the directory {config.directory}: {error.strerror}") from error

        def remove_directory(_: None = None) -> None:
            shutil.rmtree(config.directory, ignore_errors=True)

        await finish_in_thread(make_directory, remove_directory)
        memory_file = memory_path(self.memory_dir, config.machine_id)
        waiting: WaitingQemu | None = None
        try:
            await asyncio.to_thread(self.prepare_directory, config.machine_id, config.directory)
            process = await self._spawn(config, _Start.WAITING, memory_file)
            waiting = WaitingQemu(config, self._record(config, memory_file, process), process, self._become)
            await waiting.answer()
        except BaseException:
            if waiting is not None:
                await waiting.discard()
            remove_directory()
            raise
        return waiting

    async def _become(self, waiting: WaitingQemu, config: MachineConfig, state: Path) -> QemuMachine:
        commands = [
            command
            for index, disk in enumerate(config.disks)
            for command in attach_commands(index, disk, self._version_numbers)
        ]
        return await self._bring_up(config, waiting.process, waiting.memory, state, commands)

    async def _start(self, config: MachineConfig, state: Path | None, memory_file: Path) -> QemuMachine:
        start = _Start.BOOT if state is None else _Start.LOAD
        process = await self._spawn(config, start, memory_file)
        return await self._bring_up(config, process, memory_file, state)

    async def _spawn(self, config: MachineConfig, start: _Start, memory_file: Path) -> ProcessHandle:
        abandoned: list[ProcessHandle] = []
        try:
            return await finish_in_thread(lambda: self._launch(config, start, memory_file), abandoned.append)
        except BaseException:
            for process in abandoned:
                await self._abandon(config, process, memory_file)
            raise

    async def _bring_up(
        self,
        config: MachineConfig,
        process: ProcessHandle,
        memory_file: Path,
        state: Path | None,
        commands: Sequence[QmpCommand] = (),
    ) -> QemuMachine:
        try:
            machine = QemuMachine(self._record(config, memory_file, process), process, self._logs)
            if state is None:
                await machine.start_booting()
            else:
                await machine.start_loaded(state, commands)
        except BaseException:
            await self._abandon(config, process, memory_file)
            raise
        self._keep(machine)
        log.info("machine_started", machine=config.machine_id, pid=process.pid, loaded=state is not None)
        return machine

    async def _abandon(self, config: MachineConfig, process: ProcessHandle, memory_file: Path) -> None:
        # Watched first: the loop reaps it even when the wait below is cancelled once more.
        process.watch()
        process.kill()
        remove_traces(self._record(config, memory_file, process), (QMP_NAME,))
        self._logs.remove(config.directory / CONSOLE_NAME)
        self._logs.remove(config.directory / ERROR_LOG_NAME)
        await process.wait()

    def _record(self, config: MachineConfig, memory_file: Path, process: ProcessHandle) -> MachineRecord:
        return MachineRecord(
            vmm=VMM_NAME,
            version=self._version,
            pid=process.pid,
            start_time=process.start_time,
            directory=str(config.directory),
            memory_file=str(memory_file),
            kernel=str(config.kernel),
            initramfs=str(config.initramfs),
        )

    def _confinement(self, config: MachineConfig) -> Confinement | None:
        if not may_change_user():
            return None
        return Confinement(uid=_user_of(config.directory, config.machine_id), root=config.directory)

    def _launch(self, config: MachineConfig, start: _Start, memory_file: Path) -> ProcessHandle:
        """Take everything that QEMU inherits and start it. Blocking; a failure leaves nothing but logs."""
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as held:
            if start is _Start.LOAD:
                undo.callback(memory_file.unlink, missing_ok=True)
                check_memory_file(memory_file, config.memory_mib * MIB)
            lock = take_lock(config.directory)
            held.callback(os.close, lock)
            undo.callback((config.directory / INTENT_NAME).unlink, missing_ok=True)
            write_intent(config.directory, VMM_NAME, self._version, memory_file)
            if start is not _Start.LOAD:
                prepare_memory_dir(self.memory_dir)
                create_memory_file(memory_file, config.memory_mib * MIB)
                undo.callback(memory_file.unlink, missing_ok=True)
            server = held.enter_context(listen(config.directory, QMP_NAME))
            undo.callback((config.directory / QMP_NAME).unlink, missing_ok=True)
            inherit = [server.fileno()]
            tap: int | None = None
            if config.interface is not None:
                tap = open_tap(config.interface.namespace, config.interface.tap)
                held.callback(os.close, tap)
                inherit.append(tap)
            process = ProcessHandle.spawn(
                qemu_arguments(
                    self._qemu,
                    config,
                    self._acceleration,
                    version=self._version_numbers,
                    memory_file=memory_file,
                    descriptors=InheritedDescriptors(qmp=server.fileno(), tap=tap),
                    confinement=self._confinement(config),
                    incoming=start is not _Start.BOOT,
                    disks_later=start is _Start.WAITING,
                ),
                directory=config.directory,
                lock=lock,
                inherit=inherit,
                error_log=config.directory / ERROR_LOG_NAME,
                cpu_limit_s=self._cpu_limit_s,
            )
            undo.pop_all()
            return process
