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
from pathlib import Path

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from harness.server import RunningServer, new_home
from support.agent import run_command
from support.raw_machines import RawMachines
from support.report import percentiles, write_section


async def raw_boot(machines: RawMachines) -> float:
    """One boot from disk to a listening agent, seconds."""
    begun = time.perf_counter()
    made = await machines.boot()
    took = time.perf_counter() - begun
    await machines.end(made.machine, made.name, made.slot)
    return took


async def measure(server: RunningServer, raw_home: Path, rounds: int) -> None:
    raw, create, first_exec, kill = [], [], [], []
    key = {"X-API-KEY": server.api_key}
    async with RawMachines(raw_home) as machines, aiohttp.ClientSession() as session:
        for _ in range(rounds):
            raw.append(await raw_boot(machines))
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
        description = machines.description
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
