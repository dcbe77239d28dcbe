"""A QEMU process that was started before its machine is known: it gets its directory, disk, memory and state later.

What cannot be changed any more is what the command line says: kernel, size, devices and the tap; and its user, which
is its own. This file must not decide how many such processes there are; `warm.py` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from agentenv.errors import VmmError
from agentenv.vmm.base import MachineConfig, MachineRecord
from agentenv.vmm.memory import memory_path
from agentenv.vmm.process import LOCK_NAME, ProcessHandle, finish_in_thread, is_locked
from agentenv.vmm.qemu_command import CONSOLE_NAME, ERROR_LOG_NAME, QMP_NAME
from agentenv.vmm.qemu_machine import QemuMachine
from agentenv.vmm.qmp import QmpClient
from agentenv.vmm.records import INTENT_NAME, remove_traces, write_intent

_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 10.0
_OF_THE_PROCESS = frozenset({LOCK_NAME, INTENT_NAME, QMP_NAME})
"""What each process has of its own in its directory."""
_LOGS = frozenset({CONSOLE_NAME, ERROR_LOG_NAME})
_CURRENT_DIRECTORY = -100
_RENAME_EXCHANGE = 2
_libc = ctypes.CDLL(None, use_errno=True)


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
            directory: of the machine, below the same parent. What a former process of the machine left there (logs, and
                files that are not ours) stays; it changes places with this one's at one stroke.

        Raises:
            VmmError: it cannot be made, or a process works there. Then this one is where it was.
        """
        await finish_in_thread(lambda: self._move(machine_id, directory), lambda _: None)

    def _move(self, machine_id: str, directory: Path) -> None:
        former, memory = self._record, memory_path(self.memory.parent, machine_id)
        again = directory.exists()
        if again and is_locked(directory / LOCK_NAME):
            raise VmmError(f"a machine exists already in the directory {directory}")
        with contextlib.ExitStack() as undo:
            try:
                if again:
                    _take_over(directory, self.directory)
                    _exchange(self.directory, directory)
                    undo.callback(_exchange, directory, self.directory)
                else:
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
        if again:
            shutil.rmtree(former.directory, ignore_errors=True)

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


def _take_over(source: Path, destination: Path) -> None:
    """Give a directory the files of another that a machine had before, which stay as they are."""
    for path in source.iterdir():
        if path.name in _OF_THE_PROCESS or path.is_symlink() or not path.is_file():
            continue
        if path.name in _LOGS:  # open already, for appending, and empty: nothing runs in a waiting process
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            with os.fdopen(os.open(destination / path.name, flags, 0o600), "wb") as log:
                log.write(path.read_bytes())
        else:
            (destination / path.name).hardlink_to(path)


def _exchange(one: Path, other: Path) -> None:
    """Let two directories change places, atomically, so that no crash leaves a machine without one."""
    names = (os.fsencode(one), os.fsencode(other))
    if _libc.renameat2(_CURRENT_DIRECTORY, names[0], _CURRENT_DIRECTORY, names[1], _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
