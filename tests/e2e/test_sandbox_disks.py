"""Disks of sandboxes under the worst: layers captured and daemons killed while guests write, shared bases, full hosts.

Guests run `disk_check.c`, which compares every block that it reads with what it wrote; any error of the disk ends it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest
from e2b import Sandbox

from agentenv.storage.blockd import BlockClient
from agentenv.vmm.base import Machine
from harness.leftovers import leftovers_of
from harness.server import RunningServer, new_home
from harness.storage import Storage, daemons_of, kill_daemon, storage_of
from harness.vmm_lab import Lab, still_going

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.timeout(600)]

T = TypeVar("T")
MIB = 1 << 20
CHECKED_MIB = 32
COUNTS_PER_WHOLE_CHECK = 50
"""The guest of the lab checks all of its disk after so many of its counts (`vmm_guest.c`, `disk_check.c`)."""


@pytest.fixture
def home() -> Iterator[Path]:
    made = new_home()
    yield made
    assert daemons_of(made) == []
    shutil.rmtree(made)


@pytest.fixture
def own_server() -> Iterator[RunningServer]:
    with RunningServer(config="[sandbox]\nmemory_mib = 256\nvcpus = 1\n") as running:
        yield running
        for row in running.api("GET", "/v2/sandboxes")[1]:
            assert running.api("DELETE", f"/sandboxes/{row['sandboxID']}")[0] == 204
        assert [line for line in leftovers_of(running.home) if line.split()[0] in ("disk", "device", "directory")] == []
    assert leftovers_of(running.home) == []


def sdk(server: RunningServer) -> dict[str, str]:
    """Options that bind the SDK to this server."""
    return {"api_url": server.url, "sandbox_url": server.url, "api_key": server.api_key}


def ask(server: RunningServer, question: Callable[[BlockClient], Awaitable[T]]) -> T:
    """Ask the block daemon of a server's home, past the server."""

    async def work() -> T:
        client = BlockClient(server.home / "run" / "blockd.sock")
        try:
            return await question(client)
        finally:
            await client.close()

    return asyncio.run(work())


