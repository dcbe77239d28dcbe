"""The `base` template: a layer, made from the root file system recipe when it is missing or the recipe changed.

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
from agentenv.config import MIB, Settings
from agentenv.errors import AssetError
from agentenv.guest.rootfs import Progress, RootfsRecipe, build_rootfs
from agentenv.storage.layers import LayerStore, StoredLayer
from agentenv.templates.raw_images import layer_of_image
from agentenv.templates.store import LOCK, Template, TemplateStore, owner_of

TEMPLATE_ID = "base"
_DIGEST_LENGTH = 16

_log = structlog.get_logger(__name__)


def ensure_base_template(settings: Settings, layers: LayerStore, progress: Progress) -> Template:
    """Make and register the `base` template unless it is up to date. One builder at a time per home.

    The raw image is kept in the cache alone (`$AENV_CACHE`, else `~/.cache/aenv`), where a later build finds it; the
    cache is never needed.

    Raises:
        AssetError: the image could not be made; the message says why.
        InsufficientStorageError: too little room.
        LayerError, StorageError: the layer could not be made of the image.
    """
    directory = settings.paths.template(TEMPLATE_ID)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with durable.exclusive_lock(
            directory / LOCK, lambda: progress("base template", "waiting for another build", None)
        ):
            return _ensure(settings, layers, directory, progress)
    except OSError as error:
        raise AssetError(f"cannot write the base template to {directory}: {error}") from error


def _ensure(settings: Settings, layers: LayerStore, directory: Path, progress: Progress) -> Template:
    # The lock is ours, so a scratch directory belongs to a build that was killed.
    for leftover in directory.glob(".build-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    recipe = RootfsRecipe(disk_mib=settings.sandbox.disk_mib)
    source = recipe.digest()[:_DIGEST_LENGTH]
    store = TemplateStore(settings.paths, settings, layers)
    registered = store.find(TEMPLATE_ID)
    if registered is not None and registered.source == source:
        progress("base template", "up to date", 1.0)
        return registered
    layer = _make_layer(recipe, f"rootfs-{source}.ext4", layers, directory, progress)
    wanted = Template(
        template_id=TEMPLATE_ID,
        names=(TEMPLATE_ID,),
        layers=(layer.digest,),
        vcpus=settings.sandbox.vcpus,
        memory_mib=settings.sandbox.memory_mib,
        disk_mib=recipe.disk_mib,
        source=source,
    )
    store.register(wanted, follow_defaults=True)
    # Older versions kept the image here. Disks of running sandboxes keep its bytes: they hold it open.
    for old in directory.glob("rootfs-*.ext4"):
        old.unlink()
    progress("base template", "registered", 1.0)
    return wanted


def _make_layer(
    recipe: RootfsRecipe, name: str, layers: LayerStore, directory: Path, progress: Progress
) -> StoredLayer:
    for image in (directory / name, _cache() / name):
        if image.is_file() and image.stat().st_size == recipe.disk_mib * MIB:
            progress("base template", f"making a layer of the image in {image.parent}", 0.5)
            return layer_of_image(image, layers, owner_of(TEMPLATE_ID))
    scratch = Path(tempfile.mkdtemp(prefix=".build-", dir=directory))
    try:
        draft = scratch / name
        build_rootfs(recipe, scratch, draft, progress)
        progress("base template", "making a layer of the image", 0.95)
        layer = layer_of_image(draft, layers, owner_of(TEMPLATE_ID))
        progress("base template", f"keeping a copy in {_cache()}", 0.99)
        _keep(draft, _cache() / name)
        return layer
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
