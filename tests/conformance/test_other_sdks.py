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


def _run(command: list[str], cwd: Path, server: RunningServer) -> None:
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
    assert done.returncode == 0, f"{command[0]} exited with {done.returncode}; server log:\n{server.log_tail(30)}"


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
