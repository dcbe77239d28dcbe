"""Bodies of requests and responses, with their names on the wire (E2B contract §2.2).

Types only: meaning is checked elsewhere. Requests are strict (no number from a string), ignore unknown fields, and take
null as absent. Responses are sent without their None fields, because clients fail on some nulls (§2.1.3).
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

MOST_FORKS = 100
"""Copies that one call makes at most."""

Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]


class _Request(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


class _Response(BaseModel):
    model_config = ConfigDict(populate_by_name=True, frozen=True)


class AutoResumeBody(_Request):
    """Whether traffic wakes a paused sandbox."""

    enabled: bool = False


class NetworkBody(_Request):
    """Egress and ingress rules of a sandbox."""

    allow_public_traffic: bool | None = Field(default=None, alias="allowPublicTraffic")
    allow_out: list[str] | None = Field(default=None, alias="allowOut", description="IPs or CIDRs; beat denyOut")
    deny_out: list[str] | None = Field(default=None, alias="denyOut", description="IPs or CIDRs")
    dns_servers: list[str] | None = Field(default=None, alias="dnsServers")
    egress_proxy: dict[str, Any] | None = Field(default=None, alias="egressProxy")
    mask_request_host: str | None = Field(default=None, alias="maskRequestHost")
    https_ports: list[Int32] | None = Field(default=None, alias="httpsPorts")
    rules: dict[str, Any] | None = None


class VolumeMountBody(_Request):
    """A volume and where it is mounted."""

    name: str
    path: str


class CreateBody(_Request):
    """A new sandbox."""

    template_id: str = Field(alias="templateID", description="ID, alias, alias:tag, or snapshotID")
    timeout: Int32 | None = Field(default=None, description="Seconds to live; the default depends on the route")
    auto_pause: bool | None = Field(default=None, alias="autoPause")
    auto_pause_memory: bool | None = Field(default=None, alias="autoPauseMemory")
    auto_resume: AutoResumeBody | None = Field(default=None, alias="autoResume")
    allow_internet_access: bool | None = None
    network: NetworkBody | None = None
    metadata: dict[str, str] | None = None
    env_vars: dict[str, str] | None = Field(default=None, alias="envVars")
    mcp: dict[str, Any] | None = None
    iam: dict[str, Any] | None = None
    volume_mounts: list[VolumeMountBody] | None = Field(default=None, alias="volumeMounts")
    memory: bool | None = Field(default=None, description="false: boot from the disk of a snapshot, without its memory")


class ConnectBody(_Request):
    """How long a sandbox shall live from now, at least."""

    timeout: Int32 | None = None
    memory: bool | None = None


class LegacyConnectBody(_Request):
    """As `ConnectBody`, for the older route, which demands the timeout."""

    timeout: Int32
    memory: bool | None = None


class PauseBody(_Request):
    """How a sandbox is paused."""

    memory: bool | None = Field(default=None, description="false: keep the disk alone")
    require_healthy_guest: bool | None = Field(default=None, alias="requireHealthyGuest")


class ResumeBody(_Request):
    """As `ConnectBody`, for the older route that resumes paused sandboxes only."""

    timeout: Int32 | None = None
    auto_pause: bool | None = Field(default=None, alias="autoPause")
    memory: bool | None = None


class TimeoutBody(_Request):
    """Seconds from now to expiry; zero or less: now."""

    timeout: Int32


class RefreshBody(_Request):
    """Seconds that a sandbox shall live from now, at least."""

    duration: Int32 | None = None


class SnapshotBody(_Request):
    """What a snapshot keeps, and how it is called."""

    name: str | None = Field(default=None, description="alias, or alias:tag; a name that is in use gets a new build")
    memory: bool | None = Field(default=None, description="false: keep the disk alone")


class ForkBody(_Request):
    """How many copies, and how long they live."""

    timeout: Int32 | None = Field(default=None, description="Seconds to live; default 300")
    count: int | None = Field(default=None, ge=1, le=MOST_FORKS, description="Default 1")


class RollbackBody(_Request):
    """Where to."""

    snapshot_id: str = Field(alias="snapshotID", description="A snapshot that was taken of the same sandbox")


class SandboxHandle(_Response):
    """What create and connect answer: all that a client needs to reach the sandbox."""

    template_id: str = Field(alias="templateID")
    sandbox_id: str = Field(alias="sandboxID")
    client_id: str = Field(alias="clientID")
    envd_version: str = Field(alias="envdVersion")
    alias: str | None = None
    envd_access_token: str = Field(alias="envdAccessToken")
    traffic_access_token: str | None = Field(default=None, alias="trafficAccessToken")
    domain: str


class ListedSandbox(_Response):
    """An item of a list."""

    template_id: str = Field(alias="templateID")
    sandbox_id: str = Field(alias="sandboxID")
    client_id: str = Field(alias="clientID")
    alias: str | None = None
    started_at: datetime = Field(alias="startedAt")
    end_at: datetime = Field(alias="endAt")
    cpu_count: int = Field(alias="cpuCount")
    memory_mb: int = Field(alias="memoryMB", description="MiB")
    disk_size_mb: int = Field(alias="diskSizeMB", description="MiB")
    state: str
    envd_version: str = Field(alias="envdVersion")
    metadata: dict[str, str]
    envd_unresponsive_at_pause: bool | None = Field(default=None, alias="envdUnresponsiveAtPause")


class NetworkInfo(_Response):
    """The network object as it was given."""

    allow_public_traffic: bool | None = Field(default=None, alias="allowPublicTraffic")
    allow_out: list[str] | None = Field(default=None, alias="allowOut")
    deny_out: list[str] | None = Field(default=None, alias="denyOut")
    mask_request_host: str | None = Field(default=None, alias="maskRequestHost")
    https_ports: list[int] | None = Field(default=None, alias="httpsPorts")


class LifecycleInfo(_Response):
    """What happens at expiry, and whether traffic wakes the sandbox."""

    on_timeout: str = Field(alias="onTimeout")
    auto_resume: bool = Field(alias="autoResume")


class SandboxInfo(ListedSandbox):
    """All about one sandbox."""

    envd_access_token: str = Field(alias="envdAccessToken")
    domain: str
    allow_internet_access: bool | None = Field(default=None, alias="allowInternetAccess")
    network: NetworkInfo | None = None
    lifecycle: LifecycleInfo | None = None
    pause_mode: str | None = Field(default=None, alias="pauseMode")
    checkpoint_id: str | None = Field(
        default=None,
        alias="checkpointID",
        description="buildID of the snapshot that it was created from, rolled back to, or that was taken of it last",
    )


class ForkError(_Response):
    """Why a copy could not be started."""

    code: int = Field(description="The HTTP status that a call for this copy alone would have")
    message: str


class ForkResult(_Response):
    """One copy: exactly one of the two."""

    sandbox: SandboxHandle | None = None
    error: ForkError | None = None


class SnapshotView(_Response):
    """A snapshot. E2B's clients know the first two fields."""

    snapshot_id: str = Field(alias="snapshotID", description="What to create sandboxes from")
    names: list[str] = Field(description="alias:tag, as long as no later snapshot took it")
    build_id: str = Field(alias="buildID", description="UUID; names this snapshot for ever")
    template_id: str = Field(alias="templateID")
    sandbox_id: str = Field(alias="sandboxID", description="Where it was taken")
    parent_id: str | None = Field(
        default=None, alias="parentID", description="buildID of the snapshot that the sandbox had gone on from"
    )
    created_at: datetime = Field(alias="createdAt")
    mode: str = Field(description="full: memory and disk; filesystem: the disk alone")
    cpu_count: int = Field(alias="cpuCount")
    memory_mb: int = Field(alias="memoryMB", description="MiB")
    disk_size_mb: int = Field(alias="diskSizeMB", description="MiB")
    envd_version: str = Field(alias="envdVersion")


