"""A pool of VMM processes that were started before anybody asked, so that loading a machine needs no process start.

A process is bound to a network from its start, so each waits with a leased one, which goes with it to its machine.
The pool keeps what the last takers wanted, fills up in the background, and is empty again when nobody asks for long.
What a waiting process leaves when the server dies is found like a machine's remains (`records.py`): its directory lies
beside those of machines. This file must not know a VMM, nor what a leased network is.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import structlog

from agentenv.errors import AgentEnvError
from agentenv.vmm.base import Disk, GuestNetwork, Machine, MachineConfig, NetworkInterface

log = structlog.get_logger(__name__)

_PREFIX = "warm-"
_NO_NETWORK = GuestNetwork("", "", "", 0)
"""Only for the kernel command line, which a loaded machine never reads again."""

Lease = TypeVar("Lease")


@dataclass(frozen=True, slots=True)
class MachineShape:
    """What must be known of a machine to start its process."""

    kernel: Path
    initramfs: Path
    vcpus: int
    memory_mib: int
    disks: tuple[Disk, ...]
    """As in its `MachineConfig`; all over NBD."""


class WaitingMachine(Protocol):
    """A process that waits for its machine. `qemu_waiting.WaitingQemu` says what each does."""

    @property
    def alive(self) -> bool: ...
    @property
    def directory(self) -> Path: ...
    @property
    def memory(self) -> Path: ...
    async def move(self, machine_id: str, directory: Path) -> None: ...
    async def load(self, config: MachineConfig, state: Path) -> Machine: ...
    async def discard(self) -> None: ...


class WaitingVmm(Protocol):
    """A VMM that starts processes for machines that are not known yet."""

    async def start_waiting(self, config: MachineConfig) -> WaitingMachine: ...


@dataclass(frozen=True, slots=True)
class WarmMachine(Generic[Lease]):
    """A taken process. Exactly one of `load` and `discard` must follow; the lease is the taker's in any case."""

    lease: Lease
    waiting: WaitingMachine
    used: Callable[[], None]
    """Called when the process has been loaded or discarded: the next is not started at its expense."""

    @property
    def memory(self) -> Path:
        """The machine's memory file: all hole, mapped by the process, to be filled in place before `load`."""
        return self.waiting.memory

    async def load(self, config: MachineConfig, state: Path) -> Machine:
        """What `Vmm.load` does. On failure nothing is left of the process.

        Args:
            config: of the shape, in the directory and with the interface that this was taken with.
            state: the saved state.
        """
        try:
            return await self.waiting.load(config, state)
        finally:
            self.used()

    async def discard(self) -> None:
        """End the process instead. The directory stays. Idempotent."""
        try:
            await self.waiting.discard()
        finally:
            self.used()


@dataclass(frozen=True, slots=True)
class _Ready(Generic[Lease]):
    shape: MachineShape
    lease: Lease
    waiting: WaitingMachine


