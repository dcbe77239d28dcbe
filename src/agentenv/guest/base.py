"""Data of the guest room: what a guest is told about itself, and what its agent answers. No behaviour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class GuestIdentity:
    """What one life of a guest is told before the first user command (`POST /init` of the agent)."""

    sandbox_id: str
    template_id: str
    hostname: str
    access_token: str = field(repr=False)
    env_vars: Mapping[str, str] = field(repr=False)
    default_user: str
    default_workdir: str | None
    life: int


@dataclass(frozen=True, slots=True)
class AgentInfo:
    """What the agent says of itself."""

    version: str


@dataclass(frozen=True, slots=True)
class AgentMetrics:
    """A reading by the agent. Sizes in bytes, `cpu_used_pct` of all vCPUs together."""

    timestamp: datetime
    cpu_count: int
    cpu_used_pct: float
    mem_used: int
    mem_total: int
    mem_cache: int
    disk_used: int
    disk_total: int
