"""Rollouts: prepare once, fork, let each copy act differently, grade them, keep the best, roll back a mistake, go on.

The environment is a small game in the memory of a process: a walker on a hill, who sees only the height where it
stands. Nothing of it is on the disk, so only copies of the running machine can go on from the same place.

    pip install 'agentenv[client]'
    eval "$(aenv env)"
    python examples/rollouts.py            # --children 2 on a slow machine
"""

import argparse
import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from e2b import SandboxQuery

from agentenv.client import AsyncSandbox

GAME = """
import os

os.mkfifo("moves")
os.mkfifo("heights")
x = y = 0
while True:
    with open("moves") as moves:
        east, north = map(int, moves.read().split())
    x, y = x + east, y + north
    with open("heights", "w") as heights:
        print(100 - abs(x - 9) - abs(y - 5), file=heights)
"""
COMPASS = {
    "north-east": (1, 1),
    "south-west": (-1, -1),
    "east": (1, 0),
    "west": (-1, 0),
    "north": (0, 1),
    "south": (0, -1),
    "south-east": (1, -1),
    "north-west": (-1, 1),
}
PATIENCE_S = 600
"""For calls that start machines: emulated ones take their time."""


@dataclass
class Rollout:
    """One copy, what it did, and what came of it."""

    sandbox: AsyncSandbox
    action: str
    grade: int
    seconds: float


class Belongings:
    """All sandboxes and checkpoints of this program: each is written down before anything else is done with it."""

    def __init__(self) -> None:
        self.mark = {"example": "rollouts", "run": uuid.uuid4().hex}
        """Metadata of the first sandbox, which all its copies inherit."""
        self._sandboxes: set[AsyncSandbox] = set()
        self._checkpoints: list[asyncio.Task[str]] = []

    def add(self, sandbox: AsyncSandbox) -> None:
        self._sandboxes.add(sandbox)

    async def keep_only(self, kept: AsyncSandbox) -> None:
        """Kill all sandboxes but one."""
        others = self._sandboxes - {kept}
        await asyncio.gather(*(other.kill() for other in others))
        self._sandboxes -= others

    async def checkpoint(self, sandbox: AsyncSandbox) -> str:
        """Take a snapshot of a sandbox. Returns its id."""

        async def take() -> str:
            return (await sandbox.create_snapshot(request_timeout=PATIENCE_S)).snapshot_id

        # A snapshot is taken to its end whoever leaves, so its id is waited for even then.
        self._checkpoints.append(asyncio.create_task(take()))
        return await asyncio.shield(self._checkpoints[-1])

    async def remove(self) -> None:
        """Remove everything; one that cannot be removed does not keep the others."""
        taken = await asyncio.gather(*self._checkpoints, return_exceptions=True)
        # Sandboxes first: a snapshot that one is paused in cannot be deleted.
        kills = await asyncio.gather(*(left.kill() for left in self._sandboxes), return_exceptions=True)
        strays = await asyncio.gather(self._kill_strays(), return_exceptions=True)
        deletions = await asyncio.gather(
            *(AsyncSandbox.delete_snapshot(one) for one in taken if isinstance(one, str)), return_exceptions=True
        )
        failures = [one for one in (*kills, *strays, *deletions) if isinstance(one, BaseException)]
        if failures:
            raise BaseExceptionGroup("not everything could be removed", failures)

    async def _kill_strays(self) -> None:
        """Copies that were on their way when this program was interrupted are known to the server alone."""
        found = AsyncSandbox.list(query=SandboxQuery(metadata=self.mark))
        while found.has_next:
            for stray in await found.next_items():
                await AsyncSandbox.kill(stray.sandbox_id)


@asynccontextmanager
async def belongings() -> AsyncIterator[Belongings]:
    """What is made inside is removed at the end, however that comes: done, failed, or interrupted."""
    made = Belongings()
    try:
        yield made
    finally:
        await made.remove()


async def move(sandbox: AsyncSandbox, east: int, north: int) -> int:
    """Let the walker of a sandbox move. Returns the height that it is at then."""
    result = await sandbox.commands.run(f"echo {east} {north} > moves && cat heights")
    return int(result.stdout)


async def begin_game(sandbox: AsyncSandbox) -> None:
    """Let the game run in a sandbox: what would be a checkout, an installation and services for a real task."""
    await sandbox.files.write("game.py", GAME)
    await sandbox.commands.run("python3 game.py", background=True, timeout=0)
    # The game makes the pipes first of all, so they are there as soon as it runs.
    await sandbox.commands.run("until test -p heights; do sleep 0.05; done")


async def explore(made: Belongings, sandbox: AsyncSandbox, children: int, step: int) -> list[Rollout]:
    """Fork a sandbox; each copy walks in another direction. Returns the best first."""
    begun = time.monotonic()

    async def play(copy: AsyncSandbox, direction: str) -> Rollout:
        ready_after = time.monotonic() - begun
        east, north = COMPASS[direction]
        return Rollout(copy, direction, await move(copy, east * step, north * step), ready_after)

    directions = iter(COMPASS)
    plays = []
    copies = sandbox.fork_each(children, timeout=900, request_timeout=PATIENCE_S)
    async with aclosing(copies), asyncio.TaskGroup() as group:
        async for copy in copies:
            if isinstance(copy, Exception):
                print(f"  a copy did not start: {copy}")
            else:
                made.add(copy)
                plays.append(group.create_task(play(copy, next(directions))))
    return sorted((play.result() for play in plays), key=lambda rollout: rollout.grade, reverse=True)


def print_table(rollouts: list[Rollout]) -> None:
    print(f"  {'action':12} {'grade':>5}  {'ready after':>11}  sandbox")
    for rollout in rollouts:
        print(f"  {rollout.action:12} {rollout.grade:5}  {rollout.seconds:9.1f} s  {rollout.sandbox.sandbox_id}")


async def roll_out(made: Belongings, children: int, rounds: int) -> None:
    """Everything, from the first sandbox to the last move."""
    sandbox = await AsyncSandbox.create(timeout=900, metadata=made.mark, request_timeout=PATIENCE_S)
    made.add(sandbox)
    await begin_game(sandbox)
    grade = await move(sandbox, 0, 0)
    print(f"prepared {sandbox.sandbox_id}; the walker is at height {grade}")

    for number in range(1, rounds + 1):
        print(f"round {number}: {children} copies, one action each")
        rollouts = await explore(made, sandbox, children, step=3)
        if not rollouts:
            raise SystemExit("no copy started")
        print_table(rollouts)
        best = rollouts[0]
        await made.keep_only(best.sandbox)
        sandbox, grade = best.sandbox, best.grade
        print(f"kept {sandbox.sandbox_id}, which went {best.action}: height {grade}")

    checkpoint = await made.checkpoint(sandbox)
    print(f"checkpoint {checkpoint}")
    print(f"a reckless leap: height {await move(sandbox, 50, -50)}")
    await sandbox.rollback(checkpoint, request_timeout=PATIENCE_S)
    back = await move(sandbox, 0, 0)
    print(f"rolled back: height {back}, in the same sandbox {sandbox.sandbox_id}")
    assert back == grade, "the memory of the game is as it was"
    print(f"and on: height {await move(sandbox, 1, 1)}")


async def main() -> None:
    parser = argparse.ArgumentParser(description="Forked rollouts of one prepared sandbox.")
    parser.add_argument("--children", type=int, default=8, choices=range(1, len(COMPASS) + 1), metavar="1-8")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()

    async with belongings() as made:
        await roll_out(made, options.children, options.rounds)
    print("done")


if __name__ == "__main__":
    asyncio.run(main())
