"""Manifests: what is written is read again, and whatever else is refused with a message that names the place."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from snapshots_samples import digest_of, environment, manifest, reference

from agentenv.errors import SnapshotError
from agentenv.snapshots.encoding import LARGEST_MANIFEST, _checksum, decode, encode
from agentenv.snapshots.manifest import (
    Environment,
    LayerReference,
    MachineShape,
    SnapshotKind,
    SnapshotManifest,
    StateFile,
)

_UUID = "7b0ed5d1-6d8e-4a3e-8d12-0c4d0f5a7b11"
_texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=30)
_short = _texts
_digests = st.binary(min_size=1, max_size=8).map(digest_of)
_ids = st.from_regex(r"[a-z0-9][a-z0-9-]{0,63}", fullmatch=True)
_sizes = st.integers(1, 1 << 60)
_aliases = st.from_regex(r"[a-z0-9_-]{1,30}", fullmatch=True)
_names = st.builds("{}:{}".format, _aliases, st.from_regex(r"[a-z0-9_.-]{1,30}", fullmatch=True))
_maps = st.dictionaries(_texts, st.one_of(st.just(""), _texts), max_size=4)
_zones = st.integers(-23 * 60, 23 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
_times = st.datetimes(datetime(1970, 1, 3), datetime(2200, 1, 1), timezones=_zones)
_layers = st.lists(st.builds(LayerReference, _digests, _sizes), min_size=1, max_size=4, unique_by=lambda x: x.digest)
_environments = st.builds(
    Environment,
    vmm=_short,
    vmm_version=_short,
    acceleration=_short,
    boot_mode=_short,
    cpu_model=_short,
    cpu_features=_digests,
    tsc_khz=st.integers(0, 1 << 40),
    kernel_version=_short,
    kernel_digest=_digests,
    initramfs_digest=_digests,
)


@st.composite
def _manifests(draw: Callable[[Any], Any]) -> SnapshotManifest:
    layers = draw(_layers)
    cut = draw(st.integers(0, len(layers) - 1))
    full = cut > 0
    snapshot_id = draw(_ids)
    return SnapshotManifest(
        snapshot_id=snapshot_id,
        created_at=draw(_times),
        kind=SnapshotKind.FULL if full else SnapshotKind.FILESYSTEM,
        architecture=draw(_short),
        sandbox_id=draw(_short),
        template_id=draw(_short),
        machine=MachineShape(draw(st.integers(1, 1024)), draw(st.integers(1, 1 << 26)), draw(_sizes)),
        agent_version=draw(_short),
        disk_layers=tuple(layers[cut:]),
        default_user=draw(_short),
        parent_id=draw(st.none() | _ids.filter(lambda other: other != snapshot_id)),
        names=tuple(draw(st.lists(_names, unique=True, max_size=3))),
        own_template_id=draw(st.none() | _aliases),
        default_workdir=draw(st.none() | _texts),
        env=draw(_maps),
        metadata=draw(_maps),
        environment=draw(_environments if full else st.none() | _environments),
        memory_layers=tuple(layers[:cut]),
        state=StateFile("state", draw(_sizes), draw(_digests)) if full else None,
        agent_responsive=draw(st.booleans()),
        agent_token=draw(st.none() | _texts) if full else None,
    )


@given(_manifests())
def test_what_is_written_is_read_again(written: SnapshotManifest) -> None:
    content = encode(written)
    read = decode(content, "x")
    assert read == written
    assert read.created_at.utcoffset() == timedelta(0)
    assert encode(read) == content


@given(_manifests(), st.data())
def test_a_changed_byte_is_never_read_as_something_else(written: SnapshotManifest, data: st.DataObject) -> None:
    content = bytearray(encode(written))
    position = data.draw(st.integers(0, len(content) - 1))
    content[position] ^= 1 << data.draw(st.integers(0, 7))
    try:
        assert decode(bytes(content), "x") == written  # white space and the case of \u escapes mean nothing
    except SnapshotError as error:
        assert error.message.startswith("x ")


@example(b"Infinity")
@example(b"1.5")
@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_garbage_is_refused(content: bytes) -> None:
    with pytest.raises(SnapshotError, match=r"^/there/manifest\.json is (no manifest of a snapshot|damaged)"):
        decode(content, "/there/manifest.json")


def test_a_cut_file_is_refused() -> None:
    content = encode(manifest())
    for length in range(len(content) - 1):
        with pytest.raises(SnapshotError):
            decode(content[:length], "x")


def _changed(*path: str | int, value: Any) -> bytes:
    """A manifest with one field replaced (or removed: `...`), and a checksum that fits."""
    document = json.loads(encode(manifest()))
    place = document["snapshot"]
    for step in path[:-1]:
        place = place[step]
    if value is ...:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    document["checksum"] = _checksum(document["snapshot"])
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("machine", "vcpus"), ..., "field 'machine.vcpus' is missing"),
        (("machine", "vcpus"), "2", "field 'machine.vcpus' is no whole number"),
        (("machine", "vcpus"), True, "field 'machine.vcpus' is no whole number"),
        (("machine", "vcpus"), 0, "field 'machine.vcpus' is not from 1 to 1024"),
        (("machine", "vcpus"), 10**30, "field 'machine.vcpus' is no whole number"),
        (("machine", "memory_mib"), -1, "field 'machine.memory_mib' is no whole number"),
        (("machine", "disk_bytes"), (1 << 62), "field 'machine.disk_bytes' is no size"),
        (("machine", "gpus"), 1, "field 'machine.gpus' is unknown"),
        (("machine",), [], "field 'machine' is no object"),
        (("snapshot_id",), "../x", "field 'snapshot_id' is no id"),
        (("snapshot_id",), None, "field 'snapshot_id' is no text"),
        (("parent_id",), "one", "field 'parent_id' is the snapshot itself"),
        (("parent_id",), "", "field 'parent_id' is empty"),
        (("created_at",), "2026-01-02T03:04:05", "field 'created_at' is no time with a time zone"),
        (("created_at",), "yesterday", "field 'created_at' is no time"),
        (("kind",), "partial", "field 'kind' is 'partial', which this program does not know"),
        (("kind",), "filesystem", "field 'memory_layers' does not belong"),
        (("memory_layers",), [], "field 'memory_layers' is empty"),
        (("memory_layers", 0, "digest"), "sha256:AB", r"field 'memory_layers\[0\].digest' is no sha256"),
        (("memory_layers", 0, "digest"), "md5:" + "0" * 64, r"field 'memory_layers\[0\].digest' is no sha256"),
        (("memory_layers", 0, "size"), 0, r"field 'memory_layers\[0\].size' is no size"),
        (("memory_layers", 0, "size"), 1 << 62, r"field 'memory_layers\[0\].size' is no size"),
        (("memory_layers", 0), "x", r"field 'memory_layers\[0\]' is no object"),
        (
            ("disk_layers",),
            [{"digest": digest_of(b"1"), "size": 1}] * 2,
            r"field 'disk_layers\[1\].digest' is there twi",
        ),
        (("disk_layers",), [], "field 'disk_layers' is empty"),
        (("disk_layers",), [0] * 5000, "field 'disk_layers' is no list of at most 4096"),
        (
            ("disk_layers",),
            [{"digest": f"sha256:{number:064x}", "size": 1} for number in range(1025)],
            "field 'disk_layers' has more than 1024 layers",
        ),
        (("disk_layers",), [{"digest": digest_of(b"memory"), "size": 7}], "field 'disk_layers' gives a layer another"),
        (("state",), None, "field 'state' is missing"),
        (("state", "name"), "../state", "field 'state.name' is no plain file name"),
        (("state", "name"), ".state", "field 'state.name' is no plain file name"),
        (("state", "digest"), 7, "field 'state.digest' is no text"),
        (("environment",), None, "field 'environment' is missing"),
        (("environment", "cpu_features"), "x", "field 'environment.cpu_features' is no sha256"),
        (("environment", "tsc_khz"), 1.5, "1.5 is no whole number"),
        (("environment", "vmm"), "", "field 'environment.vmm' is empty"),
        (("agent_responsive",), 1, "field 'agent_responsive' is neither true nor false"),
        (("env",), [], "field 'env' is no object"),
        (("env",), {"A": 1}, "field 'env.A' is no text"),
        (("env",), {"A": "\0"}, "field 'env.A' has a NUL character"),
        (("env",), {"A": "\ud800"}, "field 'env.A' has half of a character"),
        (("env",), {"A": "x" * (1 << 20 | 1)}, "field 'env.A' has more than"),
        (("env",), {str(number): "" for number in range(5000)}, "an object has more than 4096 fields"),
        (("names",), ["a:b", "a:b"], "field 'names' has one twice"),
        (("names",), ["a:b", "a"], r"field 'names\[1\]' is no 'alias:tag'"),
        (("names",), ["team/a:b"], r"field 'names\[0\]' is no 'alias:tag'"),
        (("names",), [f"a:{_UUID}"], r"field 'names\[0\]' has the form of an id"),
        (("names",), [f"{_UUID}:b"], r"field 'names\[0\]' has the form of an id"),
        (("own_template_id",), None, "field 'own_template_id' is no text"),
        (("own_template_id",), "../x", "field 'own_template_id' is no id of a template"),
        (("own_template_id",), _UUID, "field 'own_template_id' has the form of a snapshot's id"),
        (("default_user",), "x" * 300, "field 'default_user' has more than 256 characters"),
        (("surprise",), 1, "field 'surprise' is unknown"),
    ],
)
def test_every_wrong_field_is_named(path: tuple[str | int, ...], value: Any, message: str) -> None:
    with pytest.raises(SnapshotError, match=f"^/x/manifest.json is damaged: .*{message}"):
        decode(_changed(*path, value=value), "/x/manifest.json")


def test_manifests_of_before_there_were_names_are_read() -> None:
    older = manifest("pause-i123-0a1b2c3d")
    assert "own_template_id" not in json.loads(encode(older))["snapshot"]
    assert decode(encode(older), "x").own_template_id is None and older.hidden
    newer = manifest(own_template_id="t1", names=("web:v1",))
    assert decode(encode(newer), "x").own_template_id == "t1" and not newer.hidden


def test_other_versions_and_formats_are_told_apart() -> None:
    document = json.loads(encode(manifest()))
    for version in (0, 2, "1", True, None, 1 << 80):
        with pytest.raises(SnapshotError, match=r"^x has the version .*this program reads version 1: use the program"):
            decode(json.dumps({**document, "version": version}).encode(), "x")
    with pytest.raises(SnapshotError, match="field 'format' is not"):
        decode(json.dumps({**document, "format": "other"}).encode(), "x")
    with pytest.raises(SnapshotError, match="field 'checksum' does not fit"):
        decode(json.dumps({**document, "checksum": digest_of(b"")}).encode(), "x")
    with pytest.raises(SnapshotError, match="field 'more' is unknown"):
        decode(json.dumps({**document, "more": 1}).encode(), "x")
    with pytest.raises(SnapshotError, match="field 'snapshot' is no object"):
        decode(json.dumps({**document, "snapshot": []}).encode(), "x")


def test_hostile_forms_are_refused() -> None:
    content = encode(manifest())
    for hostile, message in (
        (content + b" " * LARGEST_MANIFEST, "a manifest has at most"),
        (b"[" * 1_000_000, "it is not JSON"),
        (b'{"a":' * 200_000, "it is not JSON"),
        (content.replace(b'"kind":', b'"kind": "full", "kind":'), "a field is there twice"),
        (content.replace(b'"tsc_khz": 2000000', b'"tsc_khz": NaN'), "NaN is no whole number"),
        (content.replace(b'"tsc_khz": 2000000', b'"tsc_khz": ' + b"9" * 5000), "it is not JSON"),
        (b"\xff" + content, "it is not JSON"),
    ):
        with pytest.raises(SnapshotError, match=message):
            decode(hostile, "x")


def test_what_could_not_be_read_again_is_not_written() -> None:
    for changes in ({"env": {"A": "\0"}}, {"default_user": "\ud800"}, {"agent_version": ""}, {"own_template_id": ""}):
        with pytest.raises(SnapshotError):
            encode(manifest(**changes))


def test_a_manifest_is_immutable_and_keeps_secrets_out_of_sight() -> None:
    env = {"KEY": "hidden"}
    made = manifest(env=env)
    env["KEY"] = "changed"
    assert made.env == {"KEY": "hidden"}
    with pytest.raises(TypeError):
        made.env["KEY"] = "x"  # type: ignore[index]
    assert "secret" not in repr(made) and "hidden" not in repr(made)
    with pytest.raises(SnapshotError, match="no time zone"):
        manifest(created_at=datetime(2026, 1, 1))
    assert made.created_at.tzinfo is UTC


def test_layers_are_listed_once() -> None:
    shared = reference(b"both")
    made = manifest(memory_layers=(shared,), disk_layers=(reference(b"base"), shared))
    assert made.layers == (shared, reference(b"base"))
    with pytest.raises(SnapshotError, match="another size"):
        manifest(memory_layers=(shared,), disk_layers=(LayerReference(shared.digest, 1),))
    assert manifest(kind=SnapshotKind.FILESYSTEM, environment=environment()).layers == (reference(b"base"),)
