"""How a sandbox comes to be: idempotency, admission, start, and the complete way back when any of it fails.

A create runs in a task of its own. Without an idempotency key it is the caller's: when the caller leaves, everything is
undone. With a key it goes on, because the caller will ask for its outcome again.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

import structlog

from agentenv import ids
from agentenv.config import MIB
from agentenv.errors import (
    AgentEnvError,
    CapacityError,
    ConflictError,
    IdempotencyMismatchError,
    InsufficientStorageError,
    InvalidRequestError,
    SandboxStartError,
    SnapshotError,
    SnapshotMismatchError,
    SnapshotNotFoundError,
    TemplateNotFoundError,
    TooManyRequestsError,
)
from agentenv.guest.base import GuestIdentity
from agentenv.network.base import EgressPolicy
from agentenv.network.policy import parse_networks
from agentenv.orchestrator import codec, logbook, responsiveness
from agentenv.orchestrator.journal import KeyClaim, Outcome, Resource, ResourceKind
from agentenv.orchestrator.launch import Holdings, LaunchPlan
from agentenv.orchestrator.live import LiveSandbox
from agentenv.orchestrator.model import CreateRequest, LogEntry, Sandbox, SandboxState
from agentenv.orchestrator.parts import OperationParts
from agentenv.orchestrator.ports import Template
from agentenv.orchestrator.states import Event, after
from agentenv.orchestrator.tasks import OwnedTasks, to_the_end
from agentenv.snapshots.machines import LoadableMachine
from agentenv.snapshots.manifest import MachineShape

_log = structlog.get_logger(__name__)
_FULL_RETRY_AFTER_S = 5
_IN_PROGRESS_RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class Origin:
    """What a new sandbox is made from: a template, a snapshot, or another sandbox."""

    template_id: str
    alias: str | None
    vcpus: int
    memory_mib: int
    disk_mib: int
    default_user: str
    default_workdir: str | None
    env: Mapping[str, str]
    """That of the request wins."""
    snapshot_id: str | None
    """See `Sandbox`."""
    checkpoint_id: str | None
    """See `Sandbox`."""
    machine: Callable[[], AbstractAsyncContextManager[LoadableMachine]]
    """Keeps what the sandbox is started from while the context lasts."""
    starting_from: str | None = None
    """The named snapshot that must not be deleted meanwhile."""


class Creator:
    """Makes sandboxes."""

    def __init__(self, parts: OperationParts) -> None:
        self._parts = parts
        self._starts = OwnedTasks()
        self._digests: dict[str, str] = {}
        """Idempotency keys of creates under way, and the digest of their bodies."""
        self._closing = False

    async def create(self, request: CreateRequest) -> Sandbox:
        """See `Orchestrator.create`."""
        self.check(request)
        if request.idempotency_key is not None:
            return await self._create_once(request, request.idempotency_key)
        return await self._create(self._admit(request, None))

    async def create_from(self, origin: Origin, request: CreateRequest) -> Sandbox:
        """Start a sandbox from what the caller keeps. A cancelled call leaves nothing behind.

        Raises:
            AgentEnvError: as for `create`.
        """
        self.check(request)
        return await self._create(self._admit_from(origin, request, None))

    def check(self, request: CreateRequest) -> None:
        """Refuse a request that can never be granted, or comes too late.

        Raises:
            InvalidRequestError: a timeout or network rule out of range.
            CapacityError: the server stops.
        """
        if self._closing:
            raise CapacityError("the server is stopping")
        longest = self._parts.settings.sandbox.max_timeout_s
        if not 0 < request.timeout_s <= longest:
            raise InvalidRequestError(f"timeout must be between 1 and {longest} seconds")
        egress_policy(request)

    async def _create(self, admission: Coroutine[Any, Any, Sandbox]) -> Sandbox:
        task = self._starts.spawn(admission, "create")
        try:
            return await self._outcome(task)
        except asyncio.CancelledError:
            task.add_done_callback(self._abandon)
            task.cancel()
            await asyncio.wait([task])
            raise

    async def close(self) -> None:
        """Undo the creates under way and let no more in."""
        self._closing = True
        await self._starts.close()

    async def _outcome(self, task: asyncio.Task[Sandbox]) -> Sandbox:
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and (caller is None or not caller.cancelling()):
                raise CapacityError("the server is stopping; the sandbox was not created") from None
            raise

    def _abandon(self, task: asyncio.Task[Sandbox]) -> None:
        """The caller left in the very moment of success: nobody knows the sandbox, so it must go."""
        if task.cancelled() or task.exception() is not None:
            return
        live = self._parts.live.find(task.result().id)
        if live is not None and live.state is SandboxState.RUNNING:
            self._parts.presence.end(live, "the caller left before it was told of it")

    async def _create_once(self, request: CreateRequest, key: str) -> Sandbox:
        digest = request.request_digest or _digest_of(request)
        known = self._digests.get(key)
        if known is not None:
            raise _mismatch(key) if known != digest else _in_progress(key)
        self._digests[key] = digest
        task = self._starts.spawn(self._replay_or_admit(request, KeyClaim(key, digest)), f"create {key}")
        task.add_done_callback(lambda _: self._digests.pop(key, None))
        return await self._outcome(task)

    async def _replay_or_admit(self, request: CreateRequest, claim: KeyClaim) -> Sandbox:
        record = await self._parts.journal.find_key(claim.key)
        if record is None:
            return await self._admit(request, claim)
        if record.claim.digest != claim.digest:
            raise _mismatch(claim.key)
        if record.sandbox is not None:
            live = self._parts.live.find(record.sandbox_id)
            return record.sandbox if live is None else live.sandbox
        if record.outcome is Outcome.IN_PROGRESS:  # failed, and what it took is still being given back
            raise _in_progress(claim.key)
        raise ConflictError(
            f"the server stopped while it created the sandbox of idempotency key '{claim.key}', and what it had made "
            "was removed; use a new key",
            error_code="idempotency_outcome_unknown",
            should_retry=False,
        )

    async def _admit(self, request: CreateRequest, claim: KeyClaim | None) -> Sandbox:
        template = await self._parts.templates.resolve(request.template)
        if template.snapshot_id is not None and request.memory:
            manifest = await self._parts.saved.get(template.snapshot_id)
            if manifest.state is not None and not manifest.agent_responsive:
                raise responsiveness.agent_was_silent(
                    f"the agent did not answer when snapshot '{request.template}' was taken, so its saved memory is of "
                    "no use; create with memory: false boots from its disk"
                )
        return await self._admit_from(self._origin(template, memory=request.memory), request, claim)

    async def _admit_from(self, origin: Origin, request: CreateRequest, claim: KeyClaim | None) -> Sandbox:
        parts = self._parts
        check_room(parts.live.running + parts.cleaner.machines, parts.settings.sandbox.max_running)
        if origin.starting_from in parts.deleting:
            raise TemplateNotFoundError(request.template)
        live = self._new_sandbox(origin, request)
        parts.live.add(live)
        try:
            async with parts.gate.place():
                with parts.admission.reserve(origin.memory_mib):
                    return await self._start(live, origin, claim)
        finally:
            live.starting_from = None
            if live.state is not SandboxState.RUNNING:
                parts.live.drop(live.sandbox.id)

    def _origin(self, template: Template, *, memory: bool) -> Origin:
        parts, snapshot_id = self._parts, template.snapshot_id
        fresh = LoadableMachine(
            MachineShape(template.vcpus, template.memory_mib, template.disk_mib * MIB), tuple(template.layers)
        )
        return Origin(
            template_id=template.template_id,
            alias=template.names[0] if template.names else None,
            vcpus=template.vcpus,
            memory_mib=template.memory_mib,
            disk_mib=template.disk_mib,
            default_user=template.default_user,
            default_workdir=template.default_workdir,
            env=template.env,
            snapshot_id=snapshot_id,
            checkpoint_id=snapshot_id,
            machine=lambda: nullcontext(fresh) if snapshot_id is None else parts.saved.load(snapshot_id, memory=memory),
            starting_from=snapshot_id,
        )

    def _new_sandbox(self, origin: Origin, request: CreateRequest) -> LiveSandbox:
        now = self._parts.clock.now()
        private = request.network is not None and request.network.allow_public_traffic is False
        sandbox = Sandbox(
            id=ids.new_sandbox_id(),
            state=SandboxState.STARTING,
            template_id=origin.template_id,
            alias=origin.alias,
            started_at=now,
            end_at=now + timedelta(seconds=request.timeout_s),
            vcpus=origin.vcpus,
            memory_mib=origin.memory_mib,
            disk_mib=origin.disk_mib,
            envd_version="",
            envd_access_token=ids.new_token(),
            traffic_access_token=ids.new_token() if private else None,
            life=1,
            request=request,
            default_user=origin.default_user,
            default_workdir=origin.default_workdir,
            template_env=dict(origin.env),
            snapshot_id=origin.snapshot_id,
            checkpoint_id=origin.checkpoint_id,
        )
        live = LiveSandbox(sandbox, Holdings(sandbox.id, self._parts.settings.paths.sandbox(sandbox.id)))
        live.starting_from = origin.starting_from
        return live

    async def _start(self, live: LiveSandbox, origin: Origin, claim: KeyClaim | None) -> Sandbox:
        parts = self._parts
        sandbox = live.sandbox
        began = parts.clock.monotonic()
        try:
            await parts.journal.begin_start(
                sandbox,
                (
                    Resource(ResourceKind.DIRECTORY, str(live.holdings.directory)),
                    Resource(ResourceKind.DISK, sandbox.id),
                    Resource(ResourceKind.MACHINE, sandbox.id),
                ),
                claim,
                sandbox.started_at,
            )
            async with origin.machine() as machine:
                info = await parts.launcher.launch(plan_of(sandbox, machine), live.holdings)
            running = self._ready(sandbox, info.version)
            await logbook.append(
                live.holdings.directory, LogEntry(sandbox.started_at, "info", "orchestrator", "sandbox start began")
            )
            await parts.journal.finish_start(running, claim)
        except (Exception, asyncio.CancelledError) as error:
            live.apply(Event.START_FAILED)
            await to_the_end(parts.operations.spawn(self._roll_back(live), f"roll back {sandbox.id}"))
            if isinstance(error, asyncio.CancelledError):
                raise
            raise worded_start(sandbox.id, error) from error
        # From here to the return nothing waits: the sandbox is the caller's in the moment it is published.
        live.sandbox = running
        parts.presence.publish(live)
        _log.info("sandbox_started", sandbox=sandbox.id, took_s=round(parts.clock.monotonic() - began, 3))
        return running

    def _ready(self, sandbox: Sandbox, envd_version: str) -> Sandbox:
        # The life that the caller asked for begins when it can use the sandbox, however long the start took.
        now: datetime = self._parts.clock.now()
        state = after(sandbox.state, Event.READY)
        assert state is not None  # noqa: S101 - by the table
        return replace(
            sandbox,
            state=state,
            started_at=now,
            end_at=now + timedelta(seconds=sandbox.request.timeout_s),
            envd_version=envd_version,
        )

    async def _roll_back(self, live: LiveSandbox) -> None:
        try:
            await self._parts.releaser.release(live.holdings)
        except AgentEnvError as error:
            self._parts.cleaner.take_over(live.holdings, error)


def egress_policy(request: CreateRequest) -> EgressPolicy:
    """The network rules that a request asks for.

    Raises:
        InvalidRequestError: an entry is no IPv4 address or CIDR.
    """
    network = request.network
    return EgressPolicy(
        internet=request.allow_internet_access is not False,
        allow=parse_networks(network.allow_out, "allowOut") if network is not None else (),
        deny=parse_networks(network.deny_out, "denyOut") if network is not None else (),
    )


def check_room(running: int, most: int) -> None:
    """Refuse one more running sandbox when there are `most`.

    Raises:
        TooManyRequestsError: there are.
    """
    if running >= most:
        raise TooManyRequestsError(
            f"this node runs at most {most} sandboxes; kill or pause some, or try again later",
            retry_after_s=_FULL_RETRY_AFTER_S,
        )


def identity_of(sandbox: Sandbox) -> GuestIdentity:
    """What the guest of a sandbox is told in its present life."""
    return GuestIdentity(
        sandbox_id=sandbox.id,
        template_id=sandbox.template_id,
        hostname=sandbox.id,
        access_token=sandbox.envd_access_token,
        env_vars={**sandbox.template_env, **sandbox.request.env_vars},
        default_user=sandbox.default_user,
        default_workdir=sandbox.default_workdir,
        life=sandbox.life,
    )


def plan_of(sandbox: Sandbox, machine: LoadableMachine, *, again: bool = False) -> LaunchPlan:
    """All decisions of a start; `again` of one that ran before."""
    return LaunchPlan(
        layers=machine.disk_layers,
        disk_bytes=machine.shape.disk_bytes,
        policy=egress_policy(sandbox.request),
        vcpus=machine.shape.vcpus,
        memory_mib=machine.shape.memory_mib,
        identity=identity_of(sandbox),
        again=again,
        saved=machine,
    )


def _digest_of(request: CreateRequest) -> str:
    return hashlib.sha256(codec.encode_request(replace(request, idempotency_key=None)).encode()).hexdigest()


def _mismatch(key: str) -> IdempotencyMismatchError:
    return IdempotencyMismatchError(
        f"idempotency key '{key}' was used with another request body; use a new key", should_retry=False
    )


def _in_progress(key: str) -> ConflictError:
    return ConflictError(
        f"the create with idempotency key '{key}' is still running; try again",
        error_code="idempotency_in_progress",
        retry_after_s=_IN_PROGRESS_RETRY_AFTER_S,
        should_retry=True,
    )


def worded_start(sandbox_id: str, error: BaseException) -> AgentEnvError:
    """The error that the caller of a failed start gets: refusals as they are, failures as a failed start."""
    if isinstance(error, InsufficientStorageError | CapacityError):
        return error
    if isinstance(error, SnapshotMismatchError | SnapshotNotFoundError):
        return error
    if isinstance(error, SnapshotError):
        return SnapshotError(f"sandbox {sandbox_id} could not be started: {error.message}")
    if isinstance(error, AgentEnvError):
        return SandboxStartError(f"sandbox {sandbox_id} could not be started: {error.message}")
    _log.error("start_crashed", sandbox=sandbox_id, exc_info=error)
    return SandboxStartError(f"sandbox {sandbox_id} could not be started: internal error ({type(error).__name__})")
