"""The host's client of a guest's agent: its private and metric endpoints (E2B contract §3.3). No user traffic.

Each call makes a connection of its own: a kept one could lead to a former life of a sandbox, or to another sandbox that
got the same address.
"""

from __future__ import annotations

import base64
import json
import os
import struct
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import aiohttp
import structlog

from agentenv.errors import GuestAgentError
from agentenv.guest.base import AgentInfo, AgentMetrics, GuestIdentity

log = structlog.get_logger(__name__)

AGENT_PORT = 49983
_ENTROPY_BYTES = 64
"""Twice what the kernel's generator holds (256 bits)."""
_LARGEST_ANSWER = 64 * 1024
_CLOCK_HEADER = "X-Aenv-Clock"
"""Unix time of the guest when it answered, in nanoseconds."""
_CLOCK_ERROR_S = 0.5
"""What the clock of a guest may be off after `init`."""
_CLOCK_TRIES = 3
_ROOT = "Basic " + base64.b64encode(b"root:").decode("ascii")
"""Who processes belong to, in the words of the agent."""
_QUICK = aiohttp.ClientTimeout(total=4)
"""Less than the sampling period, so that a slow guest misses one sample and not two."""
_INIT = aiohttp.ClientTimeout(total=60, connect=10)
"""An emulated guest on a busy host takes seconds for what takes milliseconds elsewhere."""


