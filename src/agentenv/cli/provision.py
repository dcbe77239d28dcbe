"""Makes what a home needs before a server can start sandboxes: guest assets, the block daemon, the base template.

Used by `aenv assets build`, and by `aenv serve` on a home that has none, or has them in the form of an older version.
How they are made is the rooms' business.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from agentenv.config import Settings
from agentenv.errors import AssetError
from agentenv.guest.assets import GuestAssets, assets_are_current, build_assets
from agentenv.storage.layers import LayerStore
from agentenv.templates.base import ensure_base_template
from agentenv.templates.raw_images import convert_templates, templates_are_current


class ProgressLine:
    """Shows what is being made on standard error: one line that changes on a terminal, else a line per step."""

    def __init__(self) -> None:
        self._shown = ""

    def __call__(self, phase: str, detail: str, fraction: float | None) -> None:
        percent = "" if fraction is None else f" {fraction:4.0%}"
        line = f"{phase}: {detail}"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{line}{percent}")
        elif line != self._shown:
            sys.stderr.write(f"{line}{percent}\n")
        self._shown = line
        sys.stderr.flush()

    def end(self) -> None:
        """Leave the line, so that what follows has one of its own."""
        if self._shown and sys.stderr.isatty():
            sys.stderr.write("\n")


@dataclass(frozen=True, slots=True)
class Programs:
    """Our own compiled programs, as `make setup` builds them."""

    guest: Path
    blockd: Path

    @classmethod
    def find(cls, *, guest: Path | None = None, blockd: Path | None = None) -> Programs:
        """Take the paths given, else those of `AENV_GUEST_BINARY` and `AENV_BLOCKD_BINARY`, else those in this clone.

        Raises:
            AssetError: one does not exist; the message names it.
        """
        return cls(_find("aenv-guest", "AENV_GUEST_BINARY", guest), _find("aenv-blockd", "AENV_BLOCKD_BINARY", blockd))


def _find(name: str, variable: str, given: Path | None) -> Path:
    named = os.environ.get(variable)
    path = given or (Path(named) if named else Path(__file__).resolve().parents[3] / "build" / name)
    if not path.is_file():
        raise AssetError(f"the program {path} does not exist; build it with `make setup`")
    return path


def provision(settings: Settings, programs: Programs) -> GuestAssets:
    """Make the guest assets and the base template, and bring older templates into today's form.

    What is up to date is left alone.

    Raises:
        AssetError: one of them cannot be made.
        InsufficientStorageError: too little room.
    """
    progress = ProgressLine()
    try:
        assets = build_assets(settings, programs.guest, programs.blockd, progress)
        with closing(LayerStore(settings.paths.layers)) as layers:
            ensure_base_template(settings, layers, progress)
            convert_templates(settings, layers, progress)
    finally:
        progress.end()
    return assets


def provision_new_home(settings: Settings) -> None:
    """Make what a home lacks that never had any, or that an older version left, if this installation can.

    Otherwise the server says what is missing.
    """
    if not (assets_are_current(settings.paths.assets) and templates_are_current(settings)):
        try:
            programs = Programs.find()
        except AssetError:
            return
        provision(settings, programs)
