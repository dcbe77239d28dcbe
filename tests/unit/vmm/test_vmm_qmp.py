"""The QMP client against a small QMP server: order, events, errors, descriptors, deadlines, broken connections."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from agentenv.errors import VmmError
from agentenv.vmm.qmp import QmpClient, QmpCommandError, QmpDisconnectedError, listen

NAME = "qmp.sock"
GREETING = {"QMP": {"version": {}, "capabilities": []}}
Handler = Callable[["Peer"], Awaitable[None]]


class Peer:
    """The server's end of one connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.buffer = b""
        self.descriptors: list[int] = []

    async def send(self, *messages: object) -> None:
        data = b"".join(json.dumps(message).encode() + b"\r\n" for message in messages)
        await asyncio.get_running_loop().sock_sendall(self.connection, data)

    async def receive(self) -> dict[str, object]:
        loop = asyncio.get_running_loop()
        while b"\n" not in self.buffer:
            readable = asyncio.Event()
            loop.add_reader(self.connection.fileno(), readable.set)
            await readable.wait()
            loop.remove_reader(self.connection.fileno())
            data, descriptors, _, _ = socket.recv_fds(self.connection, 65536, 4)
            self.descriptors += descriptors
            assert data, "the client went away"
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        message = json.loads(line)
        assert isinstance(message, dict)
        return message

    async def greet(self) -> None:
        await self.send(GREETING)
        command = await self.receive()
        assert command["execute"] == "qmp_capabilities"
        await self.send({"return": {}, "id": command["id"]})


async def with_server(directory: Path, handler: Handler, client: Callable[[], Awaitable[None]]) -> None:
    """Run both ends; both must come to their end without an error."""
    server = listen(directory, NAME)
    server.setblocking(False)

    async def serve() -> None:
        connection, _ = await asyncio.get_running_loop().sock_accept(server)
        with connection:
            connection.setblocking(False)
            await handler(Peer(connection))

    with server:
        async with asyncio.TaskGroup() as group:
            group.create_task(serve())
            group.create_task(client())  # type: ignore[arg-type]


async def test_answers_are_matched_and_events_are_kept(tmp_path: Path) -> None:
    async def handler(peer: Peer) -> None:
        await peer.greet()
        command = await peer.receive()
        assert command["execute"] == "query-status"
        assert "arguments" not in command
        await peer.send(
            {"event": "STOP"},
            {"return": "for nobody", "id": 12345},
            {"event": "MIGRATION", "data": {"status": "active"}},
            {"return": {"running": False}, "id": command["id"]},
            {"event": "MIGRATION", "data": {"status": "completed"}},
        )

    async def client() -> None:
        async with await QmpClient.connect(tmp_path, NAME) as qmp:
            assert await qmp.execute("query-status") == {"running": False}
            first = await qmp.wait_event({"MIGRATION"})
            second = await qmp.wait_event({"MIGRATION", "STOP"})
            assert [event["data"]["status"] for event in (first, second)] == ["active", "completed"]

    await with_server(tmp_path, handler, client)


async def test_an_error_names_the_command_and_the_connection_goes_on(tmp_path: Path) -> None:
    async def handler(peer: Peer) -> None:
        await peer.greet()
        command = await peer.receive()
        await peer.send({"error": {"class": "DeviceNotFound", "desc": "no such thing"}, "id": command["id"]})
        command = await peer.receive()
        assert command["arguments"] == {"id": "x"}
        await peer.send({"return": {}, "id": command["id"]})

    async def client() -> None:
        async with await QmpClient.connect(tmp_path, NAME) as qmp:
            with pytest.raises(QmpCommandError, match="refused device_del: no such thing") as caught:
                await qmp.execute("device_del")
            assert caught.value.error_class == "DeviceNotFound"
            assert await qmp.execute("device_del", {"id": "x"}) == {}

    await with_server(tmp_path, handler, client)


