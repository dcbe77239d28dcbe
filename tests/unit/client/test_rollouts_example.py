"""The example of rollouts leaves nothing behind, however it ends. Games are not played here: there are no machines."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import pytest
import pytest_asyncio
import structlog

from agentenv.client import AsyncSandbox
from agentenv.errors import SandboxStartError
from unit.api.api_fakes import KEY, FakeService, control_plane

EXAMPLE = Path(__file__).parents[3] / "examples/rollouts.py"


@pytest_asyncio.fixture
async def service(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeService]:
    """A service whose control plane the example finds."""
    service = FakeService()
    with structlog.testing.capture_logs():
        async with control_plane(service) as client:
            monkeypatch.setenv("E2B_API_URL", client.url)
            monkeypatch.setenv("E2B_API_KEY", KEY)
            yield service


@pytest.fixture
def rollouts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example, with a game that is the same wherever one goes."""
    spec = importlib.util.spec_from_file_location("rollouts", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "rollouts", module)
    spec.loader.exec_module(module)

    async def begin_game(_sandbox: AsyncSandbox) -> None:
        pass

    async def move(_sandbox: AsyncSandbox, _east: int, _north: int) -> int:
        return 7

    monkeypatch.setattr(module, "begin_game", begin_game)
    monkeypatch.setattr(module, "move", move)
    monkeypatch.setattr(sys, "argv", ["rollouts.py", "--children", "3"])
    return module


def left(service: FakeService) -> tuple[list[str], int]:
    return list(service.sandboxes), len(service.taken)


async def test_to_the_end(service: FakeService, rollouts: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    await rollouts.main()
    assert capsys.readouterr().out.splitlines()[-1] == "done"
    assert left(service) == ([], 0)


async def test_a_game_that_does_not_begin(
    service: FakeService, rollouts: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def begin_game(_sandbox: AsyncSandbox) -> None:
        raise ValueError("no game")

    monkeypatch.setattr(rollouts, "begin_game", begin_game)
    with pytest.raises(ValueError, match="no game"):
        await rollouts.main()
    assert left(service) == ([], 0)


async def test_a_move_that_fails(service: FakeService, rollouts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    async def move(_sandbox: AsyncSandbox, east: int, _north: int) -> int:
        if east < 0:
            raise ValueError("no height")
        return 7

    monkeypatch.setattr(rollouts, "move", move)
    with pytest.raises(ExceptionGroup) as raised:
        await rollouts.main()
    assert raised.group_contains(ValueError, match="no height")
    assert left(service) == ([], 0)


async def test_an_interruption_while_copies_move(
    service: FakeService, rollouts: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way = asyncio.Semaphore(0)

    async def move(_sandbox: AsyncSandbox, east: int, _north: int) -> int:
        if east:
            under_way.release()
            await asyncio.Event().wait()
        return 7

    monkeypatch.setattr(rollouts, "move", move)
    task = asyncio.create_task(rollouts.main())
    for _ in range(3):
        await under_way.acquire()
    assert len(service.sandboxes) == 4
    task.cancel()  # as an interrupt of the keyboard does
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left(service) == ([], 0)


async def test_an_interruption_while_copies_come(
    service: FakeService, rollouts: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = asyncio.Semaphore(0)

    async def move(_sandbox: AsyncSandbox, east: int, _north: int) -> int:
        if east:
            moved.release()
        else:  # the first sandbox is there, so what never ends is the fork
            service.slow, service.fork_pauses_at = asyncio.Event(), 2
        return 7

    monkeypatch.setattr(rollouts, "move", move)
    task = asyncio.create_task(rollouts.main())
    for _ in range(2):
        await moved.acquire()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await service.cancelled.wait()
    assert left(service) == ([], 0)


async def test_an_interruption_while_a_checkpoint_is_taken(
    service: FakeService, rollouts: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    taken = service.snapshot

    async def snapshot(sandbox_id: str, *, name: str | None = None, memory: bool = True) -> object:
        begun.set()
        await go_on.wait()
        return await taken(sandbox_id, name=name, memory=memory)

    monkeypatch.setattr(service, "snapshot", snapshot)
    task = asyncio.create_task(rollouts.main())
    await begun.wait()
    task.cancel()
    asyncio.get_running_loop().call_soon(go_on.set)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert left(service) == ([], 0)


@pytest.mark.parametrize("failing", ["leap", "rollback"])
async def test_a_checkpoint_is_deleted_when_what_follows_fails(
    service: FakeService, rollouts: ModuleType, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    async def move(_sandbox: AsyncSandbox, east: int, _north: int) -> int:
        if failing == "leap" and east == 50:
            raise SandboxStartError("it fell")
        return 7

    async def rollback(_sandbox_id: str, _reference: str) -> None:
        raise SandboxStartError("it fell")

    monkeypatch.setattr(rollouts, "move", move)
    monkeypatch.setattr(service, "rollback", rollback)
    with pytest.raises(Exception, match="it fell"):
        await rollouts.main()
    assert left(service) == ([], 0)
