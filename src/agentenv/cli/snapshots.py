"""Commands on snapshots, and on sandboxes that go on from them: snapshot, snapshots, fork, rollback."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from agentenv.cli.connection import Client, CommandError, connect, sandbox_path
from agentenv.cli.output import (
    OutputFormat,
    OutputOption,
    ago,
    print_json,
    print_rows,
    print_table,
    shown,
    size_text,
    wants_json,
    write,
)
from agentenv.cli.sandboxes import HIDDEN_FIELDS, SandboxArgument

MOST_FORKS = 100

app = typer.Typer(invoke_without_command=True)


def snapshot(
    sandbox: SandboxArgument,
    name: Annotated[
        str | None,
        typer.Option(
            "--name",
            help="ALIAS or ALIAS:TAG. One that is in use moves to the new snapshot. Namespaces are dropped: team1/x "
            "and team2/x are one name.",
        ),
    ] = None,
    no_memory: Annotated[bool, typer.Option("--no-memory", help="Keep the disk alone.")] = False,
    output: OutputOption = None,
) -> None:
    """Take a snapshot of a running sandbox, which goes on. Print what to start others from (-o json: all of it)."""
    body: dict[str, Any] = {"memory": not no_memory}
    if name is not None:
        body["name"] = name

    async def run() -> None:
        async with connect() as client:
            taken, _ = await client.request("POST", sandbox_path(sandbox, "/snapshots"), body=body)
        if output is OutputFormat.JSON:
            print_json(taken)
        else:
            write(taken["snapshotID"] + "\n")

    asyncio.run(run())


@app.callback()
def snapshots(
    context: typer.Context,
    tree: Annotated[
        bool, typer.Option("--tree", help="Draw which was taken after which. SIZE: what deleting it gives back.")
    ] = False,
    sandbox: Annotated[
        str | None, typer.Option("--sandbox", metavar="SANDBOX", help="Only what was taken of this sandbox.")
    ] = None,
    output: OutputOption = None,
) -> None:
    """List snapshots, or delete some of them (snapshots rm)."""
    if context.invoked_subcommand is not None:
        return
    query = {} if sandbox is None else {"sandboxID": sandbox}

    async def run() -> None:
        async with connect() as client:
            if tree:
                nodes, _ = await client.request("GET", "/snapshots/tree", query=query)
                if wants_json(output):
                    print_json(nodes)
                else:
                    here = None if sandbox is None else await _checkpoint(client, sandbox)
                    print_table(_drawn(nodes, here))
                return
            rows = await client.list_all("/snapshots", query)
        if not wants_json(output):
            rows = [{**row, "age": ago(row["createdAt"])} for row in rows]
        columns = {
            "snapshotID": "SNAPSHOT",
            "age": "TAKEN",
            "mode": "MODE",
            "sandboxID": "OF SANDBOX",
            "buildID": "BUILD",
        }
        print_rows(rows, columns, output)

    asyncio.run(run())


@app.command("rm")
def remove(
    references: Annotated[list[str], typer.Argument(metavar="SNAPSHOT…", help="Names or ids of snapshots.")],
) -> None:
    """Delete snapshots. Sandboxes and snapshots that were made from them stay as they are."""
    if not all(reference.strip() for reference in references):
        raise CommandError("the name of a snapshot is empty; nothing was deleted", exit_code=2)

    async def run() -> None:
        failures = []
        async with connect() as client:
            for reference in references:
                try:
                    await client.request("DELETE", f"/templates/{quote(reference, safe='')}")
                except CommandError as error:
                    failures.append(f"{reference}: {error}")
                else:
                    write(reference + "\n")
        if failures:
            raise CommandError("; ".join(failures))

    asyncio.run(run())


def fork(
    sandbox: SandboxArgument,
    count: Annotated[int, typer.Option("-n", "--count", help="How many copies.", min=1, max=MOST_FORKS)] = 1,
    timeout: Annotated[
        int,
        typer.Option(
            "-t",
            "--timeout",
            help="Seconds that each runs. Then it ends; copies of one with autoPause are paused.",
            min=1,
        ),
    ] = 300,
    output: OutputOption = None,
) -> None:
    """Make copies of a running sandbox, its processes included; it goes on. Print the id of each that is ready."""

    async def run() -> None:
        results: list[dict[str, Any]] = []
        as_json = output is OutputFormat.JSON
        # On a terminal that shows the bar, ids come when the bar is gone; who reads a pipe gets each at once.
        at_once = not as_json and not (sys.stdout is not None and sys.stdout.isatty())
        async with connect() as client:
            body = {"count": count, "timeout": timeout}
            with _progress() as progress:
                task = progress.add_task(f"forking {sandbox}", total=count)
                async for result in client.stream(sandbox_path(sandbox, "/fork"), body):
                    progress.advance(task)
                    results.append(result)
                    if at_once:
                        _print_id(result)
        if as_json:
            print_json([_without_secrets(result) for result in results])
        elif not at_once:
            for result in results:
                _print_id(result)
        failures = [result["error"]["message"] for result in results if "error" in result]
        if failures:
            reasons = "; ".join(dict.fromkeys(failures))
            raise CommandError(f"{len(failures)} of {count} copies did not start: {reasons}")
        if len(results) != count:
            raise CommandError(f"the server closed the connection after {len(results)} of {count} copies")

    asyncio.run(run())


def rollback(
    sandbox: SandboxArgument,
    reference: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="Name or id of a snapshot of this sandbox.")],
) -> None:
    """Put a running sandbox back to a snapshot that was taken of it. Its id and its time to live stay.

    Commands that run in it are cut off. An SDK that waits for one says that the sandbox was killed or reached its end
    of life, which it did not.
    """

    async def run() -> None:
        async with connect() as client:
            await client.request("POST", sandbox_path(sandbox, "/rollback"), body={"snapshotID": reference})
        write(sandbox + "\n")

    asyncio.run(run())


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _print_id(result: dict[str, Any]) -> None:
    if "sandbox" in result:
        write(result["sandbox"]["sandboxID"] + "\n")


def _without_secrets(result: dict[str, Any]) -> dict[str, Any]:
    if "sandbox" not in result:
        return result
    return {"sandbox": {key: value for key, value in result["sandbox"].items() if key not in HIDDEN_FIELDS}}


async def _checkpoint(client: Client, sandbox: str) -> str | None:
    """The snapshot that a sandbox goes on from; None when it has none, or is gone: its snapshots may well be left."""
    try:
        found, _ = await client.request("GET", sandbox_path(sandbox))
    except CommandError:
        return None
    checkpoint: str | None = found.get("checkpointID")
    return checkpoint


def _drawn(nodes: Sequence[dict[str, Any]], here: str | None) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("SNAPSHOT", no_wrap=True)
    table.add_column("TAKEN", no_wrap=True)
    table.add_column("SIZE", justify="right", no_wrap=True)
    table.add_column("SHARED", justify="right", no_wrap=True)
    table.add_column("MODE")
    table.add_column("OF SANDBOX", overflow="fold")
    for branch, node in _branches(nodes):
        found = node.get("snapshot")
        label = f"({node['buildID'][:8]}, deleted)" if found is None else shown(found["snapshotID"])
        mark = "  <- here" if node["buildID"] == here else ""
        table.add_row(
            Text(branch + label + mark),
            "" if found is None else ago(found["createdAt"]),
            size_text(node["exclusiveBytes"]),
            size_text(node["sharedBytes"]),
            "" if found is None else found["mode"],
            Text("" if found is None else shown(found["sandboxID"])),
        )
    return table


def _branches(nodes: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each node with the lines that lead to it. Parents come before their children, a chain may be of any length."""
    last_child: dict[str | None, str] = {node.get("parentID"): node["buildID"] for node in nodes}
    below: dict[str, str] = {}
    for node in nodes:
        own, parent = node["buildID"], node.get("parentID")
        if parent is None:
            below[own] = ""
            yield "", node
            continue
        last = last_child[parent] == own
        below[own] = below[parent] + ("  " if last else "│ ")
        yield below[parent] + ("└ " if last else "├ "), node
