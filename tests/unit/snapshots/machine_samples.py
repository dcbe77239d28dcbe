"""A node with real layers, memory packed by the real code, and a disk that is made of whatever a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from agentenv.guest.assets import GuestAssets
from agentenv.snapshots.machines import Capture, SavedMachines, SavedMemory
from agentenv.snapshots.manifest import MachineShape
from agentenv.snapshots.repository import LocalSnapshots
from agentenv.snapshots.service import SnapshotService
from agentenv.storage.layers import LayerStore, StoredLayer
from agentenv.storage.memory import pack_memory, unpack_memory
from agentenv.vmm.base import VmmFacts

MIB = 1024 * 1024
FACTS = VmmFacts("qemu", "7.2", "tcg", "microvm", "max", frozenset(), 0)


class Disk:
    """One disk, whose chain may change between two looks at it."""

    def __init__(self, layers: LayerStore) -> None:
        self.layers = layers
        self.collections = 0
        self.chains: list[tuple[StoredLayer, ...]] = []
        self.captured = 0
        self.storing = asyncio.Event()
        """Set while sealed layers come into the store at once."""
        self.storing.set()

    async def capture(self, disk_id: str, *, sealed: Callable[[], None] | None = None) -> StoredLayer:
        self.captured += 1
        if sealed is not None:
            sealed()
        await self.storing.wait()
        return self.chains[-1][-1]

    def collect_soon(self) -> None:
        self.collections += 1
        self.layers.collect_garbage()

    async def chain(self, disk_id: str) -> tuple[StoredLayer, ...]:
        return self.chains.pop(0) if len(self.chains) > 1 else self.chains[0]


class MachineNode:
    def __init__(self, home: Path) -> None:
        self.home = home
        self.layers = LayerStore(home / "layers")
        self.snapshots = LocalSnapshots(home / "snapshots", self.layers)
        self.disk = Disk(self.layers)
        assets = home / "assets"
        assets.mkdir()
        for name in ("vmlinux-1-a", "initramfs-a"):
            (assets / name).write_text(name)
        self.assets = GuestAssets(assets / "vmlinux-1-a", "1", assets / "initramfs-a", "0", assets / "blockd")
        self.facts = FACTS
        self.memory = home / "memory"
        with self.memory.open("wb") as file:
            file.truncate(4 * MIB)
        self.state = home / "state"
        self.state.write_bytes(b"devices")
        self.saved = self.machines()

    async def begin(self) -> None:
        """Give the disk its first layer."""
        self.disk.chains = [(await self.layer(b"disk"),)]

    def machines(self, assets: GuestAssets | None = None) -> SavedMachines:
        service = SnapshotService(self.snapshots)
        return SavedMachines(service, self.layers, self.disk, assets or self.assets, lambda: self.facts)

    def touch(self, offset: int, content: bytes) -> None:
        with self.memory.open("r+b") as file:
            file.seek(offset)
            file.write(content)

    async def layer(self, content: bytes) -> StoredLayer:
        raw, out = self.home / "raw", self.home / "raw.layer"
        raw.write_bytes(content.ljust(MIB, b"\0"))
        await pack_memory(raw, (), out)
        return self.layers.import_file(out, owner="disk:i1")

    def capture(
        self,
        snapshot_id: str,
        parent_id: str | None = None,
        *,
        memory: bool = True,
        names: tuple[str, ...] = (),
        own_template_id: str | None = None,
    ) -> Capture:
        return Capture(
            names=names,
            own_template_id=own_template_id,
            snapshot_id=snapshot_id,
            sandbox_id="i1",
            template_id="base",
            parent_id=None,
            memory_parent_id=parent_id,
            machine=MachineShape(2, 4, MIB),
            agent_version="0.6.7",
            agent_responsive=True,
            default_user="user",
            default_workdir=None,
            env={},
            metadata={},
            memory=SavedMemory(self.memory, self.state, "token") if memory else None,
        )

    async def loaded(self, stack: Sequence[Path]) -> bytes:
        out = self.home / "out"
        await unpack_memory(stack, out, replace=True)
        return out.read_bytes()
