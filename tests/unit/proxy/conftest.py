"""Fixtures of the proxy's tests: uvloop, as in production, and a running proxy."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import uvloop
from proxy_world import GUEST_HOST, World

HERE = Path(__file__).parent


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that hangs is ended from a thread: uvloop does not let a signal's exception through."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(120, method="thread"))


@pytest.fixture
def agent_port() -> int:
    """A port of the guest's address on which nothing listens yet."""
    with socket.socket() as probe:
        probe.bind((GUEST_HOST, 0))
        return int(probe.getsockname()[1])


@pytest.fixture
async def world(agent_port: int) -> AsyncIterator[World]:
    async with World(agent_port).running() as running:
        yield running
