"""How the command line talks to a server: where it is, with which key, control-plane calls, and the agent's API.

Only HTTP happens here, no printing. Commands turn `CommandError` into one line on standard error.
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from agentenv.config import load_settings
from agentenv.errors import AgentEnvError

AGENT_PORT = 49983
_END_OF_STREAM = 2


class CommandError(Exception):
    """A command failed; the text is shown as one line."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Server:
    """Address and key of the server that commands talk to."""

    url: str
    api_key: str


def find_server() -> Server:
    """Find the server: `AENV_API_URL` or `E2B_API_URL`, else the one that runs on this machine's home.

    Raises:
        CommandError: no server or no key can be found.
    """
    try:
        settings = load_settings()
    except AgentEnvError as error:
        raise CommandError(str(error)) from error
    url = os.environ.get("AENV_API_URL") or os.environ.get("E2B_API_URL")
    if not url:
        try:
            url = settings.paths.listening.read_text().strip()
        except OSError:
            url = "http://127.0.0.1:8000"
    key = os.environ.get("AENV_API_KEY") or os.environ.get("E2B_API_KEY")
    if not key:
        try:
            key = settings.paths.api_key.read_text().strip()
        except PermissionError as error:
            raise CommandError(f"{settings.paths.api_key} is not readable; set AENV_API_KEY or use sudo") from error
        except OSError as error:
            raise CommandError(
                f"no API key: set AENV_API_KEY, or start a server first (looked in {settings.paths.api_key})"
            ) from error
    if not url.startswith(("http://", "https://")):
        raise CommandError(f"{url!r} is not the URL of a server; AENV_API_URL must begin with http:// or https://")
    return Server(url.rstrip("/"), key)


@dataclass(frozen=True, slots=True)
class ProcessEvent:
    """One event of a process stream: `start` (pid), `stdout`/`stderr`/`pty` (data), or `end` (exit code)."""

    kind: str
    data: bytes = b""
    pid: int = 0
    exit_code: int = 0


