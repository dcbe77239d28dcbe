"""Composes QEMU's command line and the guest kernel's, from a `MachineConfig` and what is known of the host.

Pure functions: nothing is opened, started or looked up here. Descriptor numbers come in from the caller.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentenv.errors import VmmError
from agentenv.vmm.base import Disk, DiskFormat, MachineConfig

CONSOLE_NAME = "console.log"
ERROR_LOG_NAME = "vmm.log"
QMP_NAME = "qmp.sock"

TCG_BUFFER_MIB = 128
"""Translated code that an emulated machine may keep. QEMU's own default is up to 1 GiB for each VM. Debian's kernel
fills 38 MiB until it reaches user mode, the base template 58 MiB until its agent listens; a smaller buffer is flushed
meanwhile, and all of it translated again.
"""


BOOT_MODE = "microvm-1"
"""Names the machine type, devices and their order as they are composed here. A saved state loads in the same form only,
so the number goes up with any change that the guest can see.
"""

PLACEHOLDER = "placeholder"
"""What a disk is backed by that is not known yet, followed by the number of the disk."""

RECONNECT_S = 7 * 24 * 3600
"""How long requests wait for an NBD server that went away, before they fail. Longer than any sandbox lives and anybody
needs to bring the server back: a guest notices a pause, and never an error that would turn its file system read-only.
"""
OPEN_TIMEOUT_S = 30
"""How long a starting machine waits for an NBD server that is itself being started again."""
_OPEN_TIMEOUT_SINCE = (7, 0)

Version = tuple[int, int]
"""Major and minor version of QEMU, whose options have changed their names."""
QmpCommand = tuple[str, dict[str, Any]]
"""Name and arguments."""


@dataclass(frozen=True, slots=True)
class Acceleration:
    """How guest instructions run."""

    name: str
    """`kvm` or `tcg`."""
    tsc_khz: int
    """Rate of the host's time-stamp counter, which guests see unchanged; 0 when unknown."""


@dataclass(frozen=True, slots=True)
class InheritedDescriptors:
    """Open descriptors that QEMU inherits, by their numbers."""

    qmp: int
    """Listening unix socket."""
    tap: int | None


@dataclass(frozen=True, slots=True)
class Confinement:
    """What a QEMU that root starts becomes once it has opened everything."""

    uid: int
    """User and group id of this machine alone; no account has it."""
    root: Path
    """Directory that it sees as `/` from then on."""


def _option(value: str) -> str:
    """Escape a value for QEMU's `key=value,…` syntax, where a comma is doubled."""
    return value.replace(",", ",,")


def kernel_command_line(config: MachineConfig, acceleration: Acceleration) -> str:
    """Words for the guest kernel and for the guest's init.

    `panic=-1` makes a panic end the machine at once (QEMU runs with `-no-reboot`), so that it is noticed as an exit.
    An emulated guest is told the rate of the counter instead of calibrating against emulated timers, which hangs on a
    busy host; CPU mitigations and self-tests only cost time there.
    """
    words = ["console=ttyS0", "quiet", "panic=-1", "pci=off", "8250.nr_uarts=1", "audit=0", "rcupdate.rcu_expedited=1"]
    if acceleration.name == "tcg":
        words += ["tsc=reliable", "no_timer_check", "lpj=4000000", "mitigations=off", "cryptomgr.notests"]
        if acceleration.tsc_khz > 0:
            words.append(f"tsc_early_khz={acceleration.tsc_khz}")
    words.append(f"aenv.hostname={config.machine_id}")
    if config.interface is not None:
        network = config.guest_network
        words += [
            f"aenv.ip={network.address}",
            f"aenv.gw={network.gateway}",
            f"aenv.dns={network.dns}",
            f"aenv.mtu={network.mtu}",
        ]
    if config.disks:
        words.append("aenv.root=/dev/vda")
    return " ".join([*words, *config.extra_arguments])


def _disk_arguments(index: int, disk: Disk, version: Version, *, later: bool) -> list[str]:
    nodes: list[dict[str, Any]] = []
    if later:
        empty = {"driver": "null-co", "node-name": f"{PLACEHOLDER}{index}"}
        nodes = [empty, {**_raw_node(f"{PLACEHOLDER}{index}"), **_node_options(disk)}]
    elif disk.format is DiskFormat.NBD:
        nodes = [{**_nbd_node(disk, version), **_node_options(disk)}]
    else:
        file = {"driver": "file", "node-name": f"file{index}", "filename": str(disk.path), "aio": "threads"}
        nodes = [
            {**file, **_node_options(disk, filter_zeroes=False)},
            {**_raw_node(f"file{index}"), **_node_options(disk)},
        ]
    nodes[-1]["node-name"] = f"disk{index}"
    arguments = [word for node in nodes for word in ("-blockdev", json.dumps(node))]
    return [*arguments, "-device", f"virtio-blk-device,drive=disk{index},id=blk{index}"]


def attach_commands(index: int, disk: Disk, version: Version) -> list[QmpCommand]:
    """QMP commands that put a disk over NBD in the place of what a machine had that waited for its disk."""
    server = {"node-name": f"nbd{index}", **_nbd_node(disk, version), **_node_options(disk, filter_zeroes=False)}
    raw = {"node-name": f"disk{index}", **_raw_node(f"nbd{index}"), **_node_options(disk)}
    return [
        ("blockdev-add", server),
        ("blockdev-reopen", {"options": [raw]}),
        ("blockdev-del", {"node-name": f"{PLACEHOLDER}{index}"}),
    ]


