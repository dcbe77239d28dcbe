"""Fixtures of the orchestrator's tests."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import structlog

sys.path.insert(0, str(Path(__file__).parent))

from fakes import Server, World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.fixture
async def server(world: World) -> AsyncIterator[Server]:
    async with Server(world) as running:
        yield running


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[MutableMapping[str, Any]]]:
    """What the code logs, instead of printing it: drawing a traceback takes longer than most of these tests."""
    with structlog.testing.capture_logs() as entries:
        yield entries
