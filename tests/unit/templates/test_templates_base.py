"""When the base template is made again, what a build that fails leaves behind, and templates of the older form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_layers import FakeLayers, copy_beginning

from agentenv.config import SandboxSettings, Settings
from agentenv.errors import AssetError, InsufficientStorageError
from agentenv.guest.rootfs import Progress, RootfsRecipe
from agentenv.templates import base, raw_images
from agentenv.templates.raw_images import convert_templates, templates_are_current
from agentenv.templates.store import MANIFEST, Template, TemplateStore


class Builder:
    """Stands in for the recipe's execution, which needs root and a mirror; writes a recognisable image."""

    def __init__(self) -> None:
        self.built: list[RootfsRecipe] = []
        self.failure: BaseException | None = None

    def __call__(self, recipe: RootfsRecipe, scratch: Path, destination: Path, _progress: Progress) -> None:
        self.built.append(recipe)
        (scratch / "tree").mkdir()
        with destination.open("wb") as file:
            file.write(b"image %d" % len(self.built))
            if self.failure is not None:
                raise self.failure
            file.truncate(recipe.disk_mib * 1024 * 1024)


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Builder:
    builder = Builder()
    monkeypatch.setattr(base, "build_rootfs", builder)
    monkeypatch.setattr(raw_images, "create_layer_from_raw", copy_beginning)
    monkeypatch.setenv("AENV_CACHE", str(tmp_path / "cache"))
    return builder


class Home:
    """A home with its layers."""

    def __init__(self, home: Path, disk_mib: int = 512) -> None:
        self.settings = Settings(home=home, sandbox=SandboxSettings(disk_mib=disk_mib))
        self.layers = FakeLayers(home / "layers")
        self.store = TemplateStore(self.settings.paths, self.settings, self.layers.as_store())
        self.directory = self.settings.paths.template("base")

    def ensure(self) -> Template:
        return base.ensure_base_template(self.settings, self.layers.as_store(), _ignore)

    def convert(self) -> None:
        convert_templates(self.settings, self.layers.as_store(), _ignore)

    def content(self, template: Template) -> bytes:
        (digest,) = template.layers
        return self.layers.content(digest)

    def write_old(self, template_id: str, image: str, **changes: Any) -> Path:
        """A template as older versions wrote it; the path of its image."""
        directory = self.settings.paths.template(template_id)
        directory.mkdir(parents=True)
        with (directory / image).open("wb") as file:
            file.write(f"old {template_id}".encode())
            file.truncate(512 << 20)
        content = {
            "template_id": template_id,
            "names": [template_id],
            "rootfs": image,
            "vcpus": None,
            "memory_mib": None,
            "disk_mib": 512,
            "default_user": "dev",
            "default_workdir": "/srv",
            "env": {"A": "b"},
            "created_at": "2026-01-02T03:04:05+00:00",
        }
        (directory / MANIFEST).write_text(json.dumps({**content, **changes}))
        return directory / image


@pytest.fixture
def home(tmp_path: Path, builder: Builder) -> Home:
    return Home(tmp_path / "home")


def _ignore(_phase: str, _detail: str, _fraction: float | None) -> None:
    return


async def test_the_template_is_registered_once(home: Home, builder: Builder) -> None:
    made = home.ensure()
    assert home.content(made) == b"image 1"
    assert home.ensure().layers == made.layers
    assert len(builder.built) == 1
    found = await home.store.resolve("base")
    assert (found.layers, found.disk_mib, found.default_user) == (made.layers, 512, "user")
    assert home.layers.owned == {"template:base": made.layers}
    assert {path.name for path in home.directory.iterdir()} == {".lock", MANIFEST}, "the raw image is in the cache"


def test_another_recipe_replaces_the_layer(tmp_path: Path, home: Home, builder: Builder) -> None:
    home.ensure()
    larger = Home(tmp_path / "home", 1024)
    larger.layers = home.layers
    new = larger.ensure()
    assert new.disk_mib == 1024
    assert home.layers.owned == {"template:base": new.layers}
    assert [recipe.disk_mib for recipe in builder.built] == [512, 1024]


def test_another_home_takes_the_image_from_the_cache(tmp_path: Path, builder: Builder) -> None:
    first, second = Home(tmp_path / "one"), Home(tmp_path / "two")
    assert first.content(first.ensure()) == second.content(second.ensure()) == b"image 1"
    assert len(builder.built) == 1
    (cached,) = (tmp_path / "cache" / "rootfs").iterdir()
    assert cached.stat().st_blocks < 512, "the copy stays sparse"


