"""What happens to disks reaches the log of their sandbox, once a minute at most."""

from __future__ import annotations

import pytest
from fakes import Server, World, eventually, wish

from agentenv.storage.disks import DiskEvent


@pytest.mark.parametrize(
    ("kind", "level", "words"),
    [("no_space", "warn", "is full"), ("io_error", "error", "read or write"), ("failed", "error", "opened again")],
)
async def test_an_event_is_in_the_log_of_its_sandbox(world: World, kind: str, level: str, words: str) -> None:
    async with Server(world) as server:
        sandbox, other = [await server.orchestrator.create(wish()) for _ in range(2)]
        server.disks.tell(DiskEvent(sandbox.id, kind, "disk 7 said so"))  # type: ignore[arg-type]
        log = world.home / "sandboxes" / sandbox.id / "log.jsonl"
        await eventually(lambda: words in log.read_text())
        (entry,) = await server.orchestrator.logs(sandbox.id, level="warn")
        assert (entry.level, entry.logger) == (level, "storage")
        assert "disk 7 said so" in entry.message
        assert await server.orchestrator.logs(other.id, level="warn") == []


async def test_a_storm_of_events_is_one_line_a_minute_and_kind(world: World) -> None:
    async with Server(world) as server:
        sandbox = await server.orchestrator.create(wish(timeout_s=3600))

        async def lines() -> list[str]:
            return [entry.level for entry in await server.orchestrator.logs(sandbox.id, level="warn")]

        for _ in range(100):
            server.disks.tell(DiskEvent(sandbox.id, "no_space", ""))
        server.disks.tell(DiskEvent(sandbox.id, "io_error", ""))
        await server.orchestrator._disk_events.close()
        assert sorted(await lines()) == ["error", "warn"]
        await world.clock.advance(61)
        server.disks.tell(DiskEvent(sandbox.id, "no_space", ""))
        await server.orchestrator._disk_events.close()
        assert sorted(await lines()) == ["error", "warn", "warn"]


async def test_an_event_of_a_disk_that_is_gone(world: World) -> None:
    async with Server(world) as server:
        sandbox = await server.orchestrator.create(wish())
        await server.orchestrator.kill(sandbox.id)
        server.disks.tell(DiskEvent(sandbox.id, "io_error", "late"))
        await server.settle()
        server.check([])
