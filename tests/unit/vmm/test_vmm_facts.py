"""What a saved state depends on, as the VMM tells it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.vmm import qemu
from agentenv.vmm.qemu import QemuVmm
from agentenv.vmm.qemu_command import BOOT_MODE, Acceleration


def vmm(tmp_path: Path, acceleration: Acceleration) -> QemuVmm:
    return QemuVmm(qemu=tmp_path / "qemu", version="7.2.22", acceleration=acceleration, memory_dir=tmp_path / "memory")


def test_an_emulated_guest_depends_on_nothing_of_the_cpu_but_its_counter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def host_cpu() -> tuple[str, frozenset[str]]:
        raise AssertionError("the host's CPU does not matter")

    monkeypatch.setattr(qemu, "read_cpu", host_cpu)
    facts = vmm(tmp_path, Acceleration("tcg", 2_000_000)).facts()
    assert (facts.vmm, facts.version, facts.acceleration, facts.boot_mode) == ("qemu", "7.2.22", "tcg", BOOT_MODE)
    assert (facts.cpu_model, facts.cpu_features, facts.tsc_khz) == ("max", frozenset(), 2_000_000)


def test_with_kvm_the_guest_sees_the_hosts_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qemu, "read_cpu", lambda: ("Model 1", frozenset({"fpu", "avx2"})))
    facts = vmm(tmp_path, Acceleration("kvm", 3_000_000)).facts()
    assert facts.acceleration == "kvm"
    assert (facts.cpu_model, facts.cpu_features, facts.tsc_khz) == ("Model 1", frozenset({"fpu", "avx2"}), 3_000_000)


def test_memory_to_load_lies_where_strays_are_removed(tmp_path: Path) -> None:
    path = vmm(tmp_path, Acceleration("tcg", 0)).prepare_memory("clone")
    assert path == tmp_path / "memory" / "clone.mem"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert not path.exists()
