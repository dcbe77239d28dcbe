"""Fixtures that all tests share: a server for the whole run, and skips that name what is missing."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from harness.server import RunningServer

# What the shell of whoever runs the tests says about a server must not reach tests of settings. `harness.server` has
# already noted where the built assets are.
for _name in [name for name in os.environ if name.startswith(("AENV_", "E2B_"))]:
    if _name not in ("AENV_CACHE", "AENV_TEST_KEEP"):
        del os.environ[_name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start virtual machines or change the network need root; without it they are skipped by name."""
    if os.geteuid() == 0:
        return
    skip = pytest.mark.skip(reason="needs root: namespaces, taps, nftables")
    for item in items:
        if item.get_closest_marker("vm") or item.get_closest_marker("root"):
            item.add_marker(skip)


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """One server that tests share; each test makes its own sandboxes on it."""
    with RunningServer() as running:
        yield running
