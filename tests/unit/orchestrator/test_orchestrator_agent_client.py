"""The client of the guest's agent, against a server that behaves well, badly, or not at all."""

from __future__ import annotations

import asyncio
import base64
import json
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from agentenv.errors import GuestAgentError
from agentenv.guest import client
from agentenv.guest.base import GuestIdentity
from agentenv.guest.client import GuestAgent, GuestAgents

IDENTITY = GuestIdentity(
    sandbox_id="i1",
    template_id="base",
    hostname="i1",
    access_token="t0ken",
    env_vars={"A": "é\n"},
    default_user="user",
    default_workdir=None,
    life=3,
)
METRICS = {
    "ts": 1_900_000_000,
    "cpu_count": 2,
    "cpu_used_pct": 12.5,
    "mem_total": 512,
    "mem_used": 100,
    "mem_cache": 7,
    "mem_total_mib": 0,
    "mem_used_mib": 0,
    "disk_used": 5,
    "disk_total": 9,
}


@asynccontextmanager
async def agent_that(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[GuestAgent]:
    runner = web.ServerRunner(web.Server(handler), shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    agents = GuestAgents(port=runner.addresses[0][1])
    try:
        yield agents("127.0.0.1", "t0ken")
    finally:
        await agents.close()
        await agents.close()
        await runner.cleanup()


async def test_init_tells_everything_and_learns_the_version() -> None:
    bodies: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        assert (request.method, request.path) == ("POST", "/init")
        bodies.append(await request.json())
        return web.Response(status=204, headers={"X-Envd-Version": "0.6.7"})

    async with agent_that(handler) as agent:
        before = datetime.now(UTC)
        assert (await agent.init(IDENTITY)).version == "0.6.7"
        await agent.init(IDENTITY)
    first, second = bodies
    assert before <= datetime.fromisoformat(first.pop("timestamp")) <= datetime.now(UTC)
    entropy = first.pop("entropy")
    assert len(base64.b64decode(entropy)) == 64
    assert entropy != second["entropy"]
    assert first == {
        "sandboxId": "i1",
        "templateId": "base",
        "hostname": "i1",
        "accessToken": "t0ken",
        "envVars": {"A": "é\n"},
        "defaultUser": "user",
        "lifecycleID": "3",
    }


class Guest:
    """A guest whose clock is off by some seconds until it is set, and whose first answers take their time."""

    def __init__(self, off_s: float, slow_answers: int = 0, obedient: bool = True) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._off_s = off_s
        self._slow_answers = slow_answers
        self._obedient = obedient

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        stamp = datetime.fromisoformat(body["timestamp"]).timestamp()
        if self._slow_answers:
            self._slow_answers -= 1
            await asyncio.sleep(client._CLOCK_ERROR_S + 0.1)
        if self._obedient:
            self._off_s = stamp - time.time()
        clock = int((time.time() + self._off_s) * 1e9)
        return web.Response(status=204, headers={"X-Envd-Version": "0.6.7", "X-Aenv-Clock": str(clock)})


async def test_a_clock_that_was_set_late_is_set_again() -> None:
    quick, slow = Guest(off_s=-1000), Guest(off_s=-1000, slow_answers=2)
    async with agent_that(quick.answer) as agent:
        await agent.init(IDENTITY)
    assert len(quick.bodies) == 1
    async with agent_that(slow.answer) as agent:
        assert (await agent.init(IDENTITY)).version == "0.6.7"
    first, *again = slow.bodies
    assert len(again) == 2 and all(body.keys() == {"accessToken", "timestamp"} for body in again)
    assert [first["timestamp"], *(body["timestamp"] for body in again)] == sorted(
        body["timestamp"] for body in slow.bodies
    )


@pytest.mark.parametrize("off_s", [-30.0, 30.0])
async def test_a_clock_that_cannot_be_set_is_an_error(off_s: float) -> None:
    guest = Guest(off_s, obedient=False)
    async with agent_that(guest.answer) as agent:
        with pytest.raises(GuestAgentError, match=r"the clock of the guest at \S+ is off by [+-]\d+\.\d s"):
            await agent.init(IDENTITY)


async def test_metrics_and_health_use_a_connection_each() -> None:
    peers: list[object] = []

    async def handler(request: web.Request) -> web.Response:
        assert request.transport is not None
        peers.append(request.transport.get_extra_info("peername"))
        assert request.headers["X-Access-Token"] == "t0ken"
        return web.json_response(METRICS) if request.path == "/metrics" else web.Response(status=204)

    async with agent_that(handler) as agent:
        for _ in range(3):
            await agent.health()
        reading = await agent.metrics()
    assert len(set(peers)) == 4
    assert (reading.cpu_used_pct, reading.mem_cache, reading.disk_total) == (12.5, 7, 9)
    assert reading.timestamp == datetime.fromtimestamp(1_900_000_000, UTC)


@pytest.mark.parametrize(
    "answer",
    [
        lambda: web.Response(status=401, text="no"),
        lambda: web.Response(status=302, headers={"Location": "http://example.invalid/"}),
        lambda: web.Response(status=200, text="not JSON"),
        lambda: web.Response(status=200, text="[]"),
        lambda: web.Response(status=200, body=b"\xff\xfe"),
        lambda: web.json_response(METRICS | {"ts": 1e300}),
        lambda: web.json_response({key: value for key, value in METRICS.items() if key != "mem_used"}),
        lambda: web.Response(status=200, body=b" " * 100_000),
    ],
)
async def test_wrong_answers_are_agent_errors(answer: Callable[[], web.Response]) -> None:
    async def handler(request: web.Request) -> web.Response:
        return answer()

    async with agent_that(handler) as agent:
        with pytest.raises(GuestAgentError):
            await agent.metrics()
        with pytest.raises(GuestAgentError):
            await agent.init(IDENTITY)


async def test_silence_and_hang_ups_are_agent_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_QUICK", aiohttp.ClientTimeout(total=0.05))
    hang_up = False

    async def handler(request: web.Request) -> web.Response:
        if hang_up and request.transport is not None:
            request.transport.close()
        await asyncio.Event().wait()
        raise AssertionError

    async with agent_that(handler) as agent:
        with pytest.raises(GuestAgentError, match="did not answer"):
            await agent.health()
        hang_up = True
        with pytest.raises(GuestAgentError, match="could not be asked"):
            await agent.health()


async def test_nobody_listens() -> None:
    agents = GuestAgents(port=1)
    with pytest.raises(GuestAgentError, match="could not be asked"):
        await agents("127.0.0.1", "t").health()
    await agents.close()


def messages(*contents: dict[str, Any]) -> bytes:
    """A stream in the agent's framing: flags, length, JSON."""
    texts = [json.dumps(content).encode() for content in contents]
    return b"".join(struct.pack(">BI", 0, len(text)) + text for text in texts)


STARTED: dict[str, Any] = {"event": {"start": {"pid": 7}}}


async def test_sync_runs_as_root_and_waits_for_its_end() -> None:
    seen: list[tuple[str, str, bytes]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((request.path, request.headers["Authorization"], await request.read()))
        assert request.headers["X-Access-Token"] == "t0ken"
        return web.Response(
            body=messages(STARTED, {"event": {"keepalive": {}}}, {"event": {"end": {"exited": True}}}, {})
        )

    async with agent_that(handler) as agent:
        await agent.sync()
    ((path, user, body),) = seen
    assert (path, base64.b64decode(user.removeprefix("Basic "))) == ("/process.Process/Start", b"root:")
    assert json.loads(body[5:]) == {"process": {"cmd": "sync"}}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (messages(STARTED, {"event": {"end": {"exitCode": 3, "exited": True}}}), 200, "ended with 3"),
        (messages({"error": {"code": "not_found", "message": "no such command"}}), 200, "no such command"),
        (messages(STARTED), 200, "did not say"),
        (b"", 200, "did not say"),
        (b"\0\0\0\0\2[]", 200, "something else"),
        (b"\0\0\0\0\2{x", 200, "something else"),
        (b"{}", 401, "401"),
    ],
)
async def test_sync_that_is_not_one(body: bytes, status: int, words: str) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(body=body, status=status)

    async with agent_that(handler) as agent:
        with pytest.raises(GuestAgentError, match=words):
            await agent.sync()
