"""Disks of machines over NBD on a unix socket: confined QEMU connects, and connects again when the server comes back.

The server here is qemu-nbd, so that this tests the VMM and its confinement alone; the block daemon has its own tests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentenv.errors import VmmError
from agentenv.vmm import caretaker
from agentenv.vmm.base import Disk, DiskFormat, MachineConfig
from agentenv.vmm.qmp import QmpClient
from harness.vmm_lab import DEADLINE_S, Lab, counting, counts_in, still_going, text_of

pytestmark = [
    pytest.mark.vm,
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("qemu-nbd") is None, reason="needs qemu-nbd"),
]

MIB = 1 << 20
DISK = Disk(Path("disk.sock"), DiskFormat.NBD)


class Server:
    """qemu-nbd on an image, with its socket in a machine's directory and owned as that is."""

    def __init__(self, image: Path, directory: Path) -> None:
        self._socket = directory / DISK.path
        self._image = image
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._socket.unlink(missing_ok=True)
        words = ["qemu-nbd", "--persistent", "--shared=0", "--format=raw", "--discard=unmap", "--cache=writeback"]
        # It listens under another name until the socket has its owner: whoever tries meanwhile tries again.
        draft = self._socket.with_name("draft.sock")
        self._process = subprocess.Popen([*words, "--socket", draft, "--pid-file", f"{draft}.pid", self._image])
        while not Path(f"{draft}.pid").exists():
            assert self._process.poll() is None
        owner = self._socket.parent.stat()
        os.chown(draft, owner.st_uid, owner.st_gid)
        draft.chmod(0o660)
        draft.rename(self._socket)
        Path(f"{draft}.pid").unlink()

    def kill(self) -> None:
        """kill -9; the socket stays, dead."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        self._socket.unlink(missing_ok=True)


class Served:
    """A machine's configuration with one disk, and the server of that."""

    def __init__(self, lab: Lab, image: Path, mebibytes: int, *words: str) -> None:
        with image.open("wb") as file:
            file.truncate(mebibytes * MIB)
        config = lab.config("one", *words)
        lab.vmm.prepare_directory(config.machine_id, config.directory)
        self.config: MachineConfig = dataclasses.replace(config, disks=(DISK,))
        self.server = Server(image, config.directory)

    def __enter__(self) -> Served:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()


async def test_a_server_that_dies_is_a_pause(lab: Lab) -> None:
    """Three times, with requests under way, in the confinement: user, root directory and system calls."""
    with Served(lab, lab.root / "image", 16, "aenv.test_check=16") as served:
        machine = await lab.vmm.boot(served.config)
        await still_going(machine)
        for _ in range(3):
            served.server.kill()
            await asyncio.to_thread(served.server.start)
            await still_going(machine)
        await machine.kill()


async def test_a_machine_whose_server_is_gone_ends_at_once(lab: Lab) -> None:
    with Served(lab, lab.root / "image", 16, "aenv.test_check=16") as served:
        machine = await lab.vmm.boot(served.config)
        await still_going(machine)
        served.server.kill()
        async with asyncio.timeout(5):
            await machine.kill()


async def test_a_machine_is_saved_and_loaded_with_its_disk(lab: Lab) -> None:
    image, copy = lab.root / "image", lab.root / "copy"
    with Served(lab, image, 8, "aenv.test_fill=4") as served:
        machine = await lab.vmm.boot(served.config)
        await counting(machine, 0)
        await machine.pause()
        await machine.save_state(lab.root / "state")
        await machine.resume()
        await counting(machine, counts_in(text_of(machine))[-1] + 1)
        await machine.pause()
        await machine.save_state(lab.root / "state")
        last = counts_in(text_of(machine))[-1]
        memory = lab.memory_dir / "clone.mem"
        shutil.copyfile(machine.record.memory_file or "", memory)
        await machine.kill()
    shutil.copyfile(image, copy)
    clone_config = dataclasses.replace(lab.config("clone"), disks=(DISK,))
    lab.vmm.prepare_directory("clone", clone_config.directory)
    server = Server(copy, clone_config.directory)
    server.start()
    try:
        clone = await lab.vmm.load(clone_config, lab.root / "state", memory)
        await clone.resume()
        await counting(clone, last + 1)
        await clone.kill()
    finally:
        server.close()
    assert image.read_bytes() == copy.read_bytes() == b"b" * (4 * MIB) + bytes(4 * MIB)


async def test_a_full_disk_behind_the_server_only_halts_the_guest(
    lab: Lab, small_file_system: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caretaker, "_PERIOD_S", 0.2)
    ballast, image = small_file_system / "ballast", small_file_system / "image"
    ballast.write_bytes(b"b" * (16 * MIB))
    with Served(lab, image, 16, "aenv.test_fill=16") as served:
        machine = await lab.vmm.boot(served.config)
        async with await QmpClient.connect(served.config.directory, "qmp.sock") as qmp:
            event = await qmp.wait_event({"BLOCK_IO_ERROR"}, timeout_s=DEADLINE_S)
            assert event["data"]["nospace"]
            assert event["data"]["action"] == "stop"
        ballast.unlink()
        await counting(machine, 0)
        assert "disk filled" in text_of(machine)
        await machine.kill()
    assert image.read_bytes() == b"b" * (16 * MIB)


async def test_a_disk_that_nobody_serves(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.vmm.qemu_command.OPEN_TIMEOUT_S", 1)
    config = dataclasses.replace(lab.config("one"), disks=(DISK,))
    with pytest.raises(VmmError, match=r"disk\.sock"):
        await lab.vmm.boot(config)


@pytest.fixture(autouse=True)
def no_servers_left() -> Iterator[None]:
    yield
    left = subprocess.run(["pgrep", "-P", str(os.getpid()), "qemu-nbd"], capture_output=True, text=True, check=False)
    assert left.stdout == ""