def test_a_cut_off_copy_in_the_cache_is_not_taken(tmp_path: Path, builder: Builder) -> None:
    Home(tmp_path / "one").ensure()
    (cached,) = (tmp_path / "cache" / "rootfs").iterdir()
    cached.write_bytes(b"cut off")
    Home(tmp_path / "two").ensure()
    assert len(builder.built) == 2


def test_an_unusable_cache_costs_nothing_else(
    tmp_path: Path, home: Home, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("AENV_CACHE", str(tmp_path / "file"))
    assert home.content(home.ensure()) == b"image 1"


@pytest.mark.parametrize("failure", [AssetError("mirror gone"), KeyboardInterrupt()])
async def test_a_build_that_ends_midway_leaves_nothing(
    tmp_path: Path, home: Home, builder: Builder, failure: BaseException
) -> None:
    builder.failure = failure
    with pytest.raises(type(failure)):
        home.ensure()
    assert {path.name for path in home.directory.iterdir()} == {".lock"}
    assert not (tmp_path / "cache").exists()
    assert await home.store.list() == ()
    assert home.layers.owned == {}


def test_what_a_killed_build_left_is_removed(home: Home, builder: Builder) -> None:
    leftover = home.directory / ".build-killed"
    leftover.mkdir(parents=True)
    (leftover / "half").write_bytes(b"half")
    home.layers.owned["template:base"] = (home.layers.add("of a build that did not register it"),)
    made = home.ensure()
    assert not leftover.exists()
    assert home.layers.owned == {"template:base": made.layers}


def test_a_lost_layer_is_made_again(home: Home, builder: Builder) -> None:
    home.layers.known.clear()
    first = home.ensure()
    home.layers.known.clear()
    home.layers.owned.clear()
    assert home.ensure().layers == first.layers
    assert home.store.find("base") is not None


async def test_a_base_template_of_the_older_form_is_not_built_again(home: Home, builder: Builder) -> None:
    recipe = RootfsRecipe(disk_mib=512).digest()[:16]
    image = home.write_old("base", f"rootfs-{recipe}.ext4")
    assert not templates_are_current(home.settings)
    assert await home.store.list() == ()
    assert home.content(home.ensure()) == b"old base"
    assert builder.built == []
    assert not image.exists()
    assert templates_are_current(home.settings)


async def test_other_templates_of_the_older_form_are_converted(home: Home, builder: Builder) -> None:
    home.ensure()
    fixed = home.write_old("web", "rootfs.ext4", vcpus=7, memory_mib=700)
    following = home.write_old("api", "rootfs.ext4")
    lost = home.write_old("lost", "rootfs.ext4")
    lost.unlink()
    (home.settings.paths.template("lost") / "note").write_text("x")
    home.write_old("odd", "rootfs.ext4", names=None)
    home.convert()
    web, api = await home.store.resolve("web"), await home.store.resolve("api")
    assert (home.content(web), home.content(api)) == (b"old web", b"old api")
    assert (web.vcpus, web.memory_mib, web.default_user, web.env) == (7, 700, "dev", {"A": "b"})
    assert web.created_at.year == 2026
    assert api.vcpus == home.settings.sandbox.vcpus
    assert json.loads((following.parent / MANIFEST).read_text())["vcpus"] is None
    assert not fixed.exists()
    assert not following.exists()
    assert (home.settings.paths.template("odd") / "rootfs.ext4").exists(), "what is not understood is not removed"
    assert sorted(home.layers.owned) == ["template:api", "template:base", "template:web"]
    assert {template.template_id for template in await home.store.list()} == {"api", "base", "web"}
    home.convert()
    assert (await home.store.resolve("web")).layers == web.layers


async def test_a_conversion_that_finds_no_room_loses_nothing(
    home: Home, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = home.write_old("web", "rootfs.ext4")

    def full(_source: Path, _out: Path) -> None:
        raise InsufficientStorageError("full")

    with monkeypatch.context() as patch:
        patch.setattr(raw_images, "create_layer_from_raw", full)
        with pytest.raises(InsufficientStorageError):
            home.convert()
    assert image.exists()
    home.convert()
    assert home.content(await home.store.resolve("web")) == b"old web"
