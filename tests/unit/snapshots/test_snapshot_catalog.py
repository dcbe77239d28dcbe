"""Named snapshots: what they are called, what references mean, also when builds come and go, together and by hand."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from snapshots_samples import BEGINNING, Node, manifest

from agentenv import ids
from agentenv.config import SandboxSettings, Settings
from agentenv.errors import (
    InvalidRequestError,
    SnapshotError,
    SnapshotNotFoundError,
    TemplateNotFoundError,
)
from agentenv.snapshots.accounting import SnapshotNode
from agentenv.snapshots.manifest import SnapshotKind, SnapshotManifest
from agentenv.snapshots.service import SnapshotService
from agentenv.templates.names import SnapshotNames
from agentenv.templates.snapshots import SnapshotCatalog
from agentenv.templates.store import Template, TemplateStore, parse_reference

_UUID = "7b0ed5d1-6d8e-4a3e-8d12-0c4d0f5a7b11"


class World:
    """A repository with a catalog."""

    def __init__(self, home: Path) -> None:
        self.node = Node(home)
        self.catalog = self.another()
        self.age = 0

    def another(self) -> SnapshotCatalog:
        """A catalog over the same directory, as of another process."""
        service = SnapshotService(Node(self.node.home).snapshots)
        return SnapshotCatalog(service, service.delete)

    async def take(self, name: str | None = None, **changes: Any) -> str:
        """Capture what is named by the catalog. Returns its id."""
        naming = await self.catalog.name(name, ())
        return self.store(own_template_id=naming.own_template_id, names=naming.names, **changes)

    def store(self, snapshot_id: str | None = None, **changes: Any) -> str:
        snapshot_id = snapshot_id or ids.new_uuid()
        self.age += 1
        with self.node.snapshots.draft(snapshot_id) as draft:
            layer = self.node.add_layer(b"disk", draft.owner)
            values = {"created_at": BEGINNING + timedelta(seconds=self.age), "disk_layers": (layer,), **changes}
            draft.commit(manifest(snapshot_id, kind=SnapshotKind.FILESYSTEM, **values))
        return snapshot_id

    def path(self, snapshot_id: str) -> Path:
        return self.node.directory / snapshot_id / "manifest.json"

    async def means(self, reference: str) -> str | None:
        try:
            return (await self.catalog.find(reference)).snapshot_id
        except TemplateNotFoundError:
            return None


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_one_without_a_name_is_a_template_of_its_own(world: World) -> None:
    first, second = await world.take(), await world.take()
    published = await world.catalog.find(first)
    template_id = published.template_id
    assert re.fullmatch("t[a-z0-9]{19}", template_id)
    assert (published.reference, published.names) == (f"{template_id}:default", ())
    assert template_id != (await world.catalog.find(second)).template_id
    for reference in (
        template_id,
        f" {template_id.upper()}:DEFAULT ",
        f"team/{template_id}",
        first.upper(),
        f"{template_id}:{first}",
    ):
        assert await world.means(reference) == first
    for reference in (f"{template_id}:v1", f"{template_id}:{second}", "nothing", ids.new_uuid()):
        with pytest.raises(TemplateNotFoundError, match=f"template '{re.escape(reference)}' not found"):
            await world.catalog.find(reference)


async def test_the_latest_of_a_name_has_it(world: World) -> None:
    first = await world.take("web:v1")
    other = await world.take("web")
    second = await world.take("Team/WEB:v1")
    template_id = (await world.catalog.find(first)).template_id
    assert [
        (each.snapshot_id, each.reference, each.names, each.template_id) for each in await world.catalog.list()
    ] == [
        (first, f"{template_id}:{first}", (), template_id),
        (other, "web:default", ("web:default",), template_id),
        (second, "web:v1", ("web:v1",), template_id),
    ]
    expected = {
        "web:v1": second,
        f"{template_id}:v1": second,
        "web": other,
        "web:default": other,
        template_id: other,
        f"web:{first}": first,
        f"{template_id}:{first}": first,
        first: first,
        second: second,
    }
    assert {reference: await world.means(reference) for reference in expected} == expected
    assert [build.snapshot_id for build in await world.catalog.builds(template_id)] == [first, other, second]
    assert await world.catalog.builds("web") == await world.catalog.builds(template_id)
    # When the latest goes, the one before has the name again.
    await world.catalog.delete(second)
    assert await world.means("web:v1") == first
    assert (await world.catalog.find(first)).reference == "web:v1"
    await world.catalog.delete(other)
    assert await world.means("web") is None, "no build has the tag"
    assert await world.means(template_id) == first, "an id means the template, whatever its tags are"
    await world.catalog.delete(first)
    assert [await world.means(reference) for reference in ("web:v1", template_id, first)] == [None, None, None]
    assert await world.catalog.list() == () and await world.catalog.templates() == ()


async def test_what_is_deleted_is_gone_for_good(world: World) -> None:
    snapshot_id = await world.take("web")
    assert await world.catalog.ids_called("web") == (snapshot_id,)
    await world.catalog.delete(snapshot_id)
    with pytest.raises(TemplateNotFoundError):
        await world.catalog.find("web")
    with pytest.raises(TemplateNotFoundError):
        await world.catalog.ids_called(snapshot_id)
    with pytest.raises(SnapshotNotFoundError):
        await world.catalog.delete(snapshot_id)
    assert not world.path(snapshot_id).parent.exists()


async def test_of_deletions_at_the_same_time_one_finds_it(world: World) -> None:
    snapshot_id = await world.take("web")
    outcomes = await asyncio.gather(*(world.catalog.delete(snapshot_id) for _ in range(4)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes if outcome is not None] == [SnapshotNotFoundError] * 3


@pytest.mark.parametrize(
    "name",
    ["", " ", "a b", "a:b:c", "a/b/c", "é", "../a", "a:", ":a", "x" * 200, "a\0b", "a\n:b", _UUID, f"a:{_UUID}"],
)
async def test_bad_names(world: World, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="invalid name of a snapshot"):
        await world.catalog.name(name, ())


async def test_names_that_belong_to_something_else(world: World) -> None:
    for name in ("base", "Base:v1", "team/base"):
        with pytest.raises(InvalidRequestError, match="'base' is a template of this node; give the snapshot another"):
            await world.catalog.name(name, frozenset({"base"}))
    await world.take("web")
    template_id = (await world.catalog.find("web")).template_id
    for name in (template_id, f"{template_id}:v2"):
        with pytest.raises(InvalidRequestError, match="is the id of a template"):
            await world.catalog.name(name, ())


async def test_captures_at_the_same_time_under_a_new_name_are_builds_of_one_template(world: World) -> None:
    """Also of different processes."""
    other = world.another()
    namings = await asyncio.gather(
        *(catalog.name(f"web:{tag}", ()) for catalog in (world.catalog, other) for tag in ("default", "v1", "default"))
    )
    (template_id,) = {naming.own_template_id for naming in namings}
    taken = [world.store(own_template_id=template_id, names=naming.names) for naming in namings]
    for catalog in (world.catalog, other):
        assert [build.snapshot_id for build in await catalog.builds(template_id)] == taken
        assert (await catalog.find("web")).snapshot_id == taken[5]
        assert (await catalog.find("web:v1")).snapshot_id == taken[4]
        assert sum(1 for published in await catalog.list() if published.names) == 2
    world.store(own_template_id="carried-here", names=("web:v1",))
    naming = await world.catalog.name("web:v3", ())
    assert naming.own_template_id == "carried-here", "builds of one alias stay builds of one template"


async def test_hidden_ones_are_never_seen(world: World) -> None:
    world.store("pause-i123-0a1b2c3d")
    for reference in ("pause-i123-0a1b2c3d", "pause-i123-0a1b2c3d:default", "pause-i123-0a1b2c3d:pause-i123-0a1b2c3d"):
        assert await world.means(reference) is None
    assert (await world.catalog.list(), await world.catalog.tree(), await world.catalog.templates()) == ((), (), ())
    with pytest.raises(SnapshotNotFoundError):
        await world.catalog.delete("pause-i123-0a1b2c3d")
    assert world.path("pause-i123-0a1b2c3d").exists()


async def test_those_of_before_there_were_names(world: World) -> None:
    snapshot_id = world.store()
    (published,) = await world.catalog.list()
    assert (published.template_id, published.reference) == (snapshot_id, f"{snapshot_id}:default")
    assert await world.means(published.reference) == await world.means(snapshot_id) == snapshot_id


async def test_a_deletion_by_name_is_about_all_that_ever_had_it(world: World) -> None:
    first, other, second = await world.take("web:v1"), await world.take("web"), await world.take("team/web:v1")
    unnamed = await world.take(None)
    template_id = (await world.catalog.find(first)).template_id
    alone = (await world.catalog.find(unnamed)).template_id
    expected = {
        "web:v1": (first, second),
        "web": (other,),
        "web:default": (other,),
        f"{template_id}:v1": (first, second),
        template_id: (first, other, second),
        first: (first,),
        f"web:{second}": (second,),
        f"{template_id}:{other}": (other,),
        f"{alone}:default": (unnamed,),
        alone: (unnamed,),
    }
    assert {reference: await world.catalog.ids_called(reference) for reference in expected} == expected
    for reference in ("web:v2", f"other:{first}", "nothing"):
        with pytest.raises(TemplateNotFoundError):
            await world.catalog.ids_called(reference)


async def test_damaged_manifests(world: World) -> None:
    first, second = await world.take("web"), await world.take("web")
    sound = world.path(second).read_bytes()
    world.path(second).write_bytes(b"{}")
    for catalog in (world.catalog, world.another()):
        # By name it is not found, by its id the damage is told; the others are not touched.
        assert (await catalog.find("web")).snapshot_id == first
        assert [published.snapshot_id for published in await catalog.list()] == [first]
        for reference in (second, f"web:{second}"):
            with pytest.raises(SnapshotError, match=re.escape(f"{world.path(second)} is no manifest of a snapshot")):
                await catalog.find(reference)
            assert await catalog.ids_called(reference) == (second,)
        assert await catalog.name("web", ()) == await world.catalog.name("web", ())
    # Mended by hand, it is known as soon as somebody asks for it.
    world.path(second).write_bytes(sound)
    assert await world.means(second) == second == await world.means("web")
    world.path(second).write_bytes(b"")
    with pytest.raises(SnapshotError):
        await world.catalog.find(second)
    await world.catalog.delete(second)
    assert await world.means(second) is None and not world.path(second).parent.exists()


async def test_what_is_removed_by_hand_is_not_found(world: World) -> None:
    first, second = await world.take("web"), await world.take("web")
    world.path(second).unlink()
    assert await world.means("web") == first
    assert [published.snapshot_id for published in await world.catalog.list()] == [first]
    assert await world.means(second) is None


async def test_what_other_processes_do_is_seen_at_once(world: World) -> None:
    other = world.another()
    for turn in range(3):
        snapshot_id = await world.take("web")
        assert (await other.find("web")).snapshot_id == snapshot_id
        assert len(await other.list()) == turn + 1
    await other.delete(snapshot_id)
    assert len(await world.catalog.list()) == 2 and await world.means(snapshot_id) is None


async def test_nothing_is_read_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither manifests nor directories, however many snapshots there are and whatever this process does to them."""
    taken = [await world.take(f"web:v{number}") for number in range(5)]
    service = SnapshotService(world.node.snapshots)
    catalog = SnapshotCatalog(service, service.delete)
    listed = await catalog.list()
    looks: list[str] = []
    monkeypatch.setattr(world.node.snapshots, "_present", lambda: looks.append("directory"))
    monkeypatch.setattr("agentenv.snapshots.files.decode", lambda *_: looks.append("manifest"))
    assert await catalog.list() is listed
    assert (await catalog.find("web:v3")).snapshot_id == taken[3]
    monkeypatch.setattr("agentenv.snapshots.files.encode", lambda _: b"{}")
    await catalog.delete(taken[3])
    added = world.store(own_template_id=listed[0].template_id, names=("web:v9",))
    assert [published.snapshot_id for published in await catalog.list()] == [*taken[:3], taken[4], added]
    assert (await catalog.find("web:v9")).snapshot_id == added
    assert looks == []


