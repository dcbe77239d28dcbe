"""What a snapshot says of itself: immutable data that names everything which is needed to run it again.

Only data and the rules that it always keeps; its form in a file is in `encoding.py`. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from types import MappingProxyType

from agentenv.errors import SnapshotError

DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
SNAPSHOT_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
FILE_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
TEMPLATE_ID = re.compile(r"[a-z0-9_-]{1,128}")
NAME = re.compile(r"([a-z0-9_-]{1,128}):([a-z0-9_.-]{1,128})")
"""`alias:tag`."""
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""The form of ids of named snapshots, which no alias and no tag may have."""
HIDDEN_PREFIX = "pause-"
"""Begins the ids of snapshots that belong to one sandbox, and that no caller ever names."""
MOST_LAYERS = 1024
"""Of memory, and of a disk."""
MOST_VCPUS = 1024
MOST_MEMORY_MIB = 64 * 1024 * 1024
LARGEST_FILE = 1 << 60
"""Bytes; far above what a disk holds, far below what overflows anything."""


class SnapshotKind(StrEnum):
    """What was saved."""

    FULL = "full"
    """Memory, devices and disk: processes go on."""
    FILESYSTEM = "filesystem"
    """The disk alone: the machine boots."""


@dataclass(frozen=True, slots=True)
class LayerReference:
    """A layer, by the sha256 of its bytes."""

    digest: str
    """`sha256:` and 64 hex digits."""
    size: int
    """Bytes of its file."""


@dataclass(frozen=True, slots=True)
class StateFile:
    """The saved state of the devices: a file beside the manifest."""

    name: str
    size: int
    """Bytes."""
    digest: str
    """`sha256:` and 64 hex digits."""


@dataclass(frozen=True, slots=True)
class MachineShape:
    """What the machine consists of."""

    vcpus: int
    memory_mib: int
    disk_bytes: int
    """Virtual size of the disk."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What the saved machine's devices and memory depend on. A machine of another environment cannot load it."""

    vmm: str
    """Name, as of `vmm.base.Vmm`."""
    vmm_version: str
    acceleration: str
    """`kvm` or `tcg`."""
    boot_mode: str
    """How the VMM builds a machine, in the VMM's words (machine type, kind of guest kernel)."""
    cpu_model: str
    """For people, of the CPU that the guest sees."""
    cpu_features: str
    """Digest of what the guest may use of it, see `compatibility.features_digest`."""
    tsc_khz: int
    """Rate of the time-stamp counter that the guest counts with; 0 where it does not count on a fixed one."""
    kernel_version: str
    kernel_digest: str
    initramfs_digest: str


