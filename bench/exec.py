"""What a command costs, natively: the agent on this host, asked directly and through the server's port, in one run.

Run: .venv/bin/python bench/exec.py
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from support.agent import native_agent, run_command
from support.ingress import SANDBOX, ingress
from support.report import percentiles, write_section

GUEST = "127.0.0.2"
PORT = 49983
ROUNDS = 400
BURST = 200
MIB = 256
BLOCK = bytes(range(256)) * 1024


async def measure(direct: str, through: str) -> None:
    headers = {"E2b-Sandbox-Id": SANDBOX, "E2b-Sandbox-Port": str(PORT)}
    connector = aiohttp.TCPConnector(limit=BURST)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=120)) as session:
        ways = {"agent directly": direct, "through the port": through}
        await _first_answer(session, ways, headers)
        single = await _sequential(session, ways, headers)
        burst = await _burst(session, ways, headers)
        files = await _files(session, ways, headers)
    base = statistics.median(single["agent directly"])
    rows = []
    for way in ways:
        p50, p95, p99 = percentiles(single[way])
        beyond = f"{(statistics.median(single[way]) - base) * 1000:+.2f}"
        rows.append([way, p50, beyond, p95, p99, f"{BURST / burst[way]:.0f}", *(f"{rate:.0f}" for rate in files[way])])
    write_section(
        "exec",
        "Exec and files, native",
        f"`/bin/true` by `process.Process/Start`, from request to end of stream; {ROUNDS} in turn, the two ways "
        f"interleaved; then {BURST} at once; then {MIB} MiB to and from `/files` (page cache, median of 3).",
        ["way", "p50 ms", "beyond direct", "p95 ms", "p99 ms", "at once, per s", "upload MB/s", "download MB/s"],
        rows,
        "Budget (design §6): through the port at most 1 ms beyond the agent directly. The client, the proxy and "
        "the agent share the cores of one machine, so that throughput is what is left for each.",
    )


async def _first_answer(session: aiohttp.ClientSession, ways: dict[str, str], headers: dict[str, str]) -> None:
    for url in ways.values():
        for _ in range(20):
            await run_command(session, url, ["/bin/true"], headers)


async def _sequential(
    session: aiohttp.ClientSession, ways: dict[str, str], headers: dict[str, str]
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, url in ways.items():
            begun = time.perf_counter()
            await run_command(session, url, ["/bin/true"], headers)
            times[way].append(time.perf_counter() - begun)
    return times


async def _burst(session: aiohttp.ClientSession, ways: dict[str, str], headers: dict[str, str]) -> dict[str, float]:
    seconds = {}
    for way, url in ways.items():
        begun = time.perf_counter()
        await asyncio.gather(*(run_command(session, url, ["/bin/true"], headers) for _ in range(BURST)))
        seconds[way] = time.perf_counter() - begun
    return seconds


async def _files(
    session: aiohttp.ClientSession, ways: dict[str, str], headers: dict[str, str]
) -> dict[str, tuple[float, float]]:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(MIB * 1024 * 1024 // len(BLOCK)):
            yield BLOCK

    rates: dict[str, tuple[float, float]] = {}
    size = MIB * 1024 * 1024
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        query = {"path": file.name, "username": "root"}
        typed = {**headers, "Content-Type": "application/octet-stream", "Accept-Encoding": "identity"}
        for way, url in ways.items():
            up, down = [], []
            for _ in range(3):
                begun = time.perf_counter()
                async with session.post(f"{url}/files", params=query, data=body(), headers=typed) as answer:
                    answer.raise_for_status()
                up.append(size / (time.perf_counter() - begun) / 1e6)
                begun = time.perf_counter()
                async with session.get(f"{url}/files", params=query, headers=typed) as answer:
                    answer.raise_for_status()
                    got = 0
                    async for chunk in answer.content.iter_chunked(1 << 20):
                        got += len(chunk)
                    assert got == size
                down.append(size / (time.perf_counter() - begun) / 1e6)
            rates[way] = (statistics.median(up), statistics.median(down))
    return rates


def main() -> None:
    with tempfile.TemporaryDirectory() as directory, native_agent(GUEST, PORT, Path(directory)), ingress(GUEST) as url:
        asyncio.run(measure(f"http://{GUEST}:{PORT}", url))


if __name__ == "__main__":
    main()
