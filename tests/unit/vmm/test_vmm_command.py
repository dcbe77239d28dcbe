"""Command lines: what QEMU and the guest kernel are told, for every kind of machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv.errors import VmmError
from agentenv.vmm.base import Disk, DiskFormat, GuestNetwork, MachineConfig, NetworkInterface
from agentenv.vmm.host import machine_uid
from agentenv.vmm.qemu_command import (
    TCG_BUFFER_MIB,
    Acceleration,
    Confinement,
    InheritedDescriptors,
    attach_commands,
    kernel_command_line,
    qemu_arguments,
)

QEMU = Path("/usr/bin/qemu-system-x86_64")
TCG = Acceleration("tcg", 1_996_249)
KVM = Acceleration("kvm", 0)
CONFIG = MachineConfig(
    machine_id="iabc",
    directory=Path("/home/sandboxes/iabc"),
    kernel=Path("/assets/vmlinux"),
    initramfs=Path("/assets/initramfs"),
    vcpus=2,
    memory_mib=512,
    disks=(Disk(Path("/d/disk, with comma.raw")), Disk(Path("data.raw"), read_only=True)),
    interface=NetworkInterface(Path("/run/netns/slot"), "tap0", "02:fc:00:00:00:05"),
    guest_network=GuestNetwork("169.254.0.21/30", "169.254.0.22", "169.254.0.22", 1400),
    extra_arguments=("foo=bar", "baz"),
)


def arguments_of(
    config: MachineConfig = CONFIG, acceleration: Acceleration = TCG, incoming: bool = False
) -> dict[str, list[str]]:
    """Values by option name."""
    words = qemu_arguments(
        QEMU,
        config,
        acceleration,
        version=(7, 2),
        memory_file=Path("/dev/shm/x/iabc.mem"),
        descriptors=InheritedDescriptors(qmp=7, tap=8 if config.interface else None),
        incoming=incoming,
    )
    assert words[0] == str(QEMU)
    found: dict[str, list[str]] = {}
    for position, word in enumerate(words):
        if word.startswith("-"):
            following = words[position + 1] if position + 1 < len(words) else "-"
            found.setdefault(word, []).append("" if following.startswith("-") else following)
    return found


def test_the_kernel_learns_its_network_and_name() -> None:
    words = kernel_command_line(CONFIG, KVM).split()
    assert {
        "console=ttyS0",
        "aenv.ip=169.254.0.21/30",
        "aenv.gw=169.254.0.22",
        "aenv.dns=169.254.0.22",
        "aenv.mtu=1400",
        "aenv.hostname=iabc",
        "aenv.root=/dev/vda",
    } <= set(words)
    assert words[-2:] == ["foo=bar", "baz"]


def test_only_an_emulated_kernel_is_told_about_its_clock() -> None:
    emulated = kernel_command_line(CONFIG, TCG).split()
    assert {"tsc=reliable", "no_timer_check", "lpj=4000000", "tsc_early_khz=1996249"} <= set(emulated)
    assert not [word for word in kernel_command_line(CONFIG, KVM).split() if "tsc" in word or "lpj" in word]
    unknown_rate = kernel_command_line(CONFIG, Acceleration("tcg", 0))
    assert "tsc_early_khz" not in unknown_rate


def test_a_machine_without_network_or_disk() -> None:
    config = replace(CONFIG, interface=None, disks=())
    words = kernel_command_line(config, TCG)
    assert "aenv.ip" not in words
    assert "aenv.root" not in words
    found = arguments_of(config)
    assert "-netdev" not in found
    assert "-blockdev" not in found


def test_disks_in_order_with_their_formats() -> None:
    nodes = [json.loads(value) for value in arguments_of()["-blockdev"]]
    assert [(node["driver"], node["node-name"]) for node in nodes] == [
        ("file", "file0"),
        ("raw", "disk0"),
        ("file", "file1"),
        ("raw", "disk1"),
    ]
    assert nodes[0]["filename"] == "/d/disk, with comma.raw"
    assert [node["read-only"] for node in nodes] == [False, False, True, True]
    assert all(node["discard"] == "unmap" for node in nodes)
    assert "detect-zeroes" not in nodes[3], "QEMU refuses it for a read-only node"
    devices = [device for device in arguments_of()["-device"] if "blk" in device]
    assert [device.split(",")[1] for device in devices] == ["drive=disk0", "drive=disk1"]


@pytest.mark.parametrize(("version", "waits"), [((6, 2), False), ((7, 0), True), ((10, 0), True)])
def test_an_nbd_disk_outlives_its_server(version: tuple[int, int], waits: bool) -> None:
    config = replace(CONFIG, disks=(Disk(Path("disk.sock"), DiskFormat.NBD),))
    words = qemu_arguments(
        QEMU,
        config,
        TCG,
        version=version,
        memory_file=Path("/m/x.mem"),
        descriptors=InheritedDescriptors(qmp=7, tap=8),
    )
    (node,) = [json.loads(words[position + 1]) for position, word in enumerate(words) if word == "-blockdev"]
    assert (node["driver"], node["node-name"]) == ("nbd", "disk0")
    assert node["server"] == {"type": "unix", "path": "disk.sock"}
    assert node["reconnect-delay"] > 24 * 3600, "longer than a sandbox lives"
    assert node["reconnect-delay"] < 2**32, "QEMU takes 32 bits"
    assert ("open-timeout" in node) == waits
    assert (node["discard"], node["detect-zeroes"]) == ("unmap", "unmap")


def test_a_disk_that_comes_later_is_put_in_the_place_of_nothing() -> None:
    disk = Disk(Path("disk.sock"), DiskFormat.NBD)
    words = qemu_arguments(
        QEMU,
        replace(CONFIG, disks=(disk,)),
        TCG,
        version=(7, 2),
        memory_file=Path("/m/x.mem"),
        descriptors=InheritedDescriptors(qmp=7, tap=8),
        incoming=True,
        disks_later=True,
    )
    empty, raw = [json.loads(words[position + 1]) for position, word in enumerate(words) if word == "-blockdev"]
    (add, server), (reopen, options), (delete, gone) = attach_commands(0, disk, (7, 2))
    assert (add, reopen, delete) == ("blockdev-add", "blockdev-reopen", "blockdev-del")
    assert (raw["node-name"], raw["file"]) == ("disk0", empty["node-name"])
    assert options == {"options": [{**raw, "file": server["node-name"]}]}, "reopening must change nothing else"
    assert gone == {"node-name": empty["node-name"]}
    assert (server["server"]["path"], server["cache"]["no-flush"]) == ("disk.sock", True)
    at_once = qemu_arguments(
        QEMU,
        replace(CONFIG, disks=(disk,)),
        TCG,
        version=(7, 2),
        memory_file=Path("/m/x.mem"),
        descriptors=InheritedDescriptors(qmp=7, tap=8),
        incoming=True,
    )
    without = [word for word in words if not word.startswith("{") and word != "-blockdev"]
    assert without == [word for word in at_once if not word.startswith("{") and word != "-blockdev"]


def test_an_nbd_socket_that_a_confined_machine_could_not_reach_again_is_refused() -> None:
    config = replace(CONFIG, disks=(Disk(Path("/home/sandboxes/iabc/disk.sock"), DiskFormat.NBD),))
    with pytest.raises(VmmError, match="must be relative"):
        arguments_of(config)


def test_memory_is_the_shared_file_of_the_right_size() -> None:
    memory = json.loads(arguments_of()["-object"][0])
    assert memory["mem-path"] == "/dev/shm/x/iabc.mem"
    assert memory["size"] == 512 * 1024 * 1024
    assert memory["share"] is True
    assert arguments_of()["-m"] == ["512M"]


@pytest.mark.parametrize("acceleration", [TCG, KVM])
def test_every_machine_is_confined_and_starts_stopped(acceleration: Acceleration) -> None:
    found = arguments_of(acceleration=acceleration)
    assert {"-S", "-nodefaults", "-no-user-config", "-no-reboot"} <= set(found)
    assert found["-sandbox"][0].startswith("on,")
    assert found["-display"] == ["none"]
    assert found["-machine"][0].startswith("microvm,acpi=on,rtc=on,pit=on,pic=on")
    assert found["-netdev"] == ["tap,id=net0,fd=8"]


def test_emulation_is_bounded_and_kvm_is_native() -> None:
    assert arguments_of()["-accel"] == [f"tcg,thread=multi,tb-size={TCG_BUFFER_MIB}"]
    assert arguments_of(acceleration=KVM)["-accel"] == ["kvm"]
    assert arguments_of(acceleration=KVM)["-cpu"] == ["host"]


def test_a_loaded_machine_has_the_same_devices_as_a_booted_one() -> None:
    booted, loaded = arguments_of(), arguments_of(incoming=True)
    assert loaded.pop("-incoming") == ["defer"]
    assert booted == loaded


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ((7, 2), {"-chroot": ["/m,x"], "-runas": ["1234:1234"]}),
        ((8, 2), {"-run-with": ["chroot=/m,,x"], "-runas": ["1234:1234"]}),
        ((10, 0), {"-run-with": ["chroot=/m,,x,user=1234:1234"]}),
    ],
)
def test_a_machine_of_root_gives_up_its_rights(version: tuple[int, int], expected: dict[str, list[str]]) -> None:
    words = qemu_arguments(
        QEMU,
        CONFIG,
        TCG,
        version=version,
        memory_file=Path("/m/x.mem"),
        descriptors=InheritedDescriptors(qmp=7, tap=8),
        confinement=Confinement(uid=1234, root=Path("/m,x")),
    )
    assert {name: [words[words.index(name) + 1]] for name in words if name in ("-chroot", "-runas", "-run-with")} == (
        expected
    )


def test_each_machine_has_a_user_id_of_its_own() -> None:
    first, second = machine_uid("one"), machine_uid("two")
    assert first != second
    assert first == machine_uid("one")
    assert all(0x6A000000 <= uid < 0x6B000000 for uid in (first, second))
