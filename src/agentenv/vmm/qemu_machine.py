"""One machine in one QEMU process: pause, save, copy and release its memory, end. Contract: `base.py`.

Guest memory is a shared file that stays where it is when a state is saved (capability `x-ignore-shared`), so a state
holds the devices only. No connection to QEMU is kept open between calls: after a restart of the server nothing has to
be rebuilt, and what a machine is doing is always asked, never remembered.
This file must not start processes; `qemu.py` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from agentenv.errors import VmmError
from agentenv.vmm.base import MachineExit, MachineRecord, MachineStats
from agentenv.vmm.console import LogKeeper, exit_reason
from agentenv.vmm.memory import copy_memory_file, file_bytes, share_memory_file
from agentenv.vmm.process import ProcessHandle
from agentenv.vmm.qemu_command import CONSOLE_NAME, ERROR_LOG_NAME, QMP_NAME, QmpCommand
from agentenv.vmm.qmp import QmpClient, QmpDisconnectedError
from agentenv.vmm.records import remove_traces

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
                await self._require_paused(qmp, "its state is saved")
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

    async def copy_memory(self, destination: Path) -> None:
        """Copy what is not zero of a paused machine's memory to a new sparse file, readable for its owner only.

        Raises:
            VmmError: the machine is not paused or has ended, or the file exists or cannot be written.
            InsufficientStorageError: no room for the copy. Nothing is left of it then.
        """
        async with self._memory_of_paused("copied") as memory:
            await copy_memory_file(memory, destination)

    async def release_memory(self, destination: Path) -> None:
        """End a paused machine, whose memory file becomes `destination`: at once on the same file system, else copied.

        Until the machine has been ended its memory has both names, so that a server which dies in between leaves the
        machine as it was.

        Raises:
            VmmError: the machine is not paused or has ended, or the file exists or cannot be made; then nothing has
                changed. Or the process does not end; then the file is there.
            InsufficientStorageError: no room for a copy.
        """
        async with self._memory_of_paused("released") as memory:
            await share_memory_file(memory, destination)
            await self.kill()

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

    async def start_loaded(self, state: Path, before: Sequence[QmpCommand] = ()) -> None:
        """Read a saved state into a QEMU that waits for one; the machine is paused after that.

        Args:
            state: the file.
            before: QMP commands to execute first.
        """
        try:
            descriptor = os.open(state, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise VmmError(f"cannot open the saved state {state}: {error.strerror}") from error
        try:
            async with self._qmp(_START_TIMEOUT_S) as qmp:
                for command, arguments in before:
                    await qmp.execute(command, arguments, timeout_s=_START_TIMEOUT_S)
                await qmp.execute("migrate-set-capabilities", _CAPABILITIES, timeout_s=_COMMAND_TIMEOUT_S)
                await qmp.execute("getfd", {"fdname": "state"}, descriptors=[descriptor], timeout_s=_COMMAND_TIMEOUT_S)
                await qmp.execute("migrate-incoming", {"uri": "fd:state"}, timeout_s=_COMMAND_TIMEOUT_S)
                await _migration_end(qmp, f"load the state of machine {self._directory.name}")
        finally:
            os.close(descriptor)

    async def start_booting(self) -> None:
        """Let a new QEMU run its vCPUs for the first time."""
        async with self._qmp(_START_TIMEOUT_S) as qmp:
            await qmp.execute("cont", timeout_s=_COMMAND_TIMEOUT_S)

    async def _require_paused(self, qmp: QmpClient, what: str) -> None:
        status = await qmp.execute("query-status", timeout_s=_COMMAND_TIMEOUT_S)
        if status["running"]:
            raise VmmError(f"machine {self._directory.name} must be paused before {what}")

    @contextlib.asynccontextmanager
    async def _memory_of_paused(self, done: str) -> AsyncIterator[Path]:
        """The memory file of a machine that nobody can resume before the end of the block."""
        async with self._qmp() as qmp:
            await self._require_paused(qmp, f"its memory is {done}")
            if self._record.memory_file is None:
                raise VmmError(f"the memory of machine {self._directory.name} is in no file")
            yield Path(self._record.memory_file)

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
