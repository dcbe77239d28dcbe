"""Guest memory files: whose directory, how they are made, what is refused."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from agentenv.config import MIB, Settings, VmmSettings
from agentenv.errors import CapacityError, ConfigurationError, VmmError
from agentenv.vmm.host import filesystem_is_tmpfs, measure_tsc_khz, read_cpu, read_qemu_version
from agentenv.vmm.memory import (
    check_memory_file,
    choose_memory_dir,
    copy_memory_file,
    create_memory_file,
    file_bytes,
    memory_path,
    prepare_memory_dir,
    remove_stray_memory,
    share_memory_file,
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


def touched(path: Path, size_bytes: int = 8 * MIB) -> bytes:
    """A memory file with two touched places, one of them zeroes."""
    create_memory_file(path, size_bytes)
    with path.open("r+b") as file:
        file.write(b"first page")
        file.seek(5 * MIB)
        file.write(b"\0" * 4096 + b"last")
    return path.read_bytes()


async def test_a_copy_of_memory_is_whole_sparse_and_private(tmp_path: Path) -> None:
    source, copy = tmp_path / "source.mem", tmp_path / "copy.mem"
    content = touched(source)
    await copy_memory_file(source, copy)
    assert copy.read_bytes() == content
    assert file_bytes(copy) <= file_bytes(source) < MIB
    assert copy.stat().st_mode & 0o777 == 0o600
    with copy.open("r+b") as file:
        file.write(b"changed")
    assert source.read_bytes() == content
    with pytest.raises(VmmError, match="exists"):
        await copy_memory_file(source, copy)
    assert copy.read_bytes().startswith(b"changed"), "somebody else's file was touched"
    with pytest.raises(VmmError, match=r"none\.mem"):
        await copy_memory_file(tmp_path / "none.mem", tmp_path / "other.mem")
    assert not (tmp_path / "other.mem").exists()


async def test_memory_gets_a_second_name_or_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "source.mem"
    content = touched(source)
    await share_memory_file(source, tmp_path / "second.mem")
    assert (tmp_path / "second.mem").samefile(source)
    with pytest.raises(VmmError, match="exists"):
        await share_memory_file(source, tmp_path / "second.mem")

    def other_file_system(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", other_file_system)
    await share_memory_file(source, tmp_path / "copied.mem")
    assert not (tmp_path / "copied.mem").samefile(source)
    assert (tmp_path / "copied.mem").read_bytes() == content


def test_memory_of_another_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "some.mem"
    create_memory_file(path, 8 * MIB)
    check_memory_file(path, 8 * MIB)
    for size in (8 * MIB - 4096, 8 * MIB + 4096):
        with pytest.raises(VmmError, match=f"{8 * MIB} bytes"):
            check_memory_file(path, size)
    (tmp_path / "link.mem").symlink_to(path)
    with pytest.raises(VmmError, match="no regular file"):
        check_memory_file(tmp_path / "link.mem", 8 * MIB)
    with pytest.raises(VmmError, match=r"none\.mem"):
        check_memory_file(tmp_path / "none.mem", 8 * MIB)


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


def test_the_cpu_has_a_model_and_features() -> None:
    model, features = read_cpu()
    assert model.strip() == model != ""
    assert {"fpu", "tsc"} <= features


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
