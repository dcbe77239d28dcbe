"""Runs what the README prints, as it is printed: the examples in Python and JavaScript, the commands, the demo."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid
from pathlib import Path

import pytest

from harness.server import AENV, BUILT_HOME, REPOSITORY, RunningServer

pytestmark = [pytest.mark.vm, pytest.mark.root]

README = (REPOSITORY / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def block_with(language: str, words: str) -> str:
    (found,) = [block for block in blocks(language) if words in block]
    return found


def without_sudo(commands: str) -> str:
    """The tests run as root; a bare machine's root may have no sudo."""
    return re.sub(r"\bsudo (-E )?", "", commands)


def run(command: list[str], environment: dict[str, str], cwd: Path = REPOSITORY) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_python_example(server: RunningServer) -> None:
    output = run(
        [str(REPOSITORY / ".venv/bin/python"), "-c", block_with("python", "Sandbox")],
        {**os.environ, **server.client_environment},
    )
    assert "Linux" in output
    assert "Python 3" in output


def test_javascript_example(server: RunningServer, tmp_path: Path) -> None:
    path = f"{REPOSITORY}/build/node/bin:{os.environ['PATH']}"
    node = shutil.which("node", path=path)
    assert node, "run scripts/conformance-clients.sh"
    (tmp_path / "node_modules").symlink_to(REPOSITORY / "tests/conformance/js/node_modules")
    (tmp_path / "example.mjs").write_text(block_with("js", "Sandbox"))
    output = run([node, "example.mjs"], {**os.environ, **server.client_environment, "PATH": path}, tmp_path)
    assert "Linux" in output


def test_environment_and_commands(server: RunningServer, tmp_path: Path) -> None:
    exports = without_sudo(block_with("sh", "aenv env"))
    printed = run(["bash", "-euc", exports + "env"], server.environment)
    assert f"E2B_API_URL={server.url}" in printed
    assert f"E2B_API_KEY={server.api_key}" in printed

    commands = without_sudo(block_with("sh", "aenv cp"))
    assert "aenv shell ID" in commands, "the shell needs a terminal and has a test of its own"
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "file").write_text("content")
    script = []
    for line in (re.sub(r"\s+#.*", "", line) for line in commands.splitlines()):
        if "aenv shell" in line:
            continue
        script.append(f"ID=$({line})" if "aenv start" in line else re.sub(r"\bID\b", "$ID", line))
    text = "\n".join(script).replace("./project", str(tmp_path / "project"))
    assert run(["bash", "-euc", text], server.environment).splitlines()[0] == "42"


def test_snapshots_forks_and_rolling_back(server: RunningServer) -> None:
    commands = re.sub(r"\s+#.*", "", without_sudo(block_with("sh", "aenv rollback")))
    started = f"ID=$({AENV} start --timeout 900)\n"
    output = run(["bash", "-euc", started + re.sub(r"\bID\b", "$ID", commands)], server.environment)
    assert '"ready:default"' in output, "the tree, as JSON: it goes into a pipe"


@pytest.mark.timeout(900)
def test_rollouts_example(server: RunningServer) -> None:
    command = block_with("sh", "rollouts.py").split()
    output = run([*command, "--children", "2"], {**os.environ, **server.client_environment})
    assert "kept" in output
    assert "rolled back" in output
    assert output.splitlines()[-1] == "done"


def test_toml_example() -> None:
    (example,) = blocks("toml")
    home = RunningServer(config=example)
    try:
        shown = run([str(REPOSITORY / ".venv/bin/aenv"), "home"], home.environment)
        assert shown.strip() == str(home.home)
    finally:
        home.destroy()


@pytest.mark.timeout(900)
def test_demo() -> None:
    mark = f"DEMO_MARK={uuid.uuid4().hex}"
    name, _, value = mark.partition("=")
    inherited = {key: text for key, text in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    output = run(["make", "demo"], {**inherited, "AENV_HOME": str(BUILT_HOME), name: value})
    assert "the sandbox is gone" in output
    assert output.rstrip().splitlines()[-1].startswith("done.")
    assert processes_with(mark) == [], "the demo's server has ended"
    homes = [Path(claim.read_text().strip()) for claim in Path("/run/aenv/slots").glob("*")]
    assert [home for home in homes if not home.exists()] == [], "the demo gave its slots back"


def processes_with(mark: str) -> list[str]:
    """Command lines of the processes that have this variable in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found
