"""A VMM's operating-system process: started so that it outlives this server, found again, waited for and ended.

Identity is (pid, start time); every signal and every wait goes through a pidfd, so a reused pid is never touched. A
process started here holds an inherited, locked file descriptor of `vmm.lock` in its directory from the moment of the
fork, which is how `records.py` finds it even when the server dies before it noted the pid.
This file must not know which VMM it runs, and must not install signal handlers or reap anything that is not its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agentenv.errors import VmmError

LOCK_NAME = "vmm.lock"
_START_TIME_FIELD = 22
_PARENT_FIELD = 4
_UTIME_FIELD = 14
_STIME_FIELD = 15
_FIRST_FIELD_AFTER_NAME = 3
_ENDED_STATES = ("Z", "X")
"""Ended, but not reaped by its parent yet."""
_CPU_GRACE_S = 2

T = TypeVar("T")


def _stat_fields(pid: int) -> list[str] | None:
    """Fields 3… of /proc/PID/stat (proc(5)). The process name before them may hold spaces and parentheses."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return text.rpartition(")")[2].split()


def read_start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot (field 22 of /proc/PID/stat), None when there is none."""
    fields = _stat_fields(pid)
    return None if fields is None else int(fields[_START_TIME_FIELD - _FIRST_FIELD_AFTER_NAME])


def take_lock(directory: Path) -> int:
    """Lock a machine's directory, and return the descriptor that the VMM process shall inherit. Blocking.

    Raises:
        VmmError: a VMM process runs there already, or the directory is not usable.
    """
    lock = -1
    try:
        lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if lock >= 0:
            os.close(lock)
        if isinstance(error, BlockingIOError):
            raise VmmError(f"a VMM process already runs in {directory}") from error
        raise VmmError(f"cannot use the machine directory {directory}: {error.strerror}") from error
    return lock


def is_locked(path: Path) -> bool:
    """Whether some process holds this lock file locked; False when there is none. Blocking.

    Raises:
        OSError: the file cannot be opened or asked.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """What a process used so far."""

    cpu_time_s: float
    """User and system time of all its threads, seconds."""
    resident_bytes: int
    """Resident set, shared pages (a guest memory file that it maps) included."""


