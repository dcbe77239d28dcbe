"""Fixtures that all tests share: a server for the whole run, and skips that name what is missing."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from harness.server import RunningServer


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
