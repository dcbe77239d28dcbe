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
from dataclasses import dataclass

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


async def move(sandbox: AsyncSandbox, east: int, north: int) -> int:
    """Let the walker of a sandbox move. Returns the height that it is at then."""
    result = await sandbox.commands.run(f"echo {east} {north} > moves && cat heights")
    return int(result.stdout)


async def prepare() -> AsyncSandbox:
    """A sandbox with the game running in it: what would be a checkout, an installation and services for a real task."""
    sandbox = await AsyncSandbox.create(timeout=900, metadata={"example": "rollouts"}, request_timeout=PATIENCE_S)
    await sandbox.files.write("game.py", GAME)
    await sandbox.commands.run("python3 game.py", background=True, timeout=0)
    # The game makes the pipes first of all, so they are there as soon as it runs.
    await sandbox.commands.run("until test -p heights; do sleep 0.05; done")
    return sandbox


async def explore(sandbox: AsyncSandbox, children: int, step: int) -> list[Rollout]:
    """Fork a sandbox; each copy walks in another direction. Returns the best first."""
    begun = time.monotonic()

    async def play(copy: AsyncSandbox, direction: str) -> Rollout:
        ready_after = time.monotonic() - begun
        east, north = COMPASS[direction]
        return Rollout(copy, direction, await move(copy, east * step, north * step), ready_after)

    directions = iter(COMPASS)
    plays = []
    async for copy in sandbox.fork_each(children, timeout=900, request_timeout=PATIENCE_S):
        if isinstance(copy, Exception):
            print(f"  a copy did not start: {copy}")
        else:
            plays.append(asyncio.create_task(play(copy, next(directions))))
    rollouts = await asyncio.gather(*plays)
    return sorted(rollouts, key=lambda rollout: rollout.grade, reverse=True)


def print_table(rollouts: list[Rollout]) -> None:
    print(f"  {'action':12} {'grade':>5}  {'ready after':>11}  sandbox")
    for rollout in rollouts:
        print(f"  {rollout.action:12} {rollout.grade:5}  {rollout.seconds:9.1f} s  {rollout.sandbox.sandbox_id}")


async def main() -> None:
    parser = argparse.ArgumentParser(description="Forked rollouts of one prepared sandbox.")
    parser.add_argument("--children", type=int, default=8, choices=range(1, len(COMPASS) + 1), metavar="1-8")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()

    sandbox = await prepare()
    living = {sandbox}
    try:
        grade = await move(sandbox, 0, 0)
        print(f"prepared {sandbox.sandbox_id}; the walker is at height {grade}")

        for number in range(1, options.rounds + 1):
            print(f"round {number}: {options.children} copies, one action each")
            rollouts = await explore(sandbox, options.children, step=3)
            if not rollouts:
                raise SystemExit("no copy started")
            living |= {rollout.sandbox for rollout in rollouts}
            print_table(rollouts)
            best = rollouts[0]
            await asyncio.gather(*(other.kill() for other in living if other is not best.sandbox))
            living = {best.sandbox}
            sandbox, grade = best.sandbox, best.grade
            print(f"kept {sandbox.sandbox_id}, which went {best.action}: height {grade}")

        checkpoint = await sandbox.create_snapshot(request_timeout=PATIENCE_S)
        print(f"checkpoint {checkpoint.snapshot_id}")
        print(f"a reckless leap: height {await move(sandbox, 50, -50)}")
        await sandbox.rollback(checkpoint.snapshot_id, request_timeout=PATIENCE_S)
        back = await move(sandbox, 0, 0)
        print(f"rolled back: height {back}, in the same sandbox {sandbox.sandbox_id}")
        assert back == grade, "the memory of the game is as it was"
        print(f"and on: height {await move(sandbox, 1, 1)}")
        await AsyncSandbox.delete_snapshot(checkpoint.snapshot_id)
    finally:
        await asyncio.gather(*(left.kill() for left in living))
    print("done")


if __name__ == "__main__":
    asyncio.run(main())
