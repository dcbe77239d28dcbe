"""Writes an empty qcow2 overlay over a raw image, so that making a sandbox's disk starts no process.

Format: QEMU's docs/interop/qcow2.txt, version 3. Extended L2 entries make 2 KiB the unit of copy-on-write: a small
write neither reads nor stores a whole 64 KiB cluster of the template. Nothing else of the format is known here.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from agentenv.errors import StorageError

_CLUSTER_BITS = 16
_CLUSTER_BYTES = 1 << _CLUSTER_BITS
_L2_ENTRY_BYTES = 16
_INCOMPATIBLE_EXTENDED_L2 = 1 << 4
_REFCOUNT_ORDER = 4
_HEADER_BYTES = 112
_EXTENSION_BACKING_FORMAT = 0xE2792ACA
_EXTENSION_END = 0
_MAX_NAME_BYTES = 1023


def write_overlay(descriptor: int, backing: Path, size_bytes: int) -> None:
    """Write an empty overlay into an empty file.

    Args:
        descriptor: the file, open for writing.
        backing: absolute path of the raw image below.
        size_bytes: size of the disk, that of the raw image.

    Raises:
        StorageError: the path of the image is too long for the format, or not absolute.
        OSError: writing failed.
    """
    name = os.fsencode(backing)
    if not backing.is_absolute() or len(name) > _MAX_NAME_BYTES:
        raise StorageError(f"{backing} cannot be the base of a qcow2 disk: it must be absolute, below 1 KiB")
    bytes_per_l2 = _CLUSTER_BYTES // _L2_ENTRY_BYTES * _CLUSTER_BYTES
    l1_entries = -(-size_bytes // bytes_per_l2)
    l1_clusters = max(1, -(-l1_entries * 8 // _CLUSTER_BYTES))
    # Layout: header, refcount table, one refcount block, L1 table; with the block's 32768 entries it is always enough.
    clusters = 3 + l1_clusters
    extensions = struct.pack(">II8s", _EXTENSION_BACKING_FORMAT, 3, b"raw") + struct.pack(">II", _EXTENSION_END, 0)
    header = struct.pack(
        ">4sIQIIQIIQQIIQQQQII8x",
        b"QFI\xfb",
        3,
        _HEADER_BYTES + len(extensions),  # offset of the backing file's name
        len(name),
        _CLUSTER_BITS,
        size_bytes,
        0,  # no encryption
        l1_entries,
        3 * _CLUSTER_BYTES,  # L1 table
        1 * _CLUSTER_BYTES,  # refcount table
        1,  # clusters of the refcount table
        0,  # no snapshots
        0,
        _INCOMPATIBLE_EXTENDED_L2,
        0,  # compatible features
        0,  # autoclear features
        _REFCOUNT_ORDER,
        _HEADER_BYTES,
    )
    _write(descriptor, header + extensions + name, 0)
    _write(descriptor, struct.pack(">Q", 2 * _CLUSTER_BYTES), _CLUSTER_BYTES)
    _write(descriptor, struct.pack(">H", 1) * clusters, 2 * _CLUSTER_BYTES)
    os.ftruncate(descriptor, clusters * _CLUSTER_BYTES)


def _write(descriptor: int, data: bytes, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
