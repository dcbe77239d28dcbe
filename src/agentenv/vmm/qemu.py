"""Machines run by QEMU's `microvm`: boot, pause, save, load, adopt, end. Contract: `base.py`.

Guest memory is a shared file that stays where it is when a state is saved (capability `x-ignore-shared`), so a state
holds the devices only. No connection to QEMU is kept open between calls: after a restart of the server nothing has to
be rebuilt, and what a machine is doing is always asked, never remembered.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import structlog

from agentenv.config import MIB
from agentenv.errors import VmmError
from agentenv.vmm.base import MachineConfig, MachineExit, MachineRecord, MachineStats
from agentenv.vmm.caretaker import Caretaker
from agentenv.vmm.console import LogKeeper, exit_reason
from agentenv.vmm.host import machine_uid, may_change_user
from agentenv.vmm.memory import create_memory_file, file_bytes, memory_path, prepare_memory_dir
from agentenv.vmm.process import ProcessHandle, finish_in_thread, take_lock
from agentenv.vmm.qemu_command import (
    CONSOLE_NAME,
    ERROR_LOG_NAME,
    QMP_NAME,
    Acceleration,
    Confinement,
    InheritedDescriptors,
    qemu_arguments,
)
from agentenv.vmm.qmp import QmpClient, QmpDisconnectedError, listen
from agentenv.vmm.records import INTENT_NAME, remove_traces, write_intent
from agentenv.vmm.tap import open_tap

log = structlog.get_logger(__name__)

VMM_NAME = "qemu"
_START_TIMEOUT_S = 60.0
"""A process that is starved of CPU by many others starting may need long until its control socket answers."""
_COMMAND_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 10.0
_CAPABILITIES = {
    "capabilities": [
        {"capability": "x-ignore-shared", "state": True},
        {"capability": "events", "state": True},
    ]
}


class QemuMachine:
    """One machine in one QEMU process. Made by `QemuVmm` only."""

    def __init__(self, record: MachineRecord, process: ProcessHandle, logs: LogKeeper) -> None:
        self._record = record
        self._process = process
        self._directory = Path(record.directory)
        self._logs = logs
        self._control = asyncio.Lock()
        self._exit: MachineExit | None = None
        process.watch()
        logs.add(self._directory / CONSOLE_NAME)
        logs.add(self._directory / ERROR_LOG_NAME)

    @property
    def record(self) -> MachineRecord:
        return self._record

    @property
    def running(self) -> bool:
        """Whether the process has not ended; says nothing about its vCPUs."""
        return self._process.alive

    async def pause(self) -> None:
        """Stop the vCPUs. Idempotent."""
        async with self._qmp() as qmp:
            await qmp.execute("stop", timeout_s=_COMMAND_TIMEOUT_S)

    async def resume(self) -> None:
        """Let the vCPUs run again. Idempotent."""
        async with self._qmp() as qmp:
            await qmp.execute("cont", timeout_s=_COMMAND_TIMEOUT_S)

    async def save_state(self, destination: Path) -> None:
        """Write the device state of a paused machine to a file, which appears whole or not at all.

        Raises:
            VmmError: the machine is not paused, has ended, or QEMU could not write.
        """
        draft = destination.with_name(destination.name + ".new")
        try:
            async with self._qmp() as qmp:
                status = await qmp.execute("query-status", timeout_s=_COMMAND_TIMEOUT_S)
                if status["running"]:
                    raise VmmError(f"machine {self._directory.name} must be paused before its state is saved")
                await qmp.execute("migrate-set-capabilities", _CAPABILITIES, timeout_s=_COMMAND_TIMEOUT_S)
                descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                try:
                    await qmp.execute(
                        "getfd", {"fdname": "state"}, descriptors=[descriptor], timeout_s=_COMMAND_TIMEOUT_S
                    )
                finally:
                    os.close(descriptor)
                await qmp.execute("migrate", {"uri": "fd:state"}, timeout_s=_COMMAND_TIMEOUT_S)
                await _migration_end(qmp, f"save the state of machine {self._directory.name}")
            draft.replace(destination)
        except OSError as error:
            raise VmmError(f"cannot write the state {destination}: {error.strerror}") from error
        finally:
            draft.unlink(missing_ok=True)

    async def shutdown(self, timeout_s: float) -> None:
        """Press the ACPI power button, and kill the machine when the guest has not gone after `timeout_s`."""
        with contextlib.suppress(VmmError):
            async with self._qmp() as qmp:
                await qmp.execute("cont", timeout_s=timeout_s)
                await qmp.execute("system_powerdown", timeout_s=timeout_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        await self.kill()

    async def kill(self) -> None:
        """End the process at once, reap it, remove its memory file and sockets. Idempotent."""
        self._process.kill()
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self.wait()
        except TimeoutError as error:
            raise VmmError(f"the process {self._record.pid} of machine {self._directory.name} does not end") from error
        self._logs.remove(self._directory / CONSOLE_NAME)
        self._logs.remove(self._directory / ERROR_LOG_NAME)
        await asyncio.to_thread(remove_traces, self._record, (QMP_NAME,))

    async def stats(self) -> MachineStats:
        """CPU time and memory of the process; its resident bytes include the touched part of the memory file."""
        usage = self._process.usage()
        if usage is None:
            raise VmmError(await self._ended_message())
        memory = Path(self._record.memory_file) if self._record.memory_file is not None else None
        return MachineStats(
            cpu_time_s=usage.cpu_time_s,
            resident_bytes=usage.resident_bytes,
            memory_file_bytes=file_bytes(memory) if memory is not None else 0,
        )

    async def wait(self) -> MachineExit:
        """Return when the process has ended, for whatever reason. May be awaited by several tasks."""
        code = await self._process.wait()
        if self._exit is None:
            reason = await asyncio.to_thread(
                exit_reason, self._directory / CONSOLE_NAME, self._directory / ERROR_LOG_NAME, code
            )
            self._exit = self._exit or MachineExit(exit_code=code, reason=reason)
        return self._exit

    def cpu_time_s(self) -> float | None:
        """CPU time of the process so far, None when it has ended."""
        usage = self._process.usage()
        return None if usage is None else usage.cpu_time_s

    async def resume_after_io_error(self) -> bool:
        """Resume the machine if a write that found no space on the host stopped it; whether it was."""
        async with self._qmp() as qmp:
            status = await qmp.execute("query-status", timeout_s=_COMMAND_TIMEOUT_S)
            if status["status"] != "io-error":
                return False
            await qmp.execute("cont", timeout_s=_COMMAND_TIMEOUT_S)
            return True

    def __str__(self) -> str:
        return self._directory.name

    def console_log(self) -> Path:
        """The capped file with the guest's serial output."""
        return self._directory / CONSOLE_NAME

    def detach(self) -> None:
        """Let go of the machine without ending it."""
        self._process.detach()
        self._logs.remove(self._directory / CONSOLE_NAME)
        self._logs.remove(self._directory / ERROR_LOG_NAME)

    async def start_loaded(self, state_fd: int) -> None:
        """Read a saved state into a QEMU that waits for one; the machine is paused after that."""
        async with self._qmp(_START_TIMEOUT_S) as qmp:
            await qmp.execute("migrate-set-capabilities", _CAPABILITIES, timeout_s=_COMMAND_TIMEOUT_S)
            await qmp.execute("migrate-incoming", {"uri": f"fd:{state_fd}"}, timeout_s=_COMMAND_TIMEOUT_S)
            await _migration_end(qmp, f"load the state of machine {self._directory.name}")

    async def start_booting(self) -> None:
        """Let a new QEMU run its vCPUs for the first time."""
        async with self._qmp(_START_TIMEOUT_S) as qmp:
            await qmp.execute("cont", timeout_s=_COMMAND_TIMEOUT_S)

    @contextlib.asynccontextmanager
    async def _qmp(self, timeout_s: float = _COMMAND_TIMEOUT_S) -> AsyncIterator[QmpClient]:
        async with self._control:
            if not self._process.alive:
                raise VmmError(await self._ended_message())
            try:
                async with await QmpClient.connect(self._directory, QMP_NAME, timeout_s) as qmp:
                    yield qmp
            except QmpDisconnectedError as error:
                # QEMU closes the socket when it ends; its own words are worth more than the broken connection.
                try:
                    async with asyncio.timeout(1):
                        await self._process.wait()
                except TimeoutError:
                    raise error from None
                raise VmmError(await self._ended_message()) from error

    async def _ended_message(self) -> str:
        ended = await self.wait()
        return f"machine {self._directory.name} has ended: {ended.reason}"


async def _migration_end(qmp: QmpClient, what: str) -> None:
    while True:
        event = await qmp.wait_event({"MIGRATION"}, timeout_s=_COMMAND_TIMEOUT_S)
        status = event["data"]["status"]
        if status == "completed":
            return
        if status in ("failed", "cancelled"):
            info = await qmp.execute("query-migrate")
            raise VmmError(f"QEMU could not {what}: {info.get('error-desc', status)}")


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

        `config` must describe the same devices as the one that the state was saved with. The machine is paused.

        Raises:
            VmmError: QEMU does not start or does not take the state. The memory file is removed then, too.
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
