"""The sandboxes of this node: the one object that the API, the proxy and the server's start and stop talk to.

It owns every task that works on sandboxes and decides which state each is in. How the pieces work is in the modules
beside this one; nothing of HTTP is here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta

import structlog

from agentenv.config import Settings
from agentenv.errors import (
    AgentEnvError,
)
from agentenv.orchestrator import logbook
from agentenv.orchestrator.assembly import assemble
from agentenv.orchestrator.capturing import Capturer
from agentenv.orchestrator.clock import SystemClock
from agentenv.orchestrator.creation import Creator
from agentenv.orchestrator.disk_events import DiskEvents
from agentenv.orchestrator.forking import Forker
from agentenv.orchestrator.journal import Journal
from agentenv.orchestrator.launch import WarmPool
from agentenv.orchestrator.lifetimes import Lifetimes
from agentenv.orchestrator.live import LiveSandbox
from agentenv.orchestrator.model import (
    CollectedSpace,
    CreateRequest,
    LogEntry,
    MetricSample,
    Sandbox,
    SandboxState,
    SnapshotInfo,
    SnapshotNode,
    SpaceReport,
)
from agentenv.orchestrator.pausing import Pauser
from agentenv.orchestrator.ports import (
    AgentFactory,
    Clock,
    DiskStore,
    GuestAssets,
    GuestMemory,
    HostProbe,
    OrphanReaper,
    SavedMachines,
    SlotPool,
    SnapshotCatalog,
    Space,
    TemplateStore,
)
from agentenv.orchestrator.reconcile import Adopted, Reconciler
from agentenv.orchestrator.rolling_back import RollBack
from agentenv.orchestrator.routes import Route, RouteTable
from agentenv.orchestrator.shelf import Shelf, info_of
from agentenv.orchestrator.states import VISIBLE
from agentenv.orchestrator.tasks import OwnedTasks
from agentenv.orchestrator.waiting import Waiting, outcome_of
from agentenv.vmm.base import Vmm

_log = structlog.get_logger(__name__)

SHORTEST_REFRESH_S = 15
KEYS_KEPT = timedelta(hours=48)
"""The contract asks for 24 hours at least."""
_PURGE_PERIOD_S = 3600.0


class Orchestrator:
    """See the module. All methods belong to one event loop; all errors are `AgentEnvError`s.

    Args:
        settings: of the node.
        vmm, slots, disks, templates, assets, agents, orphans, host, saved, catalog, space, memory: the rooms below,
            see `ports`.
        warm: processes that wait for machines, when there are any. Whoever made it starts it after this, and closes
            it before this.
        clock: tests bring their own.
        journal: tests bring their own; None is the one in the home.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        vmm: Vmm,
        slots: SlotPool,
        disks: DiskStore,
        templates: TemplateStore,
        assets: GuestAssets,
        agents: AgentFactory,
        orphans: OrphanReaper,
        host: HostProbe,
        saved: SavedMachines,
        catalog: SnapshotCatalog,
        space: Space,
        clock: Clock | None = None,
        journal: Journal | None = None,
        memory: GuestMemory | None = None,
        warm: WarmPool | None = None,
    ) -> None:
        self.routes = RouteTable()
        self._slots = slots
        self._space = space
        self._clock = clock = clock or SystemClock()
        self._journal = journal = journal or Journal(settings.paths.journal)
        self._background = OwnedTasks()
        self._parts = parts = assemble(
            settings,
            vmm=vmm,
            slots=slots,
            disks=disks,
            templates=templates,
            assets=assets,
            agents=agents,
            host=host,
            saved=saved,
            catalog=catalog,
            clock=clock,
            journal=journal,
            memory=memory,
            warm=warm,
            routes=self.routes,
            pause=lambda live: self._pauser.pause_at_end(live),
        )
        self._live, self._operations, self._presence = parts.live, parts.operations, parts.presence
        self._cleaner = parts.cleaner
        self._disk_events = DiskEvents(self._live, clock)
        disks.on_event(self._disk_events.note)
        self._reconciler = Reconciler(
            settings.paths.sandboxes,
            journal=journal,
            vmm=vmm,
            slots=slots,
            disks=disks,
            orphans=orphans,
            releaser=parts.releaser,
            cleaner=parts.cleaner,
            host=host,
            saved=saved,
        )
        self._creator = Creator(parts)
        self._pauser = Pauser(parts)
        self._capturer = Capturer(parts)
        self._forker = Forker(parts, self._capturer, self._creator)
        self._shelf = Shelf(parts)
        self._lifetimes = Lifetimes(parts)
        self._waiting = Waiting(self._live, self._pauser, self._lifetimes)
        self._roll_back = RollBack(parts, self._pauser)

    async def start(self) -> None:
        """Open the journal, take over the sandboxes that outlived the last server, remove all other remains of it.

        Raises:
            AgentEnvError: the journal cannot be opened, or the host refuses what every sandbox needs.
        """
        await self._journal.open()
        try:
            adopted = await self._reconciler.run()
        except BaseException:
            await self._cleaner.close()
            await self._journal.close()
            raise
        for one in adopted:
            self._adopt(one)
        self._background.spawn(self._presence.run(), "presence")
        self._background.spawn(self._purge_keys(), "purge idempotency keys")
        paused = sum(one.sandbox.state is SandboxState.PAUSED for one in adopted)
        _log.info("orchestrator_started", adopted=len(adopted) - paused, paused=paused)

    async def close(self, *, drain: bool = False) -> None:
        """Stop. Creates under way are undone, kills under way are finished, running VMs are left for the next start.

        Args:
            drain: end all sandboxes that run as well. Paused ones stay paused.
        """
        await self._creator.close()
        await self._background.close()
        if drain:
            for live in self._live:
                if live.state in VISIBLE and live.state not in (SandboxState.PAUSED, SandboxState.PAUSING):
                    self._presence.end(live, "the server was told to end all sandboxes")
        await self._operations.settle()
        await self._presence.close()
        await self._disk_events.close()
        await self._cleaner.close()
        try:
            await self._slots.close()
        finally:
            await self._journal.close()

    async def settled(self) -> None:
        """Return when no kill, roll-back or change is under way. For orderly stops and for tests."""
        await self._operations.settle()

    async def create(self, request: CreateRequest) -> Sandbox:
        """Start a sandbox; its agent is ready when this returns.

        Without an idempotency key a cancelled call leaves nothing behind. With one the create goes on, and a call with
        the same key returns its outcome.

        Raises:
            InvalidRequestError: a timeout or network rule out of range.
            TemplateNotFoundError: no such template.
            IdempotencyMismatchError: the key was used with another body.
            ConflictError: the create of that key is still running, or its outcome is unknown (`error_code`).
            TooManyRequestsError: too many sandboxes run, or wait for their start.
            CapacityError: no memory or no slot, or the server stops.
            InsufficientStorageError: a disk is full.
            SandboxStartError: the start failed; everything taken for it was released.
        """
        return await self._creator.create(request)

    async def connect(self, sandbox_id: str, timeout_s: int, *, memory: bool | None = None) -> tuple[Sandbox, bool]:
        """Let a sandbox live for `timeout_s` seconds from now at least, never shorter than before; resume a paused one.

        One that is being paused is waited for. A cancelled call does not stop a resume.

        Args:
            sandbox_id: which.
            timeout_s: seconds.
            memory: False boots a paused sandbox from its disk, as if it had been paused without its memory.

        Returns:
            The sandbox, and whether it had to be resumed.

        Raises:
            SandboxNotFoundError: there is none.
            ConflictError: it is being killed or resumed, its saved memory is of no use (`error_code`), or does not fit
                to this node.
            InvalidRequestError: `timeout_s` is not positive.
            SnapshotError: what was saved is damaged. It stays paused.
            AgentEnvError: as for `create`. It stays paused.
        """
        return await self._waiting.connect(sandbox_id, timeout_s, memory=memory)

    async def resume(
        self, sandbox_id: str, timeout_s: int, *, auto_pause: bool | None = None, memory: bool | None = None
    ) -> Sandbox:
        """Resume a paused sandbox, as `connect` does.

        Args:
            sandbox_id: which.
            timeout_s: seconds that it shall live from now.
            auto_pause: whether it is paused when they are over, instead of killed. None: as before.
            memory: as for `connect`.

        Raises:
            ConflictError: it runs, or is being resumed.
            AgentEnvError: as for `connect`.
        """
        return await self._waiting.resume(sandbox_id, timeout_s, auto_pause=auto_pause, memory=memory)

    async def pause(self, sandbox_id: str, *, memory: bool = True, require_healthy: bool = False) -> None:
        """Pause a sandbox: when this returns, its state is durable and its VM gone. A cancelled call does not stop it.

        Args:
            sandbox_id: which.
            memory: whether processes shall go on later. Otherwise its disk alone is kept, flushed before.
            require_healthy: refuse when the agent does not answer.

        Raises:
            SandboxNotFoundError: there is none.
            ConflictError: it is paused already, or changes its state.
            GuestUnresponsiveError: its agent does not answer, and `require_healthy`, or `memory` is off. It runs on.
            InsufficientStorageError: a disk is full. It runs on.
            AgentEnvError: of the step that failed. It runs on.
        """
        await self._waiting.pause(sandbox_id, memory=memory, require_healthy=require_healthy)

    def get(self, sandbox_id: str) -> Sandbox:
        """Return a sandbox.

        Raises:
            SandboxNotFoundError: there is none, or it is being killed.
        """
        return self._live.visible(sandbox_id).sandbox

    def list(self) -> list[Sandbox]:
        """Return the sandboxes that callers may know of, in no order."""
        return [live.sandbox for live in self._live if live.state in VISIBLE]

    async def kill(self, sandbox_id: str) -> None:
        """End a sandbox. From the call on it is not found and not reachable; its VM is gone when this returns.

        A cancelled call does not stop it.

        Raises:
            SandboxNotFoundError: there is none, or it is being killed already.
            VmmError: the VM could not be ended. It is tried again until it is; the sandbox stays not found.
        """
        await asyncio.shield(self._presence.end(self._live.visible(sandbox_id), "killed by request"))

    async def set_timeout(self, sandbox_id: str, timeout_s: int) -> None:
        """Let a sandbox end `timeout_s` seconds from now, capped to the longest session; zero or less: at once.

        Raises:
            SandboxNotFoundError: there is none, or it is paused.
            ConflictError: it changes its state.
            InvalidRequestError: the longest session is over already.
        """
        await self._lifetimes.change_end(self._live.visible(sandbox_id), timeout_s, extend_only=False)

    async def refresh(self, sandbox_id: str, duration_s: int) -> None:
        """Let a sandbox live for `duration_s` seconds from now at least (15 or more), never shorter than before.

        Raises:
            SandboxNotFoundError: there is none, or it is paused.
            ConflictError: it changes its state.
        """
        await self._lifetimes.change_end(
            self._live.visible(sandbox_id), max(duration_s, SHORTEST_REFRESH_S), extend_only=True
        )

    def metrics(self, sandbox_id: str, start: datetime | None, end: datetime | None) -> Sequence[MetricSample]:
        """Return readings of the last hour from `start` to `end` (both included), ascending. Empty right after start.

        Raises:
            SandboxNotFoundError: there is none.
        """
        self._live.visible(sandbox_id)
        return self._presence.sampler.samples(sandbox_id, start, end)

    async def logs(
        self,
        sandbox_id: str,
        *,
        start: datetime | None = None,
        end: datetime | None = None,
        limit: int = 1000,
        level: str | None = None,
        backward: bool = False,
        search: str | None = None,
    ) -> Sequence[LogEntry]:
        """Return log lines of the guest and of ours: ascending from `start`, or descending from `end`.

        Args:
            sandbox_id: whose.
            start: earliest time, included.
            end: latest time, included.
            limit: at most so many.
            level: the lowest one wanted.
            backward: the newest first.
            search: a part of the message.

        Raises:
            SandboxNotFoundError: there is none.
            StorageError: the log cannot be read.
        """
        live = self._live.visible(sandbox_id)
        machine = live.holdings.machine
        return await logbook.read(
            live.holdings.directory,
            None if machine is None else machine.console_log(),
            live.sandbox.started_at,
            logbook.LogQuery(start, end, limit, level, backward, search),
        )

    async def snapshot(self, sandbox_id: str, *, name: str | None = None, memory: bool = True) -> SnapshotInfo:
        """Make a named snapshot of a sandbox, which stands still for a moment and runs on.

        It is durable when this returns. A cancelled call does not stop it.

        Args:
            sandbox_id: which.
            name: `alias[:tag]`. A name that other snapshots have makes it a new build of the same template.
            memory: whether processes shall go on in what is created from it. Otherwise its disk alone is kept, flushed
                before.

        Raises:
            NotFoundError: there is no such sandbox, or it is paused.
            ConflictError: it changes its state.
            InvalidRequestError: the name is malformed, or that of a template.
            GuestUnresponsiveError: its agent does not answer, and `memory` is off.
            CapacityError: no memory for a copy of its own.
            InsufficientStorageError: a disk is full, or the budget of snapshots is.
            AgentEnvError: of the step that failed. It runs on in any case.
        """
        live = self._live.visible(sandbox_id)
        work = self._capturer.snapshot(live, name=name, memory=memory)
        return info_of(await outcome_of(self._operations.spawn(work, f"snapshot {sandbox_id}"), sandbox_id))

    async def fork(
        self,
        sandbox_id: str,
        *,
        count: int,
        timeout_s: int,
        on_result: Callable[[Sandbox | AgentEnvError], None] | None = None,
    ) -> Sequence[Sandbox | AgentEnvError]:
        """Start copies of a sandbox, which stands still for a moment and runs on before the first one starts.

        A cancelled call leaves no copy.

        Args:
            sandbox_id: which.
            count: how many, 1 to 100.
            timeout_s: seconds that each lives.
            on_result: told of each as soon as it is known.

        Returns:
            Each copy, or why it could not be started.

        Raises:
            SandboxNotFoundError: there is none.
            ConflictError: it is paused, or changes its state.
            InvalidRequestError: `count` or `timeout_s` is out of range.
            GuestUnresponsiveError: its agent does not answer.
            AgentEnvError: it could not be captured. It runs on in any case.
        """
        live = self._live.visible(sandbox_id)
        return await self._forker.fork(live, count=count, timeout_s=timeout_s, on_result=on_result)

    async def rollback(self, sandbox_id: str, reference: str) -> Sandbox:
        """Put a running sandbox back to a snapshot of its own. It keeps its id, its tokens and its time.

        A cancelled call does not stop it.

        Args:
            sandbox_id: which.
            reference: of the snapshot.

        Raises:
            SandboxNotFoundError: there is none.
            SnapshotNotFoundError: there is no such snapshot.
            InvalidRequestError: it was taken of another sandbox, or the reference is malformed.
            ConflictError: the sandbox does not run, or the snapshot does not fit to this node.
            AgentEnvError: it failed. The message says whether the sandbox runs on, or is paused in the snapshot.
        """
        return await outcome_of(self._roll_back.begin(self._live.visible(sandbox_id), reference), sandbox_id)

    async def snapshots(self, *, sandbox_id: str | None = None, name: str | None = None) -> Sequence[SnapshotInfo]:
        """Return the named snapshots, the oldest first.

        Args:
            sandbox_id: only those that were taken of it. It may be gone.
            name: only those that were taken under this `alias`, or `alias:tag`.

        Raises:
            InvalidRequestError: the name is malformed.
            StorageError: they cannot be read.
        """
        return await self._shelf.list(sandbox_id=sandbox_id, name=name)

    async def find_snapshot(self, reference: str) -> SnapshotInfo:
        """Return a named snapshot.

        Raises:
            SnapshotNotFoundError: nothing is called so.
            InvalidRequestError: the reference is malformed.
            SnapshotError: it is damaged.
        """
        return await self._shelf.find(reference)

    async def delete_snapshot(self, reference: str) -> None:
        """Delete a named snapshot, a damaged one, too. A cancelled call does not stop it.

        Raises:
            SnapshotNotFoundError: nothing is called so.
            InvalidRequestError: the reference is malformed, or a sandbox is paused in it or just starts from it.
            StorageError: it cannot be deleted.
        """
        await self._shelf.delete(reference)

    async def snapshot_tree(self, sandbox_id: str | None = None) -> tuple[SnapshotNode, ...]:
        """Return the roots of the family tree of named snapshots.

        Args:
            sandbox_id: only those that were taken of it, and what they go back to.

        Raises:
            StorageError: they cannot be read.
        """
        return await self._shelf.tree(sandbox_id)

    async def space(self) -> SpaceReport:
        """What takes up the disk of this node.

        Raises:
            StorageError: it cannot be read.
        """
        return await self._space.report()

    async def collect_garbage(self) -> CollectedSpace:
        """Remove the layers that nobody uses.

        Raises:
            StorageError: a layer cannot be removed.
        """
        return await self._space.collect()

    async def wake(self, sandbox_id: str) -> Route | None:
        """Return the route of a sandbox, awake. Calls at the same time make one resume.

        The caller has seen that the traffic may wake it (`RouteTable.sleeper`).

        Returns:
            None when it does not run and may not be woken.

        Raises:
            AgentEnvError: it could not be resumed.
        """
        while self.routes.get(sandbox_id) is None:
            if not await self._waiting.wake(sandbox_id):
                return None
        return self.routes.get(sandbox_id)

    def _adopt(self, adopted: Adopted) -> None:
        live = LiveSandbox(adopted.sandbox, adopted.holdings)
        self._live.add(live)
        if live.state is SandboxState.PAUSED:
            self._presence.let_sleep(live)
            if live.sandbox.rolling_back:
                self._roll_back.go_on(live)
        else:
            self._presence.adopt(live)

    async def _purge_keys(self) -> None:
        while True:
            try:
                await self._journal.purge_keys(self._clock.now() - KEYS_KEPT)
            except AgentEnvError as error:
                _log.warning("idempotency_keys_not_purged", error=error.message)
            await self._clock.sleep(_PURGE_PERIOD_S)
