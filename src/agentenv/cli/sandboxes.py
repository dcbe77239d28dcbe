"""Commands on sandboxes as a whole: start, ls, info, rm, pause, resume, timeout, logs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer

from agentenv.cli.connection import Client, CommandError, connect, sandbox_path
from agentenv.cli.output import (
    OutputFormat,
    OutputOption,
    ago,
    instant,
    print_fields,
    print_json,
    print_rows,
    shown,
    span,
    wants_json,
    write,
)

SandboxArgument = Annotated[str, typer.Argument(metavar="SANDBOX", help="The sandbox id.")]

HIDDEN_FIELDS = ("envdAccessToken", "trafficAccessToken", "clientID")
"""Of sandboxes: secrets, and what means nothing. Never printed."""


def parse_pairs(pairs: list[str], option: str) -> dict[str, str]:
    """`KEY=VALUE` texts of a repeated option as a mapping."""
    parsed = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise CommandError(f"{option} takes KEY=VALUE, not {pair!r}", exit_code=2)
        parsed[key] = value
    return parsed


def start(
    template: Annotated[str, typer.Argument(help="Template or snapshot to start from.")] = "base",
    timeout: Annotated[int, typer.Option("-t", "--timeout", help="Seconds until it ends.", min=1)] = 300,
    env: Annotated[list[str] | None, typer.Option("-e", "--env", help="KEY=VALUE for every process.")] = None,
    metadata: Annotated[list[str] | None, typer.Option("-m", "--metadata", help="KEY=VALUE to find it by.")] = None,
    no_internet: Annotated[bool, typer.Option("--no-internet", help="Close the network.")] = False,
    auto_pause: Annotated[bool, typer.Option("--auto-pause", help="Pause it at its end, do not end it.")] = False,
    auto_resume: Annotated[bool, typer.Option("--auto-resume", help="With --auto-pause: traffic resumes it.")] = False,
    no_memory: Annotated[
        bool, typer.Option("--no-memory", help="Boot from the disk of a snapshot; what was not synced is lost.")
    ] = False,
    output: OutputOption = None,
) -> None:
    """Start a sandbox and print its id (with -o json: all that the server says of it)."""
    body: dict[str, Any] = {
        "templateID": template,
        "timeout": timeout,
        "envVars": parse_pairs(env or [], "--env"),
        "metadata": parse_pairs(metadata or [], "--metadata"),
    }
    if no_internet:
        body["allow_internet_access"] = False
    if no_memory:
        body["memory"] = False
    if auto_resume and not auto_pause:
        raise CommandError("--auto-resume needs --auto-pause", exit_code=2)
    if auto_pause:
        body |= {"autoPause": True, "autoResume": {"enabled": auto_resume}}

    async def run() -> None:
        async with connect() as client:
            created, _ = await client.request("POST", "/v2/sandboxes", body=body)
        if output is OutputFormat.JSON:
            print_json({key: value for key, value in created.items() if key not in HIDDEN_FIELDS})
        else:
            write(created["sandboxID"] + "\n")

    asyncio.run(run())


def ls(
    state: Annotated[str | None, typer.Option(help="running, paused, or both with a comma.")] = None,
    metadata: Annotated[list[str] | None, typer.Option("-m", "--metadata", help="KEY=VALUE that must match.")] = None,
    output: OutputOption = None,
) -> None:
    """List sandboxes."""
    query: dict[str, str] = {}
    if state:
        query["state"] = state
    if metadata:
        pairs = parse_pairs(metadata, "--metadata")
        query["metadata"] = urlencode({quote(key): quote(value) for key, value in pairs.items()})

    async def run() -> None:
        async with connect() as client:
            rows = await client.list_sandboxes(query)
        if not wants_json(output):
            rows = [{**row, "left": _left(row), "started": ago(row["startedAt"])} for row in rows]
        columns = {
            "sandboxID": "ID",
            "templateID": "TEMPLATE",
            "state": "STATE",
            "started": "STARTED",
            "left": "ENDS IN",
            "cpuCount": "CPU",
            "memoryMB": "MIB",
            "metadata": "METADATA",
        }
        print_rows(rows, columns, output)

    asyncio.run(run())


def info(sandbox: SandboxArgument, output: OutputOption = None) -> None:
    """Show one sandbox."""

    async def run() -> None:
        async with connect() as client:
            found, _ = await client.request("GET", sandbox_path(sandbox))
        print_fields({key: value for key, value in found.items() if key not in HIDDEN_FIELDS}, output)

    asyncio.run(run())


def rm(
    sandboxes: Annotated[list[str] | None, typer.Argument(metavar="SANDBOX…", help="Sandbox ids.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All sandboxes of this server.")] = False,
) -> None:
    """End sandboxes."""
    if bool(sandboxes) == everything:
        raise CommandError("name the sandboxes, or say --all", exit_code=2)

    async def end(client: Client, sandbox_id: str) -> None:
        await client.request("DELETE", sandbox_path(sandbox_id))

    async def run() -> None:
        ids = sandboxes
        if not ids:
            async with connect() as client:
                ids = [row["sandboxID"] for row in await client.list_sandboxes()]
        await _each(ids, end)

    asyncio.run(run())


def pause(
    sandboxes: Annotated[list[str], typer.Argument(metavar="SANDBOX…", help="Sandbox ids.")],
    no_memory: Annotated[bool, typer.Option("--no-memory", help="Keep the disk alone; it boots again later.")] = False,
) -> None:
    """Pause sandboxes: they cost disk space only, until they are resumed."""

    async def one(client: Client, sandbox_id: str) -> None:
        await client.request("POST", sandbox_path(sandbox_id, "/pause"), body={"memory": not no_memory})

    asyncio.run(_each(sandboxes, one))


def resume(
    sandboxes: Annotated[list[str], typer.Argument(metavar="SANDBOX…", help="Sandbox ids.")],
    timeout: Annotated[int, typer.Option("-t", "--timeout", help="Seconds until it ends.", min=1)] = 300,
    no_memory: Annotated[bool, typer.Option("--no-memory", help="Boot it from its disk.")] = False,
) -> None:
    """Resume paused sandboxes. One that runs lives so long at least."""
    body: dict[str, Any] = {"timeout": timeout}
    if no_memory:
        body["memory"] = False

    async def one(client: Client, sandbox_id: str) -> None:
        await client.request("POST", f"/v2{sandbox_path(sandbox_id, '/connect')}", body=body)

    asyncio.run(_each(sandboxes, one))


async def _each(sandboxes: list[str], work: Callable[[Client, str], Awaitable[None]]) -> None:
    """Do something with each sandbox at the same time; print the id of each that it is done with."""

    async def attempt(client: Client, sandbox_id: str) -> str | None:
        try:
            await work(client, sandbox_id)
        except CommandError as error:
            return f"{sandbox_id}: {error}"
        write(sandbox_id + "\n")
        return None

    async with connect() as client:
        failures = [text for text in await asyncio.gather(*(attempt(client, one) for one in sandboxes)) if text]
    if failures:
        raise CommandError("; ".join(failures))


def timeout(
    sandbox: SandboxArgument,
    seconds: Annotated[int, typer.Argument(help="Seconds from now until it ends; 0 ends it at once.", min=0)],
) -> None:
    """Set when a sandbox ends, counted from now, and print that moment. The server may cap it."""

    async def run() -> None:
        async with connect() as client:
            await client.request("POST", sandbox_path(sandbox, "/timeout"), body={"timeout": seconds})
            if seconds:
                found, _ = await client.request("GET", sandbox_path(sandbox))
                write(found["endAt"] + "\n")

    asyncio.run(run())


def logs(
    sandbox: SandboxArgument,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the sandbox ends.")] = False,
    limit: Annotated[int, typer.Option("-n", "--limit", help="Lines at most.", min=1, max=1000)] = 1000,
    output: OutputOption = None,
) -> None:
    """Show what happened in a sandbox: its life, its agent, its console."""

    async def run() -> None:
        start_ms = 0
        async with connect() as client:
            while True:
                query = {"start": str(start_ms), "limit": str(limit)}
                try:
                    page, _ = await client.request("GET", sandbox_path(sandbox, "/logs"), query=query)
                except CommandError:
                    if start_ms:
                        return
                    raise
                entries = page["logEntries"]
                for entry in entries:
                    _print_log(entry, as_json=wants_json(output))
                if entries:
                    start_ms = int(instant(entries[-1]["timestamp"]).timestamp() * 1000) + 1
                if not follow:
                    return
                await asyncio.sleep(0.4)  # the API has no push; this is the interval that the E2B CLI polls at

    asyncio.run(run())


def _print_log(entry: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        write(json.dumps(entry, ensure_ascii=False) + "\n")
    else:
        fields = entry.get("fields") or {}
        rest = " ".join(f"{key}={value}" for key, value in fields.items() if key not in ("logger", "level"))
        moment = instant(entry["timestamp"]).astimezone().strftime("%H:%M:%S.%f")[:-3]
        write(f"{moment} {entry['level']:5} {shown(entry['message'])} {rest}".rstrip() + "\n")


def _left(row: dict[str, Any]) -> str:
    return span(instant(row["endAt"]) - datetime.now(UTC)) if row["state"] == "running" else ""
