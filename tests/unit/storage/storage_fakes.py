"""Toy layers (those of `fake_daemon.py`) and their tools, and the fake daemon as a program to start."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import sys
import uuid as uuids
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentenv.errors import BlockDaemonError, LayerError
from agentenv.storage.blockd_connection import Connection
from agentenv.storage.layer_tools import LayerFacts
from agentenv.vmm.process import ProcessHandle, read_start_time

FAKE_DAEMON = Path(__file__).with_name("fake_daemon.py")


def make_layer(path: Path, blocks: Mapping[int, str], *, parent: str | None = None, padding: int = 0) -> Path:
    """Write a sealed toy layer; `padding` makes it larger by so many bytes."""
    content = {
        "uuid": str(uuids.uuid4()),
        "parent_uuid": parent,
        "virtual_size": 1 << 20,
        "sealed": True,
        "blocks": {str(number): text for number, text in blocks.items()},
        "padding": "x" * padding,
    }
    path.write_text(json.dumps(content))
    return path


def digest_of(path: Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"


def read_blocks(paths: Sequence[Path]) -> dict[str, str]:
    """What a stack of toy layers reads as."""
    blocks: dict[str, str] = {}
    for path in paths:
        blocks |= json.loads(path.read_text())["blocks"]
    return blocks


class ToyTools:
    """The layer tools of toy layers."""

    def inspect(self, path: Path) -> LayerFacts:
        data = path.read_bytes()
        try:
            content = json.loads(data)
            if not content["sealed"]:
                raise LayerError(f"{path} is a writable layer")
            return LayerFacts(
                digest=f"sha256:{hashlib.sha256(data).hexdigest()}",
                size=len(data),
                uuid=content["uuid"],
                parent_uuid=content["parent_uuid"],
                virtual_size=content["virtual_size"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise LayerError(f"{path} is no layer") from error

    def verify(self, path: Path) -> str:
        return self.inspect(path).digest

    def merge(self, layers: Sequence[Path], out: Path, *, uuid: str | None) -> None:
        first = json.loads(layers[0].read_text())
        content = {
            "uuid": uuid or str(uuids.uuid4()),
            "parent_uuid": first["parent_uuid"],
            "virtual_size": first["virtual_size"],
            "sealed": True,
            "blocks": read_blocks(layers),
        }
        out.write_text(json.dumps(content))


def make_program(path: Path, *, protocol: int = 1) -> Path:
    """Make an executable that is the fake daemon, speaking this protocol version."""
    path.write_text(
        f'#!/bin/sh\nFAKE_PROTOCOL={protocol} exec {sys.executable} -S {FAKE_DAEMON} "$@"\n', encoding="utf-8"
    )
    path.chmod(0o755)
    return path


async def ask(socket: Path, method: str, /, **params: Any) -> dict[str, Any]:
    """Send any request to the daemon at a socket, on a connection of its own. No answer when it dies of it."""
    connection = await Connection.open(socket)
    try:
        return dict(await connection.request(method, params))
    except BlockDaemonError as error:
        if error.code == "unavailable":
            return {}
        raise
    finally:
        await connection.close()


async def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something of another process holds; there is no event for it."""
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def files_below(path: Path) -> set[str]:
    """Names of all files below a directory, relative to it."""
    return {
        os.path.relpath(os.path.join(directory, name), path)  # noqa: PTH118
        for directory, _, names in os.walk(path)
        for name in names
    }


async def end_daemon(socket: Path) -> None:
    """End the daemon at a socket, if there is one, and wait for its end."""
    try:
        connection = await Connection.open(socket)
    except BlockDaemonError:
        return
    pid = connection.greeting.pid
    await connection.close()
    start_time = read_start_time(pid)
    process = None if start_time is None else ProcessHandle.adopt(pid, start_time)
    if process is not None:
        process.kill()
        await process.wait()


def kill_daemons(state: Path) -> None:
    """Kill the fake daemons of a state directory that a failed test left."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if os.fsencode(FAKE_DAEMON) in words and os.fsencode(state) in words:
            os.kill(int(process.name), signal.SIGKILL)
