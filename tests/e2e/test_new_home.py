"""A server on a home that never had assets makes them, and then starts sandboxes; where it cannot, it says so."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2b import Sandbox

from harness.server import AENV, RunningServer

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.timeout(900)]


@pytest.fixture
def empty_home() -> Iterator[Path]:
    home = Path(tempfile.mkdtemp(prefix="aenv-test-"))
    yield home
    shutil.rmtree(home, ignore_errors=True)


def test_a_new_home_is_provisioned(empty_home: Path) -> None:
    with RunningServer(empty_home) as server:
        assert (empty_home / "templates" / "base" / "template.json").is_file()
        options = {"api_url": server.url, "sandbox_url": server.url, "api_key": server.api_key}
        with Sandbox.create(timeout=300, **options) as sandbox:
            assert sandbox.commands.run("id -un").stdout == "user\n"


@pytest.mark.parametrize("missing", ["AENV_GUEST_BINARY", "AENV_BLOCKD_BINARY"])
def test_without_one_of_our_programs_it_says_what_to_do(empty_home: Path, missing: str) -> None:
    server = RunningServer(empty_home, environment={missing: "/nonexistent"})
    ended = subprocess.run(
        [str(AENV), "serve", "--listen", "127.0.0.1:0"],
        env=server.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert len(ended.stderr.strip().splitlines()) == 1
    assert "make setup" in ended.stderr
