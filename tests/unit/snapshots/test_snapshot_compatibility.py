"""Which node can run which snapshot, and what it says when it cannot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshots_samples import digest_of, environment, manifest

from agentenv.snapshots.compatibility import NodeFacts, features_digest, mismatches
from agentenv.snapshots.manifest import SnapshotKind

_HERE = NodeFacts(
    architecture="x86_64",
    vmm="qemu",
    vmm_version="7.2.22",
    acceleration="kvm",
    boot_mode="microvm,acpi=on",
    cpu_model="Some CPU",
    cpu_features=digest_of(b"features"),
    tsc_khz=2_000_100,
    kernels={digest_of(b"kernel"): "6.12.1", digest_of(b"newer"): "6.12.2"},
    initramfs_digests=frozenset({digest_of(b"initramfs")}),
)


def test_the_same_environment_fits() -> None:
    assert mismatches(manifest(), _HERE) == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vmm_version": "9.0.1"}, "saved by qemu 7.2.22, this node runs 9.0.1"),
        ({"vmm": "firecracker", "vmm_version": "1.12.0"}, "saved by qemu 7.2.22, this node runs firecracker 1.12.0"),
        ({"acceleration": "tcg"}, "saved with the acceleration kvm, this node has tcg"),
        ({"boot_mode": "microvm"}, "saved from a machine of the form 'microvm,acpi=on', this node builds 'microvm'"),
        ({"cpu_model": "Other CPU"}, "saved on the CPU Some CPU, this node has Other CPU"),
        (
            {"cpu_features": digest_of(b"others")},
            "saved on a Some CPU with other features than that of this node "
            f"({digest_of(b'features')[7:19]}, here {digest_of(b'others')[7:19]})",
        ),
        (
            {"tsc_khz": 2_500_000},
            "saved with a time-stamp counter of 2000000 kHz, that of this node has 2500000",
        ),
        (
            {"kernels": {digest_of(b"newer"): "6.12.2"}},
            f"saved with the kernel 6.12.1 ({digest_of(b'kernel')[7:19]}), this node has 6.12.2 "
            f"({digest_of(b'newer')[7:19]})",
        ),
        ({"kernels": {}}, f"saved with the kernel 6.12.1 ({digest_of(b'kernel')[7:19]}), this node has none"),
        (
            {"initramfs_digests": frozenset()},
            f"saved with the initramfs {digest_of(b'initramfs')[7:19]}, this node has none",
        ),
        ({"architecture": "aarch64"}, "it is of a x86_64 machine, this node is aarch64"),
    ],
)
def test_each_difference_is_told_alone(change: dict[str, Any], words: str) -> None:
    assert mismatches(manifest(), replace(_HERE, **change)) == (words,)


def test_an_emulated_cpu_does_not_depend_on_the_hosts() -> None:
    saved = manifest(environment=environment(acceleration="tcg"))
    here = replace(_HERE, acceleration="tcg", cpu_model="Other CPU")
    assert mismatches(saved, here) == ()
    assert len(mismatches(saved, replace(here, cpu_features=digest_of(b"others")))) == 1


def test_a_file_system_needs_only_the_architecture() -> None:
    foreign = NodeFacts("x86_64", "firecracker", "1", "kvm", "pvm", "X", digest_of(b"x"), 0, {}, frozenset())
    saved = manifest(kind=SnapshotKind.FILESYSTEM)
    assert mismatches(saved, foreign) == ()
    assert len(mismatches(saved, replace(foreign, architecture="aarch64"))) == 1


@given(st.lists(st.text("abc", min_size=1, max_size=3)), st.randoms())
def test_features_have_no_order(features: list[str], random: Any) -> None:
    shuffled = features * 2
    random.shuffle(shuffled)
    assert features_digest(shuffled) == features_digest(features)
    assert features_digest([*features, "new"]) != features_digest(features)