def _raw_node(file: str) -> dict[str, Any]:
    return {"driver": "raw", "file": file}


def _node_options(disk: Disk, *, filter_zeroes: bool = True) -> dict[str, Any]:
    # The machine ends with the host anyway, so a flush to the platter while it runs buys nothing: flushes stop at the
    # host's page cache (for NBD, that of a server which holds nothing back), and whoever keeps a saved state or a disk
    # syncs it.
    options: dict[str, Any] = {
        "read-only": disk.read_only,
        "cache": {"direct": False, "no-flush": True},
        "discard": "unmap",
    }
    if filter_zeroes and not disk.read_only:
        options["detect-zeroes"] = "unmap"
    return options


def _nbd_node(disk: Disk, version: Version) -> dict[str, Any]:
    # The same relative path works from the working directory at the start, and later from the root that it has become.
    if disk.path.is_absolute():
        raise VmmError(f"the socket of an NBD disk must be relative to the machine's directory, unlike {disk.path}")
    node: dict[str, Any] = {
        "driver": "nbd",
        "server": {"type": "unix", "path": str(disk.path)},
        "reconnect-delay": RECONNECT_S,
    }
    if version >= _OPEN_TIMEOUT_SINCE:
        node["open-timeout"] = OPEN_TIMEOUT_S
    return node


def qemu_arguments(
    qemu: Path,
    config: MachineConfig,
    acceleration: Acceleration,
    *,
    version: Version,
    memory_file: Path,
    descriptors: InheritedDescriptors,
    confinement: Confinement | None = None,
    incoming: bool = False,
    disks_later: bool = False,
) -> list[str]:
    """The whole argument list of one QEMU process, which starts with its vCPUs stopped.

    The devices and their order must be the same when a state is saved and when it is loaded. Everything that QEMU
    opens it opens before it gives up its rights (`confinement`); only NBD sockets it opens again, when one breaks.

    Args:
        qemu, config, acceleration, version, memory_file, descriptors, confinement: what to run, on what, as whom.
        incoming: wait for a saved state.
        disks_later: have nothing behind the disks until `attach_commands` were executed.

    Raises:
        VmmError: a disk cannot be given to a confined QEMU.
    """
    memory = {
        "qom-type": "memory-backend-file",
        "id": "ram",
        "size": config.memory_mib * 1024 * 1024,
        "share": True,
        "mem-path": str(memory_file),
    }
    arguments = [
        str(qemu),
        "-name",
        f"guest={_option(config.machine_id)}",
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-no-reboot",
        "-S",
        "-sandbox",
        # The filter is in force when QEMU changes its user; afterwards it has no rights to elevate, and cannot exec.
        f"on,obsolete=deny,elevateprivileges={'allow' if confinement else 'deny'},spawn=deny,resourcecontrol=deny",
        *_confinement_arguments(confinement, version),
        "-machine",
        "microvm,acpi=on,rtc=on,pit=on,pic=on,memory-backend=ram",
        *_acceleration_arguments(acceleration),
        "-global",
        "virtio-mmio.force-legacy=false",
        "-smp",
        str(config.vcpus),
        "-m",
        f"{config.memory_mib}M",
        "-object",
        json.dumps(memory),
        "-chardev",
        f"socket,id=qmp,fd={descriptors.qmp},server=on,wait=off",
        "-mon",
        "chardev=qmp,mode=control",
        "-chardev",
        f"file,id=console,path={CONSOLE_NAME},append=on",
        "-serial",
        "chardev:console",
        "-kernel",
        str(config.kernel),
        "-initrd",
        str(config.initramfs),
        "-append",
        kernel_command_line(config, acceleration),
        "-object",
        json.dumps({"qom-type": "rng-random", "id": "entropy", "filename": "/dev/urandom"}),
        "-device",
        "virtio-rng-device,rng=entropy",
    ]
    for index, disk in enumerate(config.disks):
        arguments += _disk_arguments(index, disk, version, later=disks_later)
    if config.interface is not None and descriptors.tap is not None:
        arguments += [
            "-netdev",
            f"tap,id=net0,fd={descriptors.tap}",
            "-device",
            f"virtio-net-device,netdev=net0,id=nic0,mac={config.interface.mac}",
        ]
    if incoming:
        arguments += ["-incoming", "defer"]
    return arguments


def _confinement_arguments(confinement: Confinement | None, version: Version) -> Sequence[str]:
    if confinement is None:
        return ()
    user = f"{confinement.uid}:{confinement.uid}"
    directory = _option(str(confinement.root))
    if version >= (9, 1):
        return ("-run-with", f"chroot={directory},user={user}")
    if version >= (8, 1):
        return ("-run-with", f"chroot={directory}", "-runas", user)
    return ("-chroot", str(confinement.root), "-runas", user)


def _acceleration_arguments(acceleration: Acceleration) -> Sequence[str]:
    if acceleration.name == "kvm":
        return ("-accel", "kvm", "-cpu", "host")
    return ("-accel", f"tcg,thread=multi,tb-size={TCG_BUFFER_MIB}", "-cpu", "max")
