"""QEMU machines for real: boot, pause, save, load, adopt, the many ways to end, and that nothing is left of any.

The guest is one static C program as init (`vmm_guest.c`), so a boot needs no disk and no asset but the kernel.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path

import pytest

from agentenv.config import Settings, VmmSettings
from agentenv.errors import AgentEnvError, VmmError
from agentenv.orchestrator.orphans import HostOrphans
from agentenv.vmm import caretaker, console, probe
from agentenv.vmm.base import Disk, MachineConfig, MachineRecord, NetworkInterface
from agentenv.vmm.host import machine_uid, may_change_user, measure_tsc_khz
from agentenv.vmm.qemu_command import Acceleration
from agentenv.vmm.qmp import QmpClient
from harness.vmm_lab import DEADLINE_S, MEMORY_MIB, QEMU, FileWatch, Lab, counting, counts_in, text_of

pytestmark = [pytest.mark.vm, pytest.mark.root]


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
