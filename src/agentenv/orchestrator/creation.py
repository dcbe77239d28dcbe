"""How a sandbox comes to be: idempotency, admission, start, and the complete way back when any of it fails.

A create runs in a task of its own. Without an idempotency key it is the caller's: when the caller leaves, everything is
undone. With a key it goes on, because the caller will ask for its outcome again.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import replace
from datetime import datetime, timedelta

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
    TooManyRequestsError,
)
from agentenv.guest.base import GuestIdentity
from agentenv.network.base import EgressPolicy
from agentenv.network.policy import parse_networks
from agentenv.orchestrator import codec, logbook
from agentenv.orchestrator.journal import KeyClaim, Outcome, Resource, ResourceKind
from agentenv.orchestrator.launch import Holdings, LaunchPlan
from agentenv.orchestrator.live import LiveSandbox
from agentenv.orchestrator.model import CreateRequest, LogEntry, Sandbox, SandboxState
from agentenv.orchestrator.parts import OperationParts
from agentenv.orchestrator.ports import Template
from agentenv.orchestrator.states import Event, after
from agentenv.orchestrator.tasks import OwnedTasks, to_the_end

_log = structlog.get_logger(__name__)
_FULL_RETRY_AFTER_S = 5
_IN_PROGRESS_RETRY_AFTER_S = 1


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
        self._check_open()
        self._check_request(request)
        policy = egress_policy(request)
        if request.idempotency_key is not None:
            return await self._create_once(request, policy, request.idempotency_key)
        task = self._starts.spawn(self._admit(request, policy, None), "create")
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

    def _check_open(self) -> None:
        if self._closing:
            raise CapacityError("the server is stopping")

    def _check_request(self, request: CreateRequest) -> None:
        longest = self._parts.settings.sandbox.max_timeout_s
        if not 0 < request.timeout_s <= longest:
            raise InvalidRequestError(f"timeout must be between 1 and {longest} seconds")

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

    async def _create_once(self, request: CreateRequest, policy: EgressPolicy, key: str) -> Sandbox:
        digest = request.request_digest or _digest_of(request)
        known = self._digests.get(key)
        if known is not None:
            raise _mismatch(key) if known != digest else _in_progress(key)
        self._digests[key] = digest
        task = self._starts.spawn(self._replay_or_admit(request, policy, KeyClaim(key, digest)), f"create {key}")
        task.add_done_callback(lambda _: self._digests.pop(key, None))
        return await self._outcome(task)

    async def _replay_or_admit(self, request: CreateRequest, policy: EgressPolicy, claim: KeyClaim) -> Sandbox:
        record = await self._parts.journal.find_key(claim.key)
        if record is None:
            return await self._admit(request, policy, claim)
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

    async def _admit(self, request: CreateRequest, policy: EgressPolicy, claim: KeyClaim | None) -> Sandbox:
        parts = self._parts
        template = await parts.templates.resolve(request.template)
        most = parts.settings.sandbox.max_running
        check_room(parts.live.running + parts.cleaner.machines, most)
        live = self._new_sandbox(request, template)
        parts.live.add(live)
        try:
            async with parts.gate.place():
                with parts.admission.reserve(template.memory_mib):
                    return await self._start(live, template, policy, claim)
        finally:
            if live.state is not SandboxState.RUNNING:
                parts.live.drop(live.sandbox.id)

    def _new_sandbox(self, request: CreateRequest, template: Template) -> LiveSandbox:
        now = self._parts.clock.now()
        private = request.network is not None and request.network.allow_public_traffic is False
        sandbox = Sandbox(
            id=ids.new_sandbox_id(),
            state=SandboxState.STARTING,
            template_id=template.template_id,
            alias=template.names[0] if template.names else None,
            started_at=now,
            end_at=now + timedelta(seconds=request.timeout_s),
            vcpus=template.vcpus,
            memory_mib=template.memory_mib,
            disk_mib=template.disk_mib,
            envd_version="",
            envd_access_token=ids.new_token(),
            traffic_access_token=ids.new_token() if private else None,
            life=1,
            request=request,
            default_user=template.default_user,
            default_workdir=template.default_workdir,
            template_env=dict(template.env),
        )
        return LiveSandbox(sandbox, Holdings(sandbox.id, self._parts.settings.paths.sandbox(sandbox.id)))

    async def _start(
        self, live: LiveSandbox, template: Template, policy: EgressPolicy, claim: KeyClaim | None
    ) -> Sandbox:
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
            info = await parts.launcher.launch(_plan(sandbox, template, policy), live.holdings)
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


def _plan(sandbox: Sandbox, template: Template, policy: EgressPolicy) -> LaunchPlan:
    return LaunchPlan(
        layers=template.layers,
        disk_bytes=template.disk_mib * MIB,
        policy=policy,
        vcpus=sandbox.vcpus,
        memory_mib=sandbox.memory_mib,
        identity=identity_of(sandbox),
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
    if isinstance(error, AgentEnvError):
        return SandboxStartError(f"sandbox {sandbox_id} could not be started: {error.message}")
    _log.error("start_crashed", sandbox=sandbox_id, exc_info=error)
    return SandboxStartError(f"sandbox {sandbox_id} could not be started: internal error ({type(error).__name__})")
