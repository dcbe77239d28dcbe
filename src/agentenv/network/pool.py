"""The pool of network slots: warm ones wait, used ones are destroyed, what answers inside a slot is served here.

The pool decides when a slot is made, handed out and removed; how is in `slots.py`. It keeps no state of its own on
disk: the claims (`claims.py`) are the record from which leftovers are found, and which of them are in use only the
caller knows.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections import deque
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import structlog

from agentenv.config import NetworkSettings
from agentenv.errors import NetworkError
from agentenv.network import host, slots
from agentenv.network.base import GUEST_ADDRESS, EgressPolicy, Slot
from agentenv.network.claims import RUN_DIR, Claims
from agentenv.network.dns import DnsForwarder
from agentenv.network.resolvers import RESOLV_CONF, HostResolvers

# The kernel makes links one at a time under one lock: more threads would only wait there.
_KERNEL_THREADS = 4

log = structlog.get_logger(__name__)

T = TypeVar("T")


class _ReadySignal(asyncio.DatagramProtocol):
    """Waits for the guest's datagram. The firewall lets only the tap reach this port."""

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if addr[0] == str(GUEST_ADDRESS) and data.strip() == b"ready":
            self.event.set()


@dataclass(slots=True)
class _Active:
    """A slot with everything that serves it."""

    slot: Slot
    policy: EgressPolicy | None
    """What is loaded; None when a former process loaded it."""
    dns: DnsForwarder
    ready: _ReadySignal
    ready_transport: asyncio.DatagramTransport
    policy_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def stop(self) -> None:
        """Stop serving; the slot itself stays."""
        self.ready_transport.abort()
        await self.dns.close()


