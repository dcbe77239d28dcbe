"""Starts machines of QEMU's `microvm`: boots them, loads them from a saved state, adopts running ones.

Contract: `base.py`. What a machine can do once its process runs is in `qemu_machine.py`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import structlog

from agentenv.config import MIB
from agentenv.errors import VmmError
from agentenv.vmm.base import MachineConfig, MachineRecord, VmmFacts
from agentenv.vmm.caretaker import Caretaker
from agentenv.vmm.console import LogKeeper
from agentenv.vmm.host import machine_uid, may_change_user, read_cpu
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
    qemu_arguments,
)
from agentenv.vmm.qemu_machine import QemuMachine
from agentenv.vmm.qmp import listen
from agentenv.vmm.records import INTENT_NAME, remove_traces, write_intent
from agentenv.vmm.tap import open_tap

log = structlog.get_logger(__name__)

VMM_NAME = "qemu"


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
            os.chown(directory, -1, machine_uid(machine_id))
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

    async def _start(self, config: MachineConfig, state: Path | None, memory_file: Path) -> QemuMachine:
        started: list[ProcessHandle] = []

        def drop(launched: tuple[ProcessHandle, int]) -> None:
            started.append(launched[0])

        try:
            process, state_fd = await finish_in_thread(lambda: self._launch(config, state, memory_file), drop)
            started.append(process)
            machine = QemuMachine(self._record(config, memory_file, process), process, self._logs)
            if state is None:
                await machine.start_booting()
            else:
                await machine.start_loaded(state_fd)
        except BaseException:
            for process in started:
                # Watched first: the loop reaps it even when the wait below is cancelled once more.
                process.watch()
                process.kill()
                remove_traces(self._record(config, memory_file, process), (QMP_NAME,))
                self._logs.remove(config.directory / CONSOLE_NAME)
                self._logs.remove(config.directory / ERROR_LOG_NAME)
                await process.wait()
            raise
        self._keep(machine)
        log.info("machine_started", machine=config.machine_id, pid=process.pid, loaded=state is not None)
        return machine

    def _record(self, config: MachineConfig, memory_file: Path, process: ProcessHandle) -> MachineRecord:
        return MachineRecord(
            vmm=VMM_NAME,
            version=self._version,
            pid=process.pid,
            start_time=process.start_time,
            directory=str(config.directory),
            memory_file=str(memory_file),
        )

    def _confinement(self, config: MachineConfig) -> Confinement | None:
        if not may_change_user():
            return None
        return Confinement(uid=machine_uid(config.machine_id), root=config.directory)

    def _launch(self, config: MachineConfig, state: Path | None, memory_file: Path) -> tuple[ProcessHandle, int]:
        """Take everything that QEMU inherits and start it. Blocking; a failure leaves nothing but logs.

        Returns:
            The process, and the number under which it has the saved state open (-1 without one).
        """
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as held:
            if state is not None:
                undo.callback(memory_file.unlink, missing_ok=True)
                check_memory_file(memory_file, config.memory_mib * MIB)
            lock = take_lock(config.directory)
            held.callback(os.close, lock)
            undo.callback((config.directory / INTENT_NAME).unlink, missing_ok=True)
            write_intent(config.directory, VMM_NAME, self._version, memory_file)
            if state is None:
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
            state_fd = -1
            if state is not None:
                try:
                    state_fd = os.open(state, os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise VmmError(f"cannot open the saved state {state}: {error.strerror}") from error
                held.callback(os.close, state_fd)
                inherit.append(state_fd)
            descriptors = InheritedDescriptors(
                qmp=server.fileno(), tap=tap, state=state_fd if state is not None else None
            )
            process = ProcessHandle.spawn(
                qemu_arguments(
                    self._qemu,
                    config,
                    self._acceleration,
                    version=self._version_numbers,
                    memory_file=memory_file,
                    descriptors=descriptors,
                    confinement=self._confinement(config),
                ),
                directory=config.directory,
                lock=lock,
                inherit=inherit,
                error_log=config.directory / ERROR_LOG_NAME,
                cpu_limit_s=self._cpu_limit_s,
            )
            undo.pop_all()
            return process, state_fd
