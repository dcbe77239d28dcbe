"""The command doctor: every requirement of a server on this host, what is missing, and the command that mends it.

It only looks; it changes nothing. Each room reports its own findings, this file adds the general ones.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from agentenv.cli.output import print_json, print_table, shown, write
from agentenv.config import MIB, Settings, load_settings
from agentenv.errors import AgentEnvError

_MIN_FREE_DISK_MIB = 6 * 1024
_MIN_MEMORY_MIB = 2 * 1024


@dataclass(frozen=True, slots=True)
class Finding:
    """One requirement. `level`: ok, warn (works, but worse) or fail (the server cannot start sandboxes)."""

    name: str
    level: str
    detail: str
    mend: str | None = None


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Check this host; exit code 1 when something needed is missing."""
    try:
        findings = asyncio.run(examine(load_settings()))
    except AgentEnvError as error:
        findings = [Finding("configuration", "fail", str(error), "correct the file or variable that it names")]
    failed = any(finding.level == "fail" for finding in findings)
    if as_json:
        print_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        _print_table(findings)
        write("something needed is missing\n" if failed else "this host can run sandboxes\n")
    raise typer.Exit(1 if failed else 0)


def _print_table(findings: list[Finding]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("", "CHECK", "FOUND", "MEND IT WITH"):
        table.add_column(heading, overflow="fold")
    marks = {"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]FAIL[/]"}
    for finding in findings:
        table.add_row(marks[finding.level], finding.name, Text(shown(finding.detail)), Text(shown(finding.mend)))
    print_table(table)


async def examine(settings: Settings) -> list[Finding]:
    """All findings for this host and configuration, in the order in which one would mend them."""
    findings = [*_system(), *_programs(settings), *_room(settings)]
    findings += await asyncio.to_thread(lambda: list(_network(settings)))
    findings += await _virtualization(settings)
    findings += _assets(settings)
    findings += await asyncio.to_thread(lambda: list(_storage(settings)))
    return findings


def _system() -> Iterator[Finding]:
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    yield Finding(
        "Linux", "ok" if numbers >= (5, 10) else "fail", release, None if numbers >= (5, 10) else "Linux 5.10+"
    )
    root = os.geteuid() == 0
    yield Finding(
        "root", "ok" if root else "fail", f"uid {os.geteuid()}", None if root else "run the server as root (sudo)"
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB
    enough = memory >= _MIN_MEMORY_MIB
    yield Finding("memory", "ok" if enough else "warn", f"{memory} MiB", None if enough else "2 GiB or more")


def _programs(settings: Settings) -> Iterator[Finding]:
    needed = {
        "qemu": (str(settings.vmm.qemu), "apt-get install qemu-system-x86", "fail"),
        "qemu-img": ("qemu-img", "apt-get install qemu-utils", "warn"),
        "nft": ("nft", "apt-get install nftables", "fail"),
        "mmdebstrap": ("mmdebstrap", "apt-get install mmdebstrap (only to make the base template)", "warn"),
    }
    search = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    for name, (program, mend, level) in needed.items():
        found = shutil.which(program, path=search)
        yield Finding(name, "ok" if found else level, found or f"{program} not found", None if found else mend)


def _room(settings: Settings) -> Iterator[Finding]:
    home = settings.home
    existing = next(path for path in (home, *home.parents) if path.exists())
    writable = os.access(existing, os.W_OK)
    yield Finding(
        "home",
        "ok" if writable else "fail",
        f"{home}",
        None if writable else f"make {existing} writable, or set AENV_HOME",
    )
    free = shutil.disk_usage(existing).free // MIB
    enough = free >= _MIN_FREE_DISK_MIB
    yield Finding(
        "disk",
        "ok" if enough else "warn",
        f"{free} MiB free at {existing}",
        None if enough else "free some, or set AENV_HOME",
    )
    shared = Path("/dev/shm")  # noqa: S108  looked at, not written
    if settings.vmm.memory_dir is None and shared.is_dir():
        free = shutil.disk_usage(shared).free // MIB
        enough = free >= settings.sandbox.memory_mib * 2
        mend = "mount -o remount,size=75% /dev/shm, or set vmm.memory_dir"
        yield Finding("guest memory", "ok" if enough else "warn", f"{free} MiB in {shared}", None if enough else mend)


def _network(settings: Settings) -> Iterator[Finding]:
    from agentenv.network.checks import check_host

    for check in check_host(settings.network):
        yield Finding(check.name, "ok" if check.ok else "fail", check.detail, None if check.ok else check.mend)


async def _virtualization(settings: Settings) -> list[Finding]:
    from agentenv.guest.assets import load_assets
    from agentenv.vmm.probe import describe_acceleration

    try:
        kernel = load_assets(settings).kernel
    except AgentEnvError:
        kernel = None  # reported by its own check; the probe then tells what it can without booting
    level, detail, mend = await describe_acceleration(settings, kernel)
    return [Finding("virtualization", level, detail, mend)]


def _assets(settings: Settings) -> Iterator[Finding]:
    from agentenv.guest.assets import load_assets

    try:
        assets = load_assets(settings)
        yield Finding("guest assets", "ok", f"kernel {assets.kernel_version}")
        yield Finding("block daemon", "ok", str(assets.blockd))
    except AgentEnvError as error:
        yield Finding("guest assets", "fail", str(error), "make setup")
    base = settings.paths.template("base") / "template.json"
    yield Finding(
        "base template", "ok" if base.is_file() else "fail", str(base.parent), None if base.is_file() else "make setup"
    )


def _storage(settings: Settings) -> Iterator[Finding]:
    from agentenv.storage.checks import check_exports, check_layers

    for check in (check_exports(), check_layers(settings.paths.layers)):
        yield Finding(check.name, check.level, check.detail, check.mend or None)