class SlotPool:
    """Hands out network slots. One per server; all methods belong to one event loop, blocking work runs in threads."""

    def __init__(
        self, settings: NetworkSettings, home: Path, *, run_dir: Path = RUN_DIR, resolv_conf: Path = RESOLV_CONF
    ) -> None:
        """Args:
        settings: addresses, warm slots, resolvers.
        home: the server's home directory, which names the owner of its slots.
        run_dir: where the machine's claims lie; the same for all servers of a machine.
        resolv_conf: the host's resolvers, where the settings name none.

        Raises:
            ConfigurationError: a DNS server is no IP address.
        """
        self._settings = settings
        self._claims = Claims(home, run_dir)
        self._resolvers = HostResolvers(settings.dns_servers, resolv_conf)
        self._capacity = slots.capacity(settings)
        self._next_index = 0
        self._warm: deque[_Active] = deque()
        self._used: dict[int, _Active] = {}
        self._kept: set[int] = set()
        """In use according to the caller of `start`, not adopted yet."""
        self._waiters: deque[asyncio.Future[_Active]] = deque()
        self._creating = 0
        self._removing: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._threads: ThreadPoolExecutor | None = None
        self._open = False

    @property
    def warm(self) -> int:
        """How many slots wait."""
        return len(self._warm)

    @property
    def in_use(self) -> Collection[int]:
        """Indexes of slots that were handed out or adopted and not released."""
        return self._used.keys()

    async def start(self, keep: Collection[int]) -> None:
        """Prepare the host, remove what a former process of this home (or of a vanished home) left, begin to warm up.

        Args:
            keep: indexes that live sandboxes own; each will be adopted or released.

        Raises:
            NetworkError: the host refused something. (A leftover that cannot be removed is logged and stays claimed.)
            ConfigurationError: there is no `nft`.
        """
        self._threads = ThreadPoolExecutor(_KERNEL_THREADS, thread_name_prefix="aenv-slots")
        self._kept = set(keep)
        try:
            await self._in_thread(lambda: host.set_up(self._settings, self._claims))
            left = await self._in_thread(lambda: sorted(self._claims.owned() - self._kept))
            await asyncio.gather(*(self._in_thread(functools.partial(self._reap, index)) for index in left))
            left += await self._in_thread(self._reap_abandoned)
        except BaseException:
            self._threads.shutdown(wait=False)
            self._threads = None
            raise
        if left:
            log.info("slot_leftovers_removed", indexes=left)
        self._open = True
        self._top_up()

    async def acquire(self) -> Slot:
        """Hand out a slot under the default policy, its DNS and ready signal armed. At once while the pool is warm.

        Raises:
            CapacityError: every index of `slot_cidr` is taken.
            NetworkError: the kernel refused something, or the pool is closed.
        """
        self._check_open()
        if self._warm:
            active = self._warm.popleft()
            self._top_up()
        else:
            waiter: asyncio.Future[_Active] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            self._top_up()
            try:
                active = await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                    self._deliver(waiter.result())
                raise
        self._used[active.slot.index] = active
        return active.slot

    async def adopt(self, index: int) -> Slot:
        """Take over a slot that a former process of this server handed out: serve its DNS and ready signal again.

        Its policy stays in force until `apply_policy` is called.

        Raises:
            NetworkError: this home does not own the slot, or it does not exist any more.
        """
        self._check_open()
        if index in self._used:
            return self._used[index].slot
        slot = slots.slot_at(index, self._settings.slot_cidr)
        if index not in await self._in_thread(self._claims.owned):
            raise NetworkError(f"network slot {index} does not belong to {self._claims.home}")
        sockets = await self._in_thread(lambda: slots.reopen(slot))
        self._used[index] = await self._serve(slot, sockets, None)
        self._kept.discard(index)
        return slot

    async def release(self, slot: Slot) -> None:
        """Destroy a slot; it is never handed out again, its index later. Idempotent; finishes even if cancelled.

        Raises:
            NetworkError: the kernel refused; the claim stays, and the next start tries again.
        """
        index = slot.index
        removal = self._removing.get(index)
        if removal is None:
            active = self._used.pop(index, None)
            if active is None and index not in self._kept:
                return
            self._kept.discard(index)
            self._check_open()
            removal = self._removing[index] = self._own(self._discard(slot, active))
            removal.add_done_callback(lambda _: self._removing.pop(index, None))
        await asyncio.shield(removal)

    async def apply_policy(self, slot: Slot, policy: EgressPolicy) -> None:
        """Replace a slot's egress policy in one transaction; connections that it forbids are cut too.

        Raises:
            NetworkError: the slot is not in use, or the kernel refused the rules (the former policy stays in force).
        """
        active = self._active(slot)
        async with active.policy_lock:
            if active.policy == policy:
                return
            # Unknown until the kernel has answered: a failed or cancelled load may or may not have happened.
            active.policy = None
            await self._in_thread(lambda: slots.load_policy(slot, policy, self._settings.allow_private))
            active.policy = policy

    async def wait_ready(self, slot: Slot) -> None:
        """Return when the guest agent has said that it listens; at once if it did so since the slot was handed out.

        Raises:
            NetworkError: the slot is not in use.
        """
        await self._active(slot).ready.event.wait()

    def clear_ready(self, slot: Slot) -> None:
        """Forget the guest's ready signal, before its agent is started once more in the same slot.

        Raises:
            NetworkError: the slot is not in use.
        """
        self._active(slot).ready.event.clear()

    async def close(self) -> None:
        """Stop serving and remove the warm slots. Slots in use stay, for `adopt` after a restart. Idempotent.

        Raises:
            NetworkError: the kernel refused something.
        """
        if not self._open:
            return
        self._open = False
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(NetworkError("the server is stopping"))
        self._waiters.clear()
        try:
            while self._tasks:
                await asyncio.wait(self._tasks)
            for active in self._used.values():
                await active.stop()
            self._used.clear()
            while self._warm:
                active = self._warm.popleft()
                await self._discard(active.slot, active)
            await self._in_thread(lambda: host.tear_down(self._claims))
        finally:
            if self._threads is not None:
                self._threads.shutdown(wait=False)
                self._threads = None

    def _check_open(self) -> None:
        if not self._open:
            raise NetworkError("the network is not running")

    def _active(self, slot: Slot) -> _Active:
        active = self._used.get(slot.index)
        if active is None:
            raise NetworkError(f"network slot {slot.index} is not in use")
        return active

    async def _in_thread(self, call: Callable[[], T]) -> T:
        if self._threads is None:
            raise NetworkError("the network is not running")
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def _own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _top_up(self) -> None:
        """Start as many creations as are missing for those who wait and for the warm reserve."""
        if not self._open:
            return
        missing = self._waiting() + self._settings.warm_slots - len(self._warm) - self._creating
        for _ in range(missing):
            self._creating += 1
            self._own(self._create_one())

    def _waiting(self) -> int:
        return sum(1 for waiter in self._waiters if not waiter.done())

    async def _create_one(self) -> None:
        try:
            slot, sockets = await self._in_thread(self._create_in_thread)
            try:
                active = await self._serve(slot, sockets, EgressPolicy())
            except BaseException:
                await self._in_thread(lambda: self._remove(slot.index))
                raise
        except Exception as error:
            self._creating -= 1
            self._fail(error)
            return
        self._creating -= 1
        self._deliver(active)

    def _create_in_thread(self) -> tuple[Slot, slots.SlotSockets]:
        for _ in range(self._capacity):
            index = self._claims.take(self._next_index, self._capacity)
            self._next_index = (index + 1) % self._capacity
            slot = slots.slot_at(index, self._settings.slot_cidr)
            try:
                return slot, slots.create(slot, self._settings, EgressPolicy())
            except slots.SlotTakenError as error:
                log.warning("slot_index_skipped", index=index, reason=error.message)
                self._claims.give_back(index)
            except BaseException:
                self._claims.give_back(index)
                raise
        raise NetworkError("every network slot's name is taken by something else; look at `ip netns` and `ip link`")

    def _deliver(self, active: _Active) -> None:
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(active)
                return
        if self._open and len(self._warm) >= self._settings.warm_slots:
            self._own(self._discard_quietly(active))
        else:
            # While the pool closes, close() removes it from here.
            self._warm.append(active)

    def _fail(self, error: Exception) -> None:
        # Creations are nobody's in particular: a waiter fails only when too few are left under way to serve it.
        if self._waiting() > self._creating:
            while self._waiters:
                waiter = self._waiters.popleft()
                if not waiter.done():
                    waiter.set_exception(error)
                    return
        # Otherwise the reserve stays short, and the next acquire tries again.
        log.warning("warm_slot_failed", error=str(error))

    async def _serve(self, slot: Slot, sockets: slots.SlotSockets, policy: EgressPolicy | None) -> _Active:
        dns = DnsForwarder(sockets.dns_udp, sockets.dns_tcp, self._resolvers)
        try:
            await dns.start()
            transport, ready = await self._listen_ready(sockets.ready)
        except BaseException as error:
            await dns.close()
            sockets.close()
            if isinstance(error, OSError):
                raise NetworkError(f"cannot serve network slot {slot.index}: {error.strerror or error}") from error
            raise
        return _Active(slot, policy, dns, ready, transport)

    async def _listen_ready(self, ready: socket.socket) -> tuple[asyncio.DatagramTransport, _ReadySignal]:
        return await asyncio.get_running_loop().create_datagram_endpoint(_ReadySignal, sock=ready)

    async def _discard(self, slot: Slot, active: _Active | None) -> None:
        if active is not None:
            await active.stop()
        try:
            await self._in_thread(lambda: self._remove(slot.index))
        except NetworkError:
            # So that release may be called again.
            self._kept.add(slot.index)
            raise

    async def _discard_quietly(self, active: _Active) -> None:
        try:
            await self._discard(active.slot, active)
        except NetworkError as error:
            log.warning("slot_not_removed", index=active.slot.index, error=error.message)

    def _remove(self, index: int) -> None:
        # The claim goes last: as long as anything of the slot may exist, somebody answers for it.
        slots.destroy(index)
        self._claims.give_back(index)

    def _reap(self, index: int) -> None:
        try:
            self._remove(index)
        except NetworkError as error:
            log.error("slot_leftover_stays", index=index, error=error.message)

    def _reap_abandoned(self) -> list[int]:
        # Any server may do it, so only one at a time: after a second look the index could be somebody's again.
        with self._claims.host_lock():
            left = sorted(self._claims.abandoned())
            for index in left:
                self._reap(index)
        return left
