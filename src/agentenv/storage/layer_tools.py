"""What the store and the disks need of the layer format, as a protocol, and its implementation by `agentenv._native`.

Tests bring their own. Everything here blocks and releases the interpreter lock meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentenv.errors import AgentEnvError, InsufficientStorageError, LayerError, StorageError


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What a sealed layer says of itself, and its digest. Sizes in bytes."""

    digest: str
    size: int
    uuid: str | None
    parent_uuid: str | None
    virtual_size: int


class LayerTools(Protocol):
    """Raises `LayerError` for what is no sealed layer, `InsufficientStorageError` and `StorageError` for the rest."""

    def inspect(self, path: Path) -> LayerFacts:
        """Check a layer's structure and index, and hash its bytes."""

    def verify(self, path: Path) -> str:
        """Read all of a layer, every block and checksum. Returns its digest."""

    def merge(self, layers: Sequence[Path], out: Path, *, uuid: str | None) -> None:
        """Make one layer of neighbouring ones, bottom first. What they zero stays zeroed.

        Args:
            layers: their files.
            out: must not exist.
            uuid: of the new one; None takes a random one. Its parent is that of the bottom layer.
        """


class NativeLayerTools:
    """The compiled module."""

    def inspect(self, path: Path) -> LayerFacts:
        from agentenv import _native

        try:
            facts = _native.inspect(path)
        except _native.LayerError as error:
            raise _worded(error) from error
        if facts["variant"] not in ("committed", "sealed"):
            raise LayerError(f"{path} is a writable layer ({facts['variant']}); seal or commit it first")
        return LayerFacts(
            digest=facts["digest"],
            size=facts["size"],
            uuid=facts["uuid"],
            parent_uuid=facts["parent_uuid"],
            virtual_size=facts["virtual_size"],
        )

    def verify(self, path: Path) -> str:
        from agentenv import _native

        try:
            return _native.verify(path)["digest"]
        except _native.LayerError as error:
            raise _worded(error) from error

    def merge(self, layers: Sequence[Path], out: Path, *, uuid: str | None) -> None:
        from agentenv import _native

        try:
            _native.merge(layers, out, uuid=uuid)
        except _native.LayerError as error:
            raise _worded(error) from error


def _worded(error: Exception) -> AgentEnvError:
    kind = getattr(error, "kind", "io")
    if kind == "no_space":
        return InsufficientStorageError(f"{error}; remove sandboxes or enlarge the file system")
    if kind in ("io", "invalid", "exists"):
        return StorageError(str(error))
    return LayerError(str(error))
