"""Homes that take over what another home has, and which programs a home is made with."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentenv.cli.provision import Programs, link_home
from agentenv.config import Settings
from agentenv.errors import AssetError
from agentenv.storage.layers import LayerStore
from agentenv.templates.raw_images import layer_of_image
from agentenv.templates.store import Template, TemplateStore, owner_of

CONTENT = b"content of a disk" * 100


@pytest.fixture
def built(tmp_path: Path) -> Settings:
    """A home with assets (any will do) and a base template."""
    settings = Settings(home=tmp_path / "built")
    settings.paths.assets.mkdir(parents=True)
    for name in ("assets.json", "vmlinux-1", ".lock"):
        (settings.paths.assets / name).write_text(f"content of {name}")
    (settings.paths.assets / "aenv-blockd-1").write_text("program")
    (settings.paths.assets / "aenv-blockd-1").chmod(0o755)
    image = tmp_path / "image"
    image.write_bytes(CONTENT)
    os.truncate(image, 1 << 20)
    with closing(LayerStore(settings.paths.layers)) as layers:
        layer = layer_of_image(image, layers, owner_of("base"))
        template = Template("base", ("base",), (layer.digest,), vcpus=1, memory_mib=256, disk_mib=1, source="recipe")
        TemplateStore(settings.paths, settings, layers).register(template, follow_defaults=True)
    return settings


def refuse(*_: Any, **__: Any) -> None:
    raise OSError(18, os.strerror(18))


@pytest.mark.parametrize("links", [True, False])
def test_a_new_home_has_the_same_and_is_independent(
    tmp_path: Path, built: Settings, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(home=tmp_path / "new")
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    for _ in range(2):
        link_home(settings, built.home)
    assert {path.name for path in settings.paths.assets.iterdir()} == {"assets.json", "vmlinux-1", "aenv-blockd-1"}
    assert (settings.paths.assets / "aenv-blockd-1").stat().st_mode & 0o777 == 0o755
    shared = (settings.paths.assets / "vmlinux-1").samefile(built.paths.assets / "vmlinux-1")
    assert shared == links
    with closing(LayerStore(built.paths.layers)) as theirs, closing(LayerStore(settings.paths.layers)) as ours:
        template = TemplateStore(settings.paths, settings, ours).find("base")
        assert template is not None
        assert (template.source, template.vcpus) == ("recipe", settings.sandbox.vcpus)
        (digest,) = template.layers
        assert ours.get(digest).path.samefile(theirs.get(digest).path) == links
        theirs.drop(owner_of("base"))
        theirs.collect_garbage()
        ours.collect_garbage()
        assert ours.verify(digest).digest == digest


@pytest.mark.parametrize("spoil", ["assets", "template", "layer"])
def test_a_home_that_lacks_something_is_refused(tmp_path: Path, built: Settings, spoil: str) -> None:
    actions: dict[str, Callable[[], object]] = {
        "assets": (built.paths.assets / "assets.json").unlink,
        "template": (built.paths.template("base") / "template.json").unlink,
        "layer": next((built.paths.layers / "sha256").iterdir()).unlink,
    }
    actions[spoil]()
    with pytest.raises(AssetError, match="aenv assets build"):
        link_home(Settings(home=tmp_path / "new"), built.home)
    assert not (tmp_path / "new" / "templates").exists()


def test_a_home_is_not_linked_to_itself(tmp_path: Path, built: Settings) -> None:
    (tmp_path / "name").symlink_to(built.home)
    with pytest.raises(AssetError, match="is the home itself"):
        link_home(built, tmp_path / "name")


def test_programs_are_those_given_else_those_named_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("guest", "blockd", "other"):
        (tmp_path / name).touch()
    monkeypatch.setenv("AENV_GUEST_BINARY", str(tmp_path / "guest"))
    monkeypatch.setenv("AENV_BLOCKD_BINARY", str(tmp_path / "blockd"))
    assert Programs.find() == Programs(tmp_path / "guest", tmp_path / "blockd")
    assert Programs.find(blockd=tmp_path / "other").blockd == tmp_path / "other"
    monkeypatch.setenv("AENV_BLOCKD_BINARY", str(tmp_path / "none"))
    with pytest.raises(AssetError, match=r"none does not exist; build it with `make setup`"):
        Programs.find()
