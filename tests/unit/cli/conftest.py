"""A control plane over a fake service, in a thread of its own, so that commands can be run as they are."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import structlog

from agentenv.cli.main import main
from unit.api.api_fakes import KEY, FakeService, control_plane


@dataclass(frozen=True)
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def server(service: FakeService) -> Iterator[str]:
    """The URL of a control plane over the service."""
    ready = threading.Event()
    urls: list[str] = []
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with control_plane(service) as client:
            urls.append(client.url)
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    with structlog.testing.capture_logs():  # the server's log is not a command's output
        thread.start()
        assert ready.wait(timeout=60)
        try:
            yield urls[0]
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()


@pytest.fixture
def aenv(server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs a command against the server."""
    monkeypatch.setenv("AENV_API_URL", server)
    monkeypatch.setenv("AENV_API_KEY", KEY)

    def run(*arguments: str) -> Outcome:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["aenv", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsys.readouterr()
        code = ended.value.code
        return Outcome(code if isinstance(code, int) else 1 if code else 0, printed.out, printed.err)

    return run
