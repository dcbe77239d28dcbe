"""Layers written by hand: what the compiled module says of them and reads from them, and what it refuses."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from layer_bytes import (
    EMPTY,
    LETTERS,
    MIB,
    NIL,
    ONES,
    SEALED,
    SEGMENT,
    UPPER_DATA,
    UPPER_INDEX,
    ZEROED,
    Record,
    committed,
    endless,
    header,
    tar,
    upper,
    zfile,
)

from agentenv import _native

SEGMENT_CONTENT = bytes(65536) + b"\xa5" * 4096 + bytes(MIB - 65536 - 4096)


def put(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def kind(raised: pytest.ExceptionInfo[_native.LayerError]) -> str:
    assert raised.value.message == str(raised.value)
    return raised.value.kind


WRAPPED: list[tuple[Callable[[bytes], bytes], list[str]]] = [
    (bytes, []),
    (zfile, ["zfile"]),
    (tar, ["tar"]),
    (lambda layer: tar(zfile(layer)), ["tar", "zfile"]),
]


@pytest.mark.parametrize(("wrap", "wrapper"), WRAPPED)
def test_every_wrapper_is_told_and_read(tmp_path: Path, wrap: Callable[[bytes], bytes], wrapper: list[str]) -> None:
    content = wrap(committed({128: b"\xa5" * 4096}, uuid=ONES.upper(), parent=LETTERS))
    layer = put(tmp_path / "layer", content)
    facts = _native.inspect(layer)
    zfile_facts = facts.pop("zfile")
    assert facts == {
        "variant": "committed",
        "wrapper": wrapper,
        "flags": 6,
        "uuid": ONES,
        "parent_uuid": LETTERS,
        "virtual_size": MIB,
        "records": 1,
        "zero_records": 0,
        "data_bytes": 4096,
        "digest": f"sha256:{hashlib.sha256(content).hexdigest()}",
        "size": len(content),
        "user_tag": "",
    }
    if "zfile" in wrapper:
        assert zfile_facts == {
            "algorithm": "lz4",
            "block_size": 4096,
            "blocks": 4,
            "verified": True,
            "original_size": 16384,
        }
    else:
        assert zfile_facts is None
    assert _native.read([layer], 0, 2 * MIB) == SEGMENT_CONTENT
    verified = _native.verify(layer)
    assert verified["digest"] == facts["digest"]
    assert (verified["records"], verified["data_bytes"], verified["bytes_read"]) == (1, 4096, 16384)
    assert verified["size"] == len(content)


@pytest.mark.parametrize("parent", ["", NIL])
def test_no_uuid_is_none(tmp_path: Path, parent: str) -> None:
    facts = _native.inspect(put(tmp_path / "layer", committed({}, parent=parent)))
    assert (facts["uuid"], facts["parent_uuid"]) == (None, None)


@pytest.mark.parametrize(
    ("content", "variant", "records", "zeroes", "data"),
    [
        (SEGMENT, "committed", 1, 0, 4096),
        (ZEROED, "committed", 3, 1, 8192),
        (EMPTY, "committed", 0, 0, 0),
        (SEALED, "sealed", 1, 0, 4096),
    ],
)
def test_sealed_layers_are_counted(
    tmp_path: Path, content: bytes, variant: str, records: int, zeroes: int, data: int
) -> None:
    facts = _native.inspect(put(tmp_path / "layer", content))
    assert (facts["variant"], facts["flags"], facts["virtual_size"]) == (variant, 6, MIB)
    assert (facts["records"], facts["zero_records"], facts["data_bytes"]) == (records, zeroes, data)


def test_padding_in_a_sealed_index_is_not_counted(tmp_path: Path) -> None:
    """A layer that is sealed in place may carry filler that looks like records behind its index."""
    layer = put(tmp_path / "layer", SEALED)
    assert _native.inspect(layer)["records"] == 1
    assert _native.read([layer], 0, MIB) == SEGMENT_CONTENT


def test_the_trailer_of_an_upper_sealed_elsewhere_may_follow_its_index_at_once(tmp_path: Path) -> None:
    content = SEALED[:8704] + SEALED[12288:]
    facts = _native.inspect(put(tmp_path / "layer", content))
    assert (facts["variant"], facts["records"], facts["uuid"]) == ("sealed", 1, ONES)
    assert _native.read([tmp_path / "layer"], 65536, 4096) == b"\xa5" * 4096


@pytest.mark.parametrize(("flag", "variant"), [(0, "append"), (0x20, "hybrid")])
def test_uppers_are_described_and_left_alone(tmp_path: Path, flag: int, variant: str) -> None:
    data, index = upper(
        flag,
        [(Record(0, 8, 8), b"\x01" * 4096), (Record(8, 16, 16, zeroed=True), b""), (Record(64, 8, 16), b"\x02" * 4096)],
    )
    put(tmp_path / "upper.data", data)
    # What a crash may leave: half a record, and one whose data never came.
    put(tmp_path / "upper.index", index + Record(128, 8, 4711).encode() + b"\x07" * 5)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    facts = _native.inspect(tmp_path / "upper.data")
    assert facts["variant"] == variant
    assert facts["flags"] == 3 | flag
    assert (facts["records"], facts["zero_records"], facts["data_bytes"]) == (3, 1, 8192)
    assert (facts["uuid"], facts["parent_uuid"], facts["virtual_size"]) == (ONES, None, MIB)
    assert facts["digest"] == f"sha256:{hashlib.sha256(data).hexdigest()}"
    assert facts["wrapper"] == []
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_index_of_an_upper_can_be_named(tmp_path: Path) -> None:
    data = put(tmp_path / "data", UPPER_DATA)
    index = put(tmp_path / "somewhere", UPPER_INDEX)
    assert _native.inspect(data, index=index)["records"] == 1
    with pytest.raises(_native.LayerError, match=r"data\.index") as raised:
        _native.inspect(data)
    assert kind(raised) == "not_found"


def test_a_sparse_upper_needs_no_index(tmp_path: Path) -> None:
    path = tmp_path / "upper.data"
    with path.open("wb") as file:
        file.write(header(0x13, uuid=ONES, virtual_size=16 * MIB))
        file.truncate(4096 + 16 * MIB)
        file.seek(4096 + 8 * MIB)
        file.write(b"\x05" * 8192)
    facts = _native.inspect(path)
    assert (facts["variant"], facts["flags"], facts["virtual_size"]) == ("sparse", 0x13, 16 * MIB)
    assert (facts["records"], facts["data_bytes"]) == (1, 8192)


def test_a_stack_reads_from_the_top(tmp_path: Path) -> None:
    bottom = put(tmp_path / "bottom", committed({0: b"\x01" * 8192, 64: b"\x02" * 4096}))
    middle = put(tmp_path / "middle", zfile(committed({8: 8, 64: 4}, virtual_size=2 * MIB)))
    top = put(tmp_path / "top", tar(committed({66: b"\x03" * 512}, virtual_size=0)))
    expected = bytearray(2 * MIB)
    expected[:4096] = b"\x01" * 4096
    expected[32768 + 2048 : 32768 + 4096] = b"\x02" * 2048
    expected[33792 : 33792 + 512] = b"\x03" * 512
    stack = [bottom, middle, top]
    assert _native.virtual_size(stack) == 2 * MIB
    assert _native.read(stack, 0, 3 * MIB) == expected
    for offset, length in [(1, 1), (4095, 2), (33791, 514), (2 * MIB - 1, 5), (2 * MIB, 5), (5 * MIB, 1), (100, 0)]:
        assert _native.read(stack, offset, length) == expected[offset : offset + length]
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as out:
        count = _native.cat(stack, writing, 33000, 1500)
        os.close(writing)
        assert (count, out.read()) == (1500, expected[33000:34500])


def test_cat_ends_when_nobody_reads(tmp_path: Path) -> None:
    layer = put(tmp_path / "layer", committed({}, virtual_size=1 << 40))
    reading, writing = os.pipe()
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        _native.cat([layer], writing)
    os.close(writing)
    with pytest.raises(_native.LayerError) as raised:
        _native.cat([layer], writing)
    assert kind(raised) == "io"
    with pytest.raises(_native.LayerError) as raised:
        _native.cat([layer], -1)
    assert kind(raised) == "invalid"


def test_a_signal_ends_cat_although_nobody_reads(tmp_path: Path) -> None:
    layer = put(tmp_path / "layer", committed({}, virtual_size=1 << 40))
    code = "import sys; from agentenv import _native; _native.cat([sys.argv[1]], 1)"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(layer)], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1) == b"\0"
        process.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in process.stderr.read()
        assert process.wait() in (-signal.SIGINT, 1, 130)


def test_a_signal_ends_long_work(tmp_path: Path) -> None:
    layer = put(tmp_path / "layer", endless())
    code = (
        "import sys; from agentenv import _native; print('begun', flush=True); _native.unpack([sys.argv[1]], 'image')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(layer)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in process.stderr.read()
    assert list(tmp_path.iterdir()) == [layer]


def test_a_cancelled_call_ends(tmp_path: Path) -> None:
    layer = put(tmp_path / "layer", endless())
    cancellation = _native.Cancellation()
    with ThreadPoolExecutor() as threads:
        unpacking = threads.submit(_native.unpack, [layer], tmp_path / "image", cancellation=cancellation)
        cancellation.cancel()
        with pytest.raises(_native.LayerError) as raised:
            unpacking.result()
    assert kind(raised) == "cancelled"
    assert list(tmp_path.iterdir()) == [layer]


@pytest.mark.parametrize("wrap", [wrap for wrap, _ in WRAPPED])
def test_truncation_is_noticed_everywhere(tmp_path: Path, wrap: Callable[[bytes], bytes]) -> None:
    content = wrap(SEGMENT)
    end = len(content) - (1024 if wrap is tar else 0)
    for length in {*range(0, end, 509), end - 1, end - 512, end - 4096}:
        layer = put(tmp_path / "layer", content[:length])
        for call in (_native.inspect, _native.verify, lambda path: _native.read([path], 0, 4096)):
            with pytest.raises(_native.LayerError) as raised:
                call(layer)
            assert kind(raised) in ("format", "invalid"), (length, raised.value)
            assert str(layer) in str(raised.value)


def test_a_flipped_bit_in_a_block_is_found_by_verify(tmp_path: Path) -> None:
    content = bytearray(zfile(SEGMENT))
    content[512 + 4200] ^= 0x10
    layer = put(tmp_path / "layer", bytes(content))
    with pytest.raises(_native.LayerError, match="layer") as raised:
        _native.verify(layer)
    assert kind(raised) == "format"


@pytest.mark.parametrize(
    "records",
    [
        [Record(0, 8, 8), Record(4, 8, 16)],  # overlap
        [Record(16, 8, 8), Record(0, 8, 16)],  # order
        [Record(0, 8, 1000)],  # beyond the data
        [Record(0, 8, 0)],  # the header as data
    ],
)
def test_a_hostile_index_is_refused(tmp_path: Path, records: list[Record]) -> None:
    data = b"\x11" * 8192
    index = b"".join(record.encode() for record in records)
    trailer = header(6, index_offset=4096 + len(data), index_size=len(records))
    layer = put(tmp_path / "layer", header(7) + data + index.ljust(4096, b"\xff") + trailer)
    with pytest.raises(_native.LayerError) as raised:
        _native.inspect(layer)
    assert kind(raised) == "format"


def test_what_is_no_layer_is_named(tmp_path: Path) -> None:
    with pytest.raises(_native.LayerError, match="nowhere") as raised:
        _native.inspect(tmp_path / "nowhere")
    assert kind(raised) == "not_found"
    with pytest.raises(_native.LayerError, match="not a plain file") as raised:
        _native.verify(tmp_path)
    assert kind(raised) == "invalid"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(_native.LayerError, match="pipe is not a plain file") as raised:
        _native.read([tmp_path / "pipe"], 0, 1)
    assert kind(raised) == "invalid"
    with pytest.raises(_native.LayerError) as raised:
        _native.read([], 0, 1)
    assert kind(raised) == "invalid"
    put(tmp_path / "upper.data", UPPER_DATA)
    put(tmp_path / "upper.index", UPPER_INDEX)
    with pytest.raises(_native.LayerError) as raised:
        _native.verify(tmp_path / "upper.data")
    assert kind(raised) == "format"
    layer = put(tmp_path / "layer", EMPTY)
    with pytest.raises(_native.LayerError) as raised:
        _native.read([layer] * 300, 0, 1)
    assert kind(raised) == "limit"
