"""The `base` template: made from the root file system recipe when it is missing or the recipe changed.

Blocking work for the command line and the set-up; a server only reads what it leaves.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import structlog

from agentenv import durable
from agentenv.config import Settings
from agentenv.errors import AssetError
from agentenv.guest.rootfs import Progress, RootfsRecipe, build_rootfs
from agentenv.templates.store import Template, TemplateStore

TEMPLATE_ID = "base"
_DIGEST_LENGTH = 16

_log = structlog.get_logger(__name__)


def ensure_base_template(settings: Settings, progress: Progress) -> Template:
    """Make and register the `base` template unless it is up to date. One builder at a time per home.

    A finished image is also kept in the cache (`$AENV_CACHE`, else `~/.cache/aenv`), where a later build finds it; the
    cache is never needed.

    Raises:
        AssetError: the image could not be made; the message says why.
        InsufficientStorageError: too little room.
    """
    directory = settings.paths.template(TEMPLATE_ID)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with durable.exclusive_lock(
            directory / ".lock", lambda: progress("base template", "waiting for another build", None)
        ):
            return _ensure(settings, directory, progress)
    except OSError as error:
        raise AssetError(f"cannot write the base template to {directory}: {error}") from error


def _ensure(settings: Settings, directory: Path, progress: Progress) -> Template:
    # The lock is ours, so a scratch directory belongs to a build that was killed.
    for leftover in directory.glob(".build-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    recipe = RootfsRecipe(disk_mib=settings.sandbox.disk_mib)
    image = directory / f"rootfs-{recipe.digest()[:_DIGEST_LENGTH]}.ext4"
    store = TemplateStore(settings.paths, settings)
    wanted = Template(
        template_id=TEMPLATE_ID,
        names=(TEMPLATE_ID,),
        rootfs=image,
        vcpus=settings.sandbox.vcpus,
        memory_mib=settings.sandbox.memory_mib,
        disk_mib=recipe.disk_mib,
    )
    registered = store.find(TEMPLATE_ID)
    if registered is not None and registered.rootfs == image:
        progress("base template", "up to date", 1.0)
        return registered
    if not image.is_file():
        _make_image(recipe, directory, image, progress)
    store.register(wanted, follow_defaults=True)
    # Disks of running sandboxes keep the old image's bytes: they hold it open.
    for old in directory.glob("rootfs-*.ext4"):
        if old != image:
            old.unlink()
    progress("base template", "registered", 1.0)
    return wanted


def _make_image(recipe: RootfsRecipe, directory: Path, image: Path, progress: Progress) -> None:
    cached = _cache() / image.name
    scratch = Path(tempfile.mkdtemp(prefix=".build-", dir=directory))
    try:
        draft = scratch / image.name
        if cached.is_file() and cached.stat().st_size == recipe.disk_mib * 1024 * 1024:
            progress("base template", f"copying the image from {cached.parent}", 0.5)
            _copy(cached, draft)
        else:
            build_rootfs(recipe, scratch, draft, progress)
            progress("base template", f"keeping a copy in {cached.parent}", 0.99)
            _keep(draft, cached)
        draft.chmod(0o644)
        draft.replace(image)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _cache() -> Path:
    return Path(os.environ.get("AENV_CACHE") or Path.home() / ".cache" / "aenv") / "rootfs"


def _keep(image: Path, cached: Path) -> None:
    """Copy a finished image into the cache. It is only a cache: a failure costs time later, nothing else."""
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        draft = cached.with_name(f".{cached.name}.{os.getpid()}")
        try:
            _copy(image, draft)
            draft.replace(cached)
        finally:
            draft.unlink(missing_ok=True)
    except (OSError, AssetError) as error:
        _log.warning("rootfs_not_cached", path=str(cached), error=str(error))


def _copy(source: Path, destination: Path) -> None:
    """Copy a sparse file, sharing blocks where the file system can."""
    command = ["cp", "--reflink=auto", "--sparse=always", str(source), str(destination)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise AssetError(f"copying {source} failed: {result.stderr.strip()}")
