"""QEMU machines for real: boot, pause, save, load, adopt, the many ways to end, and that nothing is left of any.

The guest is one static C program as init (`vmm_guest.c`), so a boot needs no disk and no asset but the kernel.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import json
import os
import pickle
import re
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from agentenv.config import Settings, VmmSettings, load_settings
from agentenv.errors import AgentEnvError, VmmError
from agentenv.guest.assets import load_assets
from agentenv.orchestrator.orphans import HostOrphans
from agentenv.storage.disks import DiskStore
from agentenv.vmm import caretaker, console, probe
from agentenv.vmm.base import Disk, DiskFormat, GuestNetwork, Machine, MachineConfig, MachineRecord, NetworkInterface
from agentenv.vmm.host import machine_uid, may_change_user, measure_tsc_khz, read_qemu_version
from agentenv.vmm.probe_guest import ArchiveEntry, newc_archive
from agentenv.vmm.qemu import QemuVmm
from agentenv.vmm.qemu_command import Acceleration
from agentenv.vmm.qmp import QmpClient
from harness.server import BUILT_HOME

pytestmark = [pytest.mark.vm, pytest.mark.root]

QEMU = Path("/usr/bin/qemu-system-x86_64")
MEMORY_MIB = 160
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def kernel() -> Path:
    """The kernel that `make setup` made."""
    try:
        return load_assets(load_settings().model_copy(update={"home": BUILT_HOME})).kernel
    except AgentEnvError as error:
        pytest.fail(f"the guest assets are missing, run `make setup`: {error}")


@pytest.fixture(scope="module")
def initramfs(tmp_path_factory: pytest.TempPathFactory, kernel: Path) -> Path:
    directory = tmp_path_factory.mktemp("guest")
    program, archive = directory / "init", directory / "initramfs"
    source = Path(__file__).with_name("vmm_guest.c")
    subprocess.run(["gcc", "-static", "-O1", "-s", "-Wall", "-Werror", "-o", program, source], check=True)
    entries = [ArchiveEntry(name, b"", stat.S_IFDIR | 0o755) for name in ("proc", "dev", "modules")]
    entries.append(ArchiveEntry("init", program.read_bytes()))
    for name in ("mmio", "blk"):
        (module,) = kernel.parent.glob(f"virtio_{name}-*.ko")
        entries.append(ArchiveEntry(f"modules/{name}", module.read_bytes()))
    archive.write_bytes(newc_archive(entries))
    return archive


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[Path, Path]]:
    """Two namespaces, each with a tap of the same name."""
    names = [f"vmmtest-{secrets.token_hex(3)}" for _ in range(2)]
    try:
        for name in names:
            subprocess.run(["ip", "netns", "add", name], check=True)
            subprocess.run(["ip", "-n", name, "tuntap", "add", "tap0", "mode", "tap"], check=True)
            subprocess.run(["ip", "-n", name, "link", "set", "tap0", "up"], check=True)
        yield Path("/run/netns") / names[0], Path("/run/netns") / names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


class Lab:
    """A QEMU VMM with directories of its own; makes configurations, and knows what a machine leaves."""

    def __init__(self, root: Path, kernel: Path, initramfs: Path, namespaces: tuple[Path, Path]) -> None:
        self.root = root
        self.sandboxes = root / "sandboxes"
        self.sandboxes.mkdir()
        self.memory_dir = Path("/dev/shm") / f"aenv-vmmtest-{secrets.token_hex(4)}"
        self.kernel = kernel
        self.initramfs = initramfs
        self.namespaces = namespaces
        self.vmm = self.new_vmm()

    def new_vmm(self) -> QemuVmm:
        return QemuVmm(
            qemu=QEMU,
            version=read_qemu_version(QEMU),
            acceleration=Acceleration("tcg", measure_tsc_khz()),
            memory_dir=self.memory_dir,
        )

    def config(self, name: str, *words: str, namespace: int = 0) -> MachineConfig:
        directory = self.sandboxes / name
        directory.mkdir(mode=0o700, exist_ok=True)
        return MachineConfig(
            machine_id=name,
            directory=directory,
            kernel=self.kernel,
            initramfs=self.initramfs,
            vcpus=1,
            memory_mib=MEMORY_MIB,
            disks=(),
            interface=NetworkInterface(self.namespaces[namespace], "tap0", "02:fc:00:00:00:05"),
            guest_network=GuestNetwork("169.254.0.21/30", "169.254.0.22", "169.254.0.22", 1400),
            extra_arguments=words,
        )

    def processes(self) -> list[int]:
        """Every process whose working directory is one of our machines'."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if (entry / "cwd").readlink().is_relative_to(self.sandboxes):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def leftovers(self) -> list[str]:
        """What machines left besides logs and their lock."""
        files = [path for path in self.sandboxes.rglob("*") if path.is_file() or path.is_socket()]
        left = [str(path) for path in files if path.name not in ("console.log", "vmm.log", "vmm.lock")]
        memory = [str(path) for path in self.memory_dir.glob("*")] if self.memory_dir.is_dir() else []
        return [*left, *memory, *(f"process {pid}" for pid in self.processes())]


