"""Runs `fork_suite.py` in a process of its own, for the reason that `test_egress.py` has."""

from __future__ import annotations

import pytest

from harness.suite import run_suite


@pytest.mark.vm
@pytest.mark.root
@pytest.mark.timeout(900)
def test_forks_of_real_guests() -> None:
    run_suite("tests/e2e/fork_suite.py", passed=2)
