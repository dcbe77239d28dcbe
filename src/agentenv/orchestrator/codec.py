"""How sandboxes and machine records are written in the journal: JSON text, and whole microseconds for times.

The form is part of the journal's schema version. Reading ignores and guesses nothing: a damaged row is an error.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from typing import Any

from agentenv.errors import StorageError
from agentenv.network.base import Slot
from agentenv.orchestrator.model import CreateRequest, NetworkOptions, OnTimeout, PauseMode, Sandbox, SandboxState
from agentenv.vmm.base import MachineRecord

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_OPTIONAL_TIMES = ("resumed_at", "paused_at")


def to_micros(moment: datetime) -> int:
    """Whole microseconds since 1970, without the rounding of floats."""
    return (moment - _EPOCH) // _MICROSECOND


def from_micros(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


def _dump(value: Any) -> str:
    # ASCII only: a client may send lone surrogates, which SQLite's UTF-8 cannot hold.
    return json.dumps(value, separators=(",", ":"))


def encode_request(request: CreateRequest) -> str:
    values: dict[str, Any] = {field.name: getattr(request, field.name) for field in fields(request)}
    values["metadata"] = dict(request.metadata)
    values["env_vars"] = dict(request.env_vars)
    values["network"] = None if request.network is None else asdict(request.network)
    return _dump(values)


def decode_request(text: str) -> CreateRequest:
    """Raises StorageError when the text is not what `encode_request` wrote."""
    try:
        values = json.loads(text)
        network = values.pop("network")
        values["on_timeout"] = OnTimeout(values["on_timeout"])
        if network is not None:
            network = NetworkOptions(
                **network
                | {
                    "allow_out": tuple(network["allow_out"]),
                    "deny_out": tuple(network["deny_out"]),
                    "https_ports": tuple(network["https_ports"]),
                }
            )
        return CreateRequest(**values, network=network)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(f"the journal holds a damaged create request: {error}") from error


def encode_sandbox(sandbox: Sandbox) -> str:
    values: dict[str, Any] = {field.name: getattr(sandbox, field.name) for field in fields(sandbox)}
    values["started_at"] = to_micros(sandbox.started_at)
    values["end_at"] = to_micros(sandbox.end_at)
    for name in _OPTIONAL_TIMES:
        values[name] = None if values[name] is None else to_micros(values[name])
    values["template_env"] = dict(sandbox.template_env)
    values["request"] = encode_request(sandbox.request)
    return _dump(values)


def decode_sandbox(text: str) -> Sandbox:
    """Raises StorageError when the text is not what `encode_sandbox` wrote."""
    try:
        values = json.loads(text)
        values["state"] = SandboxState(values["state"])
        values["started_at"] = from_micros(values["started_at"])
        values["end_at"] = from_micros(values["end_at"])
        for name in _OPTIONAL_TIMES:
            if values.get(name) is not None:
                values[name] = from_micros(values[name])
        if values.get("pause_mode") is not None:
            values["pause_mode"] = PauseMode(values["pause_mode"])
        values["request"] = decode_request(values["request"])
        return Sandbox(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(f"the journal holds a damaged sandbox: {error}") from error


def encode_record(record: MachineRecord) -> str:
    return _dump(asdict(record))


def decode_record(text: str) -> MachineRecord:
    """Raises StorageError when the text is not what `encode_record` wrote."""
    try:
        return MachineRecord(**json.loads(text))
    except (ValueError, TypeError) as error:
        raise StorageError(f"the journal holds a damaged machine record: {error}") from error


def encode_slot(slot: Slot) -> str:
    return _dump(asdict(slot) | {"address": str(slot.address), "host_address": str(slot.host_address)})


def decode_slot(text: str) -> Slot:
    """Raises StorageError when the text is not what `encode_slot` wrote."""
    try:
        values = json.loads(text)
        addresses = {name: IPv4Address(values[name]) for name in ("address", "host_address")}
        return Slot(**values | addresses)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise StorageError(f"the journal holds a damaged slot: {error}") from error
