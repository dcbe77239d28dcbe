"""Layer files for the rest of the package: describe, verify, read, make. The typed face of the compiled module.

Everything here blocks and releases the interpreter lock meanwhile: call it in a thread. An output appears under its
name only when it is whole and on stable storage, and nothing is left of one that failed. This file must not know what
a layer is for, nor where layers are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from agentenv import _native
from agentenv.errors import InsufficientStorageError, LayerError, StorageError


class Compression(StrEnum):
    """Algorithms of a ZFile."""

    LZ4 = "lz4"
    ZSTD = "zstd"


@dataclass(frozen=True, slots=True)
class ZfileDescription:
    """How a layer is compressed."""

    algorithm: Compression
    block_size: int
    """Plain bytes per block."""
    blocks: int
    verified: bool
    """Whether each block carries a checksum."""
    original_size: int
    """Bytes of the layer without compression."""


@dataclass(frozen=True, slots=True)
class LayerDescription:
    """What a layer file, or the data file of an upper, says of itself. Sizes in bytes."""

    variant: str
    """`committed`, `sealed` (in place); `append`, `hybrid`, `sparse` for an upper that is not sealed."""
    wrapper: tuple[str, ...]
    """`tar`, `zfile`, from the outside to the inside."""
    flags: int
    """Of the trailer; of an upper, of the header."""
    uuid: str | None
    """Lowercase, None when there is none."""
    parent_uuid: str | None
    virtual_size: int
    """Of the device; 0 leaves it to the layer below."""
    records: int
    """Of the index, zeroed ones included."""
    zero_records: int
    data_bytes: int
    """What the data records cover, before compression."""
    digest: str
    """`sha256:<hex>` of the file as it lies there."""
    size: int
    """Of the file."""
    user_tag: str
    zfile: ZfileDescription | None

    @property
    def writable(self) -> bool:
        """Whether it is an upper, not a layer."""
        return self.variant not in ("committed", "sealed")

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        fields = asdict(self)
        fields["wrapper"] = list(self.wrapper)
        return fields


@dataclass(frozen=True, slots=True)
class WrittenLayer:
    """A layer that was just made. Sizes in bytes."""

    path: Path
    digest: str
    """`sha256:<hex>` of the file."""
    size: int
    """Of the file."""
    uuid: str
    parent_uuid: str | None
    virtual_size: int
    records: int
    zero_records: int
    data_bytes: int


@dataclass(frozen=True, slots=True)
class VerifiedLayer:
    """A layer of which every byte was read. Sizes in bytes."""

    digest: str
    size: int
    records: int
    data_bytes: int
    bytes_read: int
    """Of the layer without its wrappers."""


def describe_layer(path: Path, *, index: Path | None = None) -> LayerDescription:
    """Describe a layer or an upper, and hash its file.

    Args:
        path: a layer, or the data file of an upper.
        index: index file of the upper; None: beside it, with the ending `.index`.

    Raises:
        LayerError: it is missing, damaged, or neither.
        StorageError: it cannot be read.
    """
    with native_errors():
        facts = _native.inspect(path, index=index)
    zfile = facts["zfile"]
    return LayerDescription(
        variant=facts["variant"],
        wrapper=tuple(facts["wrapper"]),
        flags=facts["flags"],
        uuid=facts["uuid"],
        parent_uuid=facts["parent_uuid"],
        virtual_size=facts["virtual_size"],
        records=facts["records"],
        zero_records=facts["zero_records"],
        data_bytes=facts["data_bytes"],
        digest=facts["digest"],
        size=facts["size"],
        user_tag=facts["user_tag"],
        zfile=None
        if zfile is None
        else ZfileDescription(
            algorithm=Compression(zfile["algorithm"]),
            block_size=zfile["block_size"],
            blocks=zfile["blocks"],
            verified=zfile["verified"],
            original_size=zfile["original_size"],
        ),
    )


def verify_layer(path: Path) -> VerifiedLayer:
    """Read all of a sealed layer: its structure, its index, every block and its checksum.

    Raises:
        LayerError: it is missing, no sealed layer, or damaged.
        StorageError: it cannot be read.
    """
    with native_errors():
        facts = _native.verify(path)
    return VerifiedLayer(
        digest=facts["digest"],
        size=facts["size"],
        records=facts["records"],
        data_bytes=facts["data_bytes"],
        bytes_read=facts["bytes_read"],
    )


def stack_size(stack: Sequence[Path]) -> int:
    """Size in bytes of the device that layers make, bottom first.

    Raises:
        LayerError: a layer is missing or damaged, or there are too many.
        StorageError: one cannot be read, or there is none.
    """
    with native_errors():
        return _native.virtual_size(stack)


def read_stack(stack: Sequence[Path], offset: int, length: int) -> bytes:
    """Read at most 1 GiB of a stack, bottom first; short where the device ends.

    Raises:
        LayerError: a layer is missing or damaged, or there are too many.
        StorageError: one cannot be read, or there is none.
    """
    with native_errors():
        return _native.read(stack, _natural(offset, "offset"), _natural(length, "length"))


def write_stack_to(stack: Sequence[Path], descriptor: int, *, offset: int = 0, length: int | None = None) -> int:
    """Write a range of a stack, by default all of it, to an open file, pipe or socket.

    Returns:
        How many bytes were written.

    Raises:
        LayerError: a layer is missing or damaged, or there are too many.
        InsufficientStorageError: the file system of the output is full.
        StorageError: a layer cannot be read, the output cannot be written, or there is no layer.
        BrokenPipeError: nobody reads the output any more.
    """
    with native_errors():
        end = None if length is None else _natural(length, "length")
        return _native.cat(stack, descriptor, _natural(offset, "offset"), end)


def create_layer_from_raw(
    raw: Path,
    out: Path,
    *,
    compression: Compression | None = None,
    tar: bool = False,
    uuid: str | None = None,
    parent_uuid: str | None = None,
    replace: bool = False,
) -> WrittenLayer:
    """Make a layer of a raw disk image. Zero blocks (4 KiB) and holes are not stored.

    Args:
        raw: a plain file; sizes that are not whole sectors (512 bytes) are rounded up.
        out: the layer.
        compression: write a ZFile.
        tar: wrap it as the single member of a tar archive.
        uuid: None takes a random one.
        parent_uuid: of the layer that this one will lie on.
        replace: take the place of a file of that name.

    Raises:
        InsufficientStorageError: the file system is full.
        StorageError: `raw` cannot be read, `out` exists or cannot be written, or a UUID is none.
    """
    with native_errors():
        made = _native.create_from_raw(
            raw,
            out,
            zfile=_name(compression),
            tar=tar,
            uuid=uuid,
            parent_uuid=parent_uuid,
            replace=replace,
        )
    return written(out, made)


def merge_layers(
    layers: Sequence[Path],
    out: Path,
    *,
    compression: Compression | None = None,
    tar: bool = False,
    uuid: str | None = None,
    parent_uuid: str | None = None,
    replace: bool = False,
) -> WrittenLayer:
    """Make one layer of neighbouring ones, bottom first. What they zero stays zeroed, for the layers below them.

    Args:
        layers: at least one.
        out: the layer.
        compression: write a ZFile.
        tar: wrap it as the single member of a tar archive.
        uuid: None takes a random one.
        parent_uuid: None takes that of the bottom layer.
        replace: take the place of a file of that name.

    Raises:
        LayerError: a layer is missing or damaged, or a limit is exceeded.
        InsufficientStorageError: the file system is full.
        StorageError: `out` exists or cannot be written, or a UUID is none.
    """
    with native_errors():
        made = _native.merge(
            layers,
            out,
            zfile=_name(compression),
            tar=tar,
            uuid=uuid,
            parent_uuid=parent_uuid,
            replace=replace,
        )
    return written(out, made)


def commit_upper(
    data: Path,
    index: Path | None,
    out: Path,
    *,
    compression: Compression | None = None,
    tar: bool = False,
    uuid: str | None = None,
    parent_uuid: str | None = None,
    replace: bool = False,
) -> WrittenLayer:
    """Make a layer of an upper that nobody has open. The upper stays as it is.

    Args:
        data: data file of the upper.
        index: its index file; None for a sparse one.
        out: the layer.
        compression: write a ZFile.
        tar: wrap it as the single member of a tar archive.
        uuid: None takes a random one.
        parent_uuid: None takes the upper's.
        replace: take the place of a file of that name.

    Raises:
        LayerError: a file of the upper is missing or damaged, or a limit is exceeded.
        InsufficientStorageError: the file system is full.
        StorageError: `out` exists or cannot be written, or a UUID is none.
    """
    with native_errors():
        made = _native.commit(
            data,
            index,
            out,
            zfile=_name(compression),
            tar=tar,
            uuid=uuid,
            parent_uuid=parent_uuid,
            replace=replace,
        )
    return written(out, made)


def written(path: Path, facts: _native.WrittenLayer) -> WrittenLayer:
    """The compiled module's answer as an object."""
    return WrittenLayer(path=path, **facts)


@contextmanager
def native_errors() -> Iterator[None]:
    """Turn errors of the compiled module into those of this package."""
    try:
        yield
    except _native.LayerError as error:
        if error.kind == "no_space":
            raise InsufficientStorageError(f"{error}; free some space and try again") from error
        if error.kind in ("io", "invalid", "exists"):
            raise StorageError(str(error)) from error
        raise LayerError(str(error)) from error


def _natural(number: int, what: str) -> int:
    if not 0 <= number < 1 << 63:
        raise StorageError(f"{what} {number} is out of range")
    return number


def _name(compression: Compression | None) -> Any:
    return None if compression is None else compression.value
