"""The commands `aenv layer …`: the operator's tools for overlaybd layer files.

They need no server, no root and no home, and know nothing of the layer store: files in, files out.
"""

from __future__ import annotations

import json as json_format
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from agentenv.cli.connection import CommandError
from agentenv.cli.output import shown, write
from agentenv.errors import AgentEnvError
from agentenv.storage.images import (
    Compression,
    WrittenLayer,
    create_layer_from_raw,
    describe_layer,
    merge_layers,
    verify_layer,
    write_stack_to,
)

app = typer.Typer(no_args_is_help=True, help="Inspect, read, make and check overlaybd layer files.")

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}
_SIZE = re.compile(r"([0-9]{1,19})([KMGT]?)", re.IGNORECASE)


def _size(given: str | int) -> int:
    text = str(given)  # a default comes as it is
    match = _SIZE.fullmatch(text)
    size = int(match[1]) * _UNITS[match[2].upper()] if match else 1 << 63
    if size >= 1 << 63:
        raise typer.BadParameter(f"'{text}' is no size: give bytes, or a number with K, M, G or T (1024, 1024², …)")
    return size


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace OUT if it exists.")]
ZfileOption = Annotated[Compression | None, typer.Option("--zfile", help="Compress (ZFile, blocks of 4 KiB).")]
TarOption = Annotated[bool, typer.Option("--tar", help="Wrap as the single member of a tar archive.")]
UuidOption = Annotated[str | None, typer.Option("--uuid", help="UUID of the layer. Default: a random one.")]


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A layer, or the data file of an upper.")],
    json: JsonOption = False,
    index: Annotated[
        Path | None, typer.Option("--index", help="Index file of an upper. Default: beside FILE, ending in .index.")
    ] = None,
) -> None:
    """Describe a layer file: form, identity, sizes, records, sha256."""
    _print(describe_layer(file, index=index).as_dict(), json=json)


@app.command()
def cat(
    stack: Annotated[list[Path], typer.Argument(help="Layers, bottom first.", metavar="LAYER...")],
    offset: Annotated[
        int, typer.Option("--offset", parser=_size, metavar="SIZE", help="First byte; K, M, G, T are understood.")
    ] = 0,
    length: Annotated[
        int | None, typer.Option("--length", parser=_size, metavar="SIZE", help="Bytes. Default: up to the end.")
    ] = None,
) -> None:
    """Write what a stack of layers reads as to standard output."""
    write("")
    write_stack_to(stack, sys.stdout.fileno(), offset=offset, length=length)


@app.command()
def create(
    out: Annotated[Path, typer.Argument(help="The layer to make.", metavar="OUT")],
    from_raw: Annotated[Path, typer.Option("--from-raw", help="Raw disk image to make it of.", metavar="FILE")],
    zfile: ZfileOption = None,
    tar: TarOption = False,
    uuid: UuidOption = None,
    parent_uuid: Annotated[
        str | None, typer.Option("--parent-uuid", help="UUID of the layer that it will lie on. Default: none.")
    ] = None,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Make a layer of a raw disk image; zero blocks and holes are not stored."""
    made = create_layer_from_raw(
        from_raw, out, compression=zfile, tar=tar, uuid=uuid, parent_uuid=parent_uuid, replace=force
    )
    _print_written(made, json=json)


@app.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="Layers, bottom first, and last OUT.", metavar="LAYER... OUT")],
    zfile: ZfileOption = None,
    tar: TarOption = False,
    uuid: UuidOption = None,
    parent_uuid: Annotated[
        str | None,
        typer.Option("--parent-uuid", help="UUID of the layer below. Default: what the bottom layer says."),
    ] = None,
    force: ForceOption = False,
    json: JsonOption = False,
) -> None:
    """Make one layer of neighbouring ones. What they zero stays zeroed, for the layers below them."""
    *layers, out = files
    if not layers:
        raise CommandError("merge needs at least one layer and OUT", exit_code=2)
    made = merge_layers(layers, out, compression=zfile, tar=tar, uuid=uuid, parent_uuid=parent_uuid, replace=force)
    _print_written(made, json=json)


@app.command()
def verify(files: Annotated[list[Path], typer.Argument(help="Layers.", metavar="FILE...")]) -> None:
    """Read all of layers: structure, index, every block and its checksum. Exit code 1 if one is damaged."""
    damaged = False
    for file in files:
        try:
            layer = verify_layer(file)
        except AgentEnvError as error:
            damaged = True
            sys.stderr.write(f"aenv: {shown(error)}\n")
        else:
            facts = f"{layer.records} records, {layer.data_bytes} bytes of data, {layer.digest}"
            write(f"{shown(file)}: good, {facts}\n")
    if damaged:
        raise typer.Exit(1)


def _print(fields: Mapping[str, Any], *, json: bool) -> None:
    if json:
        # Escapes, so that file names that are no text survive every locale.
        write(json_format.dumps(fields, indent=2) + "\n")
    else:
        write("".join(f"{key:<14}{shown(value)}".rstrip() + "\n" for key, value in fields.items()))


def _print_written(layer: WrittenLayer, *, json: bool) -> None:
    if json:
        _print(asdict(layer) | {"path": str(layer.path)}, json=True)
    else:
        write(f"{shown(layer.path)}: {layer.size} bytes, {layer.digest}\n")