async def test_a_descriptor_travels_with_its_command(tmp_path: Path) -> None:
    async def handler(peer: Peer) -> None:
        await peer.greet()
        command = await peer.receive()
        assert command["execute"] == "getfd"
        (descriptor,) = peer.descriptors
        with os.fdopen(descriptor, "w") as file:
            file.write("through the socket")
        await peer.send({"return": {}, "id": command["id"]})

    target = tmp_path / "target"

    async def client() -> None:
        with target.open("wb") as file:
            async with await QmpClient.connect(tmp_path, NAME) as qmp:
                await qmp.execute("getfd", {"fdname": "state"}, descriptors=[file.fileno()])

    await with_server(tmp_path, handler, client)
    assert target.read_text() == "through the socket"


async def test_a_long_answer_in_small_pieces(tmp_path: Path) -> None:
    text = "y" * 300_000

    async def handler(peer: Peer) -> None:
        await peer.greet()
        command = await peer.receive()
        await peer.send({"return": text, "id": command["id"]})

    async def client() -> None:
        async with await QmpClient.connect(tmp_path, NAME) as qmp:
            assert await qmp.execute("query-long") == text

    await with_server(tmp_path, handler, client)


async def test_silence_ends_with_the_deadline(tmp_path: Path) -> None:
    done = asyncio.Event()

    async def handler(peer: Peer) -> None:
        await peer.greet()
        await done.wait()

    async def client() -> None:
        async with await QmpClient.connect(tmp_path, NAME) as qmp:
            with pytest.raises(VmmError, match=r"did not answer to stop within 0\.05 s"):
                await qmp.execute("stop", timeout_s=0.05)
            with pytest.raises(VmmError, match="did not report RESUME"):
                await qmp.wait_event({"RESUME"}, timeout_s=0.05)
        done.set()

    await with_server(tmp_path, handler, client)


async def test_a_server_that_never_accepts(tmp_path: Path) -> None:
    with listen(tmp_path, NAME), pytest.raises(VmmError, match="did not answer on"):
        await QmpClient.connect(tmp_path, NAME, timeout_s=0.05)


async def test_qemu_ends_in_the_middle_of_a_command(tmp_path: Path) -> None:
    async def handler(peer: Peer) -> None:
        await peer.greet()
        await peer.receive()

    async def client() -> None:
        async with await QmpClient.connect(tmp_path, NAME) as qmp:
            with pytest.raises(QmpDisconnectedError):
                await qmp.execute("quit")
            with pytest.raises(QmpDisconnectedError):
                for _ in range(2):  # the first may still land in the buffer of a dead peer
                    await qmp.execute("stop")

    await with_server(tmp_path, handler, client)


@pytest.mark.parametrize("words", ["not JSON\n", "[1]\n", "{}\n"])
async def test_what_is_not_qmp_is_refused(tmp_path: Path, words: str) -> None:
    async def handler(peer: Peer) -> None:
        await asyncio.get_running_loop().sock_sendall(peer.connection, words.encode())

    async def client() -> None:
        with pytest.raises(VmmError):
            await QmpClient.connect(tmp_path, NAME)

    await with_server(tmp_path, handler, client)


async def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(VmmError, match="cannot reach QEMU"):
        await QmpClient.connect(tmp_path, NAME)
    listen(tmp_path, NAME).close()
    with pytest.raises(VmmError, match="cannot reach QEMU"):
        await QmpClient.connect(tmp_path, NAME)


def test_paths_beyond_the_limit_of_sockets_work_under_uvloop_too(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)

    async def main() -> None:
        async def handler(peer: Peer) -> None:
            await peer.greet()
            command = await peer.receive()
            await peer.send({"return": 7, "id": command["id"]})

        async def client() -> None:
            async with await QmpClient.connect(deep, NAME) as qmp:
                assert await qmp.execute("query-seven") == 7

        await with_server(deep, handler, client)

    uvloop.run(main())
    asyncio.run(main())


def test_the_socket_is_closed_to_others_and_replaces_a_stale_one(tmp_path: Path) -> None:
    listen(tmp_path, NAME).close()
    with listen(tmp_path, NAME):
        assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600
