"""The client of the block daemon: typed answers, errors of our tree, broken connections, events across restarts."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentenv.errors import BlockDaemonError, InsufficientStorageError, LayerError
from agentenv.storage.blockd import BlockClient
from agentenv.storage.blockd_messages import DaemonEvent, Export, Upper
from agentenv.storage.daemon import BlockDaemonProcess
from unit.storage.storage_fakes import ask, eventually, make_layer


@pytest.fixture
def socket(home: Path) -> Path:
    return home / "run" / "blockd.sock"


async def open_disk(daemon: BlockDaemonProcess, home: Path, name: str = "d") -> Path:
    base = make_layer(home / "base", {0: "a"})
    directory = home / name
    directory.mkdir()
    await daemon.client.open(name, [base], Upper(directory))
    return directory


async def test_every_call_has_a_typed_answer(home: Path, daemon: BlockDaemonProcess, socket: Path) -> None:
    client = daemon.client
    base = make_layer(home / "base", {0: "a"})
    directory = home / "d"
    directory.mkdir()
    device = await client.open("d", [base], Upper(directory), virtual_size=4096)
    assert (device.name, device.lowers, device.upper) == ("d", (base,), Upper(directory))
    assert (device.virtual_size, device.read_only, device.exports) == (4096, False, ())
    export = await client.export_nbd("d", home / "d.sock")
    assert export == Export("nbd", home / "d.sock")
    assert (await client.list())[0].exports == (export,)
    await client.flush("d")
    sealed = await client.restack("d", home / "captured", uuid="11111111-2222-3333-4444-555555555555")
    assert (sealed.path, sealed.virtual_size, sealed.paused_us) == (home / "captured", 4096, 12)
    merged = make_layer(home / "merged", {0: "b"})
    await client.replace("d", first=0, count=2, layer=merged)
    await client.resize("d", 8192)
    (device,) = await client.list()
    assert (device.lowers, device.virtual_size) == ((merged,), 8192)
    statistics = await client.statistics()
    assert statistics.open_layers == 1
    assert statistics.devices["d"].depth == 1
    assert [(use.path, use.devices) for use in statistics.layers] == [(merged, 1)]
    await client.unexport("d", home / "d.sock")
    assert await client.close_device("d", remove_upper=True)
    assert not await client.close_device("d", remove_upper=True)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("no_space", InsufficientStorageError),
        ("bad_layer", LayerError),
        ("conflict", BlockDaemonError),
        ("io", BlockDaemonError),
        ("something new", BlockDaemonError),
    ],
)
async def test_refusals_are_errors_of_our_tree(
    daemon: BlockDaemonProcess, socket: Path, code: str, kind: type[Exception]
) -> None:
    await ask(socket, "fake_refuse", method="flush", code=code)
    with pytest.raises(kind, match="flush of block device d: told to refuse") as caught:
        await daemon.client.flush("d")
    if isinstance(caught.value, BlockDaemonError):
        assert caught.value.code == code
    with pytest.raises(BlockDaemonError) as missing:
        await daemon.client.flush("d")
    assert missing.value.code == "not_found"


async def test_many_requests_at_once(home: Path, daemon: BlockDaemonProcess) -> None:
    base = make_layer(home / "base", {0: "a"})
    names = [f"d{number}" for number in range(50)]
    for name in names:
        (home / name).mkdir()
    devices = await asyncio.gather(*(daemon.client.open(name, [base], Upper(home / name)) for name in names))
    assert [device.name for device in devices] == names
    assert len(await daemon.client.list()) == 50
    closed = await asyncio.gather(*(daemon.client.close_device(name, remove_upper=True) for name in names))
    assert closed == [True] * 50


async def test_a_cancelled_call_does_not_disturb_later_ones(
    home: Path, daemon: BlockDaemonProcess, socket: Path
) -> None:
    await open_disk(daemon, home)
    await ask(socket, "fake_hold", method="flush")
    call = asyncio.create_task(daemon.client.flush("d"))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert [device.name for device in await daemon.client.list()] == ["d"]
    await ask(socket, "fake_release", method="flush")
    await asyncio.gather(*(daemon.client.flush("d") for _ in range(20)))


async def test_calls_that_may_be_repeated_survive_the_daemons_death(
    home: Path, daemon: BlockDaemonProcess, socket: Path
) -> None:
    await open_disk(daemon, home)
    pid = daemon.pid
    await ask(socket, "fake_die", method="export", when="after")
    export = await daemon.client.export_nbd("d", home / "d.sock")
    assert export.path == home / "d.sock"
    assert daemon.pid not in (None, pid)
    await ask(socket, "fake_die", method="restack", when="after")
    with pytest.raises(BlockDaemonError, match="restack of block device d") as caught:
        await daemon.client.restack("d", home / "captured")
    assert caught.value.code == "unavailable"
    (device,) = await daemon.client.list()
    assert len(device.lowers) == 2, "restacked once, not twice"


async def test_a_request_that_was_never_sent_is_sent_later(
    home: Path, daemon: BlockDaemonProcess, socket: Path
) -> None:
    await open_disk(daemon, home)
    pid = daemon.pid
    await ask(socket, "fake_die", method="fake_calls", when="before")
    await ask(socket, "fake_calls")
    await eventually(lambda: daemon.pid not in (None, pid))
    sealed = await daemon.client.restack("d", home / "captured")
    assert sealed.path.exists()


async def test_events_go_on_after_a_restart(home: Path, daemon: BlockDaemonProcess, socket: Path) -> None:
    received: asyncio.Queue[DaemonEvent] = asyncio.Queue()

    async def listen() -> None:
        async for event in daemon.client.events():
            received.put_nowait(event)

    async def send(**event: str) -> DaemonEvent:
        async with asyncio.timeout(20):
            # The subscription is another connection's.
            while (await ask(socket, "fake_event", **event)).get("subscribers", 0) == 0:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return await received.get()

    task = asyncio.create_task(listen())
    assert await send(event="no_space", device="d") == DaemonEvent("no_space", "d", "")
    assert await send(event="io_error", device="e", message="m") == DaemonEvent("io_error", "e", "m")
    await ask(socket, "fake_die", method="fake_calls", when="before")
    await ask(socket, "fake_calls")
    await daemon.client.list()
    assert await send(event="failed", device="d", message="m") == DaemonEvent("failed", "d", "m")
    task.cancel()
    await asyncio.wait([task])


async def test_without_a_daemon_calls_fail_at_once(home: Path) -> None:
    client = BlockClient(home / "nothing.sock")
    with pytest.raises(BlockDaemonError, match=r"cannot connect to the block daemon at .*nothing\.sock"):
        await client.list()
    await client.close()
    await client.close()
    with pytest.raises(BlockDaemonError, match="is closed"):
        await client.list()


async def test_closing_ends_calls_under_way(home: Path, daemon: BlockDaemonProcess, socket: Path) -> None:
    client = BlockClient(socket)
    await ask(socket, "fake_hold", method="list")
    call = asyncio.create_task(client.list())
    await eventually(lambda: bool(client._tasks))
    await client.close()
    with pytest.raises(BlockDaemonError, match="was closed"):
        await call
    await ask(socket, "fake_release", method="list")


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def serve_once(path: Path, answer: Answer) -> asyncio.Server:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer(reader, writer)
        writer.close()

    return await asyncio.start_unix_server(handle, path)


GREETING = {"blockd": {"protocol": 1, "version": "0", "pid": 1}}


@pytest.mark.parametrize(
    ("greeting", "reply", "message"),
    [
        (b"SSH-2.0\n", b"", "not JSON"),
        (b"[]\n", b"", "not an object"),
        (b"{}\n", b"", "no block daemon"),
        (b"", b"", "has gone"),
        (json.dumps({"blockd": {"protocol": 2, "version": "9", "pid": 1}}).encode() + b"\n", b"", "protocol 2"),
        (GREETING, b'{"id": 1, "result"', "has gone"),
        (GREETING, b"\xff\n", "not JSON"),
        (GREETING, b'{"id": 99, "result": {}}\n', "something else"),
        (GREETING, b'{"id": 1, "result": {}}\n', "lacks something"),
        (GREETING, b'{"id": 1, "result": {"devices": [{"device": "d"}]}}\n', "lacks something"),
        (GREETING, b'{"id": 1, "result": {"devices": 7}}\n', "lacks something"),
        (GREETING, b'{"id": 1, "error": "?"}\n', "internal|list"),
    ],
)
async def test_nonsense_is_an_error_of_ours(home: Path, greeting: Any, reply: bytes, message: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting if isinstance(greeting, bytes) else json.dumps(greeting).encode() + b"\n")
        if reply:
            await reader.readline()
            writer.write(reply)

    server = await serve_once(home / "s", answer)
    client = BlockClient(home / "s")
    with pytest.raises(BlockDaemonError, match=message):
        await client.list()
    await client.close()
    server.close()


async def test_the_pid_is_the_kernels_word(home: Path) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(GREETING).encode() + b"\n")

    server = await serve_once(home / "s", answer)
    assert (await BlockClient(home / "s").greeting()).pid == os.getpid()
    server.close()


async def test_a_socket_whose_path_is_too_long_for_an_address(home: Path) -> None:
    directory = home / ("x" * 120)
    directory.mkdir()

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(json.dumps(GREETING).encode() + b"\n")

    server = await serve_once(home / "s", answer)
    (home / "s").rename(directory / "s")
    assert (await BlockClient(directory / "s").greeting()).version == "0"
    server.close()
