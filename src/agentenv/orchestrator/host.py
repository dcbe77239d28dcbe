"""What the host has left: memory, disk. Reads /proc, cgroup files and file system statistics; changes nothing."""

from __future__ import annotations

import os
from pathlib import Path

from agentenv.errors import CapacityError, StorageError

_KIB = 1024
_V1_UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""


class SystemHostProbe:
    """The real `ports.HostProbe`.

    Args:
        home: the state directory.
        memory_dir: where guest memory files lie, None when these are on the home's disk.
        proc, cgroup: roots of the two file systems (tests bring their own).
    """

    def __init__(
        self, home: Path, memory_dir: Path | None, *, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
    ) -> None:
        self._home = home
        self._memory_dir = memory_dir
        self._proc = proc
        self._cgroup = cgroup

    def available_memory_bytes(self) -> int:
        """See `ports.HostProbe`.

        Raises:
            CapacityError: the host does not tell.
        """
        room = [self._meminfo_available(), *self._cgroup_room()]
        if self._memory_dir is not None:
            room.append(_free_bytes(self._memory_dir))
        return min(room)

    def free_disk_bytes(self) -> int:
        """See `ports.HostProbe`.

        Raises:
            StorageError: the file system does not tell.
        """
        return _free_bytes(self._home)

    def boot_id(self) -> str:
        """See `ports.HostProbe`.

        Raises:
            StorageError: the kernel does not tell.
        """
        try:
            return (self._proc / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError as error:
            raise StorageError(f"cannot read the boot id of this host: {error.strerror}") from error

    def _meminfo_available(self) -> int:
        try:
            for line in (self._proc / "meminfo").read_text(encoding="ascii").splitlines():
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * _KIB
        except (OSError, ValueError) as error:
            raise CapacityError(f"cannot read how much memory this host has left: {error}") from error
        raise CapacityError("cannot read how much memory this host has left: /proc/meminfo lacks MemAvailable")

    def _cgroup_room(self) -> list[int]:
        """Room below each memory limit of our cgroup and its ancestors. A missing file means no limit."""
        try:
            lines = (self._proc / "self/cgroup").read_text(encoding="utf-8").splitlines()
        except OSError:
            return []
        room: list[int] = []
        for line in lines:
            _, controllers, path = line.split(":", 2)
            relative = Path(path.lstrip("/"))
            if controllers == "":
                names = ("memory.max", "memory.current", "inactive_file")
                root = self._cgroup
            elif "memory" in controllers.split(","):
                names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                root = self._cgroup / "memory"
            else:
                continue
            for directory in (relative, *relative.parents):
                left = _room_in(root / directory, *names)
                if left is not None:
                    room.append(left)
        return room


def _room_in(directory: Path, limit_name: str, usage_name: str, reclaimable: str) -> int | None:
    try:
        limit = int((directory / limit_name).read_text(encoding="ascii"))
        usage = int((directory / usage_name).read_text(encoding="ascii"))
        statistics = (directory / "memory.stat").read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):  # no such controller here, or the word "max"
        return None
    if limit >= _V1_UNLIMITED:
        return None
    # Page cache counts as usage, but the kernel drops it before it refuses memory.
    dropped = next((int(line.split()[1]) for line in statistics if line.startswith(f"{reclaimable} ")), 0)
    return max(0, limit - usage + dropped)


def _free_bytes(path: Path) -> int:
    try:
        status = os.statvfs(path)
    except OSError as error:
        raise StorageError(f"cannot read the free space of {path}: {error.strerror}") from error
    return status.f_bavail * status.f_frsize
