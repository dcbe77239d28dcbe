"""Runs `egress_suite.py` in a process of its own.

The suite enters a network namespace, and threads follow only the thread that starts them: the SDK's transport has
background threads that live as long as the process, in whichever namespace it was first used.
"""

from __future__ import annotations

import pytest

from harness.suite import run_suite


@pytest.mark.vm
@pytest.mark.root
@pytest.mark.timeout(900)
def test_egress_of_real_guests() -> None:
    run_suite("tests/e2e/egress_suite.py", passed=5)
