"""The official Python SDK: sandboxes as a whole, listing, life time, ports, metrics. The asynchronous client too."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import urllib.error
import urllib.request
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

import pytest
from e2b import AsyncSandbox, NotFoundException, Sandbox, SandboxException, SandboxQuery, SandboxState

pytestmark = pytest.mark.vm


def _all(**arguments: Any) -> list[Any]:
    pages = Sandbox.list(**arguments)
    found = []
    while pages.has_next:
        found += pages.next_items()
    return found


def test_info(sandbox: Sandbox) -> None:
    info = sandbox.get_info()
    assert info.sandbox_id == sandbox.sandbox_id
    assert info.metadata == {"suite": "shared"}
    assert info.state == SandboxState.RUNNING
    assert info.cpu_count >= 1
    assert info.memory_mb >= 128
    assert timedelta(0) < info.end_at - datetime.now(UTC) <= timedelta(seconds=1300)


def test_list_with_metadata_and_pages(endpoint: str) -> None:
    tag = f"a b&c=d é {uuid.uuid4().hex}"
    made = [Sandbox.create(timeout=300, metadata={"tag": tag, "number": str(number)}) for number in range(3)]
    try:
        ids = [item.sandbox_id for item in _all(query=SandboxQuery(metadata={"tag": tag}), limit=1)]
        assert ids == [one.sandbox_id for one in reversed(made)]
        one = _all(query=SandboxQuery(metadata={"tag": tag, "number": "1"}))
        assert [item.sandbox_id for item in one] == [made[1].sandbox_id]
        assert _all(query=SandboxQuery(metadata={"tag": tag}, state=[SandboxState.PAUSED])) == []
    finally:
        for one in made:
            one.kill()
    assert _all(query=SandboxQuery(metadata={"tag": tag})) == []


def test_connect_and_set_timeout(sandbox: Sandbox) -> None:
    before = sandbox.get_info().end_at
    again = Sandbox.connect(sandbox.sandbox_id, timeout=30)
    assert again.sandbox_id == sandbox.sandbox_id
    assert again.get_info().end_at >= before
    assert again.commands.run("echo connected").stdout == "connected\n"
    sandbox.set_timeout(600)
    assert sandbox.get_info().end_at < before
    sandbox.set_timeout(1200)


def test_unknown_things(endpoint: str) -> None:
    with pytest.raises(NotFoundException):
        Sandbox.connect("i0000000000000000000")
    with pytest.raises(SandboxException, match="not found"):
        Sandbox.create("no-such-template")
    with pytest.raises(SandboxException):
        Sandbox.create(timeout=10_000_000)


def test_not_yet_offered_says_so(sandbox: Sandbox) -> None:
    if not hasattr(sandbox, "update_network"):
        pytest.skip("this release cannot change networks")
    with pytest.raises(SandboxException, match="501"):
        sandbox.update_network({"deny_out": ["203.0.113.0/24"]})
    assert sandbox.is_running() is True


def test_wrong_key(endpoint: str) -> None:
    with pytest.raises(Exception, match=r"(?i)401|api key|auth"):
        Sandbox.create(api_key="e2b_" + "0" * 40)


def test_http_server_in_the_guest(sandbox: Sandbox) -> None:
    sandbox.files.write("www/index.html", "<h1>from the guest</h1>")
    handle = sandbox.commands.run(
        "cd www && exec python3 -u -m http.server 8000 --bind 127.0.0.1", background=True, timeout=0
    )
    for stdout, _stderr, _pty in handle:
        if stdout and "Serving" in stdout:
            break
    host = sandbox.get_host(8000)
    assert host.startswith(f"8000-{sandbox.sandbox_id}.")
    port = urlsplit(os.environ["E2B_SANDBOX_URL"]).port
    request = urllib.request.Request(f"http://127.0.0.1:{port}/index.html", headers={"Host": host})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert answer.read() == b"<h1>from the guest</h1>"
    request = urllib.request.Request(f"http://127.0.0.1:{port}/", headers={"Host": sandbox.get_host(8001)})
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(request, timeout=60)
    assert raised.value.code == 502
    assert b"port is not open" in raised.value.read()
    handle.kill()


_WEBSOCKET_ECHO = """
import base64, hashlib, socket, struct
listener = socket.create_server(("0.0.0.0", 8002))
print("ready", flush=True)
connection, _ = listener.accept()
reader = connection.makefile("rb")
headers = {}
while (line := reader.readline().strip()):
    name, _, value = line.partition(b": ")
    headers[name.lower()] = value
