"""Small ELF files made by hand: a program that says its version, kernel modules, a kernel and its compressed image."""

from __future__ import annotations

import struct


def version_program(version: str) -> bytes:
    """A static x86-64 program that prints `version` whatever its arguments are, and exits with 0."""
    text = version.encode() + b"\n"
    code = (
        b"\xb8\x01\x00\x00\x00"  # mov eax, 1 (write)
        b"\xbf\x01\x00\x00\x00"  # mov edi, 1
        b"\x48\x8d\x35\x10\x00\x00\x00"  # lea rsi, [rip + 16] (the text)
        + b"\xba"
        + struct.pack("<I", len(text))  # mov edx, length
        + b"\x0f\x05"  # syscall
        b"\xb8\x3c\x00\x00\x00"  # mov eax, 60 (exit)
        b"\x31\xff"  # xor edi, edi
        b"\x0f\x05" + text  # syscall
    )
    base, header_size = 0x400000, 64 + 56
    size = header_size + len(code)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = ident + struct.pack("<HHIQQQIHHHHHH", 2, 62, 1, base + header_size, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    segment = struct.pack("<IIQQQQQQ", 1, 5, 0, base, base, size, size, 0x1000)
    return header + segment + code


def module(depends: str, *, name: str = "sample") -> bytes:
    """A file with the `.modinfo` section of a kernel module."""
    info = f"license=GPL\0depends={depends}\0name={name}\0".encode()
    names = b"\0.modinfo\0.shstrtab\0"
    body = info + names
    table = 64 + len(body)
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    header = ident + struct.pack("<HHIQQQIHHHHHH", 1, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, 3, 2)

    def section(name_offset: int, offset: int, size: int) -> bytes:
        return struct.pack("<IIQQQQIIQQ", name_offset, 1, 0, 0, offset, size, 0, 0, 1, 0)

    return header + body + bytes(64) + section(1, 64, len(info)) + section(10, 64 + len(info), len(names))


def vmlinux(release: str = "6.99.1-test") -> bytes:
    """Something with the magic and the banner of a kernel."""
    return b"\x7fELF\x02\x01\x01".ljust(64, b"\0") + f"Linux version {release} (somebody) #1".encode() + bytes(5000)


def bzimage(payload: bytes) -> bytes:
    """An x86 boot image around a compressed payload, with two setup sectors."""
    payload_offset = 0x40
    setup = bytearray(3 * 512)
    setup[0x1F1] = 2
    setup[0x202:0x206] = b"HdrS"
    struct.pack_into("<H", setup, 0x206, 0x020F)
    struct.pack_into("<II", setup, 0x248, payload_offset, len(payload))
    return bytes(setup) + bytes(payload_offset) + payload + b"what follows the payload"
