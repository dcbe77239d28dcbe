"""A real `aenv serve` process for tests: its own home, built assets shared, every life of it under control.

Nothing here knows what a test checks. A server that a test started is ended with the test, its sandboxes too.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from email.message import Message
from pathlib import Path
from typing import Any

from harness.storage import daemons_of, share_built

REPOSITORY = Path(__file__).resolve().parents[2]
AENV = REPOSITORY / ".venv" / "bin" / "aenv"


def _built_home() -> Path:
    if os.environ.get("AENV_HOME"):
        return Path(os.environ["AENV_HOME"])
    return Path("/var/lib/aenv") if os.geteuid() == 0 else Path.home() / ".local/share/aenv"


BUILT_HOME = _built_home()
"""The home in which `make setup` made assets and the base template."""


def new_home(config: str = "") -> Path:
    """A fresh home that shares the built assets and the base template."""
    home = Path(tempfile.mkdtemp(prefix="aenv-test-"))
    share_built(BUILT_HOME, home)
    if config:
        (home / "config.toml").write_text(config)
    return home


class RunningServer:
    """One server process on one home. Use as a context manager; `kill`, `terminate` and `start` may alternate."""

    def __init__(
        self,
        home: Path | None = None,
        *,
        config: str = "",
        environment: dict[str, str] | None = None,
        program: Sequence[str] = (str(AENV),),
    ) -> None:
        self.home = home or new_home(config)
        self.url = ""
        self.log = self.home / "server.log"
        self._environment = environment or {}
        self._program = program
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RunningServer:
        try:
            self.start()
        except BaseException:
            self.destroy()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the server and of `aenv` commands for it."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("AENV_", "E2B_"))}
        return {**inherited, "AENV_HOME": str(self.home), **self._environment}

    @property
    def client_environment(self) -> dict[str, str]:
        """Environment for the official SDKs."""
        return {"E2B_API_URL": self.url, "E2B_SANDBOX_URL": self.url, "E2B_API_KEY": self.api_key}

    @property
    def api_key(self) -> str:
        return (self.home / "secrets" / "api-key").read_text().strip()

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def start(self) -> None:
        """Start the process and wait for its ready line. A second start takes the address of the first.

        Raises:
            AssertionError: it ended instead; the message carries the end of its log.
        """
        listen = self.url.removeprefix("http://") or "127.0.0.1:0"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._program, "serve", "--listen", listen],
                env=self.environment,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        if not line.startswith("listening on http://"):
            code = self._process.wait()
            raise AssertionError(f"server ended with {code}, said {line!r}; log:\n{self.log_tail()}")
        self.url = line.split()[-1]

    def log_tail(self, lines: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def kill(self) -> None:
        """kill -9: nothing is cleaned up."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def terminate(self) -> int:
        """SIGTERM: a graceful stop that leaves the sandboxes running. Returns the exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(timeout=60)

    def destroy(self) -> None:
        """End everything: sandboxes, server, home."""
        try:
            if self._process is not None and self._process.poll() is None:
                self._process.terminate()
                try:
                    self._process.wait(timeout=60)
                except subprocess.TimeoutExpired:
                    self.kill()
            if self._process is not None and (any((self.home / "sandboxes").glob("*")) or daemons_of(self.home)):
                drained = subprocess.Popen(
                    [str(AENV), "serve", "--listen", "127.0.0.1:0", "--drain"],
                    env=self.environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                assert drained.stdout is not None
                drained.stdout.readline()
                drained.send_signal(signal.SIGTERM)
                drained.wait(timeout=120)
        finally:
            if self._process is not None and self._process.stdout is not None:
                self._process.stdout.close()
            for pid in daemons_of(self.home):
                os.kill(pid, signal.SIGKILL)
            if os.environ.get("AENV_TEST_KEEP"):
                sys.stderr.write(f"kept {self.home}\n")
            else:
                shutil.rmtree(self.home, ignore_errors=True)

    def api(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None, timeout_s: float = 300
    ) -> tuple[int, Any, Message]:
        """One control-plane call with the key. Returns status, decoded JSON or None, headers (names in any case)."""
        request = urllib.request.Request(self.url + path, method=method)
        request.add_header("X-API-KEY", self.api_key)
        data = None
        if body is not None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        for name, value in (headers or {}).items():
            request.add_header(name, value)
        try:
            with urllib.request.urlopen(request, data=data, timeout=timeout_s) as answer:
                raw = answer.read()
                return answer.status, json.loads(raw) if raw else None, answer.headers
        except urllib.error.HTTPError as error:
            raw = error.read()
            return error.code, json.loads(raw) if raw else None, error.headers

    def aenv(
        self, *arguments: str, data: bytes | None = None, timeout_s: float = 300
    ) -> subprocess.CompletedProcess[bytes]:
        """Run an `aenv` command against this server."""
        environment = {**self.environment, "AENV_API_URL": self.url}
        return subprocess.run(
            [str(AENV), *arguments], env=environment, input=data, capture_output=True, timeout=timeout_s, check=False
        )
