"""The real kernel, init and agent on root file systems that no distribution made, and the ways such a machine ends.

Uses the VMM and network rooms directly, without a server. Images here hold nothing but what a test put there.
"""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
import struct
import subprocess
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from agentenv.config import load_settings
from agentenv.guest.assets import load_assets
from agentenv.guest.base import GuestIdentity
from agentenv.guest.client import AGENT_PORT, GuestAgents
from agentenv.guest.kernel import KERNEL_ARGUMENTS
from agentenv.network.base import GATEWAY_ADDRESS, GUEST_ADDRESS, GUEST_MAC, GUEST_PREFIX, TAP_NAME, Slot
from agentenv.network.pool import SlotPool
from agentenv.orchestrator.orphans import HostOrphans
from agentenv.vmm.base import GuestNetwork, Machine, MachineConfig, MachineExit, NetworkInterface
from agentenv.vmm.probe import choose_vmm
from harness.server import new_home
from harness.storage import Storage, storage_of

pytestmark = [pytest.mark.vm, pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]

BUSYBOX = Path("/bin/busybox")
TOKEN = "token-of-the-test"
DEADLINE_S = 120.0
STATIC_PROGRAM = r"""
#include <stdio.h>
#include <unistd.h>
int main(int count, char **words) {
    printf("%d words, uid %d\n", count, (int)getuid());
    return count;
}
"""


def compiled(source: str, directory: Path) -> bytes:
    """A C program as a static binary."""
    text, program = directory / "program.c", directory / "program"
    text.write_text(source)
    subprocess.run(["gcc", "-static", "-O1", "-s", "-Wall", "-Werror", "-o", program, text], check=True)
    return program.read_bytes()


def output_of(*words: str | Path) -> tuple[int, str]:
    """Exit code and output of a program on this host."""
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    return done.returncode, done.stdout


@dataclass(frozen=True)
class Outcome:
    """How a command in a guest ended."""

    code: int
    stdout: str


class Guest:
    """One machine with its slot, and a client of its agent that adds nothing of its own."""

    def __init__(self, name: str, lab: GuestLab, slot: Slot, machine: Machine) -> None:
        self.name = name
        self.machine = machine
        self.slot = slot
        self._lab = lab
        self._origin = f"http://{slot.address}:{AGENT_PORT}"

    async def listening(self) -> None:
        """Wait for the agent's ready signal, or fail with what the machine said when it ended."""
        ready = asyncio.create_task(self._lab.slots.wait_ready(self.slot))
        ended = asyncio.create_task(self.machine.wait())
        try:
            async with asyncio.timeout(DEADLINE_S):
                await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
            assert ready.done(), f"{self.name} ended: {ended.result().reason}"
        finally:
            ready.cancel()
            ended.cancel()

    async def initialize(self, hostname: str) -> None:
        """`/init`, as the server does it."""
        identity = GuestIdentity(self.name, "none", hostname, TOKEN, {}, "root", None, 1)
        await self._lab.agents(str(self.slot.address), TOKEN).init(identity)

    async def request(
        self, method: str, endpoint: str, *, token: str = TOKEN, data: bytes | None = None, **query: str
    ) -> tuple[int, bytes]:
        headers = {"X-Access-Token": token, "Content-Type": "application/octet-stream"}
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        async with self._lab.session.request(
            method, self._origin + endpoint, headers=headers, data=data, params=query, timeout=timeout
        ) as answer:
            return answer.status, await answer.read()

    async def read(self, path: str) -> str:
        """A file of the guest."""
        status, content = await self.request("GET", "/files", path=path, username="root")
        assert status == 200, content
        return content.decode()

    async def write(self, path: str, content: bytes) -> None:
        status, answer = await self.request("POST", "/files", data=content, path=path, username="root")
        assert status == 200, answer

    async def run(self, *words: str) -> Outcome:
        """A command as root, to its end."""
        payload = json.dumps({"process": {"cmd": words[0], "args": words[1:]}, "stdin": False}).encode()
        headers = {
            "Content-Type": "application/connect+json",
            "X-Access-Token": TOKEN,
            "Authorization": "Basic " + base64.b64encode(b"root:").decode(),
        }
        async with self._lab.session.post(
            f"{self._origin}/process.Process/Start",
            data=struct.pack(">BI", 0, len(payload)) + payload,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=DEADLINE_S),
        ) as answer:
            raw = await answer.read()
        stdout, end = b"", None
        while raw:
            size = struct.unpack(">BI", raw[:5])[1]
            event: dict[str, Any] = json.loads(raw[5 : 5 + size] or b"{}").get("event", {})
            stdout += base64.b64decode(event.get("data", {}).get("stdout", ""))
            end = event.get("end", end)
            raw = raw[5 + size :]
        assert end is not None, f"{words} has no end"
        return Outcome(end.get("exitCode", 0), stdout.decode())

    async def shell(self, script: str) -> str:
        """A script for the guest's `/bin/sh`, which must succeed; what it printed."""
        outcome = await self.run("/bin/sh", "-c", script)
        assert outcome.code == 0, outcome
        return outcome.stdout

    async def end(self) -> None:
        await self.machine.kill()
        await self._lab.slots.release(self.slot)


