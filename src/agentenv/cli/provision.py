"""Makes what a home needs before a server can start sandboxes: guest assets and the base template.

Used by `aenv assets build`, and by `aenv serve` on a home that has none. How they are made is the rooms' business.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from agentenv.config import Settings
from agentenv.guest.assets import GuestAssets, build_assets
from agentenv.templates.base import TEMPLATE_ID, ensure_base_template


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


def find_guest_binary() -> Path | None:
    """The built `aenv-guest` program: `AENV_GUEST_BINARY`, else the one that `make setup` built in this clone."""
    named = os.environ.get("AENV_GUEST_BINARY")
    binary = Path(named) if named else Path(__file__).resolve().parents[3] / "build" / "aenv-guest"
    return binary if binary.is_file() else None


def provision(settings: Settings, guest_binary: Path) -> GuestAssets:
    """Make the kernel, the initramfs and the base template; what is up to date is left alone.

    Raises:
        AssetError: one of them cannot be made.
        InsufficientStorageError: too little room.
    """
    progress = ProgressLine()
    try:
        assets = build_assets(settings, guest_binary, progress)
        ensure_base_template(settings, progress)
    finally:
        progress.end()
    return assets


def provision_new_home(settings: Settings) -> None:
    """Make what a home lacks that never had any, if this installation can; else the server says what is missing."""
    missing = (
        not (settings.paths.assets / "assets.json").exists()
        or not (settings.paths.template(TEMPLATE_ID) / "template.json").exists()
    )
    guest_binary = find_guest_binary()
    if missing and guest_binary is not None:
        provision(settings, guest_binary)
