"""Memory images as layers: what differs is stored and no more, chains give back the image, holes stay holes."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_bytes import LETTERS, MIB, NIL, ONES, SECTOR, committed, endless, tar, zfile

from agentenv import _native
from agentenv.errors import InsufficientStorageError, LayerError, StorageError
from agentenv.storage.memory import (
    ByteRange,
    compare_memory,
    copy_memory,
    fill_memory,
    fill_memory_from_image,
    pack_memory,
    unpack_memory,
)

PAGE = 4096


def write_image(path: Path, pages: dict[int, bytes], size: int) -> None:
    """A sparse file: only the pages named are written, zeros among them too."""
    with path.open("r+b" if path.exists() else "xb") as file:
        file.truncate(size)
        for page, content in pages.items():
            file.seek(page * PAGE)
            file.write(content[: size - page * PAGE])


def differing(one: bytes, other: bytes, page: int = PAGE) -> list[tuple[int, int]]:
    """Ranges in which two images differ, by whole pages."""
    found: list[tuple[int, int]] = []
    for offset in range(0, len(one), page):
        part = one[offset : offset + page]
        if part == other[offset : offset + page].ljust(len(part), b"\0"):
            continue
        if found and sum(found[-1]) == offset:
            found[-1] = (found[-1][0], found[-1][1] + len(part))
        else:
            found.append((offset, len(part)))
    return found


page_contents = st.one_of(
    st.just(bytes(PAGE)),
    st.integers(1, 255).map(lambda byte: bytes([byte]) * PAGE),
    st.tuples(st.integers(0, PAGE - 1), st.integers(1, 255)).map(
        lambda change: bytes(change[0]) + bytes([change[1]]) + bytes(PAGE - 1 - change[0])
    ),
)


@st.composite
def generations(draw: st.DrawFn) -> tuple[int, list[dict[int, bytes]]]:
    """A size in pages, and what each generation writes, in runs that cross the borders of windows and threads."""
    pages = draw(st.sampled_from([1, 3, 64, 65, 130, 700]))
    run = st.tuples(st.integers(0, pages - 1), st.sampled_from([1, 2, 5, 64, 70]), page_contents)
    chain = []
    for runs in draw(st.lists(st.lists(run, max_size=6), min_size=1, max_size=4)):
        writes = {}
        for first, count, content in runs:
            writes.update(dict.fromkeys(range(first, min(first + count, pages)), content))
        chain.append(writes)
    return pages, chain


@settings(max_examples=50, deadline=None)
@given(generations())
def test_a_chain_of_generations_gives_back_every_image(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[int, list[dict[int, bytes]]]
) -> None:
    pages, chain = drawn
    size = pages * PAGE
    directory = tmp_path_factory.mktemp("memory")
    image = directory / "image"
    before = bytes(size)
    stack: list[Path] = []
    for number, writes in enumerate(chain):
        write_image(image, writes, size)
        content = image.read_bytes()
        changed = differing(content, before)
        assert _native.compare(image, stack) == changed
        layer = directory / f"layer{number}"
        made = _native.pack_memory(image, stack, layer)
        facts = _native.inspect(layer)
        assert (made["digest"], made["size"]) == (facts["digest"], layer.stat().st_size)
        assert (facts["variant"], facts["virtual_size"], facts["uuid"]) == ("committed", size, made["uuid"])
        assert facts["parent_uuid"] == (_native.inspect(stack[-1])["uuid"] if stack else None)
        stored = sum(
            PAGE
            for offset, length in changed
            for page in range(offset, offset + length, PAGE)
            if any(content[page : page + PAGE])
        )
        assert facts["data_bytes"] == stored, "something else than the differing pages was stored"
        stack.append(layer)
        assert _native.compare(image, stack) == []
        assert _native.read(stack, 0, size) == content
        before = content
    unpacked = directory / "unpacked"
    written = _native.unpack(stack, unpacked)
    assert unpacked.read_bytes() == before
    full = sum(PAGE for page in range(0, size, PAGE) if any(before[page : page + PAGE]))
    assert written == full
    assert unpacked.stat().st_blocks * SECTOR <= full + 64 * 1024, "zeros were written instead of left as holes"
    # Merged, the generations are one layer that needs no other.
    _native.merge(stack, directory / "merged")
    assert _native.read([directory / "merged"], 0, size) == before
    # The next generation of an image restored from the stack begins where the stack ends.
    made = _native.pack_memory(unpacked, stack, directory / "nothing")
    assert (made["records"], made["data_bytes"]) == (0, 0)


@pytest.mark.parametrize(("dense_after", "most_records"), [(2048, 2048), (1024, 1100), (40, 70), (1, 34)])
def test_scattered_changes_do_not_exceed_the_index(tmp_path: Path, dense_after: int, most_records: int) -> None:
    """Every other page changes: 64 runs per window. Beyond the limit, unchanged pages fill the gaps."""
    size = 4096 * PAGE + 512
    image = tmp_path / "image"
    image.write_bytes(b"\1" * size)
    _native.pack_memory(image, [], tmp_path / "base")
    write_image(image, dict.fromkeys(range(0, 4096, 2), b"\2" * PAGE), size)
    made = _native.pack_memory(image, [tmp_path / "base"], tmp_path / "layer", dense_after=dense_after)
    assert made["records"] <= most_records
    stack = [tmp_path / "base", tmp_path / "layer"]
    assert _native.read(stack, 0, size) == image.read_bytes()
    assert _native.compare(image, stack) == []


@settings(max_examples=40, deadline=None)
@given(generations(), st.sampled_from([4096, 8192, 65536, 262144]))
def test_pages_of_other_sizes(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[int, list[dict[int, bytes]]], page: int
) -> None:
    pages, chain = drawn
    size = pages * PAGE
    directory = tmp_path_factory.mktemp("memory")
    image = directory / "image"
    write_image(image, chain[0], size)
    _native.pack_memory(image, [], directory / "base")
    before = image.read_bytes()
    for writes in chain[1:]:
        write_image(image, writes, size)
    content = image.read_bytes()
    assert _native.compare(image, [directory / "base"], page=page) == differing(content, before, page)
    _native.pack_memory(image, [directory / "base"], directory / "layer", page=page)
    assert _native.read([directory / "base", directory / "layer"], 0, size) == content


def test_what_was_zeroed_is_recorded_and_what_was_never_there_is_not(tmp_path: Path) -> None:
    size = 16 * MIB
    image = tmp_path / "image"
    write_image(image, {0: b"\1" * PAGE, 1: b"\2" * PAGE, 300: b"\3" * PAGE}, size)
    base = _native.pack_memory(image, [], tmp_path / "base", uuid=ONES)
    assert (base["records"], base["zero_records"], base["data_bytes"]) == (2, 0, 3 * PAGE)
    # Page 1 is written with zeros, page 300 becomes a hole, page 2000 is zero as before but is no hole any more.
    write_image(image, {1: bytes(PAGE), 2000: bytes(PAGE)}, size)
    subprocess.run(
        ["fallocate", "--punch-hole", "--offset", str(300 * PAGE), "--length", str(PAGE), str(image)], check=True
    )
    layer = _native.pack_memory(image, [tmp_path / "base"], tmp_path / "layer")
    assert (layer["records"], layer["zero_records"], layer["data_bytes"]) == (2, 2, 0)
    assert layer["parent_uuid"] == ONES
    assert layer["virtual_size"] == size
    assert _native.compare(image, [tmp_path / "base"]) == [(PAGE, PAGE), (300 * PAGE, PAGE)]
    assert _native.read([tmp_path / "base", tmp_path / "layer"], 0, size) == image.read_bytes()


def test_long_runs_become_long_records(tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(b"\1" * (20 * MIB))
    made = _native.pack_memory(image, [], tmp_path / "layer")
    assert made["records"] == 3
    zeroed = tmp_path / "zeroed"
    write_image(zeroed, {}, 20 * MIB)
    made = _native.pack_memory(zeroed, [tmp_path / "layer"], tmp_path / "second")
    assert (made["records"], made["zero_records"], made["data_bytes"]) == (3, 3, 0)


@pytest.mark.parametrize("wrap", [zfile, tar])
def test_parents_may_be_wrapped(tmp_path: Path, wrap: Callable[[bytes], bytes]) -> None:
    base = tmp_path / "base"
    base.write_bytes(wrap(committed({0: b"\1" * PAGE, 8: b"\2" * PAGE}, uuid=ONES)))
    image = tmp_path / "image"
    write_image(image, {0: b"\1" * PAGE, 1: b"\3" * PAGE}, MIB)
    made = _native.pack_memory(image, [base], tmp_path / "layer", uuid=LETTERS)
    assert (made["uuid"], made["parent_uuid"], made["data_bytes"]) == (LETTERS, ONES, PAGE)
    assert _native.read([base, tmp_path / "layer"], 0, MIB) == image.read_bytes()


def test_a_parent_without_uuid_is_no_parent(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.write_bytes(committed({}, uuid=NIL))
    write_image(tmp_path / "image", {}, MIB)
    assert _native.pack_memory(tmp_path / "image", [base], tmp_path / "layer")["parent_uuid"] is None


@pytest.mark.parametrize("size", [0, 1, 4095, PAGE + 1, MIB + 513])
def test_images_that_are_not_whole_pages(tmp_path: Path, size: int) -> None:
    image = tmp_path / "image"
    image.write_bytes(os.urandom(size))
    assert _native.compare(image, []) == ([(0, size)] if size else [])
    made = _native.pack_memory(image, [], tmp_path / "layer")
    rounded = size + -size % SECTOR
    assert made["virtual_size"] == rounded
    assert _native.compare(image, [tmp_path / "layer"]) == []
    _native.unpack([tmp_path / "layer"], tmp_path / "unpacked")
    assert (tmp_path / "unpacked").read_bytes() == image.read_bytes().ljust(rounded, b"\0")


def test_an_image_may_grow_and_must_not_shrink(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.write_bytes(committed({2040: b"\1" * PAGE}, virtual_size=MIB))
    image = tmp_path / "image"
    write_image(image, {511: b"\2" * PAGE}, 2 * MIB)
    made = _native.pack_memory(image, [base], tmp_path / "layer")
    assert made["virtual_size"] == 2 * MIB
    assert _native.read([base, tmp_path / "layer"], 0, 2 * MIB) == image.read_bytes()
    os.truncate(image, MIB - 512)
    with pytest.raises(_native.LayerError, match="fewer than the stack") as raised:
        _native.pack_memory(image, [base], tmp_path / "other")
    assert raised.value.kind == "invalid"
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("page", [0, 1, 512, 4097, 12288, 1 << 20])
def test_pages_that_are_none(tmp_path: Path, page: int) -> None:
    write_image(tmp_path / "image", {}, MIB)
    with pytest.raises(_native.LayerError, match="page") as raised:
        _native.compare(tmp_path / "image", [], page=page)
    assert raised.value.kind == "invalid"


def test_huge_sparse_images_cost_nothing(tmp_path: Path) -> None:
    """Holes are skipped, not read: this would take minutes otherwise."""
    size = 1 << 40
    image = tmp_path / "image"
    write_image(image, {0: b"\1" * PAGE, size // PAGE - 1: b"\2" * PAGE}, size)
    made = _native.pack_memory(image, [], tmp_path / "layer")
    assert (made["records"], made["data_bytes"], made["virtual_size"]) == (2, 2 * PAGE, size)
    assert _native.unpack([tmp_path / "layer"], tmp_path / "unpacked") == 2 * PAGE
    assert (tmp_path / "unpacked").stat().st_size == size
    assert _native.compare(tmp_path / "unpacked", [tmp_path / "layer"]) == []


async def test_the_asynchronous_face(tmp_path: Path) -> None:
    image = tmp_path / "image"
    write_image(image, {3: b"\1" * PAGE, 4: b"\1" * PAGE, 100: b"\1" * PAGE}, MIB)
    assert await compare_memory(image, []) == (ByteRange(3 * PAGE, 2 * PAGE), ByteRange(100 * PAGE, PAGE))
    layer = await pack_memory(image, [], tmp_path / "layer", uuid=ONES)
    assert (layer.path, layer.uuid, layer.parent_uuid, layer.records) == (tmp_path / "layer", ONES, None, 2)
    assert layer.digest == _native.inspect(layer.path)["digest"]
    assert await unpack_memory([layer.path], tmp_path / "unpacked") == 3 * PAGE
    assert (tmp_path / "unpacked").read_bytes() == image.read_bytes()
    assert await compare_memory(tmp_path / "unpacked", [layer.path]) == ()


async def test_errors_are_ours(tmp_path: Path) -> None:
    image = tmp_path / "image"
    write_image(image, {}, MIB)
    (tmp_path / "out").write_text("precious")
    (tmp_path / "base").write_bytes(committed({}))
    with pytest.raises(StorageError, match="out exists"):
        await pack_memory(image, [], tmp_path / "out")
    with pytest.raises(StorageError, match="out exists"):
        await unpack_memory([tmp_path / "base"], tmp_path / "out")
    assert (tmp_path / "out").read_text() == "precious"
    with pytest.raises(LayerError, match="image"):
        await unpack_memory([image], tmp_path / "unpacked")
    with pytest.raises(LayerError, match="nowhere"):
        await compare_memory(image, [tmp_path / "nowhere"])
    with pytest.raises(StorageError, match="at least one layer"):
        await unpack_memory([], tmp_path / "unpacked")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "image", "out"]


async def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object, **options: object) -> None:
        error = _native.LayerError("out: No space left on device (os error 28)")
        error.kind = "no_space"
        raise error

    monkeypatch.setattr(_native, "unpack", full)
    with pytest.raises(InsufficientStorageError, match="No space left"):
        await unpack_memory([tmp_path], tmp_path / "out")


async def test_a_cancelled_call_stops_and_leaves_nothing(tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    layer.write_bytes(endless())
    unpacking = asyncio.ensure_future(unpack_memory([layer], tmp_path / "image"))
    await asyncio.sleep(0)
    unpacking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await unpacking
    assert list(tmp_path.iterdir()) == [layer]


async def test_a_call_that_is_cancelled_too_late_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = tmp_path / "image"
    write_image(image, {}, MIB)
    loop = asyncio.get_running_loop()
    done = asyncio.Event()
    genuine = _native.pack_memory

    def finish_all_the_same(*arguments: object, cancellation: _native.Cancellation, **options: object) -> object:
        made = genuine(*arguments, **options)  # type: ignore[arg-type]
        loop.call_soon_threadsafe(done.set)
        cancelled.result()
        return made

    from concurrent.futures import Future

    cancelled: Future[None] = Future()
    monkeypatch.setattr(_native, "pack_memory", finish_all_the_same)
    packing = asyncio.ensure_future(pack_memory(image, [], tmp_path / "layer"))
    await done.wait()
    assert (tmp_path / "layer").exists()
    packing.cancel()
    await asyncio.sleep(0)
    cancelled.set_result(None)
    with pytest.raises(asyncio.CancelledError):
        await packing
    assert list(tmp_path.iterdir()) == [image]


async def test_a_stack_fills_a_file_that_is_mapped_already(tmp_path: Path) -> None:
    size = 300 * PAGE
    write_image(tmp_path / "image", {0: b"a" * PAGE, 7: bytes(PAGE), 130: b"b" * 5, 299: b"c" * PAGE}, size)
    await pack_memory(tmp_path / "image", [], tmp_path / "layer")
    write_image(tmp_path / "memory", {}, size)
    with (tmp_path / "memory").open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        assert await fill_memory([tmp_path / "layer"], tmp_path / "memory") == 3 * PAGE
        assert mapped[:] == (tmp_path / "image").read_bytes()
    assert (tmp_path / "memory").stat().st_blocks * SECTOR <= 3 * PAGE + 64 * 1024
    for reason, path in {
        "it has data": tmp_path / "memory",
        "it is missing": tmp_path / "none",
        "it is a directory": tmp_path,
    }.items():
        with pytest.raises(StorageError):
            await fill_memory([tmp_path / "layer"], path)
            pytest.fail(reason)
    for pages in (299, 301):
        write_image(tmp_path / f"{pages}", {}, pages * PAGE)
        with pytest.raises(StorageError, match="no empty sparse file"):
            await fill_memory([tmp_path / "layer"], tmp_path / f"{pages}")
        assert (tmp_path / f"{pages}").stat().st_blocks == 0


async def test_a_copy_has_what_is_not_zero(tmp_path: Path) -> None:
    size = 3000 * PAGE
    zeros = {page: bytes(PAGE) for page in range(100, 400)}
    write_image(tmp_path / "image", zeros | {0: b"a" * PAGE, 130: b"b" * 5, 2999: b"c" * PAGE}, size)
    assert await copy_memory(tmp_path / "image", tmp_path / "copy") == 3 * PAGE
    assert (tmp_path / "copy").read_bytes() == (tmp_path / "image").read_bytes()
    assert (tmp_path / "copy").stat().st_blocks * SECTOR <= 3 * PAGE + 64 * 1024
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600
    with pytest.raises(StorageError, match="exist"):
        await copy_memory(tmp_path / "image", tmp_path / "copy")
    with pytest.raises(StorageError, match="none"):
        await copy_memory(tmp_path / "none", tmp_path / "other")
    assert await copy_memory(tmp_path / "copy", tmp_path / "image", replace=True) == 3 * PAGE
    assert not (tmp_path / "other").exists()
    write_image(tmp_path / "empty", {}, size)
    assert await copy_memory(tmp_path / "empty", tmp_path / "other") == 0
    assert (tmp_path / "other").stat().st_size == size


async def test_an_image_fills_a_file_that_is_mapped_already(tmp_path: Path) -> None:
    size = 300 * PAGE
    write_image(tmp_path / "image", {0: b"a" * PAGE, 7: bytes(PAGE), 130: b"b" * 5, 299: b"c" * PAGE}, size)
    write_image(tmp_path / "memory", {}, size)
    with (tmp_path / "memory").open("r+b") as file, mmap.mmap(file.fileno(), size) as mapped:
        assert await fill_memory_from_image(tmp_path / "image", tmp_path / "memory") == 3 * PAGE
        assert mapped[:] == (tmp_path / "image").read_bytes()
    assert (tmp_path / "memory").stat().st_blocks * SECTOR <= 3 * PAGE + 64 * 1024
    for path in (tmp_path / "memory", tmp_path / "none"):
        with pytest.raises(StorageError):
            await fill_memory_from_image(tmp_path / "image", path)
    for pages in (299, 301):
        write_image(tmp_path / f"{pages}", {}, pages * PAGE)
        with pytest.raises(StorageError, match="no empty sparse file"):
            await fill_memory_from_image(tmp_path / "image", tmp_path / f"{pages}")
        assert (tmp_path / f"{pages}").stat().st_blocks == 0
