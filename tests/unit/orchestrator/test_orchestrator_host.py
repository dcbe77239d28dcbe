"""The server's lock, and what the host says it has left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.errors import CapacityError, ConfigurationError, StorageError
from agentenv.orchestrator.host import SystemHostProbe
from agentenv.orchestrator.lock import ServerLock

HOLDER = """
import sys
from pathlib import Path
from agentenv.orchestrator.lock import ServerLock
with ServerLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_second_server_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "home" / "server.lock"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ConfigurationError, match=f"pid {holder.pid}"):
            ServerLock(path).acquire()
        holder.kill()  # a server that dies without a word gives its lock back too
        holder.wait()
        with ServerLock(path):
            assert path.read_text() == f"{os.getpid()}\n"


def test_lock_is_given_back_and_not_inherited(tmp_path: Path) -> None:
    lock = ServerLock(tmp_path / "server.lock")
    lock.acquire()
    with pytest.raises(ConfigurationError):
        ServerLock(tmp_path / "server.lock").acquire()
    with subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        close_fds=False,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"  # its exec, which closes what it must not inherit, is over
        lock.release()
        lock.release()
        with ServerLock(tmp_path / "server.lock"):
            assert child.poll() is None
        child.communicate(b"\n")


def test_home_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"server\.lock"):
        ServerLock(tmp_path / "file" / "server.lock").acquire()


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MIB = 1 << 20


@pytest.mark.parametrize(
    ("cgroup_line", "files", "expected"),
    [
        ("0::/", {}, 1000 * MIB),
        ("0::/a/b", {"a/memory.max": "max\n", "a/memory.current": "5\n", "a/memory.stat": ""}, 1000 * MIB),
        (
            "0::/a/b",
            {
                "a/b/memory.max": str(500 * MIB),
                "a/b/memory.current": str(300 * MIB),
                "a/b/memory.stat": f"anon 1\ninactive_file {50 * MIB}\n",
                "a/memory.max": str(400 * MIB),
                "a/memory.current": str(300 * MIB),
                "a/memory.stat": "inactive_file 0\n",
            },
            100 * MIB,
        ),
        (
            "5:cpu,memory:/c",
            {
                "memory/c/memory.limit_in_bytes": str(200 * MIB),
                "memory/c/memory.usage_in_bytes": str(150 * MIB),
                "memory/c/memory.stat": f"total_inactive_file {10 * MIB}\n",
                "memory/memory.limit_in_bytes": "9223372036854771712",
                "memory/memory.usage_in_bytes": "1",
                "memory/memory.stat": "",
            },
            60 * MIB,
        ),
    ],
)
def test_memory_is_the_least_of_host_and_cgroups(
    tmp_path: Path, cgroup_line: str, files: dict[str, str], expected: int
) -> None:
    meminfo = f"MemTotal: 9 kB\nMemAvailable:    {1000 * 1024} kB\n"
    write(tmp_path / "proc", {"meminfo": meminfo, "self/cgroup": cgroup_line + "\n"})
    write(tmp_path / "cgroup", files)
    probe = SystemHostProbe(tmp_path, None, proc=tmp_path / "proc", cgroup=tmp_path / "cgroup")
    assert probe.available_memory_bytes() == expected


def test_memory_directory_bounds_memory(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    write(tmp_path / "proc", {"meminfo": f"MemAvailable: {1 << 50} kB\n", "self/cgroup": ""})
    probe = SystemHostProbe(tmp_path, tmp_path, proc=tmp_path / "proc")
    assert probe.available_memory_bytes() <= status.f_blocks * status.f_frsize


def test_host_that_does_not_tell(tmp_path: Path) -> None:
    probe = SystemHostProbe(tmp_path / "missing", None, proc=tmp_path)
    with pytest.raises(CapacityError):
        probe.available_memory_bytes()
    with pytest.raises(StorageError):
        probe.free_disk_bytes()
    with pytest.raises(StorageError):
        probe.boot_id()


def test_this_host(tmp_path: Path) -> None:
    probe = SystemHostProbe(tmp_path, None)
    assert probe.available_memory_bytes() > 0
    assert probe.free_disk_bytes() > 0
    assert len(probe.boot_id()) == 36
