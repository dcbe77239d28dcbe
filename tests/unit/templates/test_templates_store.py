"""References to templates, and the store that resolves them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.config import SandboxSettings, Settings
from agentenv.errors import AgentEnvError, AssetError, InvalidRequestError, TemplateNotFoundError
from agentenv.templates.store import MANIFEST, Template, TemplateReference, TemplateStore, parse_reference


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("base", TemplateReference("base")),
        ("  BaSe\n", TemplateReference("base")),
        ("team/base", TemplateReference("base", "team")),
        ("base:v1.2_x-y", TemplateReference("base", None, "v1.2_x-y")),
        ("Team_1/my-tpl:Default", TemplateReference("my-tpl", "team_1")),
        (
            "x:7b0ed5d1-6d8e-4a3e-8d12-0c4d0f5a7b11",
            TemplateReference("x", None, "7b0ed5d1-6d8e-4a3e-8d12-0c4d0f5a7b11"),
        ),
    ],
)
def test_references(text: str, parsed: TemplateReference) -> None:
    assert parse_reference(text) == parsed


@pytest.mark.parametrize(
    "text", ["", " ", "/", "a/", "/a", "a:", ":a", "a/b/c", "../base", "a b", "a:b:c", "a.b", "é", "a\0b", "x" * 200]
)
def test_malformed_references(text: str) -> None:
    with pytest.raises(InvalidRequestError):
        parse_reference(text)


@given(st.text(max_size=60))
def test_any_text_is_parsed_or_refused(text: str) -> None:
    try:
        parsed = parse_reference(text)
    except InvalidRequestError:
        return
    assert parsed.name == parsed.name.strip().lower()
    assert not set(parsed.name) & set("/:.\0")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path, sandbox=SandboxSettings(vcpus=3, memory_mib=777))


@pytest.fixture
def store(settings: Settings) -> TemplateStore:
    return TemplateStore(settings.paths, settings)


def _template(settings: Settings, template_id: str, *names: str) -> Template:
    directory = settings.paths.template(template_id)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "rootfs.ext4").write_bytes(b"image")
    return Template(
        template_id=template_id,
        names=names,
        rootfs=directory / "rootfs.ext4",
        vcpus=1,
        memory_mib=256,
        disk_mib=1024,
        default_user="dev",
        default_workdir="/srv",
        env={"A": "b"},
    )


async def test_a_registered_template_is_found_by_id_and_by_every_name(settings: Settings, store: TemplateStore) -> None:
    template = _template(settings, "t1", "web", "web-server")
    store.register(template)
    for reference in ("t1", "web", " WEB ", "team/web-server:default"):
        assert await store.resolve(reference) == template
    assert await store.list() == (template,)


@pytest.mark.parametrize("reference", ["other", "web:v2", "team/other"])
async def test_unknown_templates_and_tags(settings: Settings, store: TemplateStore, reference: str) -> None:
    store.register(_template(settings, "t1", "web"))
    with pytest.raises(TemplateNotFoundError, match=f"template '{reference}' not found"):
        await store.resolve(reference)


async def test_a_template_may_follow_the_settings(settings: Settings, store: TemplateStore) -> None:
    store.register(_template(settings, "t1", "web"), follow_defaults=True)
    template = await store.resolve("web")
    assert (template.vcpus, template.memory_mib, template.disk_mib) == (3, 777, 1024)


async def test_registering_again_replaces_and_leaves_no_draft(settings: Settings, store: TemplateStore) -> None:
    store.register(_template(settings, "t1", "old"))
    store.register(_template(settings, "t1", "new"))
    assert [template.names for template in await store.list()] == [("new",)]
    assert {path.name for path in settings.paths.template("t1").iterdir()} == {MANIFEST, "rootfs.ext4"}


async def test_a_failed_registration_keeps_the_old_one(
    settings: Settings, store: TemplateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.register(_template(settings, "t1", "old"))

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(AssetError, match="No space left"):
        store.register(_template(settings, "t1", "new"))
    assert (await store.resolve("old")).template_id == "t1"
    assert {path.name for path in settings.paths.template("t1").iterdir()} == {MANIFEST, "rootfs.ext4"}


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", '{"rootfs": 1}', '{"template_id": "x", "names": null, "rootfs": "rootfs.ext4"}'],
)
async def test_a_damaged_manifest_hides_only_its_own_template(
    settings: Settings, store: TemplateStore, text: str
) -> None:
    good = _template(settings, "good")
    store.register(good)
    _template(settings, "bad")
    (settings.paths.template("bad") / MANIFEST).write_text(text)
    assert await store.list() == (good,)


async def test_a_template_without_its_image_is_not_offered(settings: Settings, store: TemplateStore) -> None:
    template = _template(settings, "t1")
    store.register(template)
    template.rootfs.unlink()
    with pytest.raises(TemplateNotFoundError):
        await store.resolve("t1")


async def test_an_image_outside_of_the_directory_is_never_opened(settings: Settings, store: TemplateStore) -> None:
    store.register(_template(settings, "t1"))
    manifest = settings.paths.template("t1") / MANIFEST
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "rootfs": "/etc/../etc/passwd"}))
    with pytest.raises(TemplateNotFoundError):
        await store.resolve("t1")


@pytest.mark.parametrize("template_id", ["../x", "A", "a b", "a.b"])
def test_malformed_ids_are_not_registered(settings: Settings, store: TemplateStore, template_id: str) -> None:
    template = Template(template_id, (), settings.home / "x", 1, 256, 1024)
    with pytest.raises(AgentEnvError):
        store.register(template)
    assert list(settings.home.rglob(MANIFEST)) == []


async def test_no_templates_at_all(store: TemplateStore) -> None:
    assert await store.list() == ()
