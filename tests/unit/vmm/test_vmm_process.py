"""Processes by pidfd: exit codes, adoption, reused pids, cancellation, and processes that their parent lost."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest
import uvloop

from agentenv.errors import VmmError
from agentenv.orchestrator.orphans import HostOrphans
from agentenv.vmm.base import MachineRecord
from agentenv.vmm.process import ProcessHandle, finish_in_thread, read_start_time, take_lock
from agentenv.vmm.records import INTENT_NAME, find_orphans, reap, write_intent

SLEEP = "/bin/sleep"


def spawn(directory: Path, *arguments: str) -> ProcessHandle:
    lock = take_lock(directory)
    try:
        return ProcessHandle.spawn(arguments, directory=directory, lock=lock, error_log=directory / "err.log")
    finally:
        os.close(lock)


async def ended(handle: ProcessHandle) -> int | None:
    async with asyncio.timeout(20):
        return await handle.wait()


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 37", 37), ("kill -TERM $$", -signal.SIGTERM), ("kill -KILL $$", -9)]
)
async def test_exit_codes_reach_every_waiter(tmp_path: Path, script: str, code: int) -> None:
    handle = spawn(tmp_path, "/bin/sh", "-c", script)
    assert await asyncio.gather(ended(handle), ended(handle), ended(handle)) == [code] * 3
    assert await ended(handle) == code
    assert not handle.alive
    assert read_start_time(handle.pid) != handle.start_time, "the child was not reaped"
    handle.kill()


def test_waiting_works_under_uvloop(tmp_path: Path) -> None:
    async def main() -> int | None:
        handle = spawn(tmp_path, SLEEP, "1000")
        handle.kill()
        return await ended(handle)

    assert uvloop.run(main()) == -9


async def test_a_cancelled_wait_changes_nothing(tmp_path: Path) -> None:
    handle = spawn(tmp_path, SLEEP, "1000")
    waiting = asyncio.create_task(handle.wait())
    other = asyncio.create_task(handle.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert handle.alive
    handle.kill()
    assert await other == -9


def open_files(pid: int) -> set[Path]:
    found = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(entry.readlink())
    return found


async def test_it_has_its_own_session_directory_and_only_the_given_descriptors(tmp_path: Path) -> None:
    leaked, writer = os.pipe()
    handle = spawn(tmp_path, SLEEP, "1000")
    try:
        assert os.getsid(handle.pid) == handle.pid
        assert handle.works_in(tmp_path)
        assert not handle.works_in(tmp_path.parent)
        expected = {Path("/dev/null"), tmp_path / "err.log", tmp_path / "vmm.lock"}
        # While it loads its libraries the program has files of its own open for a moment.
        settled = next((True for _ in range(100_000) if open_files(handle.pid) == expected), False)
        assert settled, open_files(handle.pid)
        usage = handle.usage()
        assert usage is not None
        assert usage.resident_bytes > 0
    finally:
        handle.kill()
        os.close(leaked)
        os.close(writer)
    await ended(handle)
    assert handle.usage() is None


async def test_one_directory_holds_one_process(tmp_path: Path) -> None:
    handle = spawn(tmp_path, SLEEP, "1000")
    with pytest.raises(VmmError, match="already runs"):
        spawn(tmp_path, SLEEP, "1000")
    handle.kill()
    await ended(handle)
    again = spawn(tmp_path, SLEEP, "0")
    assert await ended(again) == 0


async def test_a_program_that_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(VmmError, match="cannot start /no/such/program"):
        spawn(tmp_path, "/no/such/program")
    os.close(take_lock(tmp_path))  # the lock was given back
    with pytest.raises(VmmError, match="cannot use the machine directory"):
        take_lock(tmp_path / "missing")


def start_stranger() -> int:
    """Start a sleeper that is nobody's child here: the shell between ends at once."""
    script = "setsid sleep 1000 >/dev/null 2>&1 & echo $!"
    return int(subprocess.run(["/bin/sh", "-c", script], capture_output=True, text=True, check=True).stdout)


async def test_adopting_what_another_process_started() -> None:
    pid = start_stranger()
    start_time = read_start_time(pid)
    assert start_time is not None
    assert ProcessHandle.adopt(pid, start_time + 1) is None, "a reused pid was taken for ours"
    handle = ProcessHandle.adopt(pid, start_time)
    assert handle is not None
    assert not handle.is_child
    assert handle.alive
    waiting = asyncio.create_task(handle.wait())
    await asyncio.sleep(0)
    handle.kill()
    assert await waiting is None
    assert ProcessHandle.adopt(pid, start_time) is None
    assert ProcessHandle.adopt(0, 0) is None


async def test_adopting_an_own_child_reaps_it(tmp_path: Path) -> None:
    first = spawn(tmp_path, SLEEP, "1000")
    first.detach()
    with pytest.raises(VmmError, match="was let go"):
        await first.wait()
    second = ProcessHandle.adopt(first.pid, first.start_time)
    assert second is not None
    second.kill()
    assert await ended(second) == -9
    assert not Path(f"/proc/{first.pid}").exists()


