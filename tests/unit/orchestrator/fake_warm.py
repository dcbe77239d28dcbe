"""Processes of the fake host that wait for their machine. The pool of them is the real one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agentenv.vmm.base import MachineConfig

if TYPE_CHECKING:
    from fakes import FakeMachine, FakeVmm, Script, World


class FakeWaiting:
    """A process in a slot, with a directory and a memory file of its own until it is moved."""

    def __init__(self, world: World, script: Script, vmm: FakeVmm, config: MachineConfig) -> None:
        self._world, self._script, self._vmm, self._config = world, script, vmm, config
        assert config.interface is not None
        self.index = int(config.interface.namespace.name.removeprefix("fake-"))
        self.directory = config.directory
        self.directory.mkdir(parents=True)
        self.memory = vmm.prepare_memory(config.machine_id)
        self.memory.touch()
        world.waiting.append(self)

    @property
    def alive(self) -> bool:
        return self in self._world.waiting

    async def move(self, machine_id: str, directory: Path) -> None:
        await self._script.at("waiting.move")
        if directory.exists():
            for path in directory.iterdir():
                path.rename(self.directory / path.name)
            directory.rmdir()
        self.directory.rename(directory)
        self.directory = directory
        memory = self._vmm.prepare_memory(machine_id)
        assert not memory.exists()
        self.memory = self.memory.rename(memory)

    async def load(self, config: MachineConfig, state: Path) -> FakeMachine:
        assert config.interface == self._config.interface
        assert (config.directory, config.disks) == (self.directory, self._config.disks)
        assert self.alive
        try:
            return await self._vmm.load_at("waiting.load", config, state, self.memory)
        finally:
            if not self._script.dead:
                self._end()

    async def discard(self) -> None:
        await self._script.at("waiting.discard")
        self._end()
        if self.directory == self._config.directory and self.directory.exists():
            self.directory.rmdir()

    def _end(self) -> None:
        self.memory.unlink(missing_ok=True)
        if self.alive:
            self._world.waiting.remove(self)
