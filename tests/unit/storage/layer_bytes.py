"""Layer files written byte by byte from the format's description: our writer is not judged by our reader."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KIB = 1024
MIB = 1024 * KIB
SECTOR = 512
NIL = "00000000-0000-0000-0000-000000000000"
ONES = "11111111-2222-3333-4444-555555555555"
LETTERS = "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
INVALID = bytes.fromhex("FFFFFFFFFFFF0300") + bytes(8)

# sha256 of whole files, computed by others from the format's description.
SEGMENT_SHA256 = "0ddef161c91c8a423529fd6075312201d8e698e8a0dfb6442d24ab92df6658c2"
SEGMENT_WITH_UUIDS_SHA256 = "7ac5eb46bc67506b5411e89e2f1458c5060f0b084e8f7018bb76cecd30fe3d01"
SEGMENT_UPPERCASE_SHA256 = "fd6cd2911b4700c6f54e578f752d6363189943bd3286d075913c073a2e01bea8"
SEGMENT_NIL_PARENT_SHA256 = "fa78418e5906ee50e712bf1e109e31f0af785ccb27ea306912166f85e1e27911"
ZEROED_SHA256 = "a1ae037b012abfe4862fcd15886f4fc451711cb57ee8a918439bc4f9d83b7e4d"
EMPTY_SHA256 = "879e799be0c083de4e328a3568e05004bb9a64fd4968362efe77db8a9702b2d6"
UPPER_DATA_SHA256 = "5df39c897ad09e8ab561c361b65810a3be8766002e380d512b9a98d51b2992b7"
UPPER_INDEX_SHA256 = "acaf93b2b23eebeb185f2e5958c1d5f5a6d67b38dbe5e19968a786a2f71bfad1"
SEALED_SHA256 = "a12621dbbc2b4b98da72d29af659cdfe034567566a7e8c2339bb83199eab6040"


@dataclass(frozen=True)
class Record:
    lba: int
    length: int
    physical: int
    zeroed: bool = False

    def encode(self) -> bytes:
        return struct.pack("<QQ", self.lba | self.length << 50, self.physical | int(self.zeroed) << 55)


def header(
    flags: int,
    *,
    index_offset: int = 0,
    index_size: int = 0,
    virtual_size: int = MIB,
    uuid: str = NIL,
    parent: str = "",
) -> bytes:
    fields = bytes.fromhex("4C534D5400010200657E63D29444084CA2D2C8EC4FCFAE8A")
    fields += struct.pack("<IIQQQ", 390, flags, index_offset, index_size, virtual_size)
    fields += uuid.encode().ljust(37, b"\0") + parent.encode().ljust(37, b"\0")
    fields += bytes([0, 0, 1, 1]) + bytes(256)
    return fields.ljust(4096, b"\0")


def committed(
    pieces: Mapping[int, bytes | int], *, virtual_size: int = MIB, uuid: str = NIL, parent: str = ""
) -> bytes:
    """A committed layer: LBA → data, or the number of sectors that are zeroed."""
    data = b""
    records = []
    for lba, content in sorted(pieces.items()):
        physical = 8 + len(data) // SECTOR
        if isinstance(content, int):
            records.append(Record(lba, content, physical, zeroed=True))
        else:
            records.append(Record(lba, len(content) // SECTOR, physical))
            data += content
    index = b"".join(record.encode() for record in records)
    index += INVALID * (-len(records) % 256)
    offset = 4096 + len(data)
    tail = bytes(-(offset + len(index)) % 4096)
    trailer = header(
        6, index_offset=offset, index_size=len(index) // 16, virtual_size=virtual_size, uuid=uuid, parent=parent
    )
    return header(7, virtual_size=virtual_size, uuid=uuid, parent=parent) + data + index + tail + trailer


def endless() -> bytes:
    """A layer of 0.8 TiB of zeros whose records all refer to the same 8 MiB: reading it takes a very long time."""
    sectors = 16376
    count = 1024 * 100
    index = b"".join(Record(number * sectors, sectors, 8).encode() for number in range(count))
    offset = 4096 + sectors * SECTOR
    size = count * sectors * SECTOR
    trailer = header(6, index_offset=offset, index_size=count, virtual_size=size)
    return header(7, virtual_size=size) + bytes(sectors * SECTOR) + index + trailer


SEGMENT = committed({128: b"\xa5" * 4096})
ZEROED = committed({0: b"\x11" * 4096, 8: 8, 16: b"\x22" * 4096})
EMPTY = committed({})
UPPER_DATA = header(3, uuid=ONES) + b"\xa5" * 4096
UPPER_INDEX = header(1, index_offset=4096, uuid=ONES) + Record(128, 8, 8).encode()
SEALED = (
    UPPER_DATA
    + Record(128, 8, 8).encode()
    + b"\xff" * 496
    + bytes(3584)
    + header(6, index_offset=8192, index_size=1, uuid=ONES)
)


def upper(flag: int, writes: Sequence[tuple[Record, bytes]], *, virtual_size: int = MIB) -> tuple[bytes, bytes]:
    """Data and index file of an upper: flag 0 is append-only, 0x20 hybrid. Records name where their data lies."""
    data = bytearray(header(3 | flag, uuid=ONES, virtual_size=virtual_size))
    index = header(1 | flag, index_offset=4096, uuid=ONES, virtual_size=virtual_size)
    for record, content in writes:
        end = record.physical * SECTOR + len(content)
        data.extend(bytes(max(0, end - len(data))))
        data[record.physical * SECTOR : end] = content
        index += record.encode()
    return bytes(data), index


def salted_crc(data: bytes, start: int) -> int:
    """CRC-32C without the final inversion, from a given state."""
    state = start
    for byte in data:
        state = _CRC_TABLE[(state ^ byte) & 0xFF] ^ state >> 8
    return state


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        state = byte
        for _ in range(8):
            state = state >> 1 ^ (0x82F63B78 if state & 1 else 0)
        table.append(state)
    return table


_CRC_TABLE = _crc_table()


def _lz4_literals(plain: bytes) -> bytes:
    """An LZ4 block that compresses nothing."""
    rest = len(plain) - 15
    return bytes([0xF0]) + b"\xff" * (rest // 255) + bytes([rest % 255]) + plain


def zfile(plain: bytes, block_size: int = 4096) -> bytes:
    """A ZFile (LZ4, checksums) whose header does not hold the final fields: readers take the trailer's."""
    blocks = []
    for start in range(0, len(plain), block_size):
        stored = _lz4_literals(plain[start : start + block_size])
        blocks.append(stored + struct.pack("<I", salted_crc(stored, 100007)))
    data = b"".join(blocks)
    table = b"".join(struct.pack("<I", len(block)) for block in blocks)

    def edge(flags: int, offset: int, count: int, size: int, table_crc: int) -> bytes:
        def fields(digest: int) -> bytes:
            packed = b"ZFile\0\x01\0tuji.yyf@Alibaba" + struct.pack(
                "<IIQQQQIIIBBBxIIB", 96, digest, flags, offset, count, size, table_crc, 0, block_size, 1, 0, 0, 0, 0, 1
            )
            return packed.ljust(512, b"\0")

        return fields(salted_crc(fields(0), 0))

    trailer = edge(0x16, 512 + len(data), len(blocks), len(plain), salted_crc(table, 0))
    return edge(0x13, 0, 0, 0, 0) + data + table + trailer


def tar(payload: bytes) -> bytes:
    """An ordinary archive of one member, as other tools write it."""
    block = bytearray(512)
    for at, text in (
        (0, b"overlaybd.commit"),
        (100, b"0000444\0"),
        (108, b"0000000\0"),
        (116, b"0000000\0"),
        (124, b"%011o\0" % len(payload)),
        (136, b"00000000000\0"),
        (148, b" " * 8),
        (156, b"0"),
        (257, b"ustar\x0000"),
    ):
        block[at : at + len(text)] = text
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block) + payload + bytes(-len(payload) % 512) + bytes(1024)


def raw_image(path: Path, pieces: dict[int, bytes], size: int = MIB) -> Path:
    """Write a sparse image of `size` bytes that holds the pieces at their offsets."""
    with path.open("wb") as file:
        file.truncate(size)
        for offset, data in pieces.items():
            file.seek(offset)
            file.write(data)
    return path
