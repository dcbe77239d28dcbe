"""Data of the orchestrator: what a sandbox is, what a caller may ask. Frozen; no behaviour beyond derived values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum


class SandboxState(StrEnum):
    """Where a sandbox is in its life. Only `running` and `paused` are ever shown to clients."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    KILLING = "killing"


class OnTimeout(StrEnum):
    KILL = "kill"
    PAUSE = "pause"


class PauseMode(StrEnum):
    """What a pause keeps."""

    FULL = "full"
    """Memory and disk: processes go on."""
    FILESYSTEM = "filesystem"
    """The disk alone: the sandbox boots again."""


@dataclass(frozen=True, slots=True)
class NetworkOptions:
    """The `network` object of the API, as given at creation. Entries of `allow_out` and `deny_out` are IPs or CIDRs."""

    allow_public_traffic: bool | None = None
    allow_out: tuple[str, ...] = ()
    deny_out: tuple[str, ...] = ()
    mask_request_host: str | None = None
    https_ports: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """A validated wish for a new sandbox."""

    template: str
    timeout_s: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    env_vars: Mapping[str, str] = field(default_factory=dict)
    on_timeout: OnTimeout = OnTimeout.KILL
    auto_pause_memory: bool = True
    """Whether a pause on timeout keeps the memory."""
    auto_resume: bool = False
    lifecycle_given: bool = False
    """Whether the caller chose a lifecycle; info omits the field otherwise."""
    allow_internet_access: bool | None = None
    network: NetworkOptions | None = None
    idempotency_key: str | None = None
    request_digest: str | None = None
    """sha256 of the canonical request body, compared when an idempotency key comes again."""


@dataclass(frozen=True, slots=True)
class Sandbox:
    """A sandbox as the journal and the machine confirm it. Times are aware UTC."""

    id: str
    state: SandboxState
    template_id: str
    alias: str | None
    started_at: datetime
    end_at: datetime
    vcpus: int
    memory_mib: int
    disk_mib: int
    envd_version: str
    envd_access_token: str = field(repr=False)
    traffic_access_token: str | None = field(repr=False)
    life: int
    """Grows with every (re)start of the VM; a connection of one life is never used in another."""
    request: CreateRequest
    reason: str | None = None
    """Why it ended or failed, for people."""
    default_user: str = "user"
    default_workdir: str | None = None
    template_env: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Environment that its template gives; that of the request wins."""
    resumed_at: datetime | None = None
    """When the session that runs began, if it is not the first."""
    paused_at: datetime | None = None
    """Set while it is paused."""
    pause_mode: PauseMode | None = None
    """Set while it is paused."""
    agent_unresponsive_at_pause: bool = False
    """Whether it is paused with an agent that did not answer: its memory holds that agent."""
    snapshot_id: str | None = None
    """The hidden snapshot that it is paused in, or was resumed from last."""
    pausing_into: str | None = None
    """The hidden snapshot that a pause is making."""

    @property
    def session_began(self) -> datetime:
        """From when the longest session counts."""
        return self.resumed_at or self.started_at


@dataclass(frozen=True, slots=True)
class MetricSample:
    """One reading of a sandbox. Sizes in bytes, `cpu_used_pct` of all vCPUs together (0-100)."""

    timestamp: datetime
    cpu_count: int
    cpu_used_pct: float
    mem_used: int
    mem_total: int
    mem_cache: int
    disk_used: int
    disk_total: int


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line of a sandbox's log. `level` is debug, info, warn or error."""

    timestamp: datetime
    level: str
    logger: str
    message: str
    fields: Mapping[str, str] = field(default_factory=dict)
