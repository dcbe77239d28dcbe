"""Makes what a home needs before a server can start sandboxes: guest assets, the block daemon, the base template.

Used by `aenv assets build`, and by `aenv serve` on a home that has none, or has them in the form of an older version.
How they are made is the rooms' business.
"""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from agentenv.config import HomePaths, Settings
from agentenv.errors import AssetError
from agentenv.guest.assets import MANIFEST as ASSETS_MANIFEST
from agentenv.guest.assets import GuestAssets, assets_are_current, build_assets
from agentenv.storage.layers import LayerStore
from agentenv.templates.base import TEMPLATE_ID, ensure_base_template
from agentenv.templates.raw_images import convert_templates, templates_are_current
from agentenv.templates.store import MANIFEST as TEMPLATE_MANIFEST
from agentenv.templates.store import TemplateStore, owner_of


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


def link_home(settings: Settings, source: Path) -> None:
    """Give a home the assets and the base template of another one of this host: hard links where it is possible.

    Raises:
        AssetError: the other home has none or is the same one, or they cannot be linked or copied.
        LayerError, StorageError: a layer of the template is missing or damaged, or there is no room.
    """
    if source.resolve() == settings.home.resolve():
        raise AssetError(f"{source} is the home itself; set AENV_HOME to the new one")
    theirs = HomePaths(source)
    manifest = theirs.template(TEMPLATE_ID) / TEMPLATE_MANIFEST
    if not manifest.is_file() or not (theirs.assets / ASSETS_MANIFEST).is_file():
        raise AssetError(
            f"the home {source} has no assets or no base template; run `make setup` or `aenv assets build`"
        )
    try:
        settings.paths.assets.mkdir(parents=True, exist_ok=True)
        # The manifest comes last: it is a promise that the files are there.
        for path in sorted(theirs.assets.iterdir(), key=lambda path: path.name == ASSETS_MANIFEST):
            if path.is_file() and not path.name.startswith("."):
                _link_or_copy(path, settings.paths.assets / path.name)
    except OSError as error:
        raise AssetError(f"cannot link the assets of {source} into {settings.home}: {error}") from error
    with closing(LayerStore(theirs.layers)) as from_store, closing(LayerStore(settings.paths.layers)) as to_store:
        template = TemplateStore(theirs, settings, from_store).find(TEMPLATE_ID)
        if template is None:
            raise AssetError(f"the base template of {source} is not usable; run `make setup` or `aenv assets build`")
        for digest in template.layers:
            to_store.link_from(from_store, digest, owner=owner_of(TEMPLATE_ID))
        TemplateStore(settings.paths, settings, to_store).register(template, follow_defaults=True)


def _link_or_copy(source: Path, target: Path) -> None:
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        try:
            draft.hardlink_to(source)
        except OSError:  # another file system, or one without hard links
            shutil.copy2(source, draft)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


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
