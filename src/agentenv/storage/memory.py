"""Memory images and stacks of memory layers: pack what changed, unpack a stack, compare both.

An image is a guest's memory as a file, sparse and possibly tens of GiB. The work is done by threads of the compiled
module; a cancelled call stops it, and nothing is left of its output. This file must not know whose memory it is, nor
where layers are kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from agentenv import _native
from agentenv.storage.images import WrittenLayer, native_errors, written

PAGE_BYTES = 4096
"""Unit of comparison: the smallest page of every guest."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A part of a file or device, in bytes."""

    offset: int
    length: int


async def pack_memory(
    image: Path, parents: Sequence[Path], out: Path, *, uuid: str | None = None, replace: bool = False
) -> WrittenLayer:
    """Make a layer (mode 0600) of what differs between an image and the layers that it descends from.

    Only pages that differ are stored. Pages that are zero now and were not become zeroed records; zero pages without
    data below are not stored. Holes are not read on either side.

    Args:
        image: nobody may write to it meanwhile; not smaller than the device of the parents.
        parents: bottom first. Empty: everything that is not zero is stored.
        out: the layer. Its parent is the topmost of the parents.
        uuid: None takes a random one.
        replace: take the place of a file of that name.

    Raises:
        LayerError: a parent is missing or damaged, or a limit is exceeded.
        InsufficientStorageError: the file system of `out` is full.
        StorageError: the image cannot be read or is too small, `out` exists or cannot be written.
    """

    def work(cancellation: _native.Cancellation) -> WrittenLayer:
        facts = _native.pack_memory(
            image, parents, out, uuid=uuid, page=PAGE_BYTES, replace=replace, cancellation=cancellation
        )
        return written(out, facts)

    return await _stoppable(work, lambda: out.unlink(missing_ok=True))


async def unpack_memory(stack: Sequence[Path], out: Path, *, replace: bool = False) -> int:
    """Write what a stack reads as into a sparse file (mode 0600), with holes where it is zero.

    Args:
        stack: bottom first, at least one layer.
        out: the image; its size is the stack's.
        replace: take the place of a file of that name.

    Returns:
        How many bytes of data were written.

    Raises:
        LayerError: a layer is missing or damaged.
        InsufficientStorageError: the file system of `out` is full.
        StorageError: a layer cannot be read, `out` exists or cannot be written.
    """

    def work(cancellation: _native.Cancellation) -> int:
        return _native.unpack(stack, out, replace=replace, cancellation=cancellation)

    return await _stoppable(work, lambda: out.unlink(missing_ok=True))


async def fill_memory(stack: Sequence[Path], image: Path) -> int:
    """Write what a stack reads as into a memory file that is there: all hole, of the stack's size, and possibly mapped.

    On failure or cancellation the file is partly written, and good for nothing.

    Returns:
        How many bytes of data were written.

    Raises:
        LayerError: a layer is missing or damaged.
        InsufficientStorageError: the file system of the image is full.
        StorageError: a layer cannot be read, or the image is missing, has data or another size.
    """

    def work(cancellation: _native.Cancellation) -> int:
        return _native.fill(stack, image, cancellation=cancellation)

    return await _stoppable(work, lambda: None)


async def fill_memory_from_image(image: Path, out: Path) -> int:
    """Write what is not zero of an image into a memory file that is there, as `fill_memory` does.

    Args:
        image: nobody may write to it meanwhile.
        out: all hole, of the image's size, and possibly mapped.

    Returns:
        How many bytes of data were written.

    Raises:
        InsufficientStorageError: the file system of `out` is full.
        StorageError: the image cannot be read, or `out` is missing, has data or another size.
    """

    def work(cancellation: _native.Cancellation) -> int:
        return _native.fill_from_image(image, out, cancellation=cancellation)

    return await _stoppable(work, lambda: None)


async def copy_memory(image: Path, out: Path, *, replace: bool = False) -> int:
    """Copy what is not zero of an image to a sparse file (mode 0600).

    Args:
        image: nobody may write to it meanwhile.
        out: the copy.
        replace: take the place of a file of that name.

    Returns:
        How many bytes of data were written.

    Raises:
        InsufficientStorageError: the file system of `out` is full.
        StorageError: the image cannot be read, `out` exists or cannot be written.
    """

    def work(cancellation: _native.Cancellation) -> int:
        return _native.copy_image(image, out, replace=replace, cancellation=cancellation)

    return await _stoppable(work, lambda: out.unlink(missing_ok=True))


async def compare_memory(image: Path, stack: Sequence[Path]) -> tuple[ByteRange, ...]:
    """Where an image differs from a stack: ascending, whole pages, never adjacent.

    Args:
        image: nobody may write to it meanwhile; not smaller than the stack's device.
        stack: bottom first. Empty: where the image is not zero.

    Raises:
        LayerError: a layer is missing or damaged.
        StorageError: the image or a layer cannot be read, or the image is too small.
    """

    def work(cancellation: _native.Cancellation) -> tuple[ByteRange, ...]:
        found = _native.compare(image, stack, page=PAGE_BYTES, cancellation=cancellation)
        return tuple(ByteRange(offset, length) for offset, length in found)

    return await _stoppable(work, lambda: None)


async def _stoppable(work: Callable[[_native.Cancellation], T], undo: Callable[[], None]) -> T:
    """Run work in a thread. A cancelled call stops it, waits for its end, and undoes it if it was done already."""
    cancellation = _native.Cancellation()

    def run() -> T:
        with native_errors():
            return work(cancellation)

    running = asyncio.ensure_future(asyncio.to_thread(run))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        cancellation.cancel()
        while not running.done():
            try:
                await asyncio.wait([running])
            except asyncio.CancelledError:
                continue
        if running.exception() is None:
            await asyncio.to_thread(undo)
        raise