def _ids(nodes: tuple[SnapshotNode, ...]) -> list[object]:
    return [(node.snapshot_id, node.manifest is not None, _ids(node.children)) for node in nodes]


async def test_the_tree_of_a_sandbox_has_what_it_descends_from(world: World) -> None:
    root = world.store(sandbox_id="i1")
    unrelated = world.store(sandbox_id="i1", parent_id=root)
    gone = world.store(sandbox_id="i2", parent_id=root)
    child = world.store(sandbox_id="i2", parent_id=gone)
    second = world.store(sandbox_id="i2", parent_id=root)
    await world.catalog.delete(gone)
    assert _ids(await world.catalog.tree()) == [
        (root, True, [(unrelated, True, []), (second, True, [])]),
        (gone, False, [(child, True, [])]),
    ]
    assert _ids(await world.catalog.tree("i2")) == [
        (root, True, [(second, True, [])]),
        (gone, False, [(child, True, [])]),
    ]
    assert _ids(await world.catalog.tree("i1")) == [(root, True, [(unrelated, True, [])])]
    assert await world.catalog.tree("i3") == ()


@pytest.fixture
def store(world: World) -> Iterator[TemplateStore]:
    settings = Settings(home=world.node.home, sandbox=SandboxSettings())
    store = TemplateStore(settings.paths, settings, world.node.layers, world.catalog)
    layer = world.node.add_layer(b"plain", "template:base")
    store.register(Template("base", ("base", "ubuntu"), (layer.digest,), 1, 256, 1024))
    yield store


