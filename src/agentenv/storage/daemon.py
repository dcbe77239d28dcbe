"""The block daemon's process: started detached, taken over after a restart of the server, started again when it dies.

What the daemon can be asked is in `blockd.py`; which devices it should have is the business of `disks.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from agentenv.errors import AgentEnvError, BlockDaemonError, StorageError, VmmError
from agentenv.storage.blockd import BlockClient
from agentenv.storage.blockd_messages import PROTOCOL, UNAVAILABLE, Greeting
from agentenv.vmm.console import LogKeeper, last_lines
from agentenv.vmm.process import ProcessHandle, is_locked, read_start_time

log = structlog.get_logger(__name__)

LOCK_NAME = "process.lock"
"""In the state directory: held locked by the daemon's process from its fork to its end."""
_START_TIMEOUT_S = 300.0
"""It may open all its devices before it answers."""
_END_TIMEOUT_S = 60.0
"""It flushes all its devices before it ends."""
_RECOVERY_TIMEOUT_S = 60.0
_POLL_S = 0.02
_FIRST_PAUSE_S = 0.25
_MAX_PAUSE_S = 10.0
_STEADY_S = 30.0
"""A daemon that ran so long and died is started again without a pause."""
_LAST_WORDS = 3


@dataclass(frozen=True, slots=True)
class _Found:
    process: ProcessHandle
    greeting: Greeting


