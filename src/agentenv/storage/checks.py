"""What a host offers for block devices, and whether the layer store is whole. For `aenv doctor`.

Nothing is changed; every finding names the command that mends it.
"""

from __future__ import annotations

import os
import platform
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from agentenv.config import MIB
from agentenv.errors import AgentEnvError
from agentenv.storage.layers import LayerStore


class StorageCheck(NamedTuple):
    """One requirement. `level`: ok, warn (works, but worse) or fail; `mend` is empty when there is nothing to do."""

    name: str
    level: str
    detail: str
    mend: str = ""


def check_exports(*, devices: Path = Path("/dev"), modules: Path | None = None) -> StorageCheck:
    """How the block daemon can offer disks here. Only VMMs that need a device of the host need more than NBD sockets.

    Args:
        devices: where device nodes are.
        modules: of the running kernel.
    """
    modules = modules or Path("/lib/modules") / platform.release()
    known = _module_names(modules)
    mends = []
    words = ["NBD over unix sockets: always (all that QEMU needs)"]
    for name, module, node in (("ublk", "ublk_drv", "ublk-control"), ("kernel NBD", "nbd", "nbd0")):
        if (devices / node).exists():
            words.append(f"{name}: yes")
        elif module in known:
            words.append(f"{name}: not loaded")
            mends.append(f"modprobe {module}")
        else:
            words.append(f"{name}: not in this kernel")
    return StorageCheck("block devices", "ok", "; ".join(words), " (optional); ".join([*mends, ""]).removesuffix("; "))


def _module_names(modules: Path) -> frozenset[str]:
    """Names of the modules that a kernel has, built in or loadable."""
    names = set()
    for index in ("modules.dep", "modules.builtin"):
        try:
            lines = (modules / index).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        names |= {Path(line.partition(":")[0]).name.partition(".")[0] for line in lines}
    return frozenset(names)


def check_layers(directory: Path) -> StorageCheck:
    """Whether every layer of the store is there in its full size. Reading their bytes is not part of it."""
    name = "layer store"
    if not directory.is_dir():
        return StorageCheck(name, "ok", f"none yet in {directory}")
    if not os.access(directory, os.R_OK | os.X_OK):
        return StorageCheck(name, "warn", f"{directory} is not readable for this user", "run it as root")
    try:
        with closing(LayerStore(directory)) as store:
            damaged = []
            for layer in store.list():
                if not layer.path.is_file() or layer.path.stat().st_size != layer.size:
                    owners = ", ".join(store.owners(layer.digest)) or "nobody"
                    damaged.append(f"{layer.path} is missing or cut off (it belongs to {owners})")
            usage = store.usage()
    except AgentEnvError as error:
        return StorageCheck(name, "fail", error.message, f"look at {directory}")
    if damaged:
        return StorageCheck(name, "fail", "; ".join(damaged), "make setup (for the base template)")
    return StorageCheck(name, "ok", f"{usage.layers} layers, {usage.size_bytes // MIB} MiB in {directory}")
