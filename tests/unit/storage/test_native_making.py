"""Layers that the compiled module makes: their bytes, what they read as, and what is left when making fails."""

from __future__ import annotations

import hashlib
import os
import stat
import uuid as uuids
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layer_bytes import (
    EMPTY_SHA256,
    LETTERS,
    MIB,
    NIL,
    ONES,
    SEALED,
    SECTOR,
    SEGMENT,
    SEGMENT_SHA256,
    SEGMENT_WITH_UUIDS_SHA256,
    UPPER_DATA,
    UPPER_INDEX,
    ZEROED,
    ZEROED_SHA256,
    Record,
    committed,
    raw_image,
    upper,
)

from agentenv import _native

FORMS = [
    {"zfile": zfile, "tar": tar} for zfile in (None, "lz4", "zstd") for tar in (False, True)
]  # every combination is a form that others read


def digest_of(path: Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def test_the_bytes_are_those_of_the_format(tmp_path: Path) -> None:
    segment = raw_image(tmp_path / "segment.raw", {65536: b"\xa5" * 4096})
    made = _native.create_from_raw(segment, tmp_path / "segment", uuid=NIL)
    assert made == {
        "digest": f"sha256:{SEGMENT_SHA256}",
        "size": 16384,
        "uuid": NIL,
        "parent_uuid": None,
        "virtual_size": MIB,
        "records": 1,
        "zero_records": 0,
        "data_bytes": 4096,
    }
    assert (tmp_path / "segment").read_bytes() == SEGMENT
    made = _native.create_from_raw(segment, tmp_path / "named", uuid=ONES.upper(), parent_uuid=LETTERS)
    assert made["digest"] == f"sha256:{SEGMENT_WITH_UUIDS_SHA256}" == digest_of(tmp_path / "named")
    made = _native.create_from_raw(raw_image(tmp_path / "empty.raw", {}), tmp_path / "empty", uuid=NIL)
    assert made["digest"] == f"sha256:{EMPTY_SHA256}" == digest_of(tmp_path / "empty")


def test_merging_keeps_zeroed_records(tmp_path: Path) -> None:
    below, above = tmp_path / "below", tmp_path / "above"
    below.write_bytes(committed({0: b"\x11" * 4096, 8: b"\x99" * 4096, 16: b"\x22" * 4096}, uuid=ONES))
    above.write_bytes(committed({8: 8}, uuid=LETTERS, parent=ONES))
    made = _native.merge([below, above], tmp_path / "out", uuid=NIL)
    assert (made["records"], made["zero_records"], made["data_bytes"]) == (3, 1, 8192)
    content = (tmp_path / "out").read_bytes()
    # The tag byte of a record tells readers nothing.
    plain = bytearray(content)
    for record in range(3):
        plain[12288 + record * 16 + 15] = 0
    assert plain == ZEROED
    assert hashlib.sha256(plain).hexdigest() == ZEROED_SHA256
    assert made["digest"] == digest_of(tmp_path / "out")


@pytest.mark.parametrize("flag", [0, 0x20])
def test_an_upper_is_committed_and_stays(tmp_path: Path, flag: int) -> None:
    writes = [(Record(128, 8, 8), b"\xa5" * 4096)]
    data, index = upper(flag, writes)
    (tmp_path / "upper.data").write_bytes(data)
    (tmp_path / "upper.index").write_bytes(index)
    made = _native.commit(tmp_path / "upper.data", tmp_path / "upper.index", tmp_path / "out", uuid=NIL)
    assert made["digest"] == f"sha256:{SEGMENT_SHA256}" == digest_of(tmp_path / "out")
    assert (tmp_path / "upper.data").read_bytes() == data
    assert (tmp_path / "upper.index").read_bytes() == index
    if flag == 0:
        assert (data, index) == (UPPER_DATA, UPPER_INDEX)


def test_a_log_is_committed_as_it_reads(tmp_path: Path) -> None:
    """Later records win, and a zeroed one hides what lies below the upper."""
    writes = [
        (Record(0, 8, 8), b"\x01" * 4096),
        (Record(4, 8, 16), b"\x02" * 4096),
        (Record(2, 1, 24, zeroed=True), b""),
        (Record(1, 3, 24), b"\x03" * 1536),
        (Record(100, 8, 27, zeroed=True), b""),
    ]
    data, index = upper(0, writes)
    (tmp_path / "upper.data").write_bytes(data)
    (tmp_path / "upper.index").write_bytes(index)
    _native.commit(tmp_path / "upper.data", tmp_path / "upper.index", tmp_path / "out")
    expected = b"\x01" * 512 + b"\x03" * 1536 + b"\x02" * 4096
    base = tmp_path / "base"
    base.write_bytes(committed({96: b"\x09" * 8192}))
    content = _native.read([base, tmp_path / "out"], 0, MIB)
    assert content[: len(expected)] == expected
    assert content[96 * SECTOR : 112 * SECTOR] == b"\x09" * 2048 + bytes(4096) + b"\x09" * 2048


def test_layers_sealed_in_place_are_merged(tmp_path: Path) -> None:
    (tmp_path / "sealed").write_bytes(SEALED)
    made = _native.merge([tmp_path / "sealed"], tmp_path / "out", uuid=NIL)
    assert made["digest"] == f"sha256:{SEGMENT_SHA256}"


@pytest.mark.parametrize("form", FORMS)
def test_every_form_reads_the_same(tmp_path: Path, form: dict[str, object]) -> None:
    pieces = {0: os.urandom(20000), 300_000: b"text " * 4000, MIB - 4096: os.urandom(4096)}
    source = raw_image(tmp_path / "raw", pieces)
    made = _native.create_from_raw(source, tmp_path / "layer", **form)  # type: ignore[arg-type]
    facts = _native.inspect(tmp_path / "layer")
    wrapper = ["tar"] if form["tar"] else []
    wrapper += ["zfile"] if form["zfile"] else []
    assert facts["wrapper"] == wrapper
    assert made["digest"] == facts["digest"] == digest_of(tmp_path / "layer")
    assert made["size"] == (tmp_path / "layer").stat().st_size == facts["size"]
    for key in ("uuid", "parent_uuid", "virtual_size", "records", "zero_records", "data_bytes"):
        assert made[key] == facts[key]  # type: ignore[literal-required]
    if form["zfile"]:
        assert facts["zfile"] is not None
        assert facts["zfile"]["algorithm"] == form["zfile"]
    assert uuids.UUID(made["uuid"]).int != 0
    assert _native.read([tmp_path / "layer"], 0, MIB) == source.read_bytes()
    assert _native.verify(tmp_path / "layer")["digest"] == made["digest"]
    again = _native.merge([tmp_path / "layer"], tmp_path / "again", uuid=made["uuid"], **form)  # type: ignore[arg-type]
    assert again["digest"] == made["digest"]


def test_an_archive_is_one_for_tar(tmp_path: Path) -> None:
    import tarfile

    source = raw_image(tmp_path / "raw", {0: b"x" * 4096})
    _native.create_from_raw(source, tmp_path / "plain", uuid=ONES)
    _native.create_from_raw(source, tmp_path / "archive", uuid=ONES, tar=True)
    with tarfile.open(tmp_path / "archive") as archive:
        (member,) = archive.getmembers()
        assert member.name == "overlaybd.commit"
        assert member.mode == 0o100644
        content = archive.extractfile(member)
        assert content is not None
        assert content.read() == (tmp_path / "plain").read_bytes()


@pytest.mark.parametrize("size", [0, 1, 511, 512, 4096, 4097, MIB + 513])
def test_images_of_any_size(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "raw").write_bytes(content)
    made = _native.create_from_raw(tmp_path / "raw", tmp_path / "layer")
    rounded = size + -size % 512
    assert made["virtual_size"] == rounded
    assert _native.read([tmp_path / "layer"], 0, MIB * 2) == content.ljust(rounded, b"\0")


BLOCKS = 48
content_of_blocks = st.dictionaries(
    st.integers(0, BLOCKS * 8 - 1), st.one_of(st.integers(1, 24), st.binary(min_size=1, max_size=3)), max_size=10
)


@settings(max_examples=60, deadline=None)
@given(st.lists(content_of_blocks, min_size=1, max_size=5), st.data())
def test_a_merged_run_of_layers_reads_like_the_layers(
    tmp_path_factory: pytest.TempPathFactory, layers: list[dict[int, int | bytes]], data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("merge")
    size = BLOCKS * 8 * SECTOR
    expected = bytearray(size)
    stack = []
    for number, wanted in enumerate(layers):
        pieces: dict[int, int | bytes] = {}
        end = 0
        for lba, content in sorted(wanted.items()):
            sectors = content if isinstance(content, int) else len(content)
            if lba < end or lba + sectors > BLOCKS * 8:
                continue
            end = lba + sectors
            body = bytes(sectors * SECTOR)
            if isinstance(content, bytes):
                body = b"".join(bytes([byte]) * SECTOR for byte in content)
                pieces[lba] = body
            else:
                pieces[lba] = sectors
            expected[lba * SECTOR : end * SECTOR] = body
        path = directory / str(number)
        path.write_bytes(committed(pieces, virtual_size=size))
        stack.append(path)
    assert _native.read(stack, 0, size) == expected
    first = data.draw(st.integers(0, len(stack) - 1))
    count = data.draw(st.integers(1, len(stack) - first))
    form = data.draw(st.sampled_from(FORMS))
    merged = directory / "merged"
    _native.merge(stack[first : first + count], merged, **form)  # type: ignore[arg-type]
    assert _native.read([*stack[:first], merged, *stack[first + count :]], 0, size) == expected


def test_an_output_that_exists_stays(tmp_path: Path) -> None:
    source = raw_image(tmp_path / "raw", {0: b"x" * 4096})
    out = tmp_path / "out"
    out.write_text("precious")
    for replace in (False, True):
        if not replace:
            with pytest.raises(_native.LayerError, match="out exists") as raised:
                _native.create_from_raw(source, out)
            assert raised.value.kind == "exists"
            assert out.read_text() == "precious"
        else:
            made = _native.create_from_raw(source, out, replace=True)
            assert made["digest"] == digest_of(out)
    (tmp_path / "link").symlink_to("raw")
    with pytest.raises(_native.LayerError):
        _native.create_from_raw(source, tmp_path / "link")
    with pytest.raises(_native.LayerError, match="not a plain file") as raised:
        _native.create_from_raw(source, tmp_path, replace=True)
    assert raised.value.kind == "invalid"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "out", "raw"]


def test_an_input_may_be_replaced(tmp_path: Path) -> None:
    layer = tmp_path / "layer"
    layer.write_bytes(SEGMENT)
    _native.merge([layer], layer, zfile="zstd", replace=True)
    assert _native.inspect(layer)["wrapper"] == ["zfile"]
    assert _native.read([layer], 65536, 4096) == b"\xa5" * 4096


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.write_bytes(SEGMENT[:-1])
    source = raw_image(tmp_path / "raw", {})
    out = tmp_path / "out"
    with pytest.raises(_native.LayerError, match="damaged") as raised:
        _native.merge([damaged], out)
    assert raised.value.kind == "format"
    with pytest.raises(_native.LayerError, match="'gzip'") as raised:
        _native.create_from_raw(source, out, zfile="gzip")  # type: ignore[arg-type]
    assert raised.value.kind == "invalid"
    with pytest.raises(_native.LayerError, match="'me' is not a UUID") as raised:
        _native.create_from_raw(source, out, uuid="me")
    assert raised.value.kind == "invalid"
    with pytest.raises(_native.LayerError, match="nowhere") as raised:
        _native.create_from_raw(source, tmp_path / "nowhere" / "out")
    assert raised.value.kind == "not_found"
    with pytest.raises(_native.LayerError) as raised:
        _native.merge([], out)
    assert raised.value.kind == "invalid"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "raw"]


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    source = raw_image(tmp_path / "raw", {})
    before = os.umask(0o027)
    try:
        _native.create_from_raw(source, tmp_path / "layer")
        _native.pack_memory(source, [], tmp_path / "memory")
        _native.unpack([tmp_path / "memory"], tmp_path / "image")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("layer", "memory", "image")]
    assert modes == [0o640, 0o600, 0o600]
