"""Guest memory files: whose directory, how they are made, what is refused."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from agentenv.config import Settings, VmmSettings
from agentenv.errors import CapacityError, ConfigurationError, VmmError
from agentenv.vmm.host import filesystem_is_tmpfs, measure_tsc_khz, read_qemu_version
from agentenv.vmm.memory import (
    choose_memory_dir,
    create_memory_file,
    file_bytes,
    memory_path,
    prepare_memory_dir,
    remove_stray_memory,
)


def test_every_home_has_a_directory_of_its_own(tmp_path: Path) -> None:
    vmm = VmmSettings(memory_dir=tmp_path / "memory")

    def chosen(home: str) -> Path:
        return choose_memory_dir(Settings().model_copy(update={"home": tmp_path / home, "vmm": vmm}))

    assert chosen("one").parent == chosen("two").parent == tmp_path / "memory"
    assert chosen("one") != chosen("two")
    assert chosen("one") == chosen("one")


def test_a_directory_that_others_could_open_is_refused(tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    prepare_memory_dir(ours)
    prepare_memory_dir(ours)
    assert ours.stat().st_mode & 0o777 == 0o700
    ours.chmod(0o755)
    with pytest.raises(ConfigurationError, match="only this user"):
        prepare_memory_dir(ours)
    link = tmp_path / "link"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    link.symlink_to(elsewhere)
    with pytest.raises(ConfigurationError, match="only this user"):
        prepare_memory_dir(link)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError):
        prepare_memory_dir(tmp_path / "file")


def test_a_memory_file_is_sparse_private_and_never_somebody_elses(tmp_path: Path) -> None:
    path = memory_path(tmp_path, "iabc")
    create_memory_file(path, 64 * 1024 * 1024)
    assert path.stat().st_size == 64 * 1024 * 1024
    assert path.stat().st_mode & 0o777 == 0o600
    assert file_bytes(path) == 0
    with pytest.raises(VmmError, match="exists"):
        create_memory_file(path, 1024)
    assert path.stat().st_size == 64 * 1024 * 1024
    assert file_bytes(tmp_path / "missing") == 0


def test_a_guest_larger_than_the_room_is_refused(tmp_path: Path) -> None:
    path = memory_path(tmp_path, "iabc")
    with pytest.raises(CapacityError, match="MiB free"):
        create_memory_file(path, 1 << 60)
    assert not path.exists()


def test_strays_are_removed_by_path(tmp_path: Path) -> None:
    kept, stray = memory_path(tmp_path, "kept"), memory_path(tmp_path, "stray")
    for path in (kept, stray, tmp_path / "other"):
        path.touch()
    assert remove_stray_memory(tmp_path, [str(kept), None]) == [stray]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.mem", "other"]
    assert remove_stray_memory(tmp_path / "missing", []) == []


def test_the_counter_runs_at_a_steady_rate() -> None:
    first = measure_tsc_khz()
    time.sleep(0)
    second = measure_tsc_khz()
    assert first > 100_000
    assert abs(first - second) < first * 0.001


def test_versions_and_file_systems(tmp_path: Path) -> None:
    fake = tmp_path / "qemu"
    fake.write_text("#!/bin/sh\necho 'QEMU emulator version 9.2.1 (Debian 1:9.2)'\n")
    fake.chmod(0o755)
    assert read_qemu_version(fake) == "9.2.1"
    fake.write_text("#!/bin/sh\necho something else\n")
    with pytest.raises(ConfigurationError, match="does not look like QEMU"):
        read_qemu_version(fake)
    with pytest.raises(ConfigurationError, match="apt-get install qemu-system-x86"):
        read_qemu_version(tmp_path / "missing")
    assert not filesystem_is_tmpfs(Path("/proc"))
    if os.path.ismount("/dev/shm"):
        assert filesystem_is_tmpfs(Path("/dev/shm/anything/below"))
