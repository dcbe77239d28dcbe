"""Runs the suites of other SDK releases, each in its own environment, against the shared server.

`scripts/conformance-clients.sh` installs them; where one is missing the test fails and names that script.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.server import REPOSITORY, RunningServer

HERE = Path(__file__).parent
OLD_SDK = REPOSITORY / "build" / "e2b-2.45.1" / "bin" / "python"
BUNDLED_NODE = REPOSITORY / "build" / "node" / "bin"


def _run(command: list[str], cwd: Path, server: RunningServer, *, expect: int = 0) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("AENV_", "E2B_"))}
    path = f"{BUNDLED_NODE}:{os.environ['PATH']}"
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**environment, **server.client_environment, "PATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == expect, f"{command[0]} exited with {done.returncode}; server log:\n{server.log_tail(30)}"
    return done.stdout


@pytest.mark.vm
@pytest.mark.timeout(1600)
def test_python_2_45(server: RunningServer) -> None:
    assert OLD_SDK.exists(), "run scripts/conformance-clients.sh"
    suite = HERE / "python"
    arguments = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--confcutdir",
        str(suite),
        "-c",
        str(suite / "standalone.ini"),
        str(suite),
    ]
    _run([str(OLD_SDK), "-m", "pytest", *arguments], suite, server)


@pytest.mark.vm
@pytest.mark.timeout(1600)
def test_javascript_2_51(server: RunningServer) -> None:
    node = shutil.which("node", path=f"{BUNDLED_NODE}:{os.environ['PATH']}")
    assert node and (HERE / "js" / "node_modules" / "e2b").is_dir(), "run scripts/conformance-clients.sh"
    _run([node, "--test", "--test-reporter=spec", "suite.test.js"], HERE / "js", server)


@pytest.mark.vm
def test_command_line_2_19(server: RunningServer) -> None:
    """The E2B command line, as far as this version goes; what is not offered yet fails with its name and no hang."""
    program = HERE / "js" / "node_modules" / ".bin" / "e2b"
    assert program.exists(), "run scripts/conformance-clients.sh"
    status, made, _ = server.api("POST", "/v2/sandboxes", {"templateID": "base", "metadata": {"suite": "e2b-cli"}})
    assert status == 201
    sandbox_id = made["sandboxID"]

    def e2b(*arguments: str, expect: int = 0) -> str:
        return _run([str(program), *arguments], HERE / "js", server, expect=expect)

    assert sandbox_id in e2b("sandbox", "list")
    assert "Running" in e2b("sandbox", "list", "--metadata", "suite=e2b-cli")
    assert "running" in e2b("sandbox", "info", sandbox_id)
    assert "out" in e2b("sandbox", "exec", sandbox_id, "--", "sh", "-c", "echo out; exit 3", expect=3)
    assert "process ended" in e2b("sandbox", "logs", sandbox_id)
    e2b("sandbox", "metrics", sandbox_id)
    assert "base" in e2b("template", "list")
    e2b("sandbox", "pause", sandbox_id)
    assert server.api("GET", f"/sandboxes/{sandbox_id}")[1]["state"] == "paused"
    e2b("sandbox", "resume", sandbox_id)
    assert server.api("GET", f"/sandboxes/{sandbox_id}")[1]["state"] == "running"
    assert "killed" in e2b("sandbox", "kill", sandbox_id)
    assert server.api("GET", f"/sandboxes/{sandbox_id}")[0] == 404