class BlockDaemonProcess:
    """The one daemon of a home. Used from one event loop.

    Args:
        binary: `aenv-blockd`, absolute.
        state: its state directory, made when it is missing (0700).
        socket: where it listens; the directory is made when it is missing.
        log_file: what it writes to standard error, capped.

    Attributes:
        client: talks to it; calls wait while it is being started again.
    """

    def __init__(self, binary: Path, *, state: Path, socket: Path, log_file: Path) -> None:
        self._binary = binary
        self._program = -1
        """The binary, held open: an upgrade may remove its name while this server still needs it."""
        self._state = state.absolute()
        self._socket = socket.absolute()
        self._log_file = log_file.absolute()
        self._process: ProcessHandle | None = None
        self._up = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._callbacks: list[Callable[[], Awaitable[None]]] = []
        self._calls: set[asyncio.Task[None]] = set()
        self._logs = LogKeeper()
        self.client = BlockClient(self._socket, recover=self._recovered)

    @property
    def pid(self) -> int | None:
        """Its process id, None while it does not run."""
        return self._process.pid if self._process is not None and self._process.alive else None

    async def start(self) -> None:
        """Take over the running daemon, or start one; return when it answers. From then on it is supervised.

        A daemon of another binary or protocol version is ended in order and replaced; clients of its devices see a
        pause.

        Raises:
            StorageError: it does not start; the message has its last words.
        """
        if self._supervisor is not None:
            return
        try:
            self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._socket.parent.mkdir(parents=True, exist_ok=True)
            self._log_file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot make the directories of the block daemon: {error}") from error
        try:
            self._program = os.open(self._binary, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise StorageError(
                f"cannot open the block daemon {self._binary}: {error.strerror}; run `make setup`"
            ) from error
        try:
            found = await self._find()
            if found is not None and not await asyncio.to_thread(self._is_current, found):
                await self._end(found.process)
                found = None
            if found is None:
                found = await self._launch()
            else:
                log.info("block_daemon_adopted", pid=found.process.pid, version=found.greeting.version)
        except BaseException:
            self._close_program()
            raise
        self._process = found.process
        self._logs.add(self._log_file)
        self._up.set()
        self._supervisor = asyncio.get_running_loop().create_task(self._supervise(), name="block-daemon")

    def on_start(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Have `callback` called each time a daemon answers that was started after `start` returned."""
        self._callbacks.append(callback)

    async def close(self) -> None:
        """Stop supervising. The daemon goes on, unless it has no device: then it is ended. Idempotent."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            await self.client.close()
            self._close_program()
            return
        supervisor.cancel()
        tasks = [supervisor, *self._calls]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        process, self._process = self._process, None
        try:
            if process is not None and process.alive and not await self._has_devices():
                await self._end(process)
        except AgentEnvError as error:
            log.warning("block_daemon_not_ended", error=error.message)
        finally:
            self._up.clear()
            await self.client.close()
            await self._logs.close()
            if process is not None:
                process.detach()
            self._close_program()

    def _close_program(self) -> None:
        if self._program >= 0:
            os.close(self._program)
            self._program = -1

    async def _has_devices(self) -> bool:
        client = BlockClient(self._socket)
        try:
            return bool(await client.list())
        finally:
            await client.close()

    def _has_state(self) -> bool:
        return any((self._state / "devices").glob("*.json"))

    async def _recovered(self) -> None:
        """Return when the daemon answers again, for the client."""
        if self._supervisor is None:
            raise BlockDaemonError(UNAVAILABLE, "the block daemon is not running, and nobody starts it")
        if self._process is not None and not self._process.alive:
            self._up.clear()
        try:
            async with asyncio.timeout(_RECOVERY_TIMEOUT_S):
                await self._up.wait()
        except TimeoutError as error:
            raise BlockDaemonError(UNAVAILABLE, f"the block daemon does not come back; see {self._log_file}") from error

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        pause = 0.0
        while True:
            assert self._process is not None  # noqa: S101 - `start` and this loop set it
            since = loop.time()
            code = await self._process.wait()
            self._up.clear()
            pause = 0.0 if loop.time() - since >= _STEADY_S else pause
            self._log_end(self._process.pid, code)
            while True:
                await asyncio.sleep(pause)
                pause = min(max(pause * 2, _FIRST_PAUSE_S), _MAX_PAUSE_S)
                try:
                    self._process = (await self._launch()).process
                    break
                except AgentEnvError as error:
                    log.error("block_daemon_not_started", error=error.message, next_try_s=pause)
            self._up.set()
            for callback in self._callbacks:
                self._call(callback)

    def _call(self, callback: Callable[[], Awaitable[None]]) -> None:
        async def run() -> None:
            try:
                await callback()
            except AgentEnvError as error:
                log.error("block_daemon_callback_failed", error=error.message)
            except Exception:
                log.exception("block_daemon_callback_crashed")

        task = asyncio.get_running_loop().create_task(run(), name="block-daemon-started")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    def _log_end(self, pid: int, code: int | None) -> None:
        words = last_lines(self._log_file, _LAST_WORDS)
        log.error("block_daemon_ended", pid=pid, exit_code=code, last_words=words, log=str(self._log_file))

    async def _launch(self) -> _Found:
        """Start a daemon and wait until it answers."""
        process = await self._spawn()
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                return await self._greeted_by(process)
        except asyncio.CancelledError:
            # Machines may wait for it; the next server takes it over.
            if not await asyncio.shield(asyncio.to_thread(self._has_state)):
                process.kill()
            process.detach()
            raise
        except (TimeoutError, AgentEnvError) as error:
            process.kill()
            await process.wait()
            process.detach()
            if isinstance(error, TimeoutError):
                raise StorageError(
                    f"the block daemon did not answer in {_START_TIMEOUT_S:.0f} s; see {self._log_file}"
                ) from error
            raise

    async def _spawn(self) -> ProcessHandle:
        spawning = asyncio.ensure_future(asyncio.to_thread(self._spawn_blocking))
        try:
            return await asyncio.shield(spawning)
        except asyncio.CancelledError:
            # Nobody would know of the process that the thread starts.
            await asyncio.wait([spawning])
            if spawning.exception() is None:
                spawning.result().kill()
                spawning.result().detach()
            raise

    def _spawn_blocking(self) -> ProcessHandle:
        lock = -1
        try:
            lock = os.open(self._state / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            program = self._binary if self._binary.exists() else Path(f"/proc/{os.getpid()}/fd/{self._program}")
            return ProcessHandle.spawn(
                [str(program), "serve", "--state", str(self._state), "--socket", str(self._socket)],
                directory=self._state,
                lock=lock,
                error_log=self._log_file,
            )
        except BlockingIOError as error:
            raise StorageError(f"another block daemon runs in {self._state}") from error
        except OSError as error:
            raise StorageError(f"cannot use the state directory {self._state}: {error.strerror}") from error
        except VmmError as error:
            raise StorageError(f"the block daemon: {error.message}") from error
        finally:
            if lock >= 0:
                os.close(lock)

    async def _greeted_by(self, process: ProcessHandle) -> _Found:
        """Wait for the greeting of a process that was just started; its socket is the only sign that it is ready."""
        while True:
            with contextlib.suppress(BlockDaemonError):
                greeting = await self.client.greeting()
                if greeting.pid == process.pid:
                    return _Found(process, greeting)
            if not process.alive:
                words = last_lines(self._log_file, 1)
                raise StorageError(
                    f"the block daemon {self._binary} ended at its start: {words[0] if words else 'without a word'}"
                )
            await asyncio.sleep(_POLL_S)

    async def _find(self) -> _Found | None:
        """The daemon that already runs in this state directory, if any; one that does not answer is ended."""
        deadline = asyncio.get_running_loop().time() + _START_TIMEOUT_S
        while True:
            with contextlib.suppress(BlockDaemonError):
                greeting = await self.client.greeting()
                start_time = read_start_time(greeting.pid)
                process = None if start_time is None else ProcessHandle.adopt(greeting.pid, start_time)
                if process is not None:
                    return _Found(process, greeting)
            # One that a killed server has just started has the lock, but does not listen yet.
            if not await asyncio.to_thread(_is_locked, self._state / LOCK_NAME):
                return None
            if asyncio.get_running_loop().time() > deadline:
                await self._end_silent()
                return None
            await asyncio.sleep(_POLL_S)

    async def _end_silent(self) -> None:
        for pid, start_time in await asyncio.to_thread(_holders, self._state / LOCK_NAME):
            process = ProcessHandle.adopt(pid, start_time)
            if process is not None:
                log.error("block_daemon_does_not_answer", pid=pid)
                process.kill()
                await process.wait()

    def _is_current(self, found: _Found) -> bool:
        """Whether the running daemon is the program that this server brings."""
        if found.greeting.protocol != PROTOCOL:
            log.warning("block_daemon_of_other_protocol", pid=found.process.pid, protocol=found.greeting.protocol)
            return False
        same = _runs(found.process.pid, self._binary)
        if not same:
            log.warning("block_daemon_of_other_build", pid=found.process.pid, version=found.greeting.version)
        return same

    async def _end(self, process: ProcessHandle) -> None:
        """Let a daemon flush and end. The signal means the same in every protocol version."""
        process.terminate()
        try:
            async with asyncio.timeout(_END_TIMEOUT_S):
                await process.wait()
        except TimeoutError:
            log.error("block_daemon_killed", pid=process.pid, after_s=_END_TIMEOUT_S)
            process.kill()
            await process.wait()
        log.info("block_daemon_stopped", pid=process.pid)


def _runs(pid: int, binary: Path) -> bool:
    """Whether a process runs this program, under whatever name."""
    running = Path(f"/proc/{pid}/exe")
    try:
        return running.samefile(binary) or running.read_bytes() == binary.read_bytes()
    except OSError as error:
        raise StorageError(f"cannot compare the running block daemon with {binary}: {error}") from error


def _is_locked(path: Path) -> bool:
    try:
        return is_locked(path)
    except OSError as error:
        raise StorageError(f"cannot open {path}: {error.strerror}") from error


def _holders(path: Path) -> list[tuple[int, int]]:
    """Processes, besides this one, that have a file open: (pid, start time)."""
    try:
        wanted = path.stat()
    except FileNotFoundError:
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        start_time = read_start_time(int(entry.name))
        try:
            descriptors = list((entry / "fd").iterdir())
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                status = descriptor.stat()
            except OSError:
                continue
            if (status.st_dev, status.st_ino) == (wanted.st_dev, wanted.st_ino) and start_time is not None:
                found.append((int(entry.name), start_time))
                break
    return found