class ProcessHandle:
    """One live or ended process, owned by the event loop that first waits for it.

    Attributes:
        pid: process id.
        start_time: start time in clock ticks since boot.
        is_child: whether this server started it (then its exit code is known, and it is reaped here).
    """

    def __init__(self, pid: int, start_time: int, pidfd: int, *, is_child: bool) -> None:
        self.pid = pid
        self.start_time = start_time
        self.is_child = is_child
        self._pidfd = pidfd
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[int | None] | None = None

    @classmethod
    def spawn(
        cls,
        arguments: Sequence[str],
        *,
        directory: Path,
        lock: int,
        inherit: Sequence[int] = (),
        error_log: Path,
        cpu_limit_s: int | None = None,
    ) -> ProcessHandle:
        """Start a program in a session of its own with `directory` as working directory. Blocking: call in a thread.

        Args:
            arguments: program (absolute path) and its arguments.
            directory: exists, and belongs to this process alone.
            lock: descriptor from `take_lock`, handed to the process; the caller closes its own.
            inherit: more descriptors that the process gets under the same numbers.
            error_log: file that its standard output and error are appended to.
            cpu_limit_s: CPU seconds after which the kernel ends it; None sets no limit.

        Raises:
            VmmError: the program cannot be started.
        """
        log = -1
        try:
            log = os.open(error_log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            process = subprocess.Popen(
                list(arguments),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(lock, *inherit),
                start_new_session=True,
                env={"PATH": os.defpath, "LANG": "C.UTF-8"},
            )
        except OSError as error:
            raise VmmError(f"cannot start {arguments[0]} in {directory}: {error.strerror}") from error
        finally:
            if log >= 0:
                os.close(log)
        # With a return code set, `subprocess` never polls this child again: it is reaped through the pidfd only.
        process.returncode = 0
        try:
            if cpu_limit_s is not None:
                resource.prlimit(process.pid, resource.RLIMIT_CPU, (cpu_limit_s, cpu_limit_s + _CPU_GRACE_S))
            pidfd = os.pidfd_open(process.pid)
        except OSError as error:
            os.kill(process.pid, signal.SIGKILL)
            os.waitid(os.P_PID, process.pid, os.WEXITED)
            raise VmmError(f"cannot watch the process of {arguments[0]}: {error.strerror}") from error
        start_time = read_start_time(process.pid)
        assert start_time is not None, "an unreaped child has a /proc entry"  # noqa: S101
        return cls(process.pid, start_time, pidfd, is_child=True)

    @classmethod
    def adopt(cls, pid: int, start_time: int) -> ProcessHandle | None:
        """Take hold of a process that somebody else started. None when it is gone or the pid was given out again.

        Raises:
            VmmError: the kernel refuses to open the process.
        """
        if pid <= 0:
            return None
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return None
        except OSError as error:
            if error.errno == errno.EINVAL:  # a thread id, not a process
                return None
            raise VmmError(f"cannot open process {pid}: {error.strerror}") from error
        # Checked after the pidfd was opened: from here on the pid cannot mean another process without our noticing.
        fields = _stat_fields(pid)
        if fields is not None and int(fields[_START_TIME_FIELD - _FIRST_FIELD_AFTER_NAME]) == start_time:
            is_child = int(fields[_PARENT_FIELD - _FIRST_FIELD_AFTER_NAME]) == os.getpid()
            if is_child or fields[0] not in _ENDED_STATES:
                return cls(pid, start_time, pidfd, is_child=is_child)
        os.close(pidfd)
        return None

    @property
    def alive(self) -> bool:
        """Whether the process still runs, as far as was noticed or can be seen without waiting."""
        if self._ended is not None and self._ended.done():
            return False
        if self._pidfd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._pidfd, 0)
        except ProcessLookupError:
            return False
        fields = _stat_fields(self.pid)
        return fields is not None and fields[0] not in _ENDED_STATES

    async def wait(self) -> int | None:
        """Return when the process has ended: its exit code, minus the signal number, or None if it was not our child.

        May be awaited by several tasks; a cancelled wait changes nothing.
        """
        return await asyncio.shield(self.watch())

    def watch(self) -> asyncio.Future[int | None]:
        """Have the running event loop notice and reap the end of the process, also when nobody waits for it."""
        if self._ended is None:
            if self._pidfd < 0:
                raise VmmError(f"process {self.pid} was let go and cannot be waited for")
            self._loop = asyncio.get_running_loop()
            self._ended = self._loop.create_future()
            self._loop.add_reader(self._pidfd, self._on_exit)
        return self._ended

    def works_in(self, directory: Path) -> bool:
        """Whether the process's working directory is this one (a reboot may give out a pid and start time again)."""
        try:
            return os.path.realpath(f"/proc/{self.pid}/cwd") == os.path.realpath(directory)
        except OSError:
            return False

    def kill(self) -> None:
        """Send SIGKILL. Harmless when the process has ended."""
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM. Harmless when the process has ended."""
        self._signal(signal.SIGTERM)

    def usage(self) -> ProcessUsage | None:
        """CPU time and memory of the process, None when it has ended."""
        fields = _stat_fields(self.pid) if self.alive else None
        if fields is None:
            return None
        try:
            resident_pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        except (FileNotFoundError, ProcessLookupError, IndexError):
            return None
        ticks = int(fields[_UTIME_FIELD - _FIRST_FIELD_AFTER_NAME]) + int(
            fields[_STIME_FIELD - _FIRST_FIELD_AFTER_NAME]
        )
        return ProcessUsage(
            cpu_time_s=ticks / os.sysconf("SC_CLK_TCK"),
            resident_bytes=resident_pages * os.sysconf("SC_PAGE_SIZE"),
        )

    def detach(self) -> None:
        """Let go of the process without ending it. Waits in progress are cancelled."""
        if self._ended is not None and not self._ended.done():
            self._remove_reader()
            self._ended.cancel()
        self._close_pidfd()

    def _signal(self, number: signal.Signals) -> None:
        if self._pidfd < 0:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, number)
        except ProcessLookupError:
            return

    def _on_exit(self) -> None:
        self._remove_reader()
        code: int | None = None
        if self.is_child:
            # Another handle of the same child may have reaped it.
            with contextlib.suppress(ChildProcessError):
                result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
                if result is not None:
                    code = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        self._close_pidfd()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(code)

    def _remove_reader(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._pidfd)

    def _close_pidfd(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


async def finish_in_thread(work: Callable[[], T], undo: Callable[[T], None]) -> T:
    """Run blocking work in a thread to its end, even when the caller is cancelled meanwhile.

    A cancelled caller would otherwise never learn what the thread took; here `undo` gets the result before the
    cancellation goes on.
    """
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue
        if running.exception() is None:
            undo(running.result())
        raise
