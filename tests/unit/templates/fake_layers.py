"""A layer store in memory, and a maker of layers that only copies the image, so that no test needs the format."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

from agentenv.errors import LayerError
from agentenv.storage.layers import LayerStore, StoredLayer


class FakeLayers:
    """What templates need of `LayerStore`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.owned: dict[str, tuple[str, ...]] = {}
        self.known: set[str] = set()

    def as_store(self) -> LayerStore:
        return cast(LayerStore, self)

    def add(self, name: str) -> str:
        """A layer that nobody owns."""
        digest = f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"
        self.known.add(digest)
        return digest

    def content(self, digest: str) -> bytes:
        return self._path(digest).read_bytes()

    def _path(self, digest: str) -> Path:
        return self._directory / digest.removeprefix("sha256:")

    @contextmanager
    def draft(self) -> Iterator[Path]:
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / "draft"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def import_file(self, path: Path, *, owner: str) -> StoredLayer:
        digest = self.add(path.read_bytes().decode(errors="replace"))
        path.replace(self._path(digest))
        self.owned[owner] = (*self.owned.get(owner, ()), digest)
        return StoredLayer(digest, 1, None, None, 1, self._path(digest))

    def get(self, digest: str) -> StoredLayer:
        if digest not in self.known:
            raise LayerError(f"there is no layer {digest}")
        return StoredLayer(digest, 1, None, None, 1, self._path(digest))

    def references(self, owner: str) -> tuple[str, ...]:
        return self.owned.get(owner, ())

    def set_references(self, owner: str, digests: Sequence[str]) -> None:
        for digest in digests:
            self.get(digest)
        self.owned[owner] = tuple(digests)


def copy_beginning(source: Path, out: Path) -> None:
    """Stands in for `create_layer_from_raw`."""
    with source.open("rb") as file:
        out.write_bytes(file.read(32).rstrip(b"\0"))
