"""Images and layers for the benchmarks, made in a directory of the caller: what devices and operations work on.

Contents are the same in every run but for `real_content`, which is this machine's programs.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from pathlib import Path

from agentenv import _native

_CHUNK = 1 << 20


def random_image(path: Path, size: int, *, seed: int = 1) -> Path:
    """A raw image without zero blocks."""
    source = random.Random(seed)
    with path.open("wb") as file:
        for _ in range(size // _CHUNK):
            file.write(source.randbytes(_CHUNK))
    return path


def real_content(path: Path, size: int) -> Path:
    """The largest files below /usr, one after another, from the smallest that is needed: programs and libraries."""
    found = []
    for directory, _, names in os.walk("/usr"):
        for name in names:
            file = Path(directory, name)
            if file.is_file() and not file.is_symlink() and file.stat().st_size < size // 8:
                found.append((file.stat().st_size, file))
    with path.open("wb") as out:
        for _, file in sorted(found, reverse=True):
            if out.tell() >= size:
                break
            out.write(file.read_bytes())
        if out.tell() < size:
            raise RuntimeError(f"the files below /usr are smaller than {size} bytes")
        out.truncate(size)
    return path


def change(path: Path, places: Iterable[int], length: int, *, seed: int) -> Path:
    """Write `length` random bytes at each of the places, in units of `length`; a new file is as large as its last."""
    source = random.Random(seed)
    with path.open("r+b" if path.exists() else "wb") as file:
        for place in places:
            file.seek(place * length)
            file.write(source.randbytes(length))
    return path


def layers_over(image: Path, directory: Path, depth: int, *, share: float = 0.25, run: int = 65536) -> list[Path]:
    """Stack of `depth` layers, bottom first: the image, then layers that together overwrite a share of it in runs of
    `run` bytes, so that however many they are, reads come upon as many pieces."""
    size = image.stat().st_size
    base = directory / f"{depth}-base.layer"
    made = _native.create_from_raw(image, base)
    stack = [base]
    source = random.Random(depth)
    for number in range(1, depth):
        count = max(1, int(size * share) // run // (depth - 1))
        raw = directory / "changes.raw"
        change(raw, source.sample(range(size // run), count), run, seed=number)
        os.truncate(raw, size)
        layer = directory / f"{depth}-{number}.layer"
        made = _native.create_from_raw(raw, layer, parent_uuid=made["uuid"])
        raw.unlink()
        stack.append(layer)
    return stack
