"""Contract of the compiled module (`crates/native`): overlaybd layers and memory images.

Every function blocks, releases the interpreter lock while it works, ends early with `KeyboardInterrupt`, and raises
`LayerError` and nothing else for whatever goes wrong with files (`BrokenPipeError` from `cat` excepted). Paths are
files of this host; offsets, lengths and sizes are bytes; a stack is a list of sealed layers, bottom first, each plain
or in a ZFile or tar or both. An output appears under its name only when it is whole and on stable storage; whatever
happens before, nothing is left of it. Without `replace`, an output that exists is an error and stays as it is.

The rest of the package uses `agentenv.storage.images` and `agentenv.storage.memory`, not this module.
"""

from collections.abc import Sequence
from os import PathLike
from typing import Literal, TypeAlias, TypedDict, type_check_only

_Path: TypeAlias = str | PathLike[str]
_Compression: TypeAlias = Literal["lz4", "zstd"]

class LayerError(Exception):
    """What failed, for which file. `str()` is the message."""

    kind: Literal["format", "unsupported", "limit", "invalid", "exists", "not_found", "no_space", "cancelled", "io"]
    """`format`: damaged, truncated, not a layer. `unsupported`: valid, but a kind that is not read here. `limit`: too
    many records or layers, or too large. `invalid`: wrong arguments. `exists`: the output does. `not_found`: no such
    file or directory. `no_space`: the file system of the output is full. `cancelled`: on request. `io`: anything
    else that was refused."""
    message: str

class Cancellation:
    """Ends the calls that it was given to, from another thread."""

    def __init__(self) -> None: ...
    def cancel(self) -> None:
        """Make them raise `LayerError` (`cancelled`) soon, also those that are yet to begin."""

@type_check_only
class ZfileFacts(TypedDict):
    algorithm: _Compression
    block_size: int
    blocks: int
    verified: bool
    """Whether each block carries a checksum."""
    original_size: int
    """Size of what is inside, in bytes."""

@type_check_only
class LayerFacts(TypedDict):
    variant: Literal["committed", "sealed", "append", "hybrid", "sparse"]
    """`sealed` is sealed in place; the last three are writable."""
    wrapper: list[Literal["tar", "zfile"]]
    """From the outside to the inside."""
    flags: int
    """Of the trailer; of a writable file, of the header."""
    uuid: str | None
    """Lowercase; None when there is none, or the nil UUID."""
    parent_uuid: str | None
    virtual_size: int
    records: int
    """Records that count, the zeroed ones included, padding not."""
    zero_records: int
    data_bytes: int
    """Bytes that data records refer to, as stored before compression."""
    digest: str
    """`sha256:<hex>` of the file as it lies there."""
    size: int
    """Of the file."""
    user_tag: str
    zfile: ZfileFacts | None

@type_check_only
class WrittenLayer(TypedDict):
    digest: str
    size: int
    uuid: str
    parent_uuid: str | None
    virtual_size: int
    records: int
    zero_records: int
    data_bytes: int

@type_check_only
class VerifiedLayer(TypedDict):
    records: int
    data_bytes: int
    bytes_read: int
    """Of the layer without its wrappers."""
    digest: str
    size: int

def inspect(path: _Path, *, index: _Path | None = None) -> LayerFacts:
    """Describe a layer, or the data file of an upper.

    Args:
        path: the file.
        index: index file of an append-only or hybrid upper. None: the file beside it whose name ends in `.index`
            where this one's ends in `.data`.
    """

def verify(path: _Path) -> VerifiedLayer:
    """Read all of a sealed layer: structure, index, every block and its checksum."""

def virtual_size(stack: Sequence[_Path]) -> int:
    """Size of the device that a stack makes."""

def read(stack: Sequence[_Path], offset: int, length: int) -> bytes:
    """Read a range of a stack; short where the device ends."""

