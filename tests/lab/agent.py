"""A blocking client of the guest agent in the emulated host: run commands, copy files. No knowledge of QEMU.

The agent is the product's own (`aenv-guest`), spoken to with Connect's JSON over HTTP/1.1; source of the message forms:
`crates/guest/proto`.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import struct
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from uuid import uuid4

from lab.results import CommandFailed, Completed, LabError

_ENVELOPE = struct.Struct(">BI")
_END_OF_STREAM = 2
_ROOT = "Basic " + base64.b64encode(b"root:").decode()
_GRACE_S = 30
"""How long after a command's own deadline the client waits for the word of its end."""


class Agent:
    """The agent behind a loopback port. Each call has a connection of its own, so all may be used from any thread."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._token = ""

    def initialize(self) -> None:
        """Give the host its clock, and the agent a token, so that other users of this machine are refused."""
        token = uuid4().hex
        body = {
            "sandboxId": "lab",
            "templateId": "lab",
            "hostname": "lab",
            "accessToken": token,
            "envVars": {},
            "defaultUser": "root",
            "lifecycleID": "1",
            "entropy": base64.b64encode(os.urandom(64)).decode(),
            "timestamp": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
        }
        self._request("POST", "/init", json.dumps(body).encode(), {"Content-Type": "application/json"}, timeout_s=60)
        self._token = token

    def run(
        self,
        words: Sequence[str],
        *,
        timeout_s: float = 120,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        echo: bool = True,
        on_output: Callable[[bytes], None] | None = None,
    ) -> Completed:
        """Run a program as root to its end. What it prints appears at once on this process's standard output.

        Args:
            words: the program and its arguments; nothing goes through a shell.
            timeout_s: after that the agent kills it.
            env: more environment variables.
            check: fail when the exit code is not 0.
            echo: show the output.
            on_output: called with each piece of standard output or error.

        Raises:
            CommandFailed: the exit code is not 0, or the time was up; with all that it printed.
            LabError: the host does not answer.
        """
        message = {
            "process": {"cmd": words[0], "args": list(words[1:]), "envs": dict(env or {}), "cwd": "/"},
            "stdin": False,
        }
        payload = json.dumps(message).encode()
        headers = {
            "Content-Type": "application/connect+json",
            "Connect-Protocol-Version": "1",
            "Connect-Timeout-Ms": str(int(timeout_s * 1000)),
            "Authorization": _ROOT,
        }
        streams: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        end: dict[str, Any] | None = None
        failure: dict[str, Any] | None = None
        connection = self._connect(timeout_s + _GRACE_S)
        try:
            connection.request(
                "POST",
                "/process.Process/Start",
                _ENVELOPE.pack(0, len(payload)) + payload,
                {**headers, "X-Access-Token": self._token},
            )
            answer = connection.getresponse()
            if answer.status != 200:
                raise LabError(f"starting {words[0]} failed: {answer.status} {answer.read(500)!r}")
            while header := answer.read(_ENVELOPE.size):
                flags, size = _ENVELOPE.unpack(header)
                content = json.loads(answer.read(size) or b"{}")
                if flags & _END_OF_STREAM:
                    failure = content.get("error")
                    break
                event = content.get("event", {})
                for name, text in event.get("data", {}).items():
                    piece = base64.b64decode(text)
                    streams.setdefault(name, []).append(piece)
                    if echo:
                        sys.stdout.write(piece.decode(errors="replace"))
                        sys.stdout.flush()
                    if on_output is not None:
                        on_output(piece)
                end = event.get("end", end)
        except (OSError, http.client.HTTPException, ValueError, struct.error) as error:
            raise LabError(f"the emulated host went away during {' '.join(words)[:200]}: {error!r}") from error
        finally:
            connection.close()
        completed = Completed(
            tuple(words),
            end.get("exitCode", 0) if end is not None else -1,
            b"".join(streams["stdout"]),
            b"".join(streams["stderr"]),
            (end or {}).get("error", "") or json.dumps(failure) if failure or end is None else "",
        )
        if end is None or (check and (completed.code != 0 or failure)):
            raise CommandFailed(completed)
        return completed

    def start(self, words: Sequence[str], **options: Any) -> Future[Completed]:
        """`run` beside the caller; ask the future for the result. The output is not echoed."""
        future: Future[Completed] = Future()

        def follow() -> None:
            try:
                future.set_result(self.run(words, echo=False, **options))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=follow, name=f"lab {words[0]}", daemon=True).start()
        return future

    def put(self, content: bytes, path: str, mode: int = 0o644) -> None:
        """Write a file in the host; missing directories are made."""
        query = urlencode({"path": path, "username": "root"})
        self._request("POST", f"/files?{query}", content, {"Content-Type": "application/octet-stream"}, timeout_s=120)
        self.run(["chmod", f"{mode:o}", path])

    def get(self, path: str) -> bytes:
        """Read a file of the host."""
        query = urlencode({"path": path, "username": "root"})
        return self._request("GET", f"/files?{query}", None, {}, timeout_s=120)

    def fetch(self, path: str, destination: Path) -> None:
        """Copy a file out of the host."""
        destination.write_bytes(self.get(path))

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=timeout_s)

    def _request(
        self, method: str, target: str, body: bytes | None, headers: Mapping[str, str], *, timeout_s: float
    ) -> bytes:
        connection = self._connect(timeout_s)
        try:
            connection.request(method, target, body, {**headers, "X-Access-Token": self._token})
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise LabError(f"{method} {target} to the emulated host failed: {error!r}") from error
        finally:
            connection.close()
        if answer.status not in (200, 204):
            raise LabError(f"{method} {target} to the emulated host: {answer.status} {content[:500]!r}")
        return content