@dataclass(frozen=True, slots=True)
class SnapshotManifest:
    """One snapshot. Making one that breaks a rule raises `SnapshotError`, which names the field."""

    snapshot_id: str
    created_at: datetime
    kind: SnapshotKind
    architecture: str
    """Of the guest, as in `platform.machine()`."""
    sandbox_id: str
    """Where it was taken."""
    template_id: str
    """What that sandbox was created from."""
    machine: MachineShape
    agent_version: str
    disk_layers: tuple[LayerReference, ...]
    """Bottom first, all of them: no other snapshot is needed."""
    default_user: str
    parent_id: str | None = None
    """The snapshot that the sandbox went on from, for people; it may be gone."""
    names: tuple[str, ...] = ()
    """`alias:tag`; of several snapshots with the same one, the latest has it."""
    own_template_id: str | None = None
    """The template that this is a build of; None for the hidden ones that pauses make."""
    default_workdir: str | None = None
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    metadata: Mapping[str, str] = field(default_factory=dict)
    environment: Environment | None = None
    """Always there in full ones."""
    memory_layers: tuple[LayerReference, ...] = ()
    """Bottom first, all of them; empty in snapshots of the file system."""
    state: StateFile | None = None
    """Always there in full ones, never in the others."""
    agent_responsive: bool = True
    """False: the agent did not answer when this was taken, so memory that is loaded again holds a hung agent."""
    agent_token: str | None = field(default=None, repr=False)
    """The token that the saved agent knows, with which it is told its new one. As secret as the saved memory, which
    holds it, too; None in snapshots of the file system."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "env", MappingProxyType(dict(self.env)))
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))
        if self.created_at.tzinfo is None:
            raise SnapshotError("field 'created_at' has no time zone")
        object.__setattr__(self, "created_at", self.created_at.astimezone(UTC))
        self._check()

    @property
    def hidden(self) -> bool:
        """Whether it belongs to one sandbox, and no caller ever sees it."""
        return self.snapshot_id.startswith(HIDDEN_PREFIX)

    @property
    def layers(self) -> tuple[LayerReference, ...]:
        """Every layer once: those of memory, then those of the disk."""
        return tuple(dict.fromkeys((*self.memory_layers, *self.disk_layers)))

    def _check(self) -> None:
        _require(SNAPSHOT_ID.fullmatch(self.snapshot_id), "snapshot_id", "is no id of a snapshot")
        if self.parent_id is not None:
            _require(SNAPSHOT_ID.fullmatch(self.parent_id), "parent_id", "is no id of a snapshot")
            _require(self.parent_id != self.snapshot_id, "parent_id", "is the snapshot itself")
        _require(0 < self.machine.vcpus <= MOST_VCPUS, "machine.vcpus", f"is not from 1 to {MOST_VCPUS}")
        _require(
            0 < self.machine.memory_mib <= MOST_MEMORY_MIB, "machine.memory_mib", f"is not from 1 to {MOST_MEMORY_MIB}"
        )
        _require(0 < self.machine.disk_bytes <= LARGEST_FILE, "machine.disk_bytes", "is no size of a disk")
        _check_layers(self.disk_layers, "disk_layers")
        _require(self.disk_layers, "disk_layers", "is empty")
        _check_layers(self.memory_layers, "memory_layers")
        sizes = {layer.digest: layer.size for layer in self.layers}
        _require(len(sizes) == len(self.layers), "disk_layers", "gives a layer another size than memory_layers does")
        if self.environment is not None:
            for name in ("cpu_features", "kernel_digest", "initramfs_digest"):
                value = getattr(self.environment, name)
                _require(DIGEST.fullmatch(value), f"environment.{name}", "is no sha256 digest")
            _require(0 <= self.environment.tsc_khz <= LARGEST_FILE, "environment.tsc_khz", "is no rate")
        if self.kind is SnapshotKind.FULL:
            _require(self.environment is not None, "environment", "is missing")
            _require(self.memory_layers, "memory_layers", "is empty")
            _require(self.state is not None, "state", "is missing")
        else:
            _require(not self.memory_layers, "memory_layers", "does not belong into a snapshot of the file system")
            _require(self.state is None, "state", "does not belong into a snapshot of the file system")
            _require(self.agent_token is None, "agent_token", "does not belong into a snapshot of the file system")
        if self.state is not None:
            _require(FILE_NAME.fullmatch(self.state.name), "state.name", "is no plain file name")
            _require(0 < self.state.size <= LARGEST_FILE, "state.size", "is no size of a file")
            _require(DIGEST.fullmatch(self.state.digest), "state.digest", "is no sha256 digest")
        _require(len(set(self.names)) == len(self.names), "names", "has one twice")
        for position, name in enumerate(self.names):
            match = NAME.fullmatch(name)
            _require(match, f"names[{position}]", "is no 'alias:tag'")
            is_id = match is not None and any(UUID.fullmatch(part) for part in match.groups())
            _require(not is_id, f"names[{position}]", "has the form of an id")
        if self.own_template_id is not None:
            _require(TEMPLATE_ID.fullmatch(self.own_template_id), "own_template_id", "is no id of a template")
            _require(not UUID.fullmatch(self.own_template_id), "own_template_id", "has the form of a snapshot's id")


def _check_layers(layers: Iterable[LayerReference], name: str) -> None:
    seen: dict[str, int] = {}
    for position, layer in enumerate(layers):
        _require(position < MOST_LAYERS, name, f"has more than {MOST_LAYERS} layers")
        _require(DIGEST.fullmatch(layer.digest), f"{name}[{position}].digest", "is no sha256 digest")
        _require(0 < layer.size <= LARGEST_FILE, f"{name}[{position}].size", "is no size of a file")
        _require(layer.digest not in seen, f"{name}[{position}].digest", "is there twice")
        seen[layer.digest] = layer.size


def _require(condition: object, name: str, message: str) -> None:
    if not condition:
        raise SnapshotError(f"field '{name}' {message}")
