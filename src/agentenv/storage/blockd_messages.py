"""What the block daemon says (docs/blockd.md), as types, and how its answers are read. Does no I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from agentenv.errors import BlockDaemonError, InsufficientStorageError, LayerError

PROTOCOL = 1
"""The version that this client speaks."""
UNAVAILABLE = "unavailable"
"""Code of a `BlockDaemonError` when no answer came."""

_NIL = "00000000-0000-0000-0000-000000000000"
UpperMode = Literal["hybrid", "append", "sparse"]
ExportKind = Literal["nbd", "ublk", "kernel-nbd"]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Greeting:
    """What the daemon says first."""

    protocol: int
    version: str
    pid: int
    """As the kernel says, not the daemon."""


@dataclass(frozen=True, slots=True)
class Upper:
    """The writable layer of a device."""

    directory: Path
    mode: UpperMode = "hybrid"


@dataclass(frozen=True, slots=True)
class Export:
    """How a device is reached."""

    kind: ExportKind
    path: Path


@dataclass(frozen=True, slots=True)
class Device:
    """A device that is open."""

    name: str
    lowers: tuple[Path, ...]
    """Bottom first."""
    upper: Upper | None
    virtual_size: int
    read_only: bool
    opens: int
    exports: tuple[Export, ...]
    error: str | None = None
    """Why the device, or an export of it, could not be opened again when the daemon started."""


@dataclass(frozen=True, slots=True)
class SealedLayer:
    """What a seal or a restack made. Sizes in bytes."""

    path: Path
    uuid: str
    parent_uuid: str | None
    virtual_size: int
    records: int
    data_bytes: int
    size: int
    paused_us: int
    """How long requests had to wait, microseconds."""


@dataclass(frozen=True, slots=True)
class DaemonEvent:
    """Something that happened to a device."""

    kind: str
    device: str
    message: str


@dataclass(frozen=True, slots=True)
class LayerUse:
    """A layer file that the daemon has open."""

    path: Path
    uuid: str | None
    devices: int


@dataclass(frozen=True, slots=True)
class DeviceStatistics:
    """Counters of one device since it was opened. Sizes in bytes."""

    reads: int
    read_bytes: int
    writes: int
    written_bytes: int
    discards: int
    discarded_bytes: int
    flushes: int
    errors: int
    in_flight: int
    connections: int
    upper_records: int
    upper_data_bytes: int
    upper_allocated_bytes: int
    depth: int
    merged_records: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """Counters of the daemon."""

    uptime_s: float
    open_layers: int
    threads: int
    devices: Mapping[str, DeviceStatistics]
    layers: tuple[LayerUse, ...]


def words(method: str, params: Mapping[str, object]) -> str:
    """What a request is about, for messages."""
    device = params.get("device")
    return method if device is None else f"{method} of block device {device}"


def refused(what: str, error: Any) -> InsufficientStorageError | LayerError | BlockDaemonError:
    """The error that an answer stands for."""
    code = str(error.get("code", "internal")) if isinstance(error, dict) else "internal"
    message = f"{what}: " + (str(error.get("message", code)) if isinstance(error, dict) else str(error))
    if code == "no_space":
        return InsufficientStorageError(f"{message}; remove sandboxes or enlarge the file system")
    return LayerError(message) if code == "bad_layer" else BlockDaemonError(code, message)


def parsed(parse: Callable[[Mapping[str, Any]], T], content: Mapping[str, Any]) -> T:
    """Read an answer; one that lacks something is a `BlockDaemonError`."""
    try:
        return parse(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BlockDaemonError("protocol", f"the block daemon's answer lacks something: {error!r}") from error


def read_device(content: Mapping[str, Any]) -> Device:
    """A device, as `open` and `list` give it."""
    upper = content["upper"]
    return Device(
        name=content["device"],
        lowers=tuple(Path(path) for path in content["lowers"]),
        upper=None if upper is None else Upper(Path(upper["directory"]), upper["mode"]),
        virtual_size=int(content["virtual_size"]),
        read_only=bool(content["read_only"]),
        opens=int(content["opens"]),
        exports=tuple(read_export(entry) for entry in content["exports"]),
        error=content.get("error"),
    )


def read_devices(content: Mapping[str, Any]) -> tuple[Device, ...]:
    """The answer of `list`."""
    return tuple(read_device(entry) for entry in content["devices"])


def read_export(content: Mapping[str, Any]) -> Export:
    """An export of a device."""
    return Export(content["kind"], Path(content["path"]))


def read_sealed_layer(content: Mapping[str, Any]) -> SealedLayer:
    """The answer of `restack` and `seal`."""
    layer = content["layer"]
    return SealedLayer(
        path=Path(layer["path"]),
        uuid=str(layer["uuid"]).lower(),
        parent_uuid=_uuid(layer["parent_uuid"]),
        virtual_size=int(layer["virtual_size"]),
        records=int(layer["records"]),
        data_bytes=int(layer["data_bytes"]),
        size=int(layer["size"]),
        paused_us=int(content["paused_us"]),
    )


def _uuid(text: str | None) -> str | None:
    return None if text is None or text == _NIL else text.lower()


def read_event(content: Mapping[str, Any]) -> DaemonEvent:
    """A line of a subscription."""
    kind = str(content["event"])
    return DaemonEvent(kind, str(content.get("device", "")), str(content.get("message", "")))


def read_statistics(content: Mapping[str, Any]) -> Statistics:
    """The answer of `stats`."""
    daemon = content["daemon"]
    names = DeviceStatistics.__dataclass_fields__
    return Statistics(
        uptime_s=float(daemon["uptime_s"]),
        open_layers=int(daemon["open_layers"]),
        threads=int(daemon["threads"]),
        devices={
            device: DeviceStatistics(**{name: int(counters[name]) for name in names})
            for device, counters in content["devices"].items()
        },
        layers=tuple(LayerUse(Path(use["path"]), _uuid(use["uuid"]), int(use["devices"])) for use in content["layers"]),
    )
