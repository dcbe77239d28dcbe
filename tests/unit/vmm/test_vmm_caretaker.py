"""The caretaker asks only machines that stand still, and goes on when one of them fails to answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from agentenv.errors import VmmError
from agentenv.vmm import caretaker
from agentenv.vmm.caretaker import Caretaker


class FakeMachine:
    """Reports the CPU times it was given, then the last one for ever."""

    def __init__(self, times: Iterable[float | None], *, broken: bool = False) -> None:
        self._times = list(times)
        self._broken = broken
        self.looks = 0
        self.asked: list[int] = []
        self.seen = asyncio.Condition()

    def cpu_time_s(self) -> float | None:
        self.looks += 1
        return self._times[min(self.looks, len(self._times)) - 1]

    async def resume_after_io_error(self) -> bool:
        async with self.seen:
            self.asked.append(self.looks)
            self.seen.notify_all()
        if self._broken:
            raise VmmError("it has ended")
        return True

    async def wait_asked(self, times: int) -> None:
        async with asyncio.timeout(20), self.seen:
            await self.seen.wait_for(lambda: len(self.asked) >= times)


async def test_only_machines_that_stand_still_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caretaker, "_PERIOD_S", 0)
    halted = FakeMachine([1.0])
    broken = FakeMachine([1.0], broken=True)
    busy = FakeMachine([float(number) for number in range(100_000)])
    ended = FakeMachine([None])
    watching = Caretaker(lambda: [broken, busy, ended, halted])
    watching.start()
    watching.start()
    await halted.wait_asked(3)
    await broken.wait_asked(3)
    await watching.close()
    await watching.close()
    assert halted.asked[0] == 3, "it takes two periods without any CPU time"
    assert halted.asked[1] - halted.asked[0] == 2, "it is not asked in every period"
    assert busy.asked == ended.asked == []
    looks = halted.looks
    await asyncio.sleep(0)
    assert halted.looks == looks, "it goes on after close"
