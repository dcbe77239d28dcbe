"""Removal of what earlier servers left, with real processes and files: the wanted ones are not touched."""

from __future__ import annotations

import fcntl
import os
import subprocess
from pathlib import Path

from agentenv.orchestrator.orphans import HostOrphans
from agentenv.vmm.base import MachineRecord
from agentenv.vmm.process import LOCK_NAME, read_start_time
from agentenv.vmm.records import write_intent


def start_machine(sandboxes: Path, memory: Path, name: str) -> tuple[subprocess.Popen[bytes], MachineRecord]:
    """What a VMM leaves on the host: a directory with its intent, a process that holds its lock, a memory file."""
    directory = sandboxes / name
    directory.mkdir(parents=True)
    memory.mkdir(exist_ok=True)
    memory_file = memory / f"{name}.mem"
    write_intent(directory, "fake", "1", memory_file)
    memory_file.write_bytes(b"guest")
    lock = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    fcntl.flock(lock, fcntl.LOCK_EX)
    process = subprocess.Popen(["sleep", "1000"], pass_fds=(lock,))
    os.close(lock)
    start_time = read_start_time(process.pid)
    assert start_time is not None
    return process, MachineRecord("fake", "1", process.pid, start_time, str(directory), str(memory_file))


async def test_live_machines_keep_process_and_memory(tmp_path: Path) -> None:
    sandboxes, memory = tmp_path / "sandboxes", tmp_path / "memory"
    kept, record = start_machine(sandboxes, memory, "kept")
    orphan, _ = start_machine(sandboxes, memory, "orphan")
    (memory / "stray.mem").write_bytes(b"")
    try:
        removed = await HostOrphans(sandboxes, memory).reap([record])
        assert orphan.poll() is not None, "it is over when reap returns"
        assert kept.poll() is None
        assert [path.name for path in memory.iterdir()] == ["kept.mem"]
        assert len(removed) == 2
        assert await HostOrphans(sandboxes, memory).reap([record]) == []
    finally:
        for process in (kept, orphan):
            process.kill()
            process.wait()


async def test_nothing_there(tmp_path: Path) -> None:
    assert await HostOrphans(tmp_path / "none", tmp_path / "nowhere").reap([]) == []