class SnapshotNodeView(_Response):
    """A place in the tree of snapshots. Each comes after its parent."""

    build_id: str = Field(alias="buildID")
    parent_id: str | None = Field(default=None, alias="parentID", description="buildID of the place above")
    exclusive_bytes: int = Field(alias="exclusiveBytes", description="What deleting it gives back")
    shared_bytes: int = Field(alias="sharedBytes", description="What it shares with other snapshots or templates")
    snapshot: SnapshotView | None = Field(default=None, description="Missing where the snapshot was deleted")


class SpaceView(_Response):
    """What takes up the disk of the node. Sums may share layers, so they do not add up to `layersBytes`."""

    layers_bytes: int = Field(alias="layersBytes", description="All stored layers, each once")
    garbage_bytes: int = Field(alias="garbageBytes", description="Of them, what nobody uses")
    templates_bytes: int = Field(alias="templatesBytes")
    snapshots_bytes: int = Field(alias="snapshotsBytes")
    paused_bytes: int = Field(alias="pausedBytes", description="What paused sandboxes are kept in")
    disks_bytes: int = Field(alias="disksBytes", description="What running sandboxes wrote to their disks")
    budget_bytes: int | None = Field(default=None, alias="budgetBytes", description="Of snapshots; missing: no limit")
    free_bytes: int = Field(alias="freeBytes", description="Of the file system that holds the node's home")


class CollectedView(_Response):
    """What was removed."""

    layers: int
    bytes: int


class Metric(_Response):
    """One reading. Memory and disk in bytes; CPU in per cent of all vCPUs together."""

    timestamp: datetime
    timestamp_unix: int = Field(alias="timestampUnix")
    cpu_count: int = Field(alias="cpuCount")
    cpu_used_pct: float = Field(alias="cpuUsedPct")
    mem_used: int = Field(alias="memUsed")
    mem_total: int = Field(alias="memTotal")
    mem_cache: int = Field(alias="memCache")
    disk_used: int = Field(alias="diskUsed")
    disk_total: int = Field(alias="diskTotal")


class MetricsBySandbox(_Response):
    """The latest reading of several sandboxes."""

    sandboxes: dict[str, Metric]


class LogLine(_Response):
    """A log entry as one JSON text, which the CLI parses."""

    timestamp: datetime
    line: str


class StructuredLog(_Response):
    """A log entry."""

    timestamp: datetime
    message: str
    level: str
    fields: dict[str, str]


class Logs(_Response):
    """Log entries in both forms."""

    logs: list[LogLine]
    log_entries: list[StructuredLog] = Field(alias="logEntries")


class LogPage(_Response):
    """Log entries."""

    logs: list[StructuredLog]


class ErrorBody(BaseModel):
    """Every answer that is not a success."""

    code: int = Field(description="The HTTP status")
    message: str
    error_code: str | None = None
