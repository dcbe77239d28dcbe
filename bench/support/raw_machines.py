"""Machines of a template with the rooms below the orchestrator alone: what the calls of a server stand beside.

This file must not know what is measured.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from agentenv.config import MIB, load_settings
from agentenv.guest.assets import load_assets
from agentenv.guest.kernel import KERNEL_ARGUMENTS
from agentenv.network.base import GUEST_MAC, TAP_NAME, Slot
from agentenv.network.pool import SlotPool
from agentenv.orchestrator.launch import guest_network
from agentenv.templates.store import TemplateStore
from agentenv.vmm.base import Machine, MachineConfig, NetworkInterface
from agentenv.vmm.probe import choose_vmm
from harness.storage import storage_of


@dataclass
class RawMachine:
    """A machine that runs, and what it has."""

    name: str
    config: MachineConfig
    slot: Slot
    machine: Machine


class RawMachines:
    """Boots and loads machines of the base template, until the agent listens."""

    def __init__(self, home: Path) -> None:
        self._settings = settings = load_settings().model_copy(update={"home": home})
        self._assets = load_assets(settings)
        self._slots = SlotPool(settings.network, home)
        self._stack = AsyncExitStack()
        self._count = 0

    async def __aenter__(self) -> RawMachines:
        settings = self._settings
        settings.paths.sandboxes.mkdir()
        storage = await self._stack.enter_async_context(storage_of(settings.home))
        self._disks = storage.disks
        self._template = await TemplateStore(settings.paths, settings, storage.layers).resolve("base")
        self.vmm = await choose_vmm(settings, self._assets.kernel)
        self._stack.push_async_callback(self.vmm.close)
        self._stack.push_async_callback(self._slots.close)
        await self._slots.start(())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def description(self) -> str:
        return f"{self.vmm.name} {self.vmm.version}, {self.vmm.acceleration}"

    async def boot(self) -> RawMachine:
        """From disk to a listening agent."""
        name, directory = self._new_directory()
        disk = await self._disks.create(name, self._template.layers, self._template.disk_mib * MIB, directory)
        slot = await self._slots.acquire()
        config = MachineConfig(
            machine_id=name,
            directory=directory,
            kernel=self._assets.kernel,
            initramfs=self._assets.initramfs,
            vcpus=self._template.vcpus,
            memory_mib=self._template.memory_mib,
            disks=(disk,),
            interface=NetworkInterface(namespace=slot.namespace_path, tap=TAP_NAME, mac=GUEST_MAC),
            guest_network=guest_network(self._settings.network.uplink_mtu),
            extra_arguments=KERNEL_ARGUMENTS,
        )
        machine = await self.vmm.boot(config)
        await self._slots.wait_ready(slot)
        return RawMachine(name, config, slot, machine)

    async def prepare_load(self, source: RawMachine) -> tuple[str, MachineConfig, Slot]:
        """All that a copy of a machine needs but its process: name, configuration with disk and network, slot."""
        name, directory = self._new_directory()
        disk = await self._disks.create(name, self._template.layers, self._template.disk_mib * MIB, directory)
        slot = await self._slots.acquire()
        interface = NetworkInterface(namespace=slot.namespace_path, tap=TAP_NAME, mac=GUEST_MAC)
        config = replace(source.config, machine_id=name, directory=directory, disks=(disk,), interface=interface)
        return name, config, slot

    async def end(self, machine: Machine, name: str, slot: Slot) -> None:
        """End a machine and give back what it has."""
        await machine.kill()
        await self._disks.remove(name)
        await self._slots.release(slot)

    def _new_directory(self) -> tuple[str, Path]:
        self._count += 1
        name = f"raw{self._count}"
        directory = self._settings.paths.sandbox(name)
        directory.mkdir(mode=0o700)
        self.vmm.prepare_directory(name, directory)
        return name, directory