class Client:
    """Calls of one server. Make it with `connect`."""

    def __init__(self, server: Server, session: aiohttp.ClientSession) -> None:
        self._server = server
        self._session = session

    @property
    def url(self) -> str:
        return self._server.url

    # --- control plane ------------------------------------------------------------------------------------------

    async def request(
        self, method: str, path: str, *, body: object = None, query: Mapping[str, str] | None = None
    ) -> tuple[Any, Mapping[str, str]]:
        """Call the control plane. Returns the decoded JSON body (None for 204) and the response headers.

        Raises:
            CommandError: the server is unreachable, or answered with an error (its message is used).
        """
        try:
            async with self._session.request(
                method,
                self._server.url + path,
                json=body,
                params=query,
                headers={"X-API-KEY": self._server.api_key},
            ) as response:
                raw = await response.read()
                if response.status >= 400:
                    raise CommandError(_message_of(raw, response.status))
                return (json.loads(raw) if raw else None), response.headers
        except aiohttp.ClientError as error:
            reason = getattr(error, "strerror", None) or error
            raise CommandError(f"cannot reach the server at {self._server.url}: {reason}") from error
        except ValueError as error:
            raise CommandError(f"{self._server.url} does not answer like an AgentENV server") from error

    async def stream(self, path: str, body: object) -> AsyncIterator[Any]:
        """Post to the control plane and yield the JSON values of the answer, one a line, as they come.

        Raises:
            CommandError: as `request`; also when the connection ends before the answer does.
        """
        headers = {"X-API-KEY": self._server.api_key, "Accept": "application/x-ndjson"}
        try:
            async with self._session.post(self._server.url + path, json=body, headers=headers) as response:
                if response.status >= 400:
                    raise CommandError(_message_of(await response.read(), response.status))
                if response.content_type != "application/x-ndjson":
                    for value in await response.json():
                        yield value
                    return
                buffer = b""
                async for chunk in response.content.iter_any():
                    *lines, buffer = (buffer + chunk).split(b"\n")
                    for line in lines:
                        yield json.loads(line)
        except aiohttp.ClientPayloadError as error:
            raise CommandError(f"the server at {self._server.url} closed the connection amid its answer") from error
        except aiohttp.ClientError as error:
            reason = getattr(error, "strerror", None) or error
            raise CommandError(f"the connection to the server at {self._server.url} failed: {reason}") from error
        except ValueError as error:
            raise CommandError(f"{self._server.url} does not answer like an AgentENV server") from error

    async def list_sandboxes(self, query: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """All sandboxes, over all pages."""
        return await self.list_all("/v2/sandboxes", query)

    async def list_all(self, path: str, query: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
        """All items of a list, over all pages."""
        found: list[dict[str, Any]] = []
        token: str | None = None
        while True:
            parameters = dict(query or {})
            if token:
                parameters["nextToken"] = token
            page, headers = await self.request("GET", path, query=parameters)
            found.extend(page)
            token = headers.get("X-Next-Token")
            if not token:
                return found

    async def agent(self, sandbox_id: str, user: str | None = None) -> Agent:
        """The agent of a sandbox. One control-plane call fetches its token."""
        info, _ = await self.request("GET", f"/sandboxes/{_segment(sandbox_id)}")
        return Agent(self._server.url, self._session, info["sandboxID"], info.get("envdAccessToken"), user)


class Agent:
    """Calls of one sandbox's agent, through the server's port. Make it with `Client.agent`."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, sandbox_id: str, token: str | None, user: str | None
    ) -> None:
        self._url = url
        self._session = session
        self._sandbox_id = sandbox_id
        self._token = token
        self.user = user
        self._headers = {"E2b-Sandbox-Id": sandbox_id, "E2b-Sandbox-Port": str(AGENT_PORT)}
        if token:
            self._headers["X-Access-Token"] = token
        if user:
            self._headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:".encode()).decode()

    def as_user(self, user: str) -> Agent:
        """The same agent, asked as another Linux user of the sandbox."""
        return Agent(self._url, self._session, self._sandbox_id, self._token, user)

    async def call(self, method: str, message: object) -> Any:
        """Unary call, for instance `process.Process/SendInput`."""
        try:
            async with self._session.post(f"{self._url}/{method}", json=message, headers=self._headers) as response:
                raw = await response.read()
                if response.status >= 400:
                    raise CommandError(_message_of(raw, response.status))
                return json.loads(raw) if raw else {}
        except aiohttp.ClientError as error:
            raise CommandError(f"the connection to the sandbox failed: {error}") from error

    async def start(self, message: object) -> AsyncIterator[ProcessEvent]:
        """Start a process and yield its events until it ends."""
        headers = {
            **self._headers,
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Keepalive-Ping-Interval": "50",
        }
        payload = json.dumps(message).encode()
        body = struct.pack(">BI", 0, len(payload)) + payload
        try:
            async with self._session.post(f"{self._url}/process.Process/Start", data=body, headers=headers) as response:
                if response.status >= 400:
                    raise CommandError(_message_of(await response.read(), response.status))
                while True:
                    flags, length = struct.unpack(">BI", await response.content.readexactly(5))
                    frame = json.loads(await response.content.readexactly(length) or b"{}")
                    if flags & _END_OF_STREAM:
                        if "error" in frame:
                            raise CommandError(str(frame["error"].get("message") or frame["error"].get("code")))
                        return
                    event = _process_event(frame.get("event", {}))
                    if event is not None:
                        yield event
        except aiohttp.ClientError as error:
            raise CommandError(f"the connection to the sandbox failed: {error}") from error
        except EOFError as error:
            raise CommandError("the sandbox closed the connection before the command ended") from error

    async def upload(self, path: str, data: Any) -> None:
        """Write a file in the guest. `data`: bytes, or an async iterator of bytes (streamed)."""
        headers = {**self._headers, "Content-Type": "application/octet-stream"}
        try:
            async with self._session.post(
                f"{self._url}/files", params=self._file_query(path), data=data, headers=headers
            ) as response:
                if response.status >= 400:
                    raise CommandError(_message_of(await response.read(), response.status))
        except aiohttp.ClientError as error:
            raise CommandError(f"the upload of {path} failed: {error}") from error

    @asynccontextmanager
    async def download(self, path: str) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a file of the guest for reading; the body is streamed by the caller."""
        headers = {**self._headers, "Accept-Encoding": "identity"}
        try:
            async with self._session.get(
                f"{self._url}/files", params=self._file_query(path), headers=headers
            ) as response:
                if response.status >= 400:
                    raise CommandError(_message_of(await response.read(), response.status))
                yield response
        except aiohttp.ClientError as error:
            raise CommandError(f"the download of {path} failed: {error}") from error

    def _file_query(self, path: str) -> dict[str, str]:
        return {"path": path, "username": self.user} if self.user else {"path": path}


@asynccontextmanager
async def connect() -> AsyncIterator[Client]:
    """A client of the server that `find_server` finds."""
    server = find_server()
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(timeout=timeout, auto_decompress=True) as session:
        yield Client(server, session)


def _segment(sandbox_id: str) -> str:
    """A sandbox id as one path segment; a text that could change the path is refused."""
    if not sandbox_id or not all(c.isascii() and (c.isalnum() or c in "-_") for c in sandbox_id):
        raise CommandError(f"{sandbox_id!r} is not a sandbox id")
    return sandbox_id


def sandbox_path(sandbox_id: str, rest: str = "") -> str:
    """Path of a sandbox in the control plane."""
    return f"/sandboxes/{_segment(sandbox_id)}{rest}"


def _message_of(raw: bytes, status: int) -> str:
    try:
        body = json.loads(raw)
        return str(body.get("message") or f"HTTP {status}")
    except (ValueError, AttributeError):
        return f"HTTP {status}"


def _process_event(event: Mapping[str, Any]) -> ProcessEvent | None:
    if "start" in event:
        return ProcessEvent("start", pid=int(event["start"].get("pid", 0)))
    if "data" in event:
        for kind, encoded in event["data"].items():
            return ProcessEvent(kind, data=base64.b64decode(encoded))
    if "end" in event:
        end = event["end"]
        code = int(end.get("exitCode", 0))
        return ProcessEvent("end", exit_code=_signal_exit_code(str(end.get("status", ""))) if code < 0 else code)
    return None


_SIGNAL_NUMBERS = {"hangup": 1, "interrupt": 2, "quit": 3, "aborted": 6, "killed": 9, "terminated": 15}


def _signal_exit_code(status: str) -> int:
    """The exit code that a shell gives to a command that a signal ended."""
    name = status.removeprefix("signal: ").split(" ")[0]
    return 128 + _SIGNAL_NUMBERS.get(name, 9)