class GuestLab:
    """The rooms below the orchestrator on a home of their own."""

    def __init__(self, home: Path, storage: Storage) -> None:
        self.home = home
        self.storage = storage
        self.settings = load_settings().model_copy(update={"home": home})
        self.assets = load_assets(self.settings)
        self.slots = SlotPool(self.settings.network.model_copy(update={"warm_slots": 0}), home)
        self.agents = GuestAgents()
        self._guests: list[Guest] = []

    async def __aenter__(self) -> GuestLab:
        (self.home / "sandboxes").mkdir()
        self.session = aiohttp.ClientSession()
        self.vmm = await choose_vmm(self.settings, self.assets.kernel)
        await self.slots.start(())
        return self

    async def __aexit__(self, *_: object) -> None:
        for guest in self._guests:
            await guest.end()
        await self.session.close()
        await self.agents.close()
        await self.slots.close()
        await self.vmm.close()
        await HostOrphans(self.home / "sandboxes", self.vmm.memory_dir).reap([])
        shutil.rmtree(self.vmm.memory_dir, ignore_errors=True)

    async def config(self, name: str, image: Path | None, slot: Slot | None = None) -> MachineConfig:
        """A machine whose disk begins as a copy of the image."""
        directory = self.home / "sandboxes" / name
        directory.mkdir(mode=0o700)
        self.vmm.prepare_directory(name, directory)
        disks = () if image is None else (await self.storage.disk(name, image, directory),)
        interface = None
        if slot is not None:
            interface = NetworkInterface(namespace=slot.namespace_path, tap=TAP_NAME, mac=GUEST_MAC)
        return MachineConfig(
            machine_id=name,
            directory=directory,
            kernel=self.assets.kernel,
            initramfs=self.assets.initramfs,
            vcpus=1,
            memory_mib=256,
            disks=disks,
            interface=interface,
            guest_network=GuestNetwork(
                address=f"{GUEST_ADDRESS}/{GUEST_PREFIX}",
                gateway=str(GATEWAY_ADDRESS),
                dns=str(GATEWAY_ADDRESS),
                mtu=1400,
            ),
            extra_arguments=KERNEL_ARGUMENTS,
        )

    def image(self, name: str, tree: Path) -> Path:
        """A raw ext4 that holds a directory tree, owned by root."""
        path = self.home / f"{name}.ext4"
        command = ["mke2fs", "-q", "-t", "ext4", "-E", "root_owner=0:0", "-d", str(tree), str(path), "64M"]
        subprocess.run(command, check=True)
        return path

    async def boot(self, name: str, image: Path) -> Guest:
        slot = await self.slots.acquire()
        try:
            machine = await self.vmm.boot(await self.config(name, image, slot))
        except BaseException:
            await self.slots.release(slot)
            raise
        guest = Guest(name, self, slot, machine)
        self._guests.append(guest)
        await guest.listening()
        return guest


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab() -> AsyncIterator[GuestLab]:
    home = new_home()
    try:
        async with storage_of(home) as storage, GuestLab(home, storage) as made:
            yield made
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def small(lab: GuestLab, tmp_path_factory: pytest.TempPathFactory) -> Guest:
    """A guest on BusyBox alone, whose resolver is a link that leads nowhere and that has no `/etc/hosts`."""
    if not BUSYBOX.exists() or output_of("ldd", BUSYBOX)[0] == 0:
        pytest.skip("needs a static BusyBox: apt-get install busybox-static")
    tree = tmp_path_factory.mktemp("busybox")
    for name in ("bin", "etc", "root"):
        (tree / name).mkdir()
    shutil.copy2(BUSYBOX, tree / "bin/busybox")
    for applet in ("sh", "cat", "kill", "date", "hostname", "ls", "trap", "sleep", "mount", "readlink"):
        (tree / "bin" / applet).symlink_to("busybox")
    (tree / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\n")
    (tree / "etc/resolv.conf").symlink_to("../run/systemd/resolve/stub-resolv.conf")
    guest = await lab.boot("small", lab.image("small", tree))
    await guest.initialize("small")
    return guest


async def test_an_almost_empty_root_runs_an_uploaded_static_program(lab: GuestLab, tmp_path: Path) -> None:
    """The image has one file: uploads keep the mode of what they replace, and nothing in there could set it."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "program").touch(0o755)
    guest = await lab.boot("empty", lab.image("empty", tree))
    assert (await guest.request("GET", "/health"))[0] == 204
    await guest.initialize("renamed")

    await guest.write("/program", compiled(STATIC_PROGRAM, tmp_path))
    assert await guest.run("/program", "one", "two") == Outcome(3, "3 words, uid 0\n")

    assert await guest.read("/etc/hostname") == "renamed\n"
    assert await guest.read("/etc/resolv.conf") == f"nameserver {GATEWAY_ADDRESS}\n"
    assert await guest.read("/run/e2b/.E2B_SANDBOX_ID") == "empty"
    assert len((await guest.read("/etc/machine-id")).strip()) == 32
    # The usual places exist, and a program that needs them finds them.
    mounts = {line.split()[1] for line in (await guest.read("/proc/mounts")).splitlines()}
    assert {"/", "/proc", "/sys", "/dev", "/dev/pts", "/dev/shm", "/run", "/sys/fs/cgroup"} <= mounts
    await guest.write("/tmp/file", b"x")


async def test_the_files_of_an_image_are_made_to_fit(small: Guest) -> None:
    assert await small.shell("readlink /etc/resolv.conf || cat /etc/resolv.conf") == f"nameserver {GATEWAY_ADDRESS}\n"
    localhost = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
    assert await small.read("/etc/hosts") == f"{localhost}127.0.1.1\tsmall\t# agentenv\n"

    await small.shell("echo '10.0.0.1 db' >> /etc/hosts")
    await small.initialize("second")
    assert await small.read("/etc/hosts") == f"{localhost}10.0.0.1 db\n127.0.1.1\tsecond\t# agentenv\n"
    assert await small.shell("hostname; cat /etc/hostname") == "second\nsecond\n"


@pytest.mark.parametrize("offset_s", [-3600, 3600])
async def test_init_sets_the_clock(small: Guest, offset_s: int) -> None:
    await small.shell(f"date -s @{int(time.time()) + offset_s}")
    assert abs(int(await small.shell("date +%s")) - time.time() - offset_s) < 600, "the guest's clock was not moved"
    begun = time.time()
    await small.initialize("small")
    told = int(await small.shell("date +%s"))
    assert begun - 1 <= told <= time.time() + 1


async def test_the_agent_is_protected_and_commands_are_bounded(small: Guest) -> None:
    agent = (await small.shell("cat /sys/fs/cgroup/agent/cgroup.procs")).split()
    assert len(agent) == 1
    assert await small.read(f"/proc/{agent[0]}/oom_score_adj") == "-1000\n"
    assert await small.shell("cat /proc/self/oom_score_adj /proc/1/oom_score_adj") == "0\n0\n"
    group = await small.shell("cat /proc/self/cgroup")
    assert group.startswith("0::/user/")

    memory_kib = int((await small.read("/proc/meminfo")).split()[1])
    limits = {name: await small.read(f"/sys/fs/cgroup/user/{name}.max") for name in ("memory", "pids")}
    assert 0.5 < int(limits["memory"]) / (memory_kib * 1024) < 0.95
    most = int(await small.read("/proc/sys/kernel/threads-max"))
    assert 0 < int(limits["pids"]) < most
    assert int(await small.read("/sys/fs/cgroup/agent/memory.min")) > 0


async def test_a_killed_agent_comes_back_as_it_was(lab: GuestLab, small: Guest) -> None:
    await small.initialize("stays")
    before = await small.shell("cat /sys/fs/cgroup/agent/cgroup.procs")
    lab.slots.clear_ready(small.slot)
    with pytest.raises((aiohttp.ClientError, AssertionError)):
        await small.run("/bin/sh", "-c", f"kill -9 {before}")
    await small.listening()
    after = await small.shell("cat /sys/fs/cgroup/agent/cgroup.procs")
    assert after != before
    assert await small.read(f"/proc/{after.strip()}/oom_score_adj") == "-1000\n"
    for token in ("", "another"):
        status, _ = await small.request("GET", "/files", token=token, path="/etc/hostname", username="root")
        assert status == 401
    assert await small.shell("hostname") == "stays\n"
    assert (await small.shell("cat /proc/self/cgroup")).startswith("0::/user/")


async def test_the_power_button_ends_it_cleanly(lab: GuestLab, small: Guest, tmp_path: Path) -> None:
    """The last test of this guest. What was written just before is on the disk, though a process refuses to end."""
    await small.shell("echo kept > /root/written; (trap '' TERM; while true; do sleep 100; done) > /dev/null 2>&1 &")
    # TERM, two seconds later KILL; the emulated guest gets many times that.
    await small.machine.shutdown(timeout_s=90)
    ended = await small.machine.wait()
    assert ended.exit_code == 0
    assert "Power down" in ended.reason

    disk = await lab.storage.content("small", tmp_path / "disk")
    code, header = output_of("dumpe2fs", "-h", disk)
    assert code == 0, header
    assert re.search(r"^Filesystem state: +clean$", header, re.MULTILINE), header
    assert "needs_recovery" not in header
    code, report = output_of("e2fsck", "-fn", disk)
    assert code == 0, report
    assert output_of("debugfs", "-R", "cat /root/written", disk) == (0, "kept\n")


async def test_a_machine_without_a_root_says_so(lab: GuestLab) -> None:
    """One has no disk at all, one a disk without a file system. They end at once or after init's own deadline."""
    blank = lab.home / "blank.raw"
    with blank.open("wb") as file:
        file.truncate(8 << 20)

    async def end_of(name: str, image: Path | None) -> MachineExit:
        machine = await lab.vmm.boot(await lab.config(name, image))
        try:
            async with asyncio.timeout(DEADLINE_S * 2):
                return await machine.wait()
        finally:
            await machine.kill()

    none, unusable = await asyncio.gather(end_of("none", None), end_of("blank", blank))
    assert none.exit_code == unusable.exit_code == 0
    assert "the root disk /dev/vda did not appear" in none.reason
    assert "mounting /dev/vda as ext4" in unusable.reason