async def test_snapshots_are_templates(world: World, store: TemplateStore) -> None:
    first = await world.take("web:v1", env={"A": "b"}, default_user="dev", default_workdir="/srv")
    second = await world.take("web")
    unnamed = await world.take()
    template = await store.resolve("team/web:v1")
    made = world.node.snapshots.get(first)
    assert template == Template(
        template_id=made.own_template_id or "",
        names=("web",),
        layers=(made.disk_layers[0].digest,),
        vcpus=2,
        memory_mib=512,
        disk_mib=1024,
        default_user="dev",
        default_workdir="/srv",
        env={"A": "b"},
        snapshot_id=first,
        created_at=made.created_at,
    )
    assert (await store.resolve(second)).snapshot_id == second
    assert (await store.resolve("ubuntu")).snapshot_id is None
    listed = await store.list()
    assert listed[0].template_id == "base"
    assert {item.snapshot_id for item in listed[1:]} == {second, unnamed}, "one for each template"
    for item in listed:
        assert await store.resolve(item.template_id) == item
    assert await store.taken() == {"base", "ubuntu"}
    for reference in ("web:v2", "base:v1", f"base:{first}"):
        with pytest.raises(TemplateNotFoundError):
            await store.resolve(reference)
    with pytest.raises(InvalidRequestError):
        await store.resolve("a:b:c")