@pytest.fixture
async def lab(tmp_path: Path, kernel: Path, initramfs: Path, namespaces: tuple[Path, Path]) -> AsyncIterator[Lab]:
    made = Lab(tmp_path, kernel, initramfs, namespaces)
    try:
        yield made
        assert made.leftovers() == []
    finally:
        await made.vmm.close()
        await HostOrphans(made.sandboxes, made.memory_dir).reap([])
        shutil.rmtree(made.memory_dir, ignore_errors=True)


class FileWatch:
    """Wakes up when a file is written to (inotify), so that no test has to guess how long a guest takes."""

    def __init__(self, directory: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert self._descriptor >= 0
        modified, created = 0x2, 0x100
        assert libc.inotify_add_watch(self._descriptor, os.fsencode(directory), modified | created) >= 0
        self._changed = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._descriptor, self._on_change)

    def _on_change(self) -> None:
        os.read(self._descriptor, 65536)
        self._changed.set()

    async def wait(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)


def text_of(machine: Machine) -> str:
    path = machine.console_log()
    return path.read_text(errors="replace") if path.exists() else ""


def counts_in(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"count (\d+)\r?\n", text)]


async def counting(machine: Machine, beyond: int, after: int = 0) -> list[int]:
    """Wait until the guest has counted beyond a number, reading its console from a position; all numbers so far."""
    watch = FileWatch(machine.console_log().parent)
    try:
        async with asyncio.timeout(DEADLINE_S):
            while not (found := counts_in(text_of(machine)[after:])) or found[-1] <= beyond:
                await watch.wait()
    finally:
        watch.close()
    return found


