"""Whether this node can run a snapshot, and if not, which part does not match. Decides on facts that it is given.

A saved machine is its VMM's business down to the last device register, so a full snapshot needs the same VMM, version,
way of building the machine and CPU, and the kernel that its devices were set up with. One of the file system boots
like any disk.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from agentenv.snapshots.manifest import Environment, SnapshotKind, SnapshotManifest

EMULATION = "tcg"
"""The acceleration whose guests see a CPU that the VMM makes up, whatever the host has."""
_TSC_TOLERANCE = 0.01
"""Relative. Measured rates of one host differ by less than a thousandth."""


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What this node would load a snapshot with."""

    architecture: str
    """As in `platform.machine()`."""
    vmm: str
    vmm_version: str
    acceleration: str
    boot_mode: str
    cpu_model: str
    """Of the CPU that a guest sees."""
    cpu_features: str
    """`features_digest` of what a guest may use of it."""
    tsc_khz: int
    """0 where guests do not count on a fixed rate."""
    kernels: Mapping[str, str]
    """Digests of the kernels that this node has, with their versions."""
    initramfs_digests: frozenset[str]


def features_digest(features: Iterable[str]) -> str:
    """The digest (`sha256:…`) of a set of CPU features, in whatever order they are listed."""
    return "sha256:" + hashlib.sha256("\n".join(sorted(set(features))).encode()).hexdigest()


def mismatches(manifest: SnapshotManifest, node: NodeFacts) -> tuple[str, ...]:
    """What keeps this node from running a snapshot, each in words for people. Empty: it can."""
    found = []
    if manifest.architecture != node.architecture:
        found.append(f"it is of a {manifest.architecture} machine, this node is {node.architecture}")
    if manifest.kind is SnapshotKind.FULL and manifest.environment is not None:
        found += _environment_mismatches(manifest.environment, node)
    return tuple(found)


def _environment_mismatches(saved: Environment, node: NodeFacts) -> list[str]:
    found = []
    if saved.vmm != node.vmm:
        found.append(f"saved by {saved.vmm} {saved.vmm_version}, this node runs {node.vmm} {node.vmm_version}")
        # What follows are the VMM's own words.
        return found
    if saved.vmm_version != node.vmm_version:
        found.append(f"saved by {saved.vmm} {saved.vmm_version}, this node runs {node.vmm_version}")
    if saved.acceleration != node.acceleration:
        found.append(f"saved with the acceleration {saved.acceleration}, this node has {node.acceleration}")
    if saved.boot_mode != node.boot_mode:
        found.append(f"saved from a machine of the form '{saved.boot_mode}', this node builds '{node.boot_mode}'")
    if saved.acceleration != EMULATION and saved.cpu_model != node.cpu_model:
        found.append(f"saved on the CPU {saved.cpu_model}, this node has {node.cpu_model}")
    elif saved.cpu_features != node.cpu_features:
        found.append(
            f"saved on a {saved.cpu_model} with other features than that of this node "
            f"({_short(saved.cpu_features)}, here {_short(node.cpu_features)})"
        )
    if abs(saved.tsc_khz - node.tsc_khz) > _TSC_TOLERANCE * max(saved.tsc_khz, node.tsc_khz):
        found.append(f"saved with a time-stamp counter of {saved.tsc_khz} kHz, that of this node has {node.tsc_khz}")
    if saved.kernel_digest not in node.kernels:
        have = ", ".join(f"{version} ({_short(digest)})" for digest, version in sorted(node.kernels.items()))
        found.append(
            f"saved with the kernel {saved.kernel_version} ({_short(saved.kernel_digest)}), this node has "
            f"{have or 'none'}"
        )
    if saved.initramfs_digest not in node.initramfs_digests:
        have = ", ".join(map(_short, sorted(node.initramfs_digests)))
        found.append(f"saved with the initramfs {_short(saved.initramfs_digest)}, this node has {have or 'none'}")
    return found


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]
