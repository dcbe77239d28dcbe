"""Commands about the disk space of a server: du, gc."""

from __future__ import annotations

import asyncio

from rich.table import Table

from agentenv.cli.connection import connect
from agentenv.cli.output import OutputOption, print_json, print_table, size_text, wants_json, write

_LINES = {
    "layersBytes": ("layers", "all that is stored, each once; its parts share some of it"),
    "templatesBytes": ("  templates", ""),
    "snapshotsBytes": ("  snapshots", ""),
    "pausedBytes": ("  paused sandboxes", ""),
    "garbageBytes": ("  garbage", "aenv gc removes it"),
    "disksBytes": ("disks", "what running sandboxes wrote since they started or were captured"),
    "freeBytes": ("free", "on the file system of the server's home"),
}


def du(output: OutputOption = None) -> None:
    """Show what takes up the disk of the server."""

    async def run() -> None:
        async with connect() as client:
            found, _ = await client.request("GET", "/node/space")
        if wants_json(output):
            print_json(found)
            return
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(justify="right", no_wrap=True)
        table.add_column(overflow="fold")
        for key, (label, note) in _LINES.items():
            if key == "snapshotsBytes" and "budgetBytes" in found:
                note = f"of {size_text(found['budgetBytes'])} that they may take"
            table.add_row(label, size_text(found[key]), note)
        print_table(table)

    asyncio.run(run())


def gc(output: OutputOption = None) -> None:
    """Remove what nothing uses any more. Safe at any time; it mostly happens by itself."""

    async def run() -> None:
        async with connect() as client:
            removed, _ = await client.request("POST", "/node/space/collect")
        if wants_json(output):
            print_json(removed)
        else:
            layers = removed["layers"]
            write(f"removed {layers} {'layer' if layers == 1 else 'layers'}, {size_text(removed['bytes'])}\n")

    asyncio.run(run())