async def test_pause_resume_save_and_two_clones_go_on_counting(lab: Lab) -> None:
    machine = await lab.vmm.boot(lab.config("one"))
    await counting(machine, 2)
    stats = await machine.stats()
    assert stats.cpu_time_s > 0.1
    assert 10 << 20 < stats.memory_file_bytes <= MEMORY_MIB << 20
    assert stats.resident_bytes > stats.memory_file_bytes // 2

    with pytest.raises(VmmError, match="must be paused"):
        await machine.save_state(lab.root / "state")
    assert not (lab.root / "state").exists()

    await machine.pause()
    await machine.pause()
    used = (await machine.stats()).cpu_time_s
    await machine.save_state(lab.root / "early")
    assert (await machine.stats()).cpu_time_s - used < 1, "a paused machine runs"
    position = len(text_of(machine))
    await machine.resume()
    await machine.resume()
    seen = await counting(machine, 3, position)
    assert seen == list(range(seen[0], seen[-1] + 1)), "the guest did not go on where it was"

    await machine.pause()
    last = counts_in(text_of(machine))[-1]
    state = lab.root / "state"
    await machine.save_state(state)
    assert state.stat().st_size < 1 << 20, "the state holds guest memory"
    assert state.stat().st_mode & 0o077 == 0
    copies = [lab.memory_dir / f"clone{number}.mem" for number in range(2)]
    for copy in copies:
        shutil.copyfile(machine.record.memory_file or "", copy)
    await machine.kill()
    assert not Path(machine.record.memory_file or "").exists()

    clones = await asyncio.gather(
        *(lab.vmm.load(lab.config(f"clone{n}", namespace=n), state, copies[n]) for n in range(2))
    )
    for clone in clones:
        assert counts_in(text_of(clone)) == [], "a loaded machine runs before it is resumed"
        await clone.resume()
    for clone in clones:
        numbers = await counting(clone, last + 3)
        assert numbers[0] in (last, last + 1), "the clone does not go on at the saved instant"
        assert "damaged" not in text_of(clone)
    await clones[0].kill()
    await counting(clones[1], last + 5)
    # A machine that was loaded is saved and loaded again.
    await clones[1].pause()
    await clones[1].save_state(state)
    last = counts_in(text_of(clones[1]))[-1]
    shutil.copyfile(copies[1], copies[0])
    await clones[1].kill()
    again = await lab.vmm.load(lab.config("again"), state, copies[0])
    await again.resume()
    assert (await counting(again, last + 1))[0] in (last, last + 1)
    await again.kill()
    await again.kill()


@pytest.mark.skipif(not may_change_user(), reason="this container may not change user ids")
async def test_the_process_has_no_rights(lab: Lab) -> None:
    machine = await lab.vmm.boot(lab.config("confined"))
    process = Path(f"/proc/{machine.record.pid}")
    status = (process / "status").read_text()
    assert re.search(r"^Uid:\s+(\d+)", status, re.MULTILINE)[1] == str(machine_uid("confined"))  # type: ignore[index]
    assert re.search(r"^CapEff:\s+0+$", status, re.MULTILINE)
    assert re.search(r"^NoNewPrivs:\s+1$", status, re.MULTILINE)
    assert re.search(r"^Seccomp:\s+2$", status, re.MULTILINE)
    assert (process / "root").readlink() == lab.sandboxes / "confined"
    await machine.kill()


async def test_the_guest_powers_off_or_panics(lab: Lab) -> None:
    async def end_of(name: str, namespace: int, word: str) -> str:
        machine = await lab.vmm.boot(lab.config(name, word, namespace=namespace))
        async with asyncio.timeout(DEADLINE_S):
            first, second = await asyncio.gather(machine.wait(), machine.wait())
        assert first == second
        assert first.exit_code == 0
        for call in (machine.pause(), machine.resume(), machine.save_state(lab.root / "s"), machine.stats()):
            with pytest.raises(VmmError, match="has ended"):
                await call
        await machine.shutdown(1)
        await machine.kill()
        return first.reason

    off, panic = await asyncio.gather(end_of("off", 0, "aenv.test_poweroff=1"), end_of("panic", 1, "aenv.test_panic=1"))
    assert "Power down" in off or "count 1" in off
    assert "Kernel panic" in panic