accept = hashlib.sha1(headers[b"sec-websocket-key"] + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
connection.sendall(b"HTTP/1.1 101 Switching Protocols\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\n"
                   b"Sec-WebSocket-Accept: " + base64.b64encode(accept) + b"\\r\\n\\r\\n")
while True:
    first, second = reader.read(2)
    size = second & 127
    if size == 126:
        size = struct.unpack(">H", reader.read(2))[0]
    mask = reader.read(4)
    data = bytes(byte ^ mask[index % 4] for index, byte in enumerate(reader.read(size)))
    if first & 15 == 8:
        connection.sendall(bytes([0x88, len(data)]) + data)
        break
    connection.sendall(bytes([first, len(data)]) + data)
"""


def test_websocket_server_in_the_guest(sandbox: Sandbox) -> None:
    sandbox.files.write("echo.py", _WEBSOCKET_ECHO)
    handle = sandbox.commands.run("python3 echo.py", background=True, timeout=0)
    for stdout, _stderr, _pty in handle:
        if stdout and "ready" in stdout:
            break
    address = urlsplit(os.environ["E2B_SANDBOX_URL"])
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        key = base64.b64encode(os.urandom(16)).decode()
        connection.sendall(
            f"GET / HTTP/1.1\r\nHost: {sandbox.get_host(8002)}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        reader = connection.makefile("rb")
        assert b" 101 " in reader.readline()
        while reader.readline().strip():
            pass
        mask = b"\x01\x02\x03\x04"
        text = b"hello guest"
        masked = bytes(byte ^ mask[index % 4] for index, byte in enumerate(text))
        connection.sendall(bytes([0x81, 0x80 | len(text)]) + mask + masked)
        assert reader.read(2) == bytes([0x81, len(text)])
        assert reader.read(len(text)) == text
        connection.sendall(bytes([0x88, 0x80]) + mask)
    handle.wait()


def test_metrics_appear(sandbox: Sandbox) -> None:
    for _ in range(40):
        metrics = sandbox.get_metrics()
        if metrics:
            break
        sandbox.commands.run("sleep 0.5")
    sample = metrics[-1]
    assert sample.cpu_count == sandbox.get_info().cpu_count
    assert 0 <= sample.cpu_used_pct <= 100
    assert 0 < sample.mem_used <= sample.mem_total
    assert 0 < sample.disk_used <= sample.disk_total


def test_async_client(sandbox: Sandbox) -> None:
    async def main() -> None:
        attached = await AsyncSandbox.connect(sandbox.sandbox_id)
        results = await asyncio.gather(*(attached.commands.run(f"echo {number}") for number in range(5)))
        assert [result.stdout for result in results] == [f"{number}\n" for number in range(5)]
        folder = f"/home/user/{uuid.uuid4().hex}"
        await attached.files.make_dir(folder)
        events: asyncio.Queue[Any] = asyncio.Queue()
        watch = await attached.files.watch_dir(folder, on_event=events.put, timeout=120)
        await attached.files.write(f"{folder}/file", "x")
        kinds = [(await asyncio.wait_for(events.get(), 60)).type.value for _ in range(3)]
        assert kinds == ["create", "chmod", "write"]
        await watch.stop()
        assert await attached.files.read(f"{folder}/file") == "x"

    asyncio.run(main())


def test_pause_and_connect(endpoint: str) -> None:
    pause = "pause" if hasattr(Sandbox, "pause") else "beta_pause"
    created = Sandbox.create(timeout=600, metadata={"suite": "paused"})
    try:
        created.files.write("/home/user/kept", "before")
        process = created.commands.run("sleep 1000", background=True, timeout=0)
        getattr(created, pause)()
        assert created.is_running() is False
        assert Sandbox.get_info(created.sandbox_id).state.value == "paused"
        again = Sandbox.connect(created.sandbox_id, timeout=300)
        assert again.sandbox_id == created.sandbox_id
        assert again.files.read("/home/user/kept") == "before"
        assert process.pid in [one.pid for one in again.commands.list()]
        assert created.is_running() is True
        getattr(again, pause)()
    finally:
        assert created.kill() is True
    assert created.kill() is False