async def test_a_cancelled_start_hands_over_what_the_thread_took() -> None:
    entered, leave = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    undone: list[str] = []

    def work() -> str:
        loop.call_soon_threadsafe(entered.set)
        asyncio.run_coroutine_threadsafe(leave.wait(), loop).result()
        return "taken"

    task = asyncio.create_task(finish_in_thread(work, undone.append))
    await entered.wait()
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()  # a second time, while it waits for the thread
    await asyncio.sleep(0)
    assert not task.done()
    leave.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert undone == ["taken"]


SPAWNER = textwrap.dedent(
    """
    import itertools, os, sys
    from pathlib import Path
    from agentenv.vmm.process import ProcessHandle, take_lock
    from agentenv.vmm.records import write_intent
    root = Path(sys.argv[1])
    for number in itertools.count():
        directory = root / f"m{number}"
        directory.mkdir()
        print(number, flush=True)
        lock = take_lock(directory)
        write_intent(directory, "qemu", "0", directory / "memory")
        ProcessHandle.spawn([sys.argv[2], "1000"], directory=directory, lock=lock, error_log=directory / "err")
        os.close(lock)
    """
)


def marked_processes(program: Path) -> set[int]:
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if (entry / "exe").readlink() == program:
                found.add(int(entry.name))
        except OSError:
            continue
    return found


def spawn_until_killed(root: Path, program: Path, seed: int) -> int:
    """Run a process that spawns machines, and kill -9 it somewhere within a spawn. Returns how many are complete."""
    dice = random.Random(seed)
    with subprocess.Popen(
        [sys.executable, "-c", SPAWNER, str(root), str(program)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        begun = [parent.stdout.readline() for _ in range(dice.randint(1, 20))]
        time.sleep(dice.random() * 0.005)  # any moment of the spawn that has begun
        parent.kill()
    return len(begun) - 1


@pytest.mark.parametrize("seed", range(6))
async def test_no_process_of_a_server_that_was_killed_is_lost(tmp_path: Path, seed: int) -> None:
    program = tmp_path / "sleeper"
    program.write_bytes(Path(SLEEP).read_bytes())
    program.chmod(0o755)
    root = tmp_path / "sandboxes"
    root.mkdir()
    complete = await asyncio.to_thread(spawn_until_killed, root, program, seed)
    records = await find_orphans(root)
    pids = {record.pid for record in records} - {0}
    assert marked_processes(program) <= pids, "a process was not found"
    assert len(pids) >= complete
    owned = Path(records[0].directory)
    others = await find_orphans(root, [owned])
    assert {record.directory for record in others} == {r.directory for r in records} - {str(owned)}
    for record in records:
        await reap(record)
        await reap(record)
    assert marked_processes(program) == set()
    assert await find_orphans(root) == []


async def test_orphans_in_removed_directories_and_files_without_process(tmp_path: Path) -> None:
    root = tmp_path / "sandboxes"
    memory_dir = tmp_path / "memory"
    for directory in (root / "gone", root / "files", root / "live", memory_dir):
        directory.mkdir(parents=True)
    gone = spawn(root / "gone", SLEEP, "1000")
    for file in (root / "gone").iterdir():
        file.unlink()
    (root / "gone").rmdir()
    live = spawn(root / "live", SLEEP, "1000")
    names = ("files", "live", "stray")
    for name in names:
        (memory_dir / f"{name}.mem").write_bytes(b"x")
    (memory_dir / "unrelated").write_bytes(b"x")
    for name in ("files", "live"):
        write_intent(root / name, "qemu", "1", memory_dir / f"{name}.mem")
    (root / "files" / "qmp.sock").touch()
    record = MachineRecord("qemu", "1", live.pid, live.start_time, str(root / "live"), str(memory_dir / "live.mem"))

    removed = await HostOrphans(root, memory_dir).reap([record])

    assert len(removed) == 3, removed
    assert any(str(gone.pid) in line for line in removed)
    assert not gone.alive
    assert live.alive
    assert sorted(path.name for path in memory_dir.iterdir()) == ["live.mem", "unrelated"]
    assert list((root / "files").iterdir()) == []
    assert (root / "live" / INTENT_NAME).exists()
    assert await HostOrphans(root, memory_dir).reap([record]) == []
    live.kill()
    await ended(live)


async def test_a_damaged_note_hides_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "one"
    directory.mkdir()
    handle = spawn(directory, SLEEP, "1000")
    (directory / INTENT_NAME).write_text("{half")
    (record,) = await find_orphans(tmp_path)
    assert (record.pid, record.memory_file) == (handle.pid, None)
    handle.kill()
    await ended(handle)
    assert await find_orphans(tmp_path) == []
    assert await find_orphans(tmp_path / "missing") == []
