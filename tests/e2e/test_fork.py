"""Runs `fork_suite.py` in a process of its own, for the reason that `test_egress.py` has."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from harness.server import BUILT_HOME, REPOSITORY


@pytest.mark.vm
@pytest.mark.root
@pytest.mark.timeout(900)
def test_forks_of_real_guests() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/e2e/fork_suite.py"],
        cwd=REPOSITORY,
        env={**os.environ, "AENV_HOME": str(BUILT_HOME)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=880,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0
    assert "2 passed" in done.stdout, "the suite itself must not be skipped"
