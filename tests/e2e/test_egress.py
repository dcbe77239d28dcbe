"""Runs `egress_suite.py` in a process of its own.

The suite enters a network namespace, and threads follow only the thread that starts them: the SDK's transport has
background threads that live as long as the process, in whichever namespace it was first used.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from harness.server import BUILT_HOME, REPOSITORY


@pytest.mark.vm
@pytest.mark.root
@pytest.mark.timeout(900)
def test_egress_of_real_guests() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/e2e/egress_suite.py"],
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
    assert "5 passed" in done.stdout, "the suite itself must not be skipped"
