"""Runs a file of tests in a process of its own, which may enter namespaces that its threads must not be left in."""

from __future__ import annotations

import os
import subprocess
import sys

from harness.server import BUILT_HOME, REPOSITORY


def run_suite(path: str, *, passed: int, timeout_s: float = 880) -> None:
    """Run the tests of a file below the repository; each has to pass, and none may be skipped.

    Args:
        path: of the file.
        passed: how many tests there are.
        timeout_s: seconds for all of them.
    """
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", path],
        cwd=REPOSITORY,
        env={**os.environ, "AENV_HOME": str(BUILT_HOME)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0
    assert f"{passed} passed" in done.stdout, "the suite itself must not be skipped"
