"""A QEMU process that was started before its machine is known: it gets its directory, disk, memory and state later.

What cannot be changed any more is what the command line says: kernel, size, devices and the tap; and its user, which
is its own. This file must not decide how many such processes there are; `warm.py` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from agentenv.errors import VmmError
from agentenv.vmm.base import MachineConfig, MachineRecord
from agentenv.vmm.memory import memory_path
from agentenv.vmm.process import ProcessHandle, finish_in_thread
from agentenv.vmm.qemu_command import QMP_NAME
from agentenv.vmm.qemu_machine import QemuMachine
from agentenv.vmm.qmp import QmpClient
from agentenv.vmm.records import remove_traces, write_intent

_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0


class WaitingQemu:
    """One waiting process. Made by `QemuVmm` only.

    Args:
        config: what it was started with.
        record: finds it again, as it does a machine.
        process: of QEMU.
        become: makes a machine of this that is paused; on failure nothing is left of the process.
    """

    def __init__(
        self,
        config: MachineConfig,
        record: MachineRecord,
        process: ProcessHandle,
        become: Callable[[WaitingQemu, MachineConfig, Path], Awaitable[QemuMachine]],
    ) -> None:
        self.process = process
        self._config = config
        self._record = record
        self._become = become
        process.watch()

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self.process.alive

    @property
    def directory(self) -> Path:
        """Its own until `move`, then the machine's."""
        return Path(self._record.directory)

    @property
    def memory(self) -> Path:
        """The machine's memory: a file that is all hole, to be filled in place before `load`."""
        assert self._record.memory_file is not None  # noqa: S101 - it was started with one
        return Path(self._record.memory_file)

    async def answer(self) -> None:
        """Return when the process waits for a state.

        Raises:
            VmmError: it ended, or does something else.
        """
        async with await QmpClient.connect(self.directory, QMP_NAME, _START_TIMEOUT_S) as qmp:
            status = await qmp.execute("query-status", timeout_s=_START_TIMEOUT_S)
        if status["status"] != "inmigrate":
            raise VmmError(f"QEMU in {self.directory} does not wait for a state: it is {status['status']}")

    async def move(self, machine_id: str, directory: Path) -> None:
        """Make its directory and memory file those of a machine.

        Args:
            machine_id: names the memory file.
            directory: of the machine, below the same parent; must not exist yet.

        Raises:
            VmmError: it cannot be made. Then the process is where it was.
        """
        await finish_in_thread(lambda: self._move(machine_id, directory), lambda _: None)

    def _move(self, machine_id: str, directory: Path) -> None:
        if directory.exists():
            raise VmmError(f"the directory {directory} of machine {machine_id} exists already")
        former, memory = self._record, memory_path(self.memory.parent, machine_id)
        with contextlib.ExitStack() as undo:
            try:
                self.directory.rename(directory)
                undo.callback(directory.rename, former.directory)
                write_intent(directory, former.vmm, former.version, memory)
                # A hard link first: rename would take the place of the memory of a machine of that name.
                memory.hardlink_to(self.memory)
                self.memory.unlink()
            except OSError as error:
                raise VmmError(f"cannot give a waiting process to machine {machine_id}: {error.strerror}") from error
            undo.pop_all()
        self._record = replace(former, directory=str(directory), memory_file=str(memory))

    async def load(self, config: MachineConfig, state: Path) -> QemuMachine:
        """Become a machine with this state, which is paused. Its memory must have been filled.

        Raises:
            VmmError: the process was started for another machine than `config` describes, or does not take the disk or
                the state. Nothing of it is left then.
        """
        try:
            self._check(config)
        except VmmError:
            await self.discard()
            raise
        return await self._become(self, config, state)

    async def discard(self) -> None:
        """End the process and remove its memory file; its directory as well, unless it was moved. Idempotent.

        Raises:
            VmmError: it does not end, or a file cannot be removed.
        """
        self.process.kill()
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await self.process.wait()
        except TimeoutError as error:
            raise VmmError(f"the process {self._record.pid} in {self.directory} does not end") from error
        await asyncio.to_thread(self._clear)

    def _clear(self) -> None:
        remove_traces(self._record, (QMP_NAME,))
        if self.directory == self._config.directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _check(self, config: MachineConfig) -> None:
        expected = replace(
            self._config,
            machine_id=config.machine_id,
            directory=self.directory,
            guest_network=config.guest_network,
            extra_arguments=config.extra_arguments,
        )
        if config != expected:
            raise VmmError(f"machine {config.machine_id} is of another kind than the process in {self.directory}")
