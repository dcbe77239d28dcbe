"""The form of a manifest in a file: JSON that says what it is, of which version, and carries a checksum of itself.

Version 1 is an object of four fields: `format` (`agentenv-snapshot`), `version` (1), `checksum` (`sha256:` and 64 hex
digits) and `snapshot`. The checksum is taken over the UTF-8 bytes of `snapshot` as JSON with sorted keys, `,` and `:`
without spaces, and only ASCII characters. What a manifest means is in `manifest.py`; reading files is not done here.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NoReturn

from agentenv.errors import SnapshotError
from agentenv.snapshots.fields import MOST_ITEMS, Fields
from agentenv.snapshots.manifest import (
    Environment,
    LayerReference,
    MachineShape,
    SnapshotKind,
    SnapshotManifest,
    StateFile,
)

FORMAT = "agentenv-snapshot"
VERSION = 1
LARGEST_MANIFEST = 8 * 1024 * 1024
"""Bytes. A command line can carry 2 MiB of environment at most."""


def encode(manifest: SnapshotManifest) -> bytes:
    """The file's content.

    Raises:
        SnapshotError: it could not be read again (a text with half of a character, or beyond a limit).
    """
    body = _body(manifest)
    document = {"format": FORMAT, "version": VERSION, "checksum": _checksum(body), "snapshot": body}
    content = json.dumps(document, indent=1, sort_keys=True).encode("ascii") + b"\n"
    source = f"the manifest of snapshot {manifest.snapshot_id}"
    if decode(content, source) != manifest:
        raise SnapshotError(f"{source} cannot be written: a field would be read as something else")
    return content


def decode(content: bytes, source: str) -> SnapshotManifest:
    """Read a file's content.

    Args:
        content: all of it.
        source: what errors call it, usually its path.

    Raises:
        SnapshotError: it is no manifest, is damaged, or is of another version; the message names the field.
    """
    if len(content) > LARGEST_MANIFEST:
        raise SnapshotError(f"{source} has {len(content)} bytes; a manifest has at most {LARGEST_MANIFEST}")
    try:
        document = json.loads(content, object_pairs_hook=_object, parse_constant=_refuse, parse_float=_refuse)
    except SnapshotError as error:
        raise SnapshotError(f"{source} is damaged: {error.message}") from error
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{source} is no manifest of a snapshot: it is not JSON ({_brief(error)})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise SnapshotError(f"{source} is no manifest of a snapshot: field 'format' is not '{FORMAT}'")
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        raise SnapshotError(
            f"{source} has the version {str(version)[:40]}, this program reads version {VERSION}: use the program "
            "that wrote it, or a newer one"
        )
    try:
        outer = Fields(
            {name: value for name, value in document.items() if name not in ("format", "version", "snapshot")}
        )
        checksum = outer.text("checksum")
        body = document.get("snapshot")
        if not isinstance(body, dict):
            raise SnapshotError("field 'snapshot' is no object")
        if checksum != _checksum(body):
            raise SnapshotError("field 'checksum' does not fit the rest")
        outer.close()
        fields = Fields(body)
        manifest = _read(fields)
        fields.close()
    except SnapshotError as error:
        raise SnapshotError(f"{source} is damaged: {error.message}") from error
    return manifest


def _checksum(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(canonical.encode("ascii")).hexdigest()


def _body(manifest: SnapshotManifest) -> dict[str, Any]:
    body = {
        "snapshot_id": manifest.snapshot_id,
        "created_at": manifest.created_at.isoformat(),
        "kind": manifest.kind.value,
        "architecture": manifest.architecture,
        "sandbox_id": manifest.sandbox_id,
        "template_id": manifest.template_id,
        "parent_id": manifest.parent_id,
        "names": list(manifest.names),
        "machine": {
            "vcpus": manifest.machine.vcpus,
            "memory_mib": manifest.machine.memory_mib,
            "disk_bytes": manifest.machine.disk_bytes,
        },
        "environment": None if manifest.environment is None else _environment(manifest.environment),
        "agent_version": manifest.agent_version,
        "agent_responsive": manifest.agent_responsive,
        "agent_token": manifest.agent_token,
        "memory_layers": [{"digest": layer.digest, "size": layer.size} for layer in manifest.memory_layers],
        "disk_layers": [{"digest": layer.digest, "size": layer.size} for layer in manifest.disk_layers],
        "state": None
        if manifest.state is None
        else {"name": manifest.state.name, "size": manifest.state.size, "digest": manifest.state.digest},
        "default_user": manifest.default_user,
        "default_workdir": manifest.default_workdir,
        "env": dict(manifest.env),
        "metadata": dict(manifest.metadata),
    }
    if manifest.own_template_id is not None:  # older programs know no such field, and need not where there is none
        body["own_template_id"] = manifest.own_template_id
    return body


def _environment(environment: Environment) -> dict[str, Any]:
    return {name: getattr(environment, name) for name in Environment.__slots__}


def _read(fields: Fields) -> SnapshotManifest:
    kind = fields.text("kind", longest=32)
    if kind not in tuple(SnapshotKind):
        raise SnapshotError(f"field 'kind' is '{kind}', which this program does not know")
    return SnapshotManifest(
        snapshot_id=fields.text("snapshot_id", longest=64),
        created_at=fields.time("created_at"),
        kind=SnapshotKind(kind),
        architecture=fields.text("architecture", longest=32),
        sandbox_id=fields.text("sandbox_id", longest=64),
        template_id=fields.text("template_id", longest=256),
        parent_id=fields.optional_text("parent_id"),
        names=fields.texts("names"),
        own_template_id=fields.text_if_there("own_template_id"),
        machine=fields.record("machine", _read_machine),
        environment=fields.optional_record("environment", _read_environment),
        agent_version=fields.text("agent_version", longest=64),
        agent_responsive=fields.flag("agent_responsive"),
        agent_token=fields.optional_text("agent_token"),
        memory_layers=fields.records("memory_layers", _read_layer),
        disk_layers=fields.records("disk_layers", _read_layer),
        state=fields.optional_record("state", _read_state),
        default_user=fields.text("default_user", longest=256),
        default_workdir=fields.optional_text("default_workdir"),
        env=fields.mapping("env"),
        metadata=fields.mapping("metadata"),
    )


def _read_machine(fields: Fields) -> MachineShape:
    return MachineShape(fields.number("vcpus"), fields.number("memory_mib"), fields.number("disk_bytes"))


def _read_environment(fields: Fields) -> Environment:
    return Environment(
        vmm=fields.text("vmm", longest=64),
        vmm_version=fields.text("vmm_version", longest=64),
        acceleration=fields.text("acceleration", longest=32),
        boot_mode=fields.text("boot_mode", longest=1024),
        cpu_model=fields.text("cpu_model", longest=256),
        cpu_features=fields.text("cpu_features", longest=128),
        tsc_khz=fields.number("tsc_khz"),
        kernel_version=fields.text("kernel_version", longest=256),
        kernel_digest=fields.text("kernel_digest", longest=128),
        initramfs_digest=fields.text("initramfs_digest", longest=128),
    )


def _read_layer(fields: Fields) -> LayerReference:
    return LayerReference(fields.text("digest", longest=128), fields.number("size"))


def _read_state(fields: Fields) -> StateFile:
    return StateFile(fields.text("name", longest=64), fields.number("size"), fields.text("digest", longest=128))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise SnapshotError("a field is there twice")
    if len(found) > MOST_ITEMS:
        raise SnapshotError(f"an object has more than {MOST_ITEMS} fields")
    return found


def _refuse(text: str) -> NoReturn:
    raise SnapshotError(f"{text[:40]} is no whole number")


def _brief(error: Exception) -> str:
    return str(error)[:200]
