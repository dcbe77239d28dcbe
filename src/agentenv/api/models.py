"""Bodies of requests and responses, with their names on the wire (E2B contract §2.2).

Types only: meaning is checked elsewhere. Requests are strict (no number from a string), ignore unknown fields, and take
null as absent. Responses are sent without their None fields, because clients fail on some nulls (§2.1.3).
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

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

    template_id: str = Field(alias="templateID", description="ID, alias, or alias:tag")
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
