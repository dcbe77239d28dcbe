"""Runs in two ways: inside this project's test run, and alone in the environment of another SDK release.

In the second case the environment already says where the server is. These files import nothing of this project.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def endpoint(request: pytest.FixtureRequest) -> Iterator[str]:
    """URL of the server; the SDK's environment variables are set while the tests run."""
    if os.environ.get("E2B_API_URL"):
        yield os.environ["E2B_API_URL"]
        return
    server = request.getfixturevalue("server")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.client_environment.items():
            patch.setenv(name, value)
        yield server.url


@pytest.fixture(scope="session")
def sandbox(endpoint: str) -> Iterator[object]:
    """One sandbox for tests that do not end or change it as a whole."""
    from e2b import Sandbox

    created = Sandbox.create(timeout=1200, metadata={"suite": "shared"}, envs={"SANDBOX_VARIABLE": "from create"})
    try:
        yield created
    finally:
        created.kill()
