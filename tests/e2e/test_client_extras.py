"""What `agentenv.client` adds to the official SDK, with real sandboxes: forks, roll backs, trees, cold starts."""

from __future__ import annotations

import pytest

from agentenv.client import AsyncSandbox
from harness.server import RunningServer

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.timeout(900)]

PATIENCE_S = 300


async def test_extras(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.client_environment.items():
        monkeypatch.setenv(name, value)
    sandbox = await AsyncSandbox.create(timeout=900, request_timeout=PATIENCE_S)
    made = [sandbox]
    snapshots = []
    try:

        async def shell(which: AsyncSandbox, command: str) -> str:
            return (await which.commands.run(command, timeout=PATIENCE_S)).stdout.strip()

        await shell(sandbox, "echo first > state; sync; nohup sleep 10000 > /dev/null 2>&1 & echo $! > pid")
        snapshots.append((await sandbox.create_snapshot("extras", request_timeout=PATIENCE_S)).snapshot_id)
        first = await AsyncSandbox.get_snapshot(snapshots[0])
        assert (first.names, first.mode, first.sandbox_id) == (("extras:default",), "full", sandbox.sandbox_id)
        await shell(sandbox, "echo second > state; kill $(cat pid)")
        snapshots.append((await sandbox.create_snapshot(request_timeout=PATIENCE_S)).snapshot_id)

        await sandbox.rollback(snapshots[0], request_timeout=PATIENCE_S)
        assert await shell(sandbox, "cat state; kill -0 $(cat pid) && echo alive") == "first\nalive"
        assert await sandbox.is_running()
        snapshots.append((await sandbox.create_snapshot(request_timeout=PATIENCE_S)).snapshot_id)
        [root] = await sandbox.snapshot_tree()
        shape = [(depth, node.snapshot.snapshot_id) for depth, node in root.walk() if node.snapshot]
        assert shape == [(0, snapshots[0]), (1, snapshots[1]), (1, snapshots[2])]
        assert root.build_id in [tree.build_id for tree in await AsyncSandbox.all_snapshot_trees()]

        cold = await AsyncSandbox.create_cold(snapshots[0], timeout=900, envs={"A": "b"}, request_timeout=PATIENCE_S)
        made.append(cold)
        assert await shell(cold, "cat state; echo $A; kill -0 $(cat pid) 2> /dev/null || echo gone") == "first\nb\ngone"

        copies = [copy async for copy in sandbox.fork_each(2, timeout=900, request_timeout=PATIENCE_S)]
        assert all(isinstance(copy, AsyncSandbox) for copy in copies), copies
        for copy in copies:
            assert isinstance(copy, AsyncSandbox)
            made.append(copy)
            assert await shell(copy, "hostname; kill -0 $(cat pid) && echo alive") == f"{copy.sandbox_id}\nalive"
    finally:
        for one in made:
            await one.kill()
        for snapshot_id in snapshots:
            assert await AsyncSandbox.delete_snapshot(snapshot_id)
