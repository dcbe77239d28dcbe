"""References to templates, and the store that resolves them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_layers import FakeLayers
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
def layers(tmp_path: Path) -> FakeLayers:
    return FakeLayers(tmp_path / "layers")


@pytest.fixture
def store(settings: Settings, layers: FakeLayers) -> TemplateStore:
    return TemplateStore(settings.paths, settings, layers.as_store())


def _template(layers: FakeLayers, template_id: str, *names: str) -> Template:
    return Template(
        template_id=template_id,
        names=names,
        layers=(layers.add(f"{template_id} below {names}"), layers.add(f"{template_id} above {names}")),
        vcpus=1,
        memory_mib=256,
        disk_mib=1024,
        default_user="dev",
        default_workdir="/srv",
        env={"A": "b"},
    )


async def test_a_registered_template_is_found_by_id_and_by_every_name(layers: FakeLayers, store: TemplateStore) -> None:
    template = _template(layers, "t1", "web", "web-server")
    store.register(template)
    for reference in ("t1", "web", " WEB ", "team/web-server:default"):
        assert await store.resolve(reference) == template
    assert await store.list() == (template,)
    assert layers.owned == {"template:t1": template.layers}


@pytest.mark.parametrize("reference", ["other", "web:v2", "team/other"])
async def test_unknown_templates_and_tags(layers: FakeLayers, store: TemplateStore, reference: str) -> None:
    store.register(_template(layers, "t1", "web"))
    with pytest.raises(TemplateNotFoundError, match=f"template '{reference}' not found"):
        await store.resolve(reference)


async def test_a_template_may_follow_the_settings(layers: FakeLayers, store: TemplateStore) -> None:
    store.register(_template(layers, "t1", "web"), follow_defaults=True)
    template = await store.resolve("web")
    assert (template.vcpus, template.memory_mib, template.disk_mib) == (3, 777, 1024)


async def test_registering_again_replaces_and_leaves_no_draft(
    settings: Settings, layers: FakeLayers, store: TemplateStore
) -> None:
    store.register(_template(layers, "t1", "old"))
    new = _template(layers, "t1", "new")
    store.register(new)
    assert [template.names for template in await store.list()] == [("new",)]
    assert {path.name for path in settings.paths.template("t1").iterdir()} == {MANIFEST}
    assert layers.owned == {"template:t1": new.layers}, "the old layers may go"


async def test_a_failed_registration_keeps_the_old_one(
    settings: Settings, layers: FakeLayers, store: TemplateStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = _template(layers, "t1", "old")
    store.register(old)

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(AssetError, match="No space left"):
        store.register(_template(layers, "t1", "new"))
    assert await store.resolve("old") == old
    assert {path.name for path in settings.paths.template("t1").iterdir()} == {MANIFEST}
    assert set(old.layers) <= set(layers.owned["template:t1"])


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", '{"layers": 1}', '{"template_id": "x", "names": null, "layers": []}'],
)
async def test_a_damaged_manifest_hides_only_its_own_template(
    settings: Settings, layers: FakeLayers, store: TemplateStore, text: str
) -> None:
    good = _template(layers, "good")
    store.register(good)
    settings.paths.template("bad").mkdir()
    (settings.paths.template("bad") / MANIFEST).write_text(text)
    assert await store.list() == (good,)


async def test_a_template_without_one_of_its_layers_is_not_offered(layers: FakeLayers, store: TemplateStore) -> None:
    template = _template(layers, "t1")
    store.register(template)
    layers.known.discard(template.layers[1])
    with pytest.raises(TemplateNotFoundError):
        await store.resolve("t1")


def test_layers_that_the_store_lacks_are_not_registered(
    settings: Settings, layers: FakeLayers, store: TemplateStore
) -> None:
    for missing in ((), ("sha256:" + 64 * "0",)):
        with pytest.raises(AgentEnvError):
            store.register(replace(_template(layers, "t1"), layers=missing))
    assert list(settings.home.rglob(MANIFEST)) == []
    assert layers.owned == {}


@pytest.mark.parametrize("template_id", ["../x", "A", "a b", "a.b"])
def test_malformed_ids_are_not_registered(
    settings: Settings, layers: FakeLayers, store: TemplateStore, template_id: str
) -> None:
    with pytest.raises(AgentEnvError):
        store.register(_template(layers, template_id))
    assert list(settings.home.rglob(MANIFEST)) == []


async def test_no_templates_at_all(store: TemplateStore) -> None:
    assert await store.list() == ()
