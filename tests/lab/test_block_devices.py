"""The block daemon's devices, ublk and kernel NBD, under a real kernel: file systems, restacks, kills, full disks.

What the exports have in common is tested with both. Sizes are small: two emulated processors do the work.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.blockd import BINARY, MIB, Blockd, BlockdError, Export
from lab.host import Lab
from lab.image import HOST_MODULES

ROOT = Path(__file__).parents[2]
KINDS = ("ublk", "kernel-nbd")
MODULES = {"ublk": ("ublk_drv", "ublk"), "kernel-nbd": ("nbd", "kernel_nbd")}
DEADLINE_S = 200


@pytest.fixture(scope="module", autouse=True)
def program(lab: Lab) -> None:
    """The daemon's program in the host: as `make setup` builds it, or another that `LAB_BLOCKD` names."""
    binary = Path(os.environ.get("LAB_BLOCKD") or ROOT / "build/aenv-blockd")
    if not binary.exists():
        pytest.fail(f"{binary} is missing: run `make setup`")
    lab.put(binary, BINARY, 0o755)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind of export."""
    chosen: str = request.param
    return chosen


@pytest.fixture
def blockd(lab: Lab) -> Iterator[Blockd]:
    """A running daemon without devices. Afterwards nothing of it may be left in the host."""
    daemon = Blockd(lab)
    daemon.start()
    yield daemon
    assert daemon.tear_down() == []


@pytest.fixture
def cramped_blockd(lab: Lab) -> Iterator[Blockd]:
    """Like `blockd`, with a file system of 8 MiB for all that it stores."""
    daemon = Blockd(lab, size_mib=8)
    daemon.start()
    yield daemon
    assert daemon.tear_down() == []


class Load:
    """Random writes that are read back and checked, again and again until `finish`. Runs beside the test."""

    def __init__(self, lab: Lab, export: Export, directory: str) -> None:
        self._lab = lab
        self._flag = f"{directory}/stop"
        # A seed of its own for each run: what a run before wrote is told from what this one did.
        self._work = lab.start_shell(
            'until test -e "$2"; do fio --name=load --filename="$1" --rw=randwrite --bs=4k --size=2m --direct=1'
            " --ioengine=libaio --iodepth=8 --randrepeat=0 --verify=crc32c --verify_backlog=64 --verify_fatal=1"
            " --output-format=terse || exit 1; done",
            export.path,
            self._flag,
            timeout_s=DEADLINE_S,
        )

    def finish(self) -> None:
        """Let the run that is going on end. It fails on an I/O error, and on data that is not what was written."""
        self._lab.run("touch", self._flag)
        self._work.result(timeout=DEADLINE_S)


def exists(lab: Lab, export: Export) -> bool:
    """Whether the host has the block device. The nodes of the NBD module are always there, connected or not."""
    sign = "pid" if export.name.startswith("nbd") else ""
    return lab.run("test", "-e", f"/sys/block/{export.name}/{sign}", check=False).code == 0


def wait_for_writes(blockd: Blockd, device: str, count: int) -> None:
    """Return when the device has seen so many more writes."""
    first = blockd.stats(device)["writes"]
    while blockd.stats(device)["writes"] < first + count:
        pass


def test_a_file_system_on_a_stack(lab: Lab, blockd: Blockd, kind: str) -> None:
    blockd.open_upper("disk", size_mib=64)
    export = blockd.export("disk", kind, queues=2)
    assert blockd.export("disk", kind) == export
    queue = f"/sys/block/{export.name}/queue"
    assert lab.shell('ls "$1/mq" | wc -l; cat "$1/size" "$1/ro"', f"/sys/block/{export.name}").split() == [
        "2",
        str(64 * MIB // 512),
        "0",
    ]
    assert lab.shell('cat "$1/write_cache" "$1/logical_block_size"', queue).split("\n") == ["write back", "512"]
    lab.shell('mkfs.ext4 -q "$1"; mkdir -p /mnt/disk; mount "$1" /mnt/disk', export.path)
    before = blockd.stats("disk")
    lab.shell(
        "cd /mnt/disk; dd if=/dev/urandom of=file bs=64k count=64 conv=fsync status=none; sha256sum file > sum; sync"
    )
    after = blockd.stats("disk")
    assert after["flushes"] > before["flushes"]
    assert after["written_bytes"] - before["written_bytes"] >= 4 * MIB
    with pytest.raises(BlockdError) as refused:
        blockd.call("unexport", device="disk", path="/dev/other")
    assert refused.value.code == "not_found"
    # Two jobs, so that both queues are used.
    lab.shell(
        "fio --name=verify --directory=/mnt/disk --numjobs=2 --rw=randwrite --bs=16k --size=2m --direct=1"
        " --verify=crc32c --ioengine=libaio --iodepth=8 --fsync=64 --verify_fatal=1 --output-format=terse",
        timeout_s=DEADLINE_S,
    )
    lab.shell('umount /mnt/disk; fsck.ext4 -fn "$1"', export.path)
    blockd.call("unexport", device="disk", path=export.path)
    assert not exists(lab, export)
    # The same stack through a new export.
    again = blockd.export("disk", kind)
    lab.shell('mount -o ro "$1" /mnt/disk; cd /mnt/disk; sha256sum -c sum; cd /; umount /mnt/disk', again.path)
    blockd.call("close", device="disk", remove_upper=True)
    assert not exists(lab, again)


def test_discard_and_zeroes_give_room_back(lab: Lab, blockd: Blockd, kind: str) -> None:
    blockd.open_upper("disk", size_mib=64)
    export = blockd.export("disk", kind)
    lab.shell('dd if=/dev/urandom of="$1" bs=1M count=24 oflag=direct status=none', export.path)
    full = blockd.stats("disk")["upper_allocated_bytes"]
    assert full >= 24 * MIB

    lab.run("blkdiscard", "--offset", "0", "--length", str(8 * MIB), export.path)
    discarded = blockd.stats("disk")
    assert discarded["upper_allocated_bytes"] <= full - 8 * MIB + MIB
    assert discarded["discarded_bytes"] >= 8 * MIB

    lab.run("fallocate", "--punch-hole", "--offset", str(8 * MIB), "--length", str(8 * MIB), export.path)
    assert blockd.stats("disk")["upper_allocated_bytes"] <= full - 16 * MIB + MIB
    lab.run("blkdiscard", "--zeroout", "--offset", str(16 * MIB), "--length", str(4 * MIB), export.path)
    lab.shell(
        'echo 3 > /proc/sys/vm/drop_caches; cmp -n "$2" "$1" /dev/zero; ! cmp -s -n 4096 -i "$2:0" "$1" /dev/zero',
        export.path,
        str(20 * MIB),
    )
    # And through a file system.
    lab.shell('mkfs.ext4 -q "$1"; mkdir -p /mnt/disk; mount "$1" /mnt/disk', export.path)
    lab.shell("dd if=/dev/urandom of=/mnt/disk/file bs=1M count=16 status=none; sync")
    with_file = blockd.stats("disk")["upper_allocated_bytes"]
    lab.shell("rm /mnt/disk/file; sync; fstrim /mnt/disk; umount /mnt/disk")
    assert blockd.stats("disk")["upper_allocated_bytes"] <= with_file - 14 * MIB


def test_ten_restacks_under_load(lab: Lab, blockd: Blockd, kind: str) -> None:
    blockd.open_upper("disk", size_mib=16)
    export = blockd.export("disk", kind)
    load = Load(lab, export, blockd.directory)
    layers = []
    for number in range(10):
        wait_for_writes(blockd, "disk", 1)
        layers.append(blockd.call("restack", device="disk", layer=f"{blockd.directory}/layer-{number}")["layer"])
    load.finish()
    assert all(layer["data_bytes"] > 0 for layer in layers)
    assert blockd.stats("disk")["depth"] == 11
    # What was written is in the layers now, and reads the same through a daemon that only knows the files.
    digest = lab.shell('dd if="$1" bs=1M count=2 iflag=direct status=none | sha256sum', export.path)
    blockd.terminate()
    blockd.start()
    assert lab.shell('dd if="$1" bs=1M count=2 iflag=direct status=none | sha256sum', export.path) == digest


def test_a_killed_daemon_is_a_pause(lab: Lab, blockd: Blockd, kind: str) -> None:
    blockd.open_upper("disk", size_mib=16)
    export = blockd.export("disk", kind)
    load = Load(lab, export, blockd.directory)
    for end in (blockd.kill, blockd.terminate, blockd.kill):
        wait_for_writes(blockd, "disk", 20)
        end()
        blockd.start()
        listed = blockd.call("list")["devices"]
        assert [device["exports"] for device in listed] == [[{"kind": kind, "path": export.path}]]
    wait_for_writes(blockd, "disk", 20)
    load.finish()


def test_connections_that_the_kernel_gave_up_are_replaced(lab: Lab, blockd: Blockd) -> None:
    blockd.open_upper("disk", size_mib=16)
    export = blockd.export("disk", "kernel-nbd")
    load = Load(lab, export, blockd.directory)
    wait_for_writes(blockd, "disk", 20)
    gave_up = f"block {export.name}: Connection timed out"
    before = lab.shell('dmesg | grep -c "$1" || true', gave_up)
    # A daemon that hangs: requests get no answer, and the kernel shuts their connections down.
    blockd.signal("STOP")
    lab.shell('until test "$(dmesg | grep -c "$1")" -gt "$2"; do sleep 0.2; done', gave_up, before)
    blockd.signal("CONT")
    wait_for_writes(blockd, "disk", 20)
    load.finish()
    while blockd.stats("disk")["connections"] < 2:
        pass


def test_requests_wait_for_a_daemon_that_is_away(lab: Lab, blockd: Blockd, kind: str) -> None:
    blockd.open_upper("disk", size_mib=16)
    export = blockd.export("disk", kind)
    lab.shell('printf written | dd of="$1" bs=512 count=1 conv=sync oflag=direct status=none', export.path)
    blockd.kill()
    reading = lab.start_shell('dd if="$1" bs=512 count=1 iflag=direct status=none', export.path, timeout_s=DEADLINE_S)
    # Proof that it waits: it is in the kernel, uninterruptibly, and stays there.
    lab.shell("until pgrep -x -r D dd >/dev/null; do sleep 0.05; done", timeout_s=60)
    assert not reading.done()
    blockd.start()
    assert reading.result(timeout=DEADLINE_S).stdout.startswith(b"written\0")


def test_a_shared_device_refuses_writes(lab: Lab, blockd: Blockd, kind: str) -> None:
    layer = f"{blockd.directory}/sealed"
    blockd.open_upper("disk", size_mib=4)
    export = blockd.export("disk", kind)
    lab.shell('dd if=/dev/urandom of="$1" bs=1M count=4 oflag=direct status=none', export.path)
    digest = lab.shell('sha256sum < "$1"', export.path)
    blockd.call("seal", device="disk", layer=layer)
    blockd.call("close", device="disk")

    for opens in (1, 2):
        assert blockd.call("open", device="shared", lowers=[layer])["opens"] == opens
    shared = blockd.export("shared", kind)
    assert blockd.export("shared", kind) == shared
    assert lab.shell('blockdev --getro "$1"; sha256sum < "$1"', shared.path).split("\n") == ["1", digest]
    refused = lab.run("dd", "if=/dev/zero", f"of={shared.path}", "bs=4k", "count=1", "oflag=direct", check=False)
    assert refused.code != 0
    assert lab.run("blkdiscard", shared.path, check=False).code != 0
    assert lab.shell('echo 3 > /proc/sys/vm/drop_caches; sha256sum < "$1"', shared.path) == digest
    blockd.call("close", device="shared")
    lab.run("test", "-b", shared.path)
    assert lab.shell('dd if="$1" bs=1M count=4 iflag=direct status=none | sha256sum', shared.path) == digest
    blockd.call("close", device="shared")


def test_a_full_disk_is_an_error_of_the_application(lab: Lab, cramped_blockd: Blockd, kind: str) -> None:
    blockd = cramped_blockd
    blockd.open_upper("disk", size_mib=16)
    export = blockd.export("disk", kind)
    data = "/lab/random"
    lab.shell('dd if=/dev/urandom of="$1" bs=1M count=16 status=none', data)
    write = ("dd", f"if={data}", f"of={export.path}", "bs=64k", "oflag=direct", "status=none")
    full = lab.run(*write, check=False)
    assert full.code == 1
    # The kernel's NBD client makes the same of every error.
    assert {"ublk": b"No space left on device", "kernel-nbd": b"Input/output error"}[kind] in full.stderr
    assert blockd.stats("disk")["errors"] > 0
    # Reads go on, and after room was made, writes too.
    lab.shell('dd if="$1" bs=64k count=32 iflag=direct status=none | cmp -n 2097152 - "$2"', export.path, data)
    lab.run("mount", "-o", "remount,size=60m", blockd.directory)
    lab.run(*write)
    lab.shell('cmp -n 16777216 "$1" "$2"; rm "$2"', export.path, data)


def test_a_host_without_the_module(lab: Lab, blockd: Blockd, kind: str) -> None:
    module, capability = MODULES[kind]
    blockd.open_upper("disk", size_mib=16)
    assert blockd.call("capabilities") == {"ublk": True, "kernel_nbd": True, "reasons": {}}
    lab.run("rmmod", module)
    try:
        answer = blockd.call("capabilities")
        assert answer[capability] is False
        assert module in answer["reasons"][capability]
        with pytest.raises(BlockdError) as refused:
            blockd.export("disk", kind)
        assert refused.value.code == "unsupported"
        assert module in refused.value.message
        assert blockd.call("list")["devices"][0]["exports"] == []
    finally:
        lab.run("insmod", f"{HOST_MODULES}/{module}.ko")
    export = blockd.export("disk", kind)
    lab.run("test", "-b", export.path)


def test_devices_of_others_are_left_alone(lab: Lab, blockd: Blockd, kind: str) -> None:
    other = Blockd(lab, size_mib=32)
    other.start()
    other.open_upper("disk", size_mib=16)
    theirs = other.export("disk", kind)
    blockd.open_upper("mine", size_mib=16)
    ours = blockd.export("mine", kind)
    assert ours.path != theirs.path
    # A daemon whose record names a device that is somebody else's now, as after a reboot of the host.
    blockd.terminate()
    number = ours.name.removeprefix("ublkb").removeprefix("nbd")
    wrong = theirs.name.removeprefix("ublkb").removeprefix("nbd")
    record = f"{blockd.directory}/state/devices/mine.json"
    lab.shell(
        'sed -i "s/\\"number\\": *$2/\\"number\\":$3/" "$1"; grep -q "\\"number\\":$3" "$1"', record, number, wrong
    )
    blockd.start()
    lab.shell('dd if=/dev/urandom of="$1" bs=64k count=4 oflag=direct status=none', theirs.path)
    assert other.stats("disk")["writes"] > 0
    assert blockd.stats("mine")["writes"] == 0
    lab.shell('sed -i "s/\\"number\\": *$3/\\"number\\":$2/" "$1"', record, number, wrong)
    blockd.kill()
    blockd.start()
    lab.shell('dd if=/dev/urandom of="$1" bs=64k count=4 oflag=direct status=none', ours.path)
    assert blockd.stats("mine")["writes"] > 0
    assert other.call("close", device="disk", remove_upper=True) == {}
    lab.run("test", "-b", ours.path)
    # What is still there belongs to the other daemon of this test.
    assert [line for line in other.tear_down() if ours.name not in line and number not in line] == []
