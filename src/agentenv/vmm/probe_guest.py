"""Makes the smallest guest there is: an initramfs whose init prints one line in user mode and powers off.

It shows more than kernel messages do: that the kernel reached user mode, and that `cmpxchg16b` works, which hosts that
interpret guests instead of running them lack. Formats: ELF64 (System V ABI), cpio "newc" (kernel docs,
driver-api/early-userspace/buffer-format).
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass

MARKER = "aenv-probe-guest-ran"
_LOAD_ADDRESS = 0x400000
_ELF_HEADER_BYTES = 64
_PROGRAM_HEADER_BYTES = 56


@dataclass(frozen=True, slots=True)
class ArchiveEntry:
    """One member of an initramfs."""

    name: str
    data: bytes
    mode: int = stat.S_IFREG | 0o755


def newc_archive(entries: Sequence[ArchiveEntry]) -> bytes:
    """Pack an uncompressed initramfs."""
    archive = bytearray()
    for inode, entry in enumerate([*entries, ArchiveEntry("TRAILER!!!", b"", 0)], start=1):
        name = entry.name.encode() + b"\0"
        fields = (inode, entry.mode, 0, 0, 1, 0, len(entry.data), 0, 0, 0, 0, len(name), 0)
        archive += b"070701" + b"".join(b"%08X" % value for value in fields) + name
        archive += b"\0" * (-len(archive) % 4)
        archive += entry.data
        archive += b"\0" * (-len(archive) % 4)
    return bytes(archive)


def probe_program() -> bytes:
    """A static x86-64 executable: `cmpxchg16b`, write(1, MARKER), reboot(POWER_OFF), without any library."""
    message = MARKER.encode() + b"\n"
    before = bytes.fromhex(
        "4883e4f0"  # and rsp, -16
        "4883ec10"  # sub rsp, 16
        "31c031d231db31c9"  # xor eax, edx, ebx, ecx
        "f0480fc70c24"  # lock cmpxchg16b [rsp]
        "b801000000bf01000000"  # mov eax, 1 (write); mov edi, 1
        "488d35"  # lea rsi, [rip + …]
    )
    after = (
        b"\xba"
        + struct.pack("<I", len(message))  # mov edx, length
        + bytes.fromhex(
            "0f05"  # syscall
            "b8a9000000bfaddee1febe69191228badcfe2143"  # reboot(magic1, magic2, LINUX_REBOOT_CMD_POWER_OFF)
            "0f05"  # syscall
            "ebfe"  # jmp to itself
        )
    )
    code = before + struct.pack("<i", len(after)) + after
    size = _ELF_HEADER_BYTES + _PROGRAM_HEADER_BYTES + len(code) + len(message)
    entry = _LOAD_ADDRESS + _ELF_HEADER_BYTES + _PROGRAM_HEADER_BYTES
    header = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    header += struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, entry, _ELF_HEADER_BYTES, 0, 0, 64, 56, 1, 0, 0, 0)
    program = struct.pack("<IIQQQQQQ", 1, 5, 0, _LOAD_ADDRESS, _LOAD_ADDRESS, size, size, 0x1000)
    return header + program + code + message


def probe_initramfs() -> bytes:
    """The initramfs of the probe's guest."""
    return newc_archive([ArchiveEntry("init", probe_program())])