@pytest.fixture(scope="module")
def checker(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """`disk_check` as a program for guests."""
    program = tmp_path_factory.mktemp("checker") / "disk_check"
    source = Path(__file__).with_name("disk_check.c")
    command = ["gcc", "-static", "-O1", "-s", "-Wall", "-Werror", "-DSTANDALONE", "-o", program, source]
    subprocess.run(command, check=True)
    return program.read_bytes()


async def booted(lab: Lab, storage: Storage, tmp_path: Path) -> Machine:
    """A guest that checks a disk, which begins with blocks of a layer below."""
    image = tmp_path / "image"
    image.write_bytes(bytes(CHECKED_MIB * MIB) + b"below" * (MIB // 5))
    os.truncate(image, (CHECKED_MIB + 1) * MIB)
    config = lab.config("one", f"aenv.test_check={CHECKED_MIB}")
    lab.vmm.prepare_directory("one", config.directory)
    disk = await storage.disk("one", image, config.directory)
    return await lab.vmm.boot(dataclasses.replace(config, disks=(disk,)))


async def test_ten_captures_of_a_disk_in_use(lab: Lab, home: Path, tmp_path: Path) -> None:
    async with storage_of(home) as storage:
        machine = await booted(lab, storage, tmp_path)
        for _ in range(10):
            await still_going(machine, 3)
            layer = await storage.disks.capture("one")
            assert layer.size > 0
        assert len(await storage.disks.chain("one")) == 11
        await still_going(machine, COUNTS_PER_WHOLE_CHECK + 1)
        await machine.kill()
        await storage.disks.remove("one")


async def test_captures_and_deaths_of_the_daemon_together(lab: Lab, home: Path, tmp_path: Path) -> None:
    async with storage_of(home) as storage:
        machine = await booted(lab, storage, tmp_path)
        for _ in range(2):
            await still_going(machine, 3)
            await storage.disks.capture("one")
            await still_going(machine, 3)
            kill_daemon(home)
            await still_going(machine, 3)
        await storage.disks.capture("one")
        await still_going(machine, COUNTS_PER_WHOLE_CHECK + 1)
        await machine.kill()
        content = (await storage.content("one", tmp_path / "content")).read_bytes()
        assert content[CHECKED_MIB * MIB :] == (tmp_path / "image").read_bytes()[CHECKED_MIB * MIB :]
        await storage.disks.remove("one")


async def test_a_machine_ends_while_its_daemon_is_gone(lab: Lab, home: Path, tmp_path: Path) -> None:
    async with storage_of(home) as storage:
        machine = await booted(lab, storage, tmp_path)
        await still_going(machine, 3)
        (pid,) = daemons_of(home)
        os.kill(pid, signal.SIGSTOP)  # it takes no request and closes no connection
        async with asyncio.timeout(5):
            await machine.kill()
        os.kill(pid, signal.SIGKILL)
        await storage.disks.remove("one")


class Check:
    """`disk_check` on a file in a sandbox, in the background."""

    def __init__(self, sandbox: Sandbox, checker: bytes) -> None:
        self._sandbox = sandbox
        sandbox.files.write("/home/user/disk_check", checker)
        self._command = sandbox.commands.run(
            f"chmod +x disk_check && ./disk_check checked {CHECKED_MIB} stop > output 2>&1; echo $? > code",
            background=True,
            timeout=0,
        )
        self._seen = 0

    def goes_on(self, sandbox: Sandbox) -> None:
        """Wait until it has made some more steps."""
        words = f"until [ $(tail -n 1 output | tr -dc 0-9) -gt {self._seen} ] || [ -e code ]; do sleep 0.2; done"
        output = sandbox.commands.run(f"touch output; {words}; cat output", timeout=300).stdout
        assert "disk check" not in output, output
        self._seen = int(output.splitlines()[-1].split()[-1])

    def ends_well(self, sandbox: Sandbox) -> None:
        sandbox.files.write("/home/user/stop", "")
        output = sandbox.commands.run("until [ -e code ]; do sleep 0.2; done; cat output code", timeout=300).stdout
        lines = output.splitlines()
        assert lines[-1] == "0", output
        assert lines[-2].startswith("verified after"), output


def test_a_sandbox_notices_neither_restacks_nor_deaths(own_server: RunningServer, checker: bytes) -> None:
    sandbox = Sandbox.create(timeout=3000, **sdk(own_server))
    check = Check(sandbox, checker)
    upper = own_server.home / "disks" / sandbox.sandbox_id
    for number in range(10):
        check.goes_on(sandbox)
        sealed = ask(own_server, lambda client, n=number: client.restack(sandbox.sandbox_id, upper / f"test-{n}"))
        assert sealed.size == (upper / f"test-{number}").stat().st_size > 0
        if number in (3, 7):
            kill_daemon(own_server.home)
    check.goes_on(sandbox)
    check.ends_well(sandbox)
    assert sandbox.commands.run("dmesg | grep -ciE 'i/o error|remount' || true", user="root").stdout == "0\n"


def test_server_and_daemon_killed_together(own_server: RunningServer, checker: bytes) -> None:
    sandbox = Sandbox.create(timeout=3000, **sdk(own_server))
    check = Check(sandbox, checker)
    for daemon_first in (True, False):
        check.goes_on(sandbox)
        steps = [lambda: kill_daemon(own_server.home), own_server.kill]
        for step in steps if daemon_first else reversed(steps):
            step()
        own_server.start()
        sandbox = Sandbox.connect(sandbox.sandbox_id, **sdk(own_server))
    check.goes_on(sandbox)
    check.ends_well(sandbox)


def test_the_daemon_outlives_the_server_while_it_has_disks(own_server: RunningServer) -> None:
    assert len(daemons_of(own_server.home)) == 1
    assert own_server.terminate() == 0
    assert daemons_of(own_server.home) == [], "nobody needs it"
    own_server.start()
    sandbox = Sandbox.create(timeout=3000, **sdk(own_server))
    before = daemons_of(own_server.home)
    assert own_server.terminate() == 0
    assert daemons_of(own_server.home) == before != []
    own_server.start()
    assert daemons_of(own_server.home) == before, "the same one was taken over"
    again = Sandbox.connect(sandbox.sandbox_id, **sdk(own_server))
    assert again.commands.run("echo there > file && sync && cat file").stdout == "there\n"


def test_sandboxes_of_one_template_share_its_layers(own_server: RunningServer) -> None:
    """Eight of them: each layer is opened once, and a disk takes up what its guest wrote."""
    sandboxes: list[Sandbox] = []

    def create() -> None:
        sandboxes.append(Sandbox.create(timeout=3000, request_timeout=500, **sdk(own_server)))

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sandboxes) == 8

    statistics = ask(own_server, lambda client: client.statistics())
    stored = [path.name for path in (own_server.home / "layers" / "sha256").iterdir()]
    assert sorted(Path(layer.path).name for layer in statistics.layers) == sorted(stored)
    assert {layer.devices for layer in statistics.layers} == {8}

    written_mib = {sandbox.sandbox_id: 8 * number for number, sandbox in enumerate(sandboxes)}

    def size_mib(sandbox: Sandbox) -> float:
        files = (own_server.home / "disks" / sandbox.sandbox_id).iterdir()
        return sum(path.stat().st_blocks * 512 for path in files) / MIB

    for sandbox in sandboxes:
        sandbox.commands.run("sync", user="root")
    before = {sandbox.sandbox_id: size_mib(sandbox) for sandbox in sandboxes}
    assert max(before.values()) < 64, "a boot writes little"
    for sandbox in sandboxes:
        count = written_mib[sandbox.sandbox_id]
        sandbox.commands.run(f"head -c {count}M /dev/urandom > data && sync", timeout=300)
    for sandbox in sandboxes:
        grown = size_mib(sandbox) - before[sandbox.sandbox_id]
        written = written_mib[sandbox.sandbox_id]
        assert written <= grown < written + 16, f"{grown} MiB for {written} MiB"
