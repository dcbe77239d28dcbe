"""Fixtures of the control plane's tests: one server for all, whose sandboxes are forgotten between tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, MutableMapping
from typing import Any

import pytest
import pytest_asyncio
import structlog
from api_fakes import Client, FakeService, control_plane


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[list[MutableMapping[str, Any]]]:
    """The server's log entries of a test."""
    with structlog.testing.capture_logs() as entries:
        yield entries


@pytest.fixture(scope="session")
def shared_service() -> FakeService:
    return FakeService()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def client(shared_service: FakeService) -> AsyncIterator[Client]:
    """A client of a served control plane."""
    async with control_plane(shared_service) as client:
        yield client


@pytest.fixture
def service(shared_service: FakeService) -> FakeService:
    """The service behind the control plane, empty."""
    shared_service.reset()
    return shared_service
