"""What takes up the node's disk: each layer counts once where it belongs, and is not looked at by itself."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes import FakeHost, World

from agentenv.config import Settings, SnapshotSettings
from agentenv.errors import StorageError
from agentenv.orchestrator.model import CollectedSpace
from agentenv.orchestrator.space import NodeSpace
from agentenv.storage.layers import LayerStore

MIB = 1 << 20
MANY = 10_000


@pytest.fixture
def layers(world: World) -> Iterator[LayerStore]:
    store = LayerStore(world.home / "layers")
    store.usage()
    yield store
    store.close()


def space_of(world: World, layers: LayerStore, budget_mib: int | None = None) -> NodeSpace:
    settings = Settings(home=world.home, snapshots=SnapshotSettings(budget_mib=budget_mib))
    return NodeSpace(settings, layers, FakeHost(world))


def put(world: World, sizes: dict[str, int], owners: dict[str, list[str]]) -> None:
    """Write an index as the store would have it."""
    with sqlite3.connect(world.home / "layers" / "index.db") as connection:
        connection.executemany(
            "INSERT INTO layers (digest, size, virtual_size) VALUES (?, ?, 0)",
            [(digest_of(name), size) for name, size in sizes.items()],
        )
        connection.executemany(
            "INSERT INTO layer_references (owner, position, digest) VALUES (?, ?, ?)",
            [
                (owner, position, digest_of(name))
                for owner, names in owners.items()
                for position, name in enumerate(names)
            ],
        )
    connection.close()


def digest_of(name: str) -> str:
    return "sha256:" + name.encode().hex().rjust(64, "0")


def write(path: Path, size: int) -> int:
    """Make a file; returns what it takes up."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x" * size)
    return path.stat().st_blocks * 512


async def test_each_layer_counts_once_where_it_belongs(world: World, layers: LayerStore) -> None:
    put(
        world,
        {"base": 1, "disk": 10, "named": 100, "both": 1000, "paused": 10_000, "garbage": 100_000, "merged": 1_000_000},
        {
            "template:base": ["base"],
            "template:other": ["base"],
            "disk:i1": ["base", "disk"],
            "merge:i1": ["merged"],
            "snapshot:pause": ["named"],
            "snapshot:00000000-0000-0000-0000-000000000000": ["base", "named", "both"],
            "snapshot:zzz": ["named", "both"],
            "snapshot:pause-i1-00000000": ["base", "both", "paused"],
            "snapshots:none of ours": ["merged"],
            "x": ["base"],
        },
    )
    named = write(world.home / "snapshots" / "zzz" / "manifest.json", 5000)
    named += write(world.home / "snapshots" / "zzz" / "state", 50_000)
    hidden = write(world.home / "snapshots" / "pause-i1-00000000" / "state", 9000)
    uppers = write(world.home / "disks" / "i1" / "upper.data", 70_000) + write(world.home / "disks" / "i2" / "a", 1)
    (world.home / "disks" / "i1" / "hole").touch()
    with (world.home / "disks" / "i1" / "hole").open("r+b") as hole:
        hole.truncate(1 << 40)
    (world.home / "disks" / "dangling").symlink_to("nowhere")
    report = await space_of(world, layers, budget_mib=3).report()
    assert report.layers_bytes == 1_111_111
    assert report.garbage_bytes == 100_000
    assert report.templates_bytes == 1
    assert report.snapshots_bytes - 1 - 100 - 1000 in range(named, named + 64 * 1024)
    assert report.paused_bytes - 1 - 1000 - 10_000 in range(hidden, hidden + 64 * 1024)
    assert report.disks_bytes in range(uppers, uppers + 64 * 1024)
    assert (report.budget_bytes, report.free_bytes) == (3 * MIB, 1 << 40)


async def test_an_empty_node(world: World, layers: LayerStore) -> None:
    report = await space_of(world, layers).report()
    assert (report.layers_bytes, report.snapshots_bytes, report.paused_bytes, report.disks_bytes) == (0, 0, 0, 0)
    assert report.budget_bytes is None


async def test_what_cannot_be_read_is_said(world: World, layers: LayerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> object:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("agentenv.orchestrator.space.os.scandir", refuse)
    with pytest.raises(StorageError, match="snapshots: Permission denied"):
        await space_of(world, layers).report()


async def test_many_snapshots_take_as_many_queries_as_one(world: World, layers: LayerStore) -> None:
    put(
        world,
        {f"{number}": 1 for number in range(MANY)},
        {f"snapshot:{number}": ["0", f"{number}"] for number in range(1, MANY)}
        | {f"snapshot:pause-{number}": [f"{number}"] for number in range(10)},
    )
    statements: list[str] = []
    with layers._index.reading() as connection:
        connection.set_trace_callback(statements.append)
    report = await space_of(world, layers).report()
    assert (report.layers_bytes, report.snapshots_bytes, report.paused_bytes) == (MANY, MANY, 10)
    assert len(statements) < 10


async def test_garbage_goes(world: World, layers: LayerStore) -> None:
    put(world, {"kept": 1, "one": 10, "two": 100}, {"disk:i1": ["kept"]})
    space = space_of(world, layers)
    assert await space.collect() == CollectedSpace(2, 110)
    assert await space.collect() == CollectedSpace(0, 0)
    assert (await space.report()).layers_bytes == 1
