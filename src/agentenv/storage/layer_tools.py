"""What the store and the disks need of the layer format, as a protocol, and its implementation by the compiled module.

Tests bring their own. Everything here blocks and releases the interpreter lock meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from agentenv.errors import LayerError
from agentenv.storage import images


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
    """`agentenv._native`, through `images.py`."""

    def inspect(self, path: Path) -> LayerFacts:
        layer = images.describe_layer(path)
        if layer.writable:
            raise LayerError(f"{path} is a writable layer ({layer.variant}); seal or commit it first")
        return LayerFacts(
            digest=layer.digest,
            size=layer.size,
            uuid=layer.uuid,
            parent_uuid=layer.parent_uuid,
            virtual_size=layer.virtual_size,
        )

    def verify(self, path: Path) -> str:
        return images.verify_layer(path).digest

    def merge(self, layers: Sequence[Path], out: Path, *, uuid: str | None) -> None:
        images.merge_layers(layers, out, uuid=uuid)
