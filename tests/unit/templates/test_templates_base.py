"""When the base template is made again, and what a build that fails leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.config import SandboxSettings, Settings
from agentenv.errors import AssetError
from agentenv.guest.rootfs import Progress, RootfsRecipe
from agentenv.templates import base
from agentenv.templates.store import TemplateStore


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
    monkeypatch.setenv("AENV_CACHE", str(tmp_path / "cache"))
    return builder


def _settings(home: Path, disk_mib: int = 512) -> Settings:
    return Settings(home=home, sandbox=SandboxSettings(disk_mib=disk_mib))


def _beginning(image: Path) -> bytes:
    with image.open("rb") as file:
        return file.read(7)


def _ignore(_phase: str, _detail: str, _fraction: float | None) -> None:
    return


async def test_the_template_is_registered_once(tmp_path: Path, builder: Builder) -> None:
    settings = _settings(tmp_path / "home")
    made = base.ensure_base_template(settings, _ignore)
    assert _beginning(made.rootfs) == b"image 1"
    assert base.ensure_base_template(settings, _ignore).rootfs == made.rootfs
    assert len(builder.built) == 1
    found = await TemplateStore(settings.paths, settings).resolve("base")
    assert (found.rootfs, found.disk_mib, found.default_user) == (made.rootfs, 512, "user")


def test_another_recipe_replaces_the_image(tmp_path: Path, builder: Builder) -> None:
    old = base.ensure_base_template(_settings(tmp_path / "home"), _ignore)
    new = base.ensure_base_template(_settings(tmp_path / "home", 1024), _ignore)
    assert new.disk_mib == 1024
    assert not old.rootfs.exists()
    assert [recipe.disk_mib for recipe in builder.built] == [512, 1024]


def test_another_home_takes_the_image_from_the_cache(tmp_path: Path, builder: Builder) -> None:
    first = base.ensure_base_template(_settings(tmp_path / "one"), _ignore)
    second = base.ensure_base_template(_settings(tmp_path / "two"), _ignore)
    assert len(builder.built) == 1
    assert _beginning(second.rootfs) == _beginning(first.rootfs) == b"image 1"
    assert second.rootfs.stat().st_blocks < 512, "the copy stays sparse"


def test_a_cut_off_copy_in_the_cache_is_not_taken(tmp_path: Path, builder: Builder) -> None:
    first = base.ensure_base_template(_settings(tmp_path / "one"), _ignore)
    (tmp_path / "cache" / "rootfs" / first.rootfs.name).write_bytes(b"cut off")
    base.ensure_base_template(_settings(tmp_path / "two"), _ignore)
    assert len(builder.built) == 2


def test_an_unusable_cache_costs_nothing_else(
    tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("AENV_CACHE", str(tmp_path / "file"))
    assert base.ensure_base_template(_settings(tmp_path / "home"), _ignore).rootfs.exists()


@pytest.mark.parametrize("failure", [AssetError("mirror gone"), KeyboardInterrupt()])
async def test_a_build_that_ends_midway_leaves_nothing(
    tmp_path: Path, builder: Builder, failure: BaseException
) -> None:
    settings = _settings(tmp_path / "home")
    builder.failure = failure
    with pytest.raises(type(failure)):
        base.ensure_base_template(settings, _ignore)
    assert {path.name for path in settings.paths.template("base").iterdir()} == {".lock"}
    assert not (tmp_path / "cache").exists()
    assert await TemplateStore(settings.paths, settings).list() == ()


def test_what_a_killed_build_left_is_removed(tmp_path: Path, builder: Builder) -> None:
    settings = _settings(tmp_path / "home")
    leftover = settings.paths.template("base") / ".build-killed"
    leftover.mkdir(parents=True)
    (leftover / "half").write_bytes(b"half")
    base.ensure_base_template(settings, _ignore)
    assert not leftover.exists()


def test_a_lost_image_is_made_again(tmp_path: Path, builder: Builder) -> None:
    settings = _settings(tmp_path / "home")
    base.ensure_base_template(settings, _ignore).rootfs.unlink()
    assert base.ensure_base_template(settings, _ignore).rootfs.is_file()