class GuestAgents:
    """Makes clients of agents. Close it when no client is used any more."""

    def __init__(self, port: int = AGENT_PORT) -> None:
        self._port = port
        self._session: aiohttp.ClientSession | None = None

    def __call__(self, host: str, access_token: str) -> GuestAgent:
        """A client of the agent at that address. Makes no connection yet."""
        return GuestAgent(self._shared_session, f"http://{host}:{self._port}", access_token)

    def _shared_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(force_close=True, limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._session

    async def close(self) -> None:
        """End what is open. Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None


class GuestAgent:
    """One life of one guest's agent. Methods raise `GuestAgentError`."""

    def __init__(self, session: Callable[[], aiohttp.ClientSession], origin: str, access_token: str) -> None:
        self._session = session
        self._origin = origin
        self._token = access_token

    async def health(self) -> None:
        """Return when the agent answers; it has 4 s."""
        await self._call("GET", "/health", _QUICK)

    async def init(self, identity: GuestIdentity) -> AgentInfo:
        """Give the guest its identity, fresh entropy and the time of day, and learn the agent's version.

        Another life than the last makes a copy a machine of its own (names, machine id, connections, generation file).
        When a step of that fails, the error names it, and the guest must not be used.
        """
        body: dict[str, Any] = {
            "sandboxId": identity.sandbox_id,
            "templateId": identity.template_id,
            "hostname": identity.hostname,
            "accessToken": identity.access_token,
            "envVars": dict(identity.env_vars),
            "defaultUser": identity.default_user,
            "lifecycleID": str(identity.life),
            "entropy": base64.b64encode(os.urandom(_ENTROPY_BYTES)).decode("ascii"),
        }
        if identity.default_workdir is not None:
            body["defaultWorkdir"] = identity.default_workdir
        headers, error = await self._init(body)
        version = headers.get("X-Envd-Version")
        if not version:
            raise GuestAgentError(f"the agent at {self._origin} did not tell its version")
        await self._settle_clock(identity.access_token, error)
        return AgentInfo(version)

    async def _init(self, body: dict[str, Any]) -> tuple[Mapping[str, str], tuple[float, float]]:
        """Make the request with the time of day; return headers, and what its clock is off at least and at most, s."""
        sent = time.time()
        # Last, so that the clock that the guest sets is as fresh as can be.
        body["timestamp"] = datetime.fromtimestamp(sent, UTC).isoformat().replace("+00:00", "Z")
        headers, _ = await self._call("POST", "/init", _INIT, body)
        received = time.time()
        try:
            told = int(headers[_CLOCK_HEADER]) / 1e9
        except (KeyError, ValueError):  # an agent of a snapshot from before this header
            return headers, (0, 0)
        return headers, (told - received, told - sent)

    async def _settle_clock(self, access_token: str, error: tuple[float, float]) -> None:
        """A slow answer leaves open whether the time that it brought was still right; then it is brought again."""
        for _ in range(_CLOCK_TRIES):
            if error[0] >= -_CLOCK_ERROR_S and error[1] <= _CLOCK_ERROR_S:
                return
            _, error = await self._init({"accessToken": access_token})
        if error[0] > _CLOCK_ERROR_S or error[1] < -_CLOCK_ERROR_S:
            raise GuestAgentError(
                f"the clock of the guest at {self._origin} is off by {min(error, key=abs):+.1f} s although it was set"
            )
        log.warning("guest_clock_uncertain", agent=self._origin, least_s=error[0], most_s=error[1])

    async def metrics(self) -> AgentMetrics:
        """Read the guest's use of CPU, memory and disk."""
        _, content = await self._call("GET", "/metrics", _QUICK)
        try:
            values = json.loads(content)
            return AgentMetrics(
                timestamp=datetime.fromtimestamp(int(values["ts"]), UTC),
                cpu_count=int(values["cpu_count"]),
                cpu_used_pct=float(values["cpu_used_pct"]),
                mem_used=int(values["mem_used"]),
                mem_total=int(values["mem_total"]),
                mem_cache=int(values["mem_cache"]),
                disk_used=int(values["disk_used"]),
                disk_total=int(values["disk_total"]),
            )
        except (ValueError, TypeError, KeyError, OverflowError, OSError) as error:
            raise GuestAgentError(
                f"the agent at {self._origin} answered /metrics with something else: {error!r}"
            ) from error

    async def sync(self) -> None:
        """Bring all that the guest wrote to its disk; it has a minute."""
        request = json.dumps({"process": {"cmd": "sync"}}).encode()
        try:
            async with self._session().post(
                self._origin + "/process.Process/Start",
                data=struct.pack(">BI", 0, len(request)) + request,
                headers={
                    "Content-Type": "application/connect+json",
                    "Connect-Protocol-Version": "1",
                    "Authorization": _ROOT,
                    "X-Access-Token": self._token,
                },
                timeout=_INIT,
                allow_redirects=False,
            ) as response:
                content = await _read_capped(response)
                if response.status != 200:
                    raise GuestAgentError(f"the agent at {self._origin} answered {response.status} to a sync")
        except TimeoutError as error:
            raise GuestAgentError(
                f"the guest at {self._origin} did not flush its disk within {_INIT.total} s"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as error:
            raise GuestAgentError(f"the agent at {self._origin} could not be asked for a sync: {error}") from error
        _check_sync(content)

    async def _call(
        self, method: str, path: str, timeout: aiohttp.ClientTimeout, body: dict[str, Any] | None = None
    ) -> tuple[Any, bytes]:
        """Make one request; return headers and content of a successful answer."""
        try:
            async with self._session().request(
                method,
                self._origin + path,
                json=body,
                headers={"X-Access-Token": self._token},
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                content = await _read_capped(response)
                if response.status not in (200, 204):
                    detail = content[:200].decode("utf-8", "replace").strip()
                    raise GuestAgentError(
                        f"the agent at {self._origin} answered {path} with {response.status}: {detail}"
                    )
                return response.headers, content
        except TimeoutError as error:
            raise GuestAgentError(
                f"the agent at {self._origin} did not answer {path} within {timeout.total} s"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as error:
            raise GuestAgentError(f"the agent at {self._origin} could not be asked for {path}: {error}") from error


async def _read_capped(response: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    async for chunk in response.content.iter_any():
        content += chunk
        if len(content) > _LARGEST_ANSWER:
            raise GuestAgentError(f"the agent answered with more than {_LARGEST_ANSWER} bytes")
    return bytes(content)


def _check_sync(stream: bytes) -> None:
    """Find the end of the process in the agent's messages, each after one byte of flags and four of length."""
    while len(stream) >= 5:
        _, length = struct.unpack_from(">BI", stream)
        message, stream = stream[5 : 5 + length], stream[5 + length :]
        try:
            content = json.loads(message)
            end = content.get("event", {}).get("end")
            error = content.get("error")
        except (ValueError, AttributeError) as bad:
            raise GuestAgentError(f"the agent answered a sync with something else: {message[:100]!r}") from bad
        if error:
            raise GuestAgentError(f"the guest's disk could not be flushed: {str(error)[:200]}")
        if end is not None:
            if end.get("exitCode"):
                raise GuestAgentError(f"the guest's `sync` ended with {end['exitCode']}")
            return
    raise GuestAgentError("the agent did not say whether the guest's disk was flushed")
