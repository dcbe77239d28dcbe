"""Fixtures of the network tests: every test gets a private host, and on request a world and a home."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from network_lab import (
    World,
    private_host,
)


@pytest.fixture(autouse=True)
def host() -> Iterator[None]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    with private_host():
        yield


@pytest.fixture
async def world(host: None) -> AsyncIterator[World]:
    made = World()
    await made.serve()
    yield made
    made.close()


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir()
    return path