def cat(stack: Sequence[_Path], descriptor: int, offset: int = 0, length: int | None = None) -> int:
    """Write a range of a stack (None: up to the end of the device) to an open file, pipe or socket.

    Returns:
        How many bytes were written.
    """

def create_from_raw(
    source: _Path,
    out: _Path,
    *,
    zfile: _Compression | None = None,
    tar: bool = False,
    uuid: str | None = None,
    parent_uuid: str | None = None,
    replace: bool = False,
) -> WrittenLayer:
    """Make a layer of a raw disk image. Zero blocks (4 KiB) and holes are not stored.

    Args:
        zfile: compress with this.
        tar: wrap as the single member of a tar archive.
        uuid: None takes a random one.
    """

def merge(
    layers: Sequence[_Path],
    out: _Path,
    *,
    zfile: _Compression | None = None,
    tar: bool = False,
    uuid: str | None = None,
    parent_uuid: str | None = None,
    replace: bool = False,
) -> WrittenLayer:
    """Make one layer of neighbouring layers, bottom first. What they zero stays zeroed, for the layers below them.

    Args:
        parent_uuid: None takes the parent of the bottom one.
    """

def commit(
    data: _Path,
    index: _Path | None,
    out: _Path,
    *,
    zfile: _Compression | None = None,
    tar: bool = False,
    uuid: str | None = None,
    parent_uuid: str | None = None,
    replace: bool = False,
) -> WrittenLayer:
    """Make a layer of an upper that nobody has open; the upper stays as it is.

    Args:
        index: index file; None for a sparse upper.
        parent_uuid: None takes the upper's.
    """

def pack_memory(
    image: _Path,
    parents: Sequence[_Path],
    out: _Path,
    *,
    uuid: str | None = None,
    page: int = 4096,
    dense_after: int = 500_000,
    replace: bool = False,
    cancellation: Cancellation | None = None,
) -> WrittenLayer:
    """Make a layer (mode 0600) of what differs between a memory image and a stack of memory layers.

    Pages that are zero in the image and not in the stack become zeroed records; holes are not read on either side.

    Args:
        image: file that nobody writes to meanwhile; its size must not be smaller than the stack's.
        parents: bottom first; empty: everything that is not zero is stored.
        page: unit of comparison, a power of two from 4 KiB to 256 KiB.
        dense_after: after so many runs of pages, unchanged pages between two runs are stored too, so that the layer
            stays below the million records that other implementations read.
    """

def unpack(
    stack: Sequence[_Path], out: _Path, *, replace: bool = False, cancellation: Cancellation | None = None
) -> int:
    """Write what a stack reads as into a sparse file (mode 0600) of its virtual size, with holes where it is zero.

    Returns:
        How many bytes of data were written.
    """

def fill(stack: Sequence[_Path], image: _Path, *, cancellation: Cancellation | None = None) -> int:
    """Write what a stack reads as into a sparse file of its virtual size that is there, and all hole.

    Unlike other outputs it may be open elsewhere (mapped by the machine whose memory it is), so a call that fails
    leaves it partly written.

    Returns:
        How many bytes of data were written.
    """

def fill_from_image(image: _Path, out: _Path, *, cancellation: Cancellation | None = None) -> int:
    """As `fill`, with what is not zero of a memory image, which nobody writes to meanwhile.

    Returns:
        How many bytes of data were written.
    """

def copy_image(image: _Path, out: _Path, *, replace: bool = False, cancellation: Cancellation | None = None) -> int:
    """Copy what is not zero of a memory image, which nobody writes to meanwhile, to a sparse file (mode 0600).

    Returns:
        How many bytes of data were written.
    """

def compare(
    image: _Path, stack: Sequence[_Path], *, page: int = 4096, cancellation: Cancellation | None = None
) -> list[tuple[int, int]]:
    """Where an image differs from a stack (what lies behind the stack's end counts as zero there).

    Returns:
        (offset, length) in ascending order, multiples of the page (but for the end of the image), never adjacent.
    """
