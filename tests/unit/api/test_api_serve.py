"""The life of the server process: its one line, its key, its lock, its signals, its end (with fake rooms behind it)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from agentenv.cli.http_server import base_url, bound_socket, parse_listen
from agentenv.errors import ConfigurationError

PROGRAM = Path(__file__).with_name("api_server.py")
NO_PROGRAMS = {"AENV_GUEST_BINARY": "/nonexistent", "AENV_BLOCKD_BINARY": "/nonexistent"}
"""Keeps a server from provisioning its home, which fetches packages."""


class Server:
    """A server process whose standard error is collected in a file."""

    def __init__(self, home: Path, listen: str = "127.0.0.1:0", mode: str = "ready", **environment: str) -> None:
        self.stderr = home.parent / f"{home.name}-{len(list(home.parent.iterdir()))}.log"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("AENV_")}
        with self.stderr.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, str(PROGRAM), listen, mode],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**inherited, "AENV_HOME": str(home), "AENV_LOG_LEVEL": "debug", **NO_PROGRAMS, **environment},
            )
        assert self.process.stdout is not None
        self.stdout = self.process.stdout

    def ready(self) -> str:
        line = self.stdout.readline()
        match = re.fullmatch(r"listening on (http://\S+:\d+)\n", line)
        assert match, (line, self.log())
        return match[1]

    def log(self) -> str:
        return self.stderr.read_text()

    def reports(self) -> list[str]:
        return [line.removeprefix("TEST ") for line in self.log().splitlines() if line.startswith("TEST ")]

    def end(self, *signals: signal.Signals) -> int:
        for number in signals:
            self.process.send_signal(number)
        return self.process.wait(timeout=60)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@contextlib.contextmanager
def running(*args: object, **options: str) -> Iterator[Server]:
    server = Server(*args, **options)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        server.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_one_line_a_key_and_an_orderly_end(home: Path, number: signal.Signals) -> None:
    with running(home) as server:
        url = server.ready()
        key_file = home / "secrets" / "api-key"
        assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
        assert stat.S_IMODE(key_file.parent.stat().st_mode) == 0o700
        key = key_file.read_text().strip()
        assert re.fullmatch(r"e2b_[0-9a-f]{40}", key)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/health") as answer:
                assert answer.status == 200
                assert "Server" not in answer.headers
            headers = {"X-API-KEY": key}
            async with session.post(f"{url}/v2/sandboxes", headers=headers, json={"templateID": "base"}) as answer:
                assert answer.status == 201
                assert (await answer.json())["domain"] == f"aenv.localhost:{url.rpartition(':')[2]}"
            # Sandbox traffic never reaches a route of the control plane.
            for path in ("/health", "/v2/sandboxes", "/docs"):
                async with session.get(url + path, headers={"E2b-Sandbox-Id": "ix"}) as answer:
                    assert answer.status == 299
                    assert await answer.content.readexactly(5) == b"first"
        assert server.end(number) == 0
        assert server.stdout.read() == ""
        assert server.reports() == ["stream ended"] * 3 + ["closed proxy", "closed orchestrator drain=False"]
        assert key not in server.log()


async def test_open_streams_do_not_hold_up_a_stop(home: Path) -> None:
    with running(home, mode="drain") as server:
        url = server.ready()
        async with (
            aiohttp.ClientSession() as session,
            session.get(url, headers={"E2b-Sandbox-Id": "ix"}) as answer,
        ):
            assert await answer.content.readexactly(5) == b"first"
            assert server.end(signal.SIGTERM) == 0
        assert server.reports() == ["stream ended", "closed proxy", "closed orchestrator drain=True"]


async def test_a_second_signal_does_not_wait_for_streams(home: Path) -> None:
    with running(home) as server:
        url = server.ready()
        async with (
            aiohttp.ClientSession() as session,
            session.get(url, headers={"E2b-Sandbox-Id": "ix"}) as answer,
        ):
            assert await answer.content.readexactly(5) == b"first"
            assert server.end(signal.SIGTERM, signal.SIGINT) == 0
        assert "closed orchestrator drain=False" in server.reports()
        assert "timeout graceful shutdown exceeded" not in server.log()


def test_a_start_can_be_interrupted(home: Path) -> None:
    with running(home, mode="hang") as server:
        assert server.stdout.readline() == "hanging\n"
        assert server.end(signal.SIGINT) == 130
        assert server.reports() == ["closed orchestrator drain=False"]
        assert server.stdout.read() == ""


def test_a_second_server_on_the_same_home_is_refused(home: Path) -> None:
    with running(home) as first:
        first.ready()
        with running(home) as second:
            assert second.end() == 1
            assert "error: another server" in second.reports()[-1]
            assert str(first.process.pid) in second.reports()[-1]


def test_a_busy_port_is_named(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with running(home, address) as server:
            assert server.end() == 1
            assert f"cannot listen on {address}: the port is in use" in server.reports()[-1]
            assert server.stdout.read() == ""


def test_the_configured_key_leaves_no_file(home: Path) -> None:
    with running(home, AENV_API_KEY="my-key") as server:
        server.ready()
        assert not (home / "secrets").exists()
        assert server.end(signal.SIGTERM) == 0
        assert "my-key" not in server.log()


def test_ipv6(home: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this host has no IPv6 loopback")
    with running(home, "[::1]:0") as server:
        assert server.ready().startswith("http://[::1]:")


@pytest.mark.parametrize(
    "text", ["", "8000", ":8000", "host", "host:", "host:x", "host:70000", "::1:80", "host:-1", "h:८"]
)
def test_bad_listen_addresses(text: str) -> None:
    with pytest.raises(ConfigurationError, match="--listen"):
        parse_listen(text)


def test_good_listen_addresses() -> None:
    assert parse_listen("127.0.0.1:0") == ("127.0.0.1", 0)
    assert parse_listen("[::1]:8000") == ("::1", 8000)
    assert parse_listen("localhost:80") == ("localhost", 80)


def test_an_unknown_host_is_named() -> None:
    with pytest.raises(ConfigurationError, match="cannot listen on"):
        bound_socket("192.0.2.1", 0)
    with pytest.raises(ConfigurationError, match="has no address"):
        bound_socket("no-such-host.invalid", 80)


def test_until_it_is_served_a_bound_address_refuses_clients() -> None:
    with bound_socket("127.0.0.1", 0) as listener:
        host, port = base_url(listener).removeprefix("http://").split(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))
