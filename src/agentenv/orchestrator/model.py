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
    CAPTURING = "capturing"
    """It runs, but for the moment in which it is captured for a snapshot or a fork."""
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
    memory: bool = True
    """Whether it goes on from the memory of the snapshot that it is created from; else it boots from its disk."""
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
    """The snapshot, hidden or not, that it is paused in, or that its memory is most like: what it was started or
    resumed from last, or what was taken of it since."""
    checkpoint_id: str | None = None
    """The named snapshot that it was started from, was rolled back to, or that was taken of it, whichever was last."""
    rolling_back: bool = False
    """Whether it is on its way to `snapshot_id`: then the next server goes on with that."""
    pausing_into: str | None = None
    """The hidden snapshot that a pause is making."""

    @property
    def session_began(self) -> datetime:
        """From when the longest session counts."""
        return self.resumed_at or self.started_at


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """A named snapshot, as callers see it."""

    id: str
    """Of this one snapshot, for ever; also its build id. A UUID."""
    reference: str
    """What the API calls `snapshotID`: `alias:tag`, or `<template id>:default` when it has no name;
    `<template id>:<id>` when a later one took its name."""
    names: tuple[str, ...]
    """`alias:tag`, while they are its own."""
    template_id: str
    """Of the template that it is a build of."""
    sandbox_id: str
    """Where it was taken."""
    parent_id: str | None
    """`id` of the snapshot that the sandbox went on from; it may be gone."""
    created_at: datetime
    kind: PauseMode
    vcpus: int
    memory_mib: int
    disk_mib: int
    agent_version: str


@dataclass(frozen=True, slots=True)
class SnapshotNode:
    """A place in the tree of snapshots. `snapshot` is None where one was deleted, or cannot be read."""

    id: str
    snapshot: SnapshotInfo | None
    exclusive_bytes: int
    """What deleting it would give back."""
    shared_bytes: int
    children: tuple[SnapshotNode, ...]


@dataclass(frozen=True, slots=True)
class SpaceReport:
    """What takes up the disk of this node. Bytes."""

    layers_bytes: int
    """All stored layers, each once; the sums below share them."""
    garbage_bytes: int
    """Of them, what nobody uses: `aenv gc` removes it."""
    templates_bytes: int
    snapshots_bytes: int
    """Of named snapshots, their own files included."""
    paused_bytes: int
    """Of what paused sandboxes are kept in."""
    disks_bytes: int
    """Uppers: what running sandboxes wrote since they started or were last captured."""
    budget_bytes: int | None
    """Of snapshots; None: no limit."""
    free_bytes: int
    """Of the file system that holds the home."""


@dataclass(frozen=True, slots=True)
class CollectedSpace:
    """What `aenv gc` removed."""

    layers: int
    bytes: int


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