async def test_a_killed_vmm_is_noticed_and_shutdown_ends_a_deaf_guest(lab: Lab) -> None:
    machine = await lab.vmm.boot(lab.config("killed"))
    waiting = asyncio.create_task(machine.wait())
    os.kill(machine.record.pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        ended = await waiting
    assert ended.exit_code == -signal.SIGKILL
    await machine.kill()

    deaf = await lab.vmm.boot(lab.config("deaf"))
    await deaf.shutdown(timeout_s=0.2)
    assert (await deaf.wait()).exit_code == -signal.SIGKILL
    with pytest.raises(VmmError, match="has ended"):
        await deaf.pause()


async def test_a_boot_that_fails_or_is_cancelled_leaves_nothing(lab: Lab, tmp_path: Path) -> None:
    broken = lab.config("broken")
    cases = {
        "no such tap": dataclasses.replace(broken, interface=NetworkInterface(lab.namespaces[0], "tap9", "02::")),
        "no namespace": dataclasses.replace(broken, interface=NetworkInterface(tmp_path / "none", "tap0", "02::")),
        "no kernel": dataclasses.replace(broken, kernel=tmp_path / "none"),
        "no disk": dataclasses.replace(broken, disks=(Disk(tmp_path / "none"),)),
    }
    for name, config in cases.items():
        with pytest.raises(VmmError) as caught:
            await lab.vmm.boot(config)
        assert "none" in caught.value.message or "tap9" in caught.value.message, f"{name}: {caught.value.message}"
        assert lab.leftovers() == [], name

    for steps in (0, 1, 2, 3, 5, 8, 13, 21, 34):
        task = asyncio.create_task(lab.vmm.boot(broken))
        for _ in range(steps):
            await asyncio.sleep(0.004)
        task.cancel()
        try:
            machine = await task
        except asyncio.CancelledError:
            assert lab.leftovers() == [], f"cancelled after {steps} steps"
        else:
            await machine.kill()

    (tmp_path / "state").write_bytes(b"this is no state")
    memory = lab.memory_dir / "x.mem"
    memory.write_bytes(b"\0" * (MEMORY_MIB << 20))
    with pytest.raises(VmmError):
        await lab.vmm.load(broken, tmp_path / "state", memory)
    assert lab.leftovers() == []


async def test_a_second_machine_neither_takes_a_directory_nor_a_tap(lab: Lab) -> None:
    config = lab.config("one")
    machine = await lab.vmm.boot(config)
    with pytest.raises(VmmError, match="already runs"):
        await lab.vmm.boot(config)
    with pytest.raises(VmmError, match="tap0"):
        await lab.vmm.boot(lab.config("two"))
    await machine.pause()
    await machine.resume()
    assert Path(machine.record.memory_file or "").exists()
    await machine.kill()


BOOTER = textwrap.dedent(
    """
    import asyncio, dataclasses, json, pickle, sys
    from agentenv.vmm.qemu import QemuVmm
    async def main():
        vmm_arguments, config = pickle.load(sys.stdin.buffer)
        machine = await QemuVmm(**vmm_arguments).boot(config)
        print(json.dumps(dataclasses.asdict(machine.record)), flush=True)
        await asyncio.Event().wait()
    asyncio.run(main())
    """
)


def boot_elsewhere(lab: Lab, config: MachineConfig) -> MachineRecord:
    """Boot a machine in another server process, and kill -9 that."""
    arguments = {
        "qemu": QEMU,
        "version": lab.vmm.version,
        "acceleration": Acceleration("tcg", measure_tsc_khz()),
        "memory_dir": lab.memory_dir,
    }
    with subprocess.Popen(
        [sys.executable, "-c", BOOTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(os.environ)
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        pickle.dump((arguments, config), server.stdin)
        server.stdin.close()
        lines = (line for line in server.stdout if line.startswith(b"{"))
        record = json.loads(next(lines))
        server.kill()
    return MachineRecord(**record)


async def test_a_machine_outlives_its_server_and_is_adopted(lab: Lab) -> None:
    record = await asyncio.to_thread(boot_elsewhere, lab, lab.config("adopted"))
    machine = await lab.vmm.adopt(record)
    assert machine is not None
    assert machine.record == record
    await counting(machine, 1)
    await machine.pause()
    await machine.save_state(lab.root / "state")
    await machine.resume()
    await counting(machine, counts_in(text_of(machine))[-1])
    assert await lab.vmm.adopt(dataclasses.replace(record, start_time=record.start_time + 1)) is None
    assert await lab.vmm.adopt(dataclasses.replace(record, directory=str(lab.root))) is None
    # A graceful stop lets go of it, and the next server takes it again.
    await lab.vmm.close()
    lab.vmm = lab.new_vmm()
    machine = await lab.vmm.adopt(record)
    assert machine is not None
    waiting = asyncio.create_task(machine.wait())
    await asyncio.sleep(0)
    os.kill(record.pid, signal.SIGKILL)
    ended = await waiting
    assert ended.exit_code is None
    assert ended.reason.startswith("count"), ended
    await machine.kill()
    assert await lab.vmm.adopt(record) is None


async def test_what_a_killed_server_left_is_reaped(lab: Lab) -> None:
    live = await lab.vmm.boot(lab.config("live", namespace=1))
    record = await asyncio.to_thread(boot_elsewhere, lab, lab.config("orphan"))
    removed = await HostOrphans(lab.sandboxes, lab.memory_dir).reap([live.record])
    assert [line for line in removed if str(record.pid) in line]
    assert lab.processes() == [live.record.pid]
    assert [path.name for path in lab.memory_dir.iterdir()] == ["live.mem"]
    await live.pause()
    await live.kill()


async def test_a_flooding_guest_cannot_fill_the_disk(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "CAP_BYTES", 64 * 1024)
    monkeypatch.setattr(console, "KEEP_BYTES", 16 * 1024)
    monkeypatch.setattr(console, "_PERIOD_S", 0.05)
    machine = await lab.vmm.boot(lab.config("flood", "aenv.test_flood"))
    watch = FileWatch(machine.console_log().parent)
    sizes: list[int] = []
    async with asyncio.timeout(DEADLINE_S):
        while not (len(sizes) > 2 and sizes[-1] > 0 and any(a > b for a, b in pairwise(sizes))):
            await watch.wait()
            sizes.append(machine.console_log().stat().st_size if machine.console_log().exists() else 0)
    watch.close()
    data = machine.console_log().read_bytes()
    assert b"\0" not in data, "the cut left a hole"
    await machine.kill()


async def test_a_saved_machine_keeps_its_overlay_disk(lab: Lab) -> None:
    template = lab.root / "template.raw"
    with template.open("wb") as file:
        file.truncate(8 << 20)
    config = lab.config("one", "aenv.test_fill=4")
    disk = await DiskStore(frozenset({DiskFormat.QCOW2})).create(template, config.directory)
    machine = await lab.vmm.boot(dataclasses.replace(config, disks=(disk,)))
    await counting(machine, 0)
    await machine.pause()
    await machine.save_state(lab.root / "state")
    await machine.resume()
    await counting(machine, counts_in(text_of(machine))[-1] + 1)
    await machine.pause()
    await machine.save_state(lab.root / "state")
    last = counts_in(text_of(machine))[-1]
    clone_config = lab.config("clone")
    copy = lab.root / "copy.qcow2"
    shutil.copyfile(disk.path, copy)
    memory = lab.memory_dir / "clone.mem"
    shutil.copyfile(machine.record.memory_file or "", memory)
    await machine.kill()
    disk.path.unlink()
    clone = await lab.vmm.load(
        dataclasses.replace(clone_config, disks=(Disk(copy, disk.format),)), lab.root / "state", memory
    )
    await clone.resume()
    await counting(clone, last + 1)
    await clone.kill()
    raw = lab.root / "raw"
    await asyncio.to_thread(subprocess.run, ["qemu-img", "convert", "-O", "raw", copy, raw], check=True)
    assert raw.read_bytes() == b"b" * (4 << 20) + b"\0" * (4 << 20)


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Path]:
    mount = tmp_path / "small"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", mount], check=True)
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", mount], check=True)


async def test_a_full_disk_of_the_host_only_halts_the_guest(
    lab: Lab, small_file_system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caretaker, "_PERIOD_S", 0.2)
    ballast, disk = small_file_system / "ballast", small_file_system / "disk.raw"
    ballast.write_bytes(b"b" * (16 << 20))
    with disk.open("wb") as file:
        file.truncate(16 << 20)
    config = dataclasses.replace(lab.config("full", "aenv.test_fill=16"), disks=(Disk(disk),))
    machine = await lab.vmm.boot(config)
    async with await QmpClient.connect(config.directory, "qmp.sock") as qmp:
        event = await qmp.wait_event({"BLOCK_IO_ERROR"}, timeout_s=DEADLINE_S)
        assert event["data"]["nospace"]
        assert event["data"]["action"] == "stop"
    ballast.unlink()
    await counting(machine, 0)
    assert "disk filled" in text_of(machine)
    await machine.kill()
    assert disk.read_bytes() == b"b" * (16 << 20)


def probe_settings(tmp_path: Path, acceleration: str = "auto") -> Settings:
    vmm = VmmSettings.model_validate({"acceleration": acceleration, "memory_dir": tmp_path / "memory"})
    return Settings().model_copy(update={"home": tmp_path / "home", "vmm": vmm})


async def test_the_probe_finds_what_works_and_remembers_it(
    tmp_path: Path, kernel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = probe_settings(tmp_path)
    vmm = await probe.choose_vmm(settings, kernel)
    await vmm.close()
    assert vmm.acceleration in ("kvm", "tcg")
    assert (vmm.acceleration == "tcg") == bool(vmm.acceleration_reason)
    assert list(settings.paths.run.iterdir()) == []
    known = json.loads((settings.paths.assets / probe.RESULT_NAME).read_text())
    assert any(result["acceleration"] == vmm.acceleration and result["usable"] for result in known.values())

    async def no_boot(*_: object) -> None:
        raise AssertionError("it was booted again")

    monkeypatch.setattr(probe, "boot_probe_guest", no_boot)
    again = await probe.choose_vmm(settings, kernel)
    await again.close()
    assert (again.acceleration, again.acceleration_reason) == (vmm.acceleration, vmm.acceleration_reason)
    level, detail, _ = await probe.describe_acceleration(settings, kernel)
    assert level == ("ok" if vmm.acceleration == "kvm" else "warn")
    assert vmm.acceleration_reason in detail


@pytest.mark.skipif(not Path("/sys/module/kvm_pvm").exists(), reason="this host's KVM is not kvm_pvm")
async def test_kvm_that_opens_but_does_not_run_stock_guests(tmp_path: Path, kernel: Path) -> None:
    settings = probe_settings(tmp_path, "kvm")
    obstacle = probe.kvm_obstacle(settings)
    assert obstacle is not None
    assert "kvm_pvm" in obstacle
    result = await probe.boot_probe_guest(settings, kernel, "kvm")
    assert not result.usable
    assert result.reason
    assert list(settings.paths.run.iterdir()) == []
    with pytest.raises(AgentEnvError, match="kvm_pvm"):
        await probe.choose_vmm(settings, kernel)


async def test_a_guest_that_crawls_is_given_up(tmp_path: Path, kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(probe._CPU_LIMIT_S, "tcg", 1)
    settings = probe_settings(tmp_path, "tcg")
    result = await probe.boot_probe_guest(settings, kernel, "tcg")
    assert not result.usable
    assert "CPU time" in result.reason
    monkeypatch.setitem(probe._CPU_LIMIT_S, "tcg", 100)
    monkeypatch.setitem(probe._DEADLINE_S, "tcg", 0.2)
    result = await probe.boot_probe_guest(settings, kernel, "tcg")
    assert "within 0.2 s" in result.reason
    assert list(settings.paths.run.iterdir()) == []


async def test_a_kernel_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "kernel").write_bytes(b"not a kernel" * 100)
    with pytest.raises(AgentEnvError, match="no virtual machine runs on this host"):
        await probe.choose_vmm(probe_settings(tmp_path, "tcg"), tmp_path / "kernel")
    with pytest.raises(AgentEnvError, match="cannot read the guest kernel"):
        await probe.choose_vmm(probe_settings(tmp_path, "tcg"), tmp_path / "missing")
