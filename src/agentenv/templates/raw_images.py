"""Raw disk images as templates: the layer that is made of one, and templates of the older form, which were such images.

Blocking work for the command line and the set-up; a server only reads what it leaves.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from agentenv import durable
from agentenv.config import Settings
from agentenv.errors import AgentEnvError, AssetError
from agentenv.guest.rootfs import Progress
from agentenv.storage.images import create_layer_from_raw
from agentenv.storage.layers import LayerStore, StoredLayer
from agentenv.templates.store import LOCK, MANIFEST, TemplateStore, owner_of, template_from

_log = structlog.get_logger(__name__)
_RECIPE_IMAGE = re.compile(r"rootfs-([0-9a-f]+)\.ext4")


def layer_of_image(image: Path, layers: LayerStore, owner: str) -> StoredLayer:
    """Put a layer with the content of a raw image into the store, referenced by `owner`. The image stays as it is.

    Raises:
        InsufficientStorageError: too little room.
        AgentEnvError: the image cannot be read, or the layer not be written.
    """
    with layers.draft() as draft:
        create_layer_from_raw(image, draft)
        return layers.import_file(draft, owner=owner)


def templates_are_current(settings: Settings) -> bool:
    """Whether there is a base template, and none is of the older form."""
    manifests = list(settings.paths.templates.glob(f"*/{MANIFEST}"))
    return settings.paths.template("base") / MANIFEST in manifests and not any(map(_old_content, manifests))


def convert_templates(settings: Settings, layers: LayerStore, progress: Progress) -> None:
    """Turn every template that is still a raw image into layers. What cannot be converted stays, and is logged.

    Raises:
        InsufficientStorageError, StorageError: too little room, or the layer store refuses; nothing is lost.
    """
    store = TemplateStore(settings.paths, settings, layers)
    for manifest in sorted(settings.paths.templates.glob(f"*/{MANIFEST}")):
        if _old_content(manifest) is None:
            continue
        try:
            with durable.exclusive_lock(
                manifest.parent / LOCK, lambda: progress("templates", "waiting for another build", None)
            ):
                _convert(manifest, settings, store, layers, progress)
        except (AgentEnvError, OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, AgentEnvError) and not isinstance(error, AssetError):
                raise
            _log.warning("template_not_converted", path=str(manifest), error=str(error))


def _convert(manifest: Path, settings: Settings, store: TemplateStore, layers: LayerStore, progress: Progress) -> None:
    content = _old_content(manifest)
    if content is None:  # another process was faster
        return
    image = manifest.parent / Path(content["rootfs"]).name
    if not image.is_file():
        raise AssetError(f"the image {image} of the template {manifest.parent.name} is missing")
    recipe = _RECIPE_IMAGE.fullmatch(image.name)
    template = template_from({**content, "layers": (), "source": recipe[1] if recipe else None}, settings.sandbox)
    progress("templates", f"making a layer of {template.template_id}", None)
    layer = layer_of_image(image, layers, owner_of(template.template_id))
    store.register(replace(template, layers=(layer.digest,)), follow_defaults=content.get("vcpus") is None)
    # Disks of running sandboxes keep the old image's bytes: they hold it open.
    image.unlink()


def _old_content(manifest: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(manifest.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "rootfs" in content and "layers" not in content else None
