"""The initramfs: the guest binary as `/init`, the boot modules, and the order to load them in, as a newc cpio archive.

Pure and deterministic: the same input gives the same bytes on every machine.
"""

from __future__ import annotations

import stat
from collections.abc import Sequence

from agentenv.errors import AssetError
from agentenv.guest.kernel import Module

MODULE_ORDER = "etc/aenv/modules"
"""File that init reads: module paths, one a line, dependencies first."""

_MAGIC = b"070701"
_TRAILER = "TRAILER!!!"
_BLOCK = 512


class CpioWriter:
    """Writes the archive form that the kernel unpacks (source: Linux, Documentation/driver-api/early-userspace/
    buffer-format.rst). Owners are root, times are zero, inode numbers count up.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._length = 0
        self._inode = 0

    def directory(self, name: str, mode: int = 0o755) -> None:
        """Add a directory. Parents have to come before it."""
        self._entry(name, stat.S_IFDIR | mode, b"", links=2)

    def file(self, name: str, content: bytes, mode: int = 0o644) -> None:
        """Add a regular file."""
        self._entry(name, stat.S_IFREG | mode, content)

    def character_device(self, name: str, major: int, minor: int, mode: int = 0o600) -> None:
        """Add a device node; writing an archive needs no privilege for it."""
        self._entry(name, stat.S_IFCHR | mode, b"", device=(major, minor))

    def finish(self) -> bytes:
        """End the archive and return it."""
        self._inode = -1
        self._entry(_TRAILER, 0, b"")
        self._append(b"\0" * (-self._length % _BLOCK))
        return b"".join(self._parts)

    def _entry(self, name: str, mode: int, content: bytes, *, links: int = 1, device: tuple[int, int] = (0, 0)) -> None:
        self._inode += 1
        encoded = name.encode() + b"\0"
        # inode, mode, uid, gid, nlink, mtime, size, dev major/minor, rdev major/minor, name size, checksum
        numbers = (self._inode, mode, 0, 0, links, 0, len(content), 0, 0, *device, len(encoded), 0)
        self._append(_MAGIC + b"".join(b"%08X" % number for number in numbers) + encoded)
        self._pad()
        self._append(content)
        self._pad()

    def _pad(self) -> None:
        self._append(b"\0" * (-self._length % 4))

    def _append(self, data: bytes) -> None:
        self._parts.append(data)
        self._length += len(data)


def build_initramfs(guest_binary: bytes, modules: Sequence[Module]) -> bytes:
    """Make the archive. It is not compressed: unpacking costs an emulated guest more than copying.

    Args:
        guest_binary: the static guest program.
        modules: in load order, as `kernel.pick_modules` returns them.

    Raises:
        AssetError: the guest binary is not a 64-bit ELF file.
    """
    if guest_binary[:5] != b"\x7fELF\x02":
        raise AssetError("the guest binary is not a 64-bit ELF program; build it with `make setup`")
    archive = CpioWriter()
    for name in ("dev", "etc", "etc/aenv", "lib", "lib/modules", "newroot", "proc", "sys"):
        archive.directory(name)
    # The kernel opens it as init's standard streams, before anything is mounted.
    archive.character_device("dev/console", 5, 1)
    order = []
    for module in modules:
        path = f"lib/modules/{module.name}.ko"
        archive.file(path, module.content)
        order.append(f"/{path}\n")
    archive.file(MODULE_ORDER, "".join(order).encode())
    archive.file("init", guest_binary, 0o755)
    return archive.finish()
