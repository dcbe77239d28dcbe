"""Fixtures of the storage tests: the fake daemon, supervised, and a short directory for unix sockets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agentenv.storage import daemon as daemon_module
from agentenv.storage.daemon import BlockDaemonProcess
from unit.storage.storage_fakes import end_daemon, kill_daemons, make_program


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory whose path is short enough for the addresses of unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="aenv-", dir="/tmp"))
    yield path
    kill_daemons(path / "blockd")
    shutil.rmtree(path)


@pytest.fixture
def program(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The fake daemon's program. A script is another file than the one that the kernel runs for it."""
    monkeypatch.setattr(daemon_module, "_runs", lambda pid, binary: True)
    return make_program(home / "fake-blockd")


@pytest.fixture
async def daemon(home: Path, program: Path) -> AsyncIterator[BlockDaemonProcess]:
    """A running fake daemon."""
    process = BlockDaemonProcess(
        program, state=home / "blockd", socket=home / "run" / "blockd.sock", log_file=home / "run" / "blockd.log"
    )
    await process.start()
    yield process
    await process.close()
    await end_daemon(home / "run" / "blockd.sock")