async def test_names_of_unreadable_templates_are_taken(world: World, store: TemplateStore) -> None:
    (world.node.home / "templates" / "base" / "template.json").write_text("{")
    assert await store.taken() == {"base"}


_ALIASES = ("web", "db")
_TAGS = ("default", "v1")


class Model:
    """What references mean, by going through everything each time."""

    def __init__(self, manifests: list[SnapshotManifest]) -> None:
        self.manifests = sorted(
            (each for each in manifests if not each.hidden), key=lambda each: (each.created_at, each.snapshot_id)
        )

    def tags(self, each: SnapshotManifest) -> set[tuple[str, str]]:
        own = each.own_template_id or each.snapshot_id
        if not each.names:
            return {(own, "default")}
        pairs = [tuple(name.split(":")) for name in each.names]
        return {(alias, tag) for alias, tag in pairs} | {(own, tag) for _, tag in pairs}

    def templates(self, each: SnapshotManifest) -> set[str]:
        return {each.own_template_id or each.snapshot_id, *(name.split(":")[0] for name in each.names)}

    def find(self, reference: str) -> str | None:
        name, _, tag = reference.partition(":")
        builds = [each for each in self.manifests if name in self.templates(each)]
        for each in reversed(builds):
            if each.snapshot_id == tag:
                return tag
        for each in reversed(builds):
            if (name, tag or "default") in self.tags(each):
                return each.snapshot_id
        if tag in ("", "default"):
            for each in self.manifests:
                if each.snapshot_id == name:
                    return name
            for each in reversed(builds):
                if name == (each.own_template_id or each.snapshot_id):
                    return builds[-1].snapshot_id
        return None


