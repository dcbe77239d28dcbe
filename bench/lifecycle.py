"""What starting a sandbox costs beside a raw boot of the same guest, alternating in one run; then first exec and kill.

Needs root and built assets. Run: .venv/bin/python bench/lifecycle.py [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from agentenv.config import MIB, load_settings
from agentenv.guest.assets import load_assets
from agentenv.guest.kernel import KERNEL_ARGUMENTS
from agentenv.network.base import GUEST_MAC, TAP_NAME
from agentenv.network.pool import SlotPool
from agentenv.orchestrator.launch import guest_network
from agentenv.templates.store import TemplateStore
from agentenv.vmm.base import MachineConfig, NetworkInterface
from agentenv.vmm.probe import choose_vmm
from harness.server import RunningServer, new_home
from harness.storage import storage_of
from support.agent import run_command
from support.report import percentiles, write_section


class RawBoots:
    """Boots of the template with the rooms below the orchestrator alone: slot, disk, VMM, until the agent listens."""

    def __init__(self, home: Path) -> None:
        self._settings = settings = load_settings().model_copy(update={"home": home})
        self._assets = load_assets(settings)
        self._slots = SlotPool(settings.network, home)
        self._stack = AsyncExitStack()
        self._count = 0

    async def __aenter__(self) -> RawBoots:
        settings = self._settings
        settings.paths.sandboxes.mkdir()
        storage = await self._stack.enter_async_context(storage_of(settings.home))
        self._disks = storage.disks
        self._template = await TemplateStore(settings.paths, settings, storage.layers).resolve("base")
        self._vmm = await choose_vmm(settings, self._assets.kernel)
        self._stack.push_async_callback(self._vmm.close)
        self._stack.push_async_callback(self._slots.close)
        await self._slots.start(())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def description(self) -> str:
        return f"{self._vmm.name} {self._vmm.version}, {self._vmm.acceleration}"

    async def boot(self) -> float:
        """One boot from disk to a listening agent, seconds."""
        self._count += 1
        name = f"raw{self._count}"
        directory = self._settings.paths.sandbox(name)
        directory.mkdir(mode=0o700)
        self._vmm.prepare_directory(name, directory)
        begun = time.perf_counter()
        disk = await self._disks.create(name, self._template.layers, self._template.disk_mib * MIB, directory)
        slot = await self._slots.acquire()
        machine = await self._vmm.boot(
            MachineConfig(
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
        )
        await self._slots.wait_ready(slot)
        took = time.perf_counter() - begun
        await machine.kill()
        await self._disks.remove(name)
        await self._slots.release(slot)
        return took


async def measure(server: RunningServer, raw_home: Path, rounds: int) -> None:
    raw, create, first_exec, kill = [], [], [], []
    key = {"X-API-KEY": server.api_key}
    async with RawBoots(raw_home) as boots, aiohttp.ClientSession() as session:
        for _ in range(rounds):
            raw.append(await boots.boot())
            begun = time.perf_counter()
            async with session.post(f"{server.url}/v2/sandboxes", json={"templateID": "base"}, headers=key) as answer:
                assert answer.status == 201, await answer.text()
                made = await answer.json()
            ready = time.perf_counter()
            headers = {
                "E2b-Sandbox-Id": made["sandboxID"],
                "E2b-Sandbox-Port": "49983",
                "X-Access-Token": made["envdAccessToken"],
            }
            await run_command(session, server.url, ["/bin/true"], headers)
            ran = time.perf_counter()
            async with session.delete(f"{server.url}/sandboxes/{made['sandboxID']}", headers=key) as answer:
                assert answer.status == 204
            create.append(ready - begun)
            first_exec.append(ran - ready)
            kill.append(time.perf_counter() - ran)
        description = boots.description
    share = statistics.median(create) - statistics.median(raw)
    rows = [
        ["raw: disk, slot, boot, agent listens", *percentiles(raw)],
        ["`POST /v2/sandboxes`, request to 201", *percentiles(create)],
        ["first `/bin/true` after it", *percentiles(first_exec)],
        ["`DELETE`, request to 204", *percentiles(kill)],
    ]
    write_section(
        "lifecycle",
        "Create, first exec, kill",
        f"{description}. {rounds} rounds; in each a raw boot of the same template with the VMM room alone, then a "
        "create through the API, one command, one kill.",
        ["step", "p50 ms", "p95 ms", "p99 ms"],
        rows,
        f"Create beyond the raw boot, difference of medians: {share * 1000:+.0f} ms. It holds the agent's `/init`, "
        "which under emulation costs translation of guest code that runs for the first time.",
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    raw_home = new_home()
    try:
        with RunningServer() as server:
            asyncio.run(measure(server, raw_home, arguments.rounds))
    finally:
        shutil.rmtree(raw_home, ignore_errors=True)


if __name__ == "__main__":
    main()