class WarmMachines(Generic[Lease]):
    """The pool.

    Args:
        vmm: starts the processes.
        directory: parent of the machines' directories.
        lend: leases a network for a machine.
        give_back: takes a lease back that no machine used.
        interface_of: the interface of a lease.
        most: how many processes wait, at most.
        idle_s: seconds after which nobody is expected any more who wants the same as a former taker.
    """

    def __init__(
        self,
        vmm: WaitingVmm,
        directory: Path,
        *,
        lend: Callable[[], Awaitable[Lease]],
        give_back: Callable[[Lease], Awaitable[None]],
        interface_of: Callable[[Lease], NetworkInterface],
        most: int,
        idle_s: float,
    ) -> None:
        self._vmm = vmm
        self._directory = directory
        self._lend = lend
        self._give_back = give_back
        self._interface_of = interface_of
        self._idle_s = idle_s
        self._ready: list[_Ready[Lease]] = []
        self._wishes: deque[tuple[float, MachineShape]] = deque(maxlen=most)
        self._changed = asyncio.Event()
        self._settled = asyncio.Event()
        self._settled.set()
        self._dropping: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """How many processes wait."""
        return len(self._ready)

    def start(self) -> None:
        """Begin to serve. What an earlier pool left was removed before, with the remains of machines."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="warm-machines")

    async def close(self) -> None:
        """End every waiting process, and give its lease back. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        ready, self._ready = self._ready, []
        await asyncio.gather(*map(self._drop, ready))
        await asyncio.gather(*self._dropping)

    async def settled(self) -> None:
        """Return when as many processes wait as former takers ask for, or no more can be started."""
        await self._settled.wait()

    async def take(self, shape: MachineShape, machine_id: str, directory: Path) -> WarmMachine[Lease] | None:
        """A process of a shape, moved to a machine's directory, where logs of a former one stay. None: there is none.

        Either way one more of the shape is made ready in the background, as soon as this one was used.
        """
        if self._task is None:
            return None
        self._wishes.append((asyncio.get_running_loop().time(), shape))
        ready = self._next(shape)
        if ready is None:
            self._look()
            return None
        try:
            await ready.waiting.move(machine_id, directory)
        except BaseException as error:
            self._look()
            await self._drop(ready)
            if not isinstance(error, AgentEnvError):
                raise
            log.warning("warm_machine_not_taken", machine=machine_id, error=error.message)
            return None
        return WarmMachine(ready.lease, ready.waiting, self._look)

    async def make_room(self) -> bool:
        """End one process, for its network, and start no more until somebody asks again. False: there was none."""
        self._wishes.clear()
        if not self._ready:
            return False
        await self._drop(self._ready.pop())
        return True

    def _look(self) -> None:
        """Compare what waits with what is wished for, in the background."""
        if self._task is not None:
            self._settled.clear()
            self._changed.set()

    def _next(self, shape: MachineShape) -> _Ready[Lease] | None:
        for ready in self._ready:
            if ready.shape == shape and ready.waiting.alive:
                self._ready.remove(ready)
                return ready
        return None

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._changed.clear()
            while self._wishes and self._wishes[0][0] + self._idle_s <= loop.time():
                self._wishes.popleft()
            for ready in self._surplus():
                self._ready.remove(ready)
                await self._drop(ready)
            missing = self._missing()
            if missing is not None:
                try:
                    self._ready.append(await self._make(missing))
                except AgentEnvError as error:
                    # Whoever asks next causes the next attempt, so that a host that cannot is not asked for ever.
                    log.warning("warm_machine_not_started", error=error.message)
                    self._wishes.clear()
                continue
            if not self._changed.is_set():
                self._settled.set()
            timeout = self._wishes[0][0] + self._idle_s - loop.time() if self._wishes else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await self._changed.wait()

    def _surplus(self) -> list[_Ready[Lease]]:
        """What ended, or is more than is wished for."""
        wanted = Counter(shape for _, shape in self._wishes)
        surplus = []
        for ready in self._ready:
            if ready.waiting.alive and wanted[ready.shape] > 0:
                wanted[ready.shape] -= 1
            else:
                surplus.append(ready)
        return surplus

    def _missing(self) -> MachineShape | None:
        wanted = Counter(shape for _, shape in self._wishes)
        wanted.subtract(ready.shape for ready in self._ready)
        # The latest wish first: it is the likeliest to be made again.
        return next((shape for _, shape in reversed(self._wishes) if wanted[shape] > 0), None)

    async def _make(self, shape: MachineShape) -> _Ready[Lease]:
        lease = await self._lend()
        name = _PREFIX + secrets.token_hex(8)
        try:
            waiting = await self._vmm.start_waiting(
                MachineConfig(
                    machine_id=name,
                    directory=self._directory / name,
                    kernel=shape.kernel,
                    initramfs=shape.initramfs,
                    vcpus=shape.vcpus,
                    memory_mib=shape.memory_mib,
                    disks=shape.disks,
                    interface=self._interface_of(lease),
                    guest_network=_NO_NETWORK,
                )
            )
        except BaseException:
            await self._give_back(lease)
            raise
        return _Ready(shape, lease, waiting)

    async def _drop(self, ready: _Ready[Lease]) -> None:
        """Give back what a process holds; to the end, even if the caller is cancelled."""
        task = asyncio.get_running_loop().create_task(self._drop_now(ready))
        self._dropping.add(task)
        task.add_done_callback(self._dropping.discard)
        await asyncio.shield(task)

    async def _drop_now(self, ready: _Ready[Lease]) -> None:
        try:
            await ready.waiting.discard()
            await self._give_back(ready.lease)
        except AgentEnvError as error:
            # Both are found again when the next server starts.
            log.warning("warm_machine_not_removed", directory=str(ready.waiting.directory), error=error.message)
