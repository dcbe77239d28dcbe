"""The guest agent on this host, without a VM, and a client of it that adds as little as possible of its own."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

BINARY = Path(__file__).resolve().parents[2] / "build" / "aenv-guest"


@contextmanager
def native_agent(address: str, port: int, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Run the agent on `address:port` until the block ends."""
    process = subprocess.Popen(
        [
            str(BINARY),
            "agent",
            "--listen",
            f"{address}:{port}",
            "--private-peer",
            "any",
            "--state-file",
            str(directory / "agent.json"),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if str(port) in line:
                break
        yield process
    finally:
        process.kill()
        process.wait()


async def run_command(session: aiohttp.ClientSession, url: str, command: list[str], headers: dict[str, str]) -> bytes:
    """One `process.Process/Start` from request to end of stream. Returns the raw stream."""
    payload = json.dumps({"process": {"cmd": command[0], "args": command[1:]}, "stdin": False}).encode()
    async with session.post(
        f"{url}/process.Process/Start",
        data=struct.pack(">BI", 0, len(payload)) + payload,
        headers={"Content-Type": "application/connect+json", "Connect-Protocol-Version": "1", **headers},
    ) as answer:
        raw = await answer.read()
        if answer.status != 200 or b'"end"' not in raw:
            raise RuntimeError(f"exec failed: {answer.status} {raw[:200]!r}")
        return raw