_names = st.lists(st.builds("{}:{}".format, st.sampled_from(_ALIASES), st.sampled_from(_TAGS)), unique=True, max_size=2)
_builds = st.tuples(_names, st.sampled_from((None, "t1", "t2")), st.integers(0, 3), st.sampled_from((0, 0, 0, 1)))


@given(st.lists(_builds | st.integers(0, 5), max_size=14))
def test_references_mean_what_a_model_says(steps: list[tuple[list[str], str | None, int, int] | int]) -> None:
    """Builds that come, with any age, and go (a number: which of those that are there), in any order."""
    names = SnapshotNames()
    there: list[SnapshotManifest] = []
    gone: list[str] = []
    for number, step in enumerate(steps):
        if isinstance(step, int):
            if step < len(there):
                gone.append(there[step].snapshot_id)
                names.removed(there.pop(step))
            continue
        called, own, age, hidden = step
        made = manifest(
            "pause-" * hidden + f"{number * 7 % 16:x}" + _UUID[1:],
            names=tuple(called),
            own_template_id=own,
            created_at=BEGINNING + timedelta(seconds=age),
        )
        there.append(made)
        names.added(made)
    model = Model(there)
    every = [each.snapshot_id for each in there] + gone[:2]
    for owner in (*_ALIASES, "t1", "t2", *every):
        for tag in ("", *_TAGS, *every):
            reference = f"{owner}:{tag}" if tag else owner
            found = names.find(parse_reference(reference))
            assert (found and found.snapshot_id) == model.find(reference), reference
    listed = names.list()
    assert [each.snapshot_id for each in listed] == [each.snapshot_id for each in model.manifests]
    references = [reference for each in listed for reference in {each.reference, *each.names}]
    assert len(set(references)) == len(references)
    for each in listed:
        assert names.find(parse_reference(each.reference)) == each
        for name in each.manifest.names:
            assert (names.find(parse_reference(name)) == each) == (name in each.names)
        assert each.reference == (each.names or (each.reference,))[0]
    for template_id in names.template_ids():
        assert names.find(parse_reference(template_id)) in names.builds(template_id)


@given(st.text(max_size=40))
def test_template_ids_of_aliases_are_ids(alias: str) -> None:
    assert ids.template_id_for(alias) == ids.template_id_for(alias)
    assert re.fullmatch("t[a-z0-9]{19}", ids.template_id_for(alias))
    assert ids.template_id_for(alias) != ids.template_id_for(alias + "x")
