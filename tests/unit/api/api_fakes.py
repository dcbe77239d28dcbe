"""A service of sandboxes in memory, and the control plane served over real HTTP on a loopback port."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp
from starlette.types import ASGIApp

from agentenv.api.app import create_app
from agentenv.cli.http_server import HttpServer, base_url, bound_socket
from agentenv.config import ApiSettings, SandboxSettings, Settings
from agentenv.errors import (
    AgentEnvError,
    ConflictError,
    IdempotencyMismatchError,
    InvalidRequestError,
    SandboxNotFoundError,
    TemplateNotFoundError,
)
from agentenv.ids import new_sandbox_id, new_token
from agentenv.orchestrator.model import (
    CollectedSpace,
    CreateRequest,
    LogEntry,
    MetricSample,
    PauseMode,
    Sandbox,
    SandboxState,
    SnapshotInfo,
    SnapshotNode,
    SpaceReport,
)
from agentenv.templates.store import Template, parse_reference

KEY = "e2b_" + "0123456789abcdef0123" * 2
DOMAIN = "aenv.localhost:1234"
NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)


def make_sandbox(
    sandbox_id: str = "i00000000000000000000",
    *,
    state: SandboxState = SandboxState.RUNNING,
    started_at: datetime = NOW,
    metadata: dict[str, str] | None = None,
    template: str = "base",
    request: CreateRequest | None = None,
) -> Sandbox:
    """A sandbox with likely values."""
    request = request or CreateRequest(template=template, timeout_s=300, metadata=metadata or {})
    private = request.network is not None and request.network.allow_public_traffic is False
    return Sandbox(
        id=sandbox_id,
        state=state,
        template_id="t" + template,
        alias=template,
        started_at=started_at,
        end_at=started_at + timedelta(seconds=request.timeout_s),
        vcpus=2,
        memory_mib=512,
        disk_mib=4096,
        envd_version="0.6.7",
        envd_access_token=new_token(),
        traffic_access_token=new_token() if private else None,
        life=1,
        request=request,
    )


def make_snapshot(
    number: int = 1,
    *,
    name: str | None = None,
    sandbox_id: str = "i00000000000000000000",
    parent: SnapshotInfo | None = None,
    kind: PauseMode = PauseMode.FULL,
) -> SnapshotInfo:
    """A snapshot with likely values; each number has another id and time."""
    return SnapshotInfo(
        id=f"00000000-0000-4000-8000-{number:012}",
        reference=name or f"tsnap{number}:default",
        names=() if name is None else (name,),
        template_id=f"tsnap{number}",
        sandbox_id=sandbox_id,
        parent_id=None if parent is None else parent.id,
        created_at=NOW + timedelta(minutes=number),
        kind=kind,
        vcpus=2,
        memory_mib=512,
        disk_mib=4096,
        agent_version="0.6.7",
    )


@dataclass
class FakeService:
    """Does what the orchestrator's interface promises, without machines."""

    sandboxes: dict[str, Sandbox] = field(default_factory=dict)
    created: list[CreateRequest] = field(default_factory=list)
    by_key: dict[str, tuple[str | None, str]] = field(default_factory=dict)
    samples: list[MetricSample] = field(default_factory=list)
    entries: list[LogEntry] = field(default_factory=list)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    fail_with: Exception | None = None
    slow: asyncio.Event | None = None
    """Set when a create has begun; it goes on until it is cancelled."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    taken: list[SnapshotInfo] = field(default_factory=list)
    fork_failures: dict[int, AgentEnvError] = field(default_factory=dict)
    """By the number of the copy."""
    fork_pauses_at: int = 0
    """The copy before which it fails, or never ends, as told."""

    def reset(self) -> None:
        vars(self).update(vars(FakeService()))

    def add(self, sandbox: Sandbox) -> Sandbox:
        self.sandboxes[sandbox.id] = sandbox
        return sandbox

    def _change(self, sandbox_id: str, **values: Any) -> Sandbox:
        return self.add(replace(self.get(sandbox_id), **values))

    async def _perhaps(self) -> None:
        """Fail or never end, as the test wants it."""
        if self.fail_with is not None:
            raise self.fail_with
        if self.slow is not None:
            self.slow.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()

    async def create(self, request: CreateRequest) -> Sandbox:
        await self._perhaps()
        if request.template != "base":
            raise TemplateNotFoundError(request.template)
        if request.idempotency_key is not None and request.idempotency_key in self.by_key:
            digest, sandbox_id = self.by_key[request.idempotency_key]
            if digest != request.request_digest:
                raise IdempotencyMismatchError("the Idempotency-Key was used with another body")
            return self.get(sandbox_id)
        self.created.append(request)
        sandbox = self.add(make_sandbox(new_sandbox_id(), started_at=datetime.now(UTC), request=request))
        if request.idempotency_key is not None:
            self.by_key[request.idempotency_key] = (request.request_digest, sandbox.id)
        return sandbox

    async def connect(self, sandbox_id: str, timeout_s: int, *, memory: bool | None = None) -> tuple[Sandbox, bool]:
        sandbox = self.get(sandbox_id)
        self.calls.append(("connect", memory))
        end_at = datetime.now(UTC) + timedelta(seconds=timeout_s)
        if sandbox.state is SandboxState.PAUSED:
            return self._change(sandbox_id, state=SandboxState.RUNNING, end_at=end_at), True
        return self._change(sandbox_id, end_at=max(sandbox.end_at, end_at)), False

    async def resume(self, sandbox_id: str, timeout_s: int, **options: Any) -> Sandbox:
        if self.get(sandbox_id).state is not SandboxState.PAUSED:
            raise ConflictError("it runs")
        self.calls.append(("resume", (timeout_s, options)))
        return self._change(sandbox_id, state=SandboxState.RUNNING)

    async def pause(self, sandbox_id: str, **options: Any) -> None:
        if self.get(sandbox_id).state is not SandboxState.RUNNING:
            raise ConflictError("it is paused")
        self.calls.append(("pause", options))
        self._change(sandbox_id, state=SandboxState.PAUSED)

    def get(self, sandbox_id: str) -> Sandbox:
        if sandbox_id not in self.sandboxes:
            raise SandboxNotFoundError(sandbox_id)
        return self.sandboxes[sandbox_id]

    def list(self) -> list[Sandbox]:
        return list(self.sandboxes.values())

    async def kill(self, sandbox_id: str) -> None:
        if self.get(sandbox_id).state is SandboxState.STARTING:
            raise ConflictError("the sandbox is being started")
        del self.sandboxes[sandbox_id]

    async def set_timeout(self, sandbox_id: str, timeout_s: int) -> None:
        if self.get(sandbox_id).state is not SandboxState.RUNNING:
            raise SandboxNotFoundError(sandbox_id)
        self._change(sandbox_id, end_at=datetime.now(UTC) + timedelta(seconds=timeout_s))

    async def refresh(self, sandbox_id: str, duration_s: int) -> None:
        self.calls.append(("refresh", duration_s))
        sandbox = self.get(sandbox_id)
        self._change(sandbox_id, end_at=max(sandbox.end_at, datetime.now(UTC) + timedelta(seconds=duration_s)))

    def metrics(self, sandbox_id: str, start: datetime | None, end: datetime | None) -> list[MetricSample]:
        self.get(sandbox_id)
        return [
            sample
            for sample in self.samples
            if (start is None or sample.timestamp >= start) and (end is None or sample.timestamp <= end)
        ]

    async def logs(self, sandbox_id: str, **options: Any) -> list[LogEntry]:
        self.get(sandbox_id)
        self.calls.append(("logs", options))
        start = options.get("start")
        return [entry for entry in self.entries if start is None or entry.timestamp >= start][: options["limit"]]

    def _running(self, sandbox_id: str) -> Sandbox:
        sandbox = self.get(sandbox_id)
        if sandbox.state is not SandboxState.RUNNING:
            raise ConflictError(f"the sandbox is {sandbox.state}")
        return sandbox

    async def snapshot(self, sandbox_id: str, *, name: str | None = None, memory: bool = True) -> SnapshotInfo:
        sandbox = self._running(sandbox_id)
        await self._perhaps()
        kind = PauseMode.FULL if memory else PauseMode.FILESYSTEM
        tagged = None if name is None else name if ":" in name else f"{name}:default"
        number = len(self.taken) + 1
        self.taken.append(make_snapshot(number, name=tagged, sandbox_id=sandbox.id, kind=kind))
        return self.taken[-1]

    async def fork(
        self,
        sandbox_id: str,
        *,
        count: int,
        timeout_s: int,
        on_result: Callable[[Sandbox | AgentEnvError], None] | None = None,
    ) -> list[Sandbox | AgentEnvError]:
        request = self._running(sandbox_id).request
        self.calls.append(("fork", (count, timeout_s)))
        results: list[Sandbox | AgentEnvError] = []
        for number in range(count):
            if number == self.fork_pauses_at:
                await self._perhaps()
            results.append(self.fork_failures.get(number) or self.add(make_sandbox(new_sandbox_id(), request=request)))
            if on_result is not None:
                on_result(results[-1])
        return results

    async def rollback(self, sandbox_id: str, reference: str) -> Sandbox:
        sandbox = self._running(sandbox_id)
        await self._perhaps()
        target = await self.find_snapshot(reference)
        if target.sandbox_id != sandbox_id:
            raise InvalidRequestError(f"it was taken of {target.sandbox_id}")
        return self._change(sandbox_id, checkpoint_id=target.id, life=sandbox.life + 1)

    async def snapshots(self, *, sandbox_id: str | None = None, name: str | None = None) -> list[SnapshotInfo]:
        self.calls.append(("snapshots", name))
        return [
            snapshot
            for snapshot in self.taken
            if sandbox_id in (None, snapshot.sandbox_id)
            and (name is None or any(name in (one, one.partition(":")[0]) for one in snapshot.names))
        ]

    async def find_snapshot(self, reference: str) -> SnapshotInfo:
        for snapshot in self.taken:
            if reference in (snapshot.id, snapshot.reference, snapshot.template_id, *snapshot.names):
                return snapshot
        raise TemplateNotFoundError(reference)

    async def delete_snapshot(self, reference: str) -> None:
        await self._perhaps()
        self.taken.remove(await self.find_snapshot(reference))

    async def snapshot_tree(self, sandbox_id: str | None = None) -> tuple[SnapshotNode, ...]:
        self.calls.append(("tree", sandbox_id))
        made: dict[str | None, tuple[SnapshotNode, ...]] = {}
        for snapshot in reversed(self.taken):
            node = SnapshotNode(snapshot.id, snapshot, 1000, 50, made.pop(snapshot.id, ()))
            made[snapshot.parent_id] = (node, *made.get(snapshot.parent_id, ()))
        return made.get(None, ())

    async def space(self) -> SpaceReport:
        return SpaceReport(8, 7, 6, 5, 4, 3, None, 1)

    async def collect_garbage(self) -> CollectedSpace:
        return CollectedSpace(layers=3, bytes=4096)


@dataclass
class FakeTemplates:
    """One template, unless more are given."""

    templates: tuple[Template, ...] = (
        Template("tbase", ("base", "debian"), ("sha256:0",), 2, 512, 4096, created_at=NOW),
    )

    async def resolve(self, reference: str) -> Template:
        wanted = parse_reference(reference)
        for template in self.templates:
            if wanted.tag is None and wanted.name in (template.template_id, *template.names):
                return template
        raise TemplateNotFoundError(reference)

    async def list(self) -> tuple[Template, ...]:
        return self.templates


def make_settings(**api: Any) -> Settings:
    return Settings(api=ApiSettings(**api), sandbox=SandboxSettings(max_timeout_s=3600))


@contextlib.asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[str]:
    """Serve an application on a free loopback port; yields its URL."""
    listener = bound_socket("127.0.0.1", 0)
    ready = asyncio.Event()
    server = HttpServer(app, listener, ready.set)
    url = base_url(listener)
    task = asyncio.create_task(server.run_until_stopped())
    try:
        await ready.wait()
        yield url
    finally:
        server.stop(force=True)
        await task


@dataclass(frozen=True)
class Answer:
    """A response, read to its end."""

    status: int
    headers: Any
    json: Any
    raw: bytes


class Client:
    """Calls a control plane, with the key unless told otherwise."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def __call__(self, method: str, path: str, *, key: str | None = KEY, **options: Any) -> Answer:
        from yarl import URL

        headers = dict(options.pop("headers", {}))
        if key is not None:
            headers["X-API-KEY"] = key
        url = URL(self.url + path, encoded=True)
        async with self.session.request(method, url, headers=headers, **options) as response:
            raw = await response.read()
            is_json = response.content_type == "application/json" and raw
            return Answer(response.status, response.headers, await response.json() if is_json else None, raw)


@contextlib.asynccontextmanager
async def control_plane(
    service: FakeService, templates: FakeTemplates | None = None, **api: Any
) -> AsyncIterator[Client]:
    """Serve the control plane over a fake service; yields a client of it."""
    app = create_app(service, templates or FakeTemplates(), make_settings(**api), KEY, domain=DOMAIN)
    async with served(app) as url, aiohttp.ClientSession() as session:
        yield Client(session, url)
