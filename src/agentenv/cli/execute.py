"""Commands that run something in a sandbox: exec and shell.

Exit codes pass through unchanged; a command ended by signal N gives 128+N, as a shell does.
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any

import typer

from agentenv.cli.connection import Agent, Client, CommandError, ProcessEvent, connect, sandbox_path
from agentenv.cli.sandboxes import SandboxArgument, parse_pairs

UserOption = Annotated[str | None, typer.Option("-u", "--user", help="Linux user; default: the template's.")]
_INPUT_CHUNK = 64 * 1024
_BROKEN_PIPE = 128 + signal.SIGPIPE
_KEEP_ALIVE_S = 60
_KEEP_ALIVE_LIFE_S = 180


def exec_(
    sandbox: SandboxArgument,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND…", help="Program and arguments, run as they are.")],
    interactive: Annotated[bool, typer.Option("-i", "--interactive", help="Pass standard input on.")] = False,
    env: Annotated[list[str] | None, typer.Option("-e", "--env", help="KEY=VALUE for the command.")] = None,
    user: UserOption = None,
    cwd: Annotated[str | None, typer.Option("--cwd", help="Working directory.")] = None,
) -> None:
    """Run a command in a sandbox; its exit code becomes ours."""
    command = command[1:] if command[0] == "--" else command
    if not command:
        raise CommandError("name the command to run", exit_code=2)
    process: dict[str, Any] = {
        "cmd": command[0],
        "args": command[1:],
        "envs": parse_pairs(env or [], "--env"),
    }
    if cwd is not None:
        process["cwd"] = cwd

    async def run() -> int:
        async with connect() as client:
            agent = await client.agent(sandbox, user)
            events = agent.start({"process": process, "stdin": interactive})
            return await _attach(agent, events, _input_of_pipe() if interactive else None, pty=False)

    raise typer.Exit(asyncio.run(run()))


def shell(
    sandbox: SandboxArgument,
    user: UserOption = None,
    cwd: Annotated[str | None, typer.Option("--cwd", help="Working directory.")] = None,
) -> None:
    """Open a terminal in a sandbox. While it is open, the sandbox does not expire."""
    if not sys.stdin.isatty():
        raise CommandError("shell needs a terminal; use exec -i for pipes")

    async def run() -> int:
        async with connect() as client:
            agent = await client.agent(sandbox, user)
            message = {
                "process": {
                    "cmd": "/bin/sh",
                    "args": ["-c", "if [ -x /bin/bash ]; then exec /bin/bash -i -l; else exec /bin/sh -i -l; fi"],
                    "envs": {"TERM": os.environ.get("TERM", "xterm-256color"), "LANG": "C.UTF-8", "LC_ALL": "C.UTF-8"},
                    **({"cwd": cwd} if cwd else {}),
                },
                "pty": {"size": _terminal_size()},
            }
            with _raw_terminal():
                async with asyncio.TaskGroup() as tasks:
                    keeper = tasks.create_task(_keep_alive(client, sandbox))
                    try:
                        return await _attach(agent, agent.start(message), _input_of_terminal(), pty=True)
                    finally:
                        keeper.cancel()

    raise typer.Exit(asyncio.run(run()))


async def _attach(
    agent: Agent, events: AsyncIterator[ProcessEvent], source: AsyncIterator[bytes] | None, *, pty: bool
) -> int:
    """Pump a running process to this terminal until it ends. Returns its exit code."""
    loop = asyncio.get_running_loop()
    pid = 0
    async with asyncio.TaskGroup() as tasks:
        helpers: list[asyncio.Task[None]] = []
        handled: list[signal.Signals] = []

        def on_signal(number: signal.Signals, action: Callable[[], None]) -> None:
            loop.add_signal_handler(number, action)
            handled.append(number)

        def terminate() -> None:
            helpers.append(tasks.create_task(_end_process(agent, pid, "SIGNAL_SIGTERM")))

        def hang_up() -> None:
            helpers.append(tasks.create_task(_end_process(agent, pid, "SIGNAL_SIGKILL")))

        try:
            async for event in events:
                match event.kind:
                    case "start":
                        pid = event.pid
                        if source is not None:
                            helpers.append(tasks.create_task(_feed(agent, pid, source, pty=pty)))
                        if pty:
                            resized = asyncio.Event()
                            on_signal(signal.SIGWINCH, resized.set)
                            helpers.append(tasks.create_task(_resize(agent, pid, resized)))
                            on_signal(signal.SIGTERM, hang_up)
                        else:
                            on_signal(signal.SIGINT, terminate)
                            on_signal(signal.SIGTERM, terminate)
                        on_signal(signal.SIGHUP, hang_up)
                    case "stdout" | "pty":
                        await _write(sys.stdout.fileno(), event.data)
                    case "stderr":
                        await _write(sys.stderr.fileno(), event.data)
                    case "end":
                        return event.exit_code
        except BrokenPipeError:
            # Whoever read our output has left; as with a local pipe, that ends the command.
            await _end_process(agent, pid, "SIGNAL_SIGKILL")
            return _BROKEN_PIPE
        finally:
            for number in handled:
                loop.remove_signal_handler(number)
            for helper in helpers:
                helper.cancel()
    raise CommandError("the sandbox ended the stream before the command ended")


async def _write(descriptor: int, data: bytes) -> None:
    """Write all of it without holding up the loop when the reader of our output is slow."""

    def write() -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    await asyncio.to_thread(write)


async def _feed(agent: Agent, pid: int, source: AsyncIterator[bytes], *, pty: bool) -> None:
    """Send our input to the process, then close its input. A process that ended meanwhile is no error."""
    kind = "pty" if pty else "stdin"
    selector = {"pid": pid}
    try:
        async for chunk in source:
            message = {"process": selector, "input": {kind: base64.b64encode(chunk).decode()}}
            await agent.call("process.Process/SendInput", message)
        if not pty:
            await agent.call("process.Process/CloseStdin", {"process": selector})
    except CommandError:
        # The stream of events tells how the process ended; input that it no longer takes says nothing more.
        return


async def _resize(agent: Agent, pid: int, resized: asyncio.Event) -> None:
    while True:
        await resized.wait()
        resized.clear()
        with suppress(CommandError):
            message = {"process": {"pid": pid}, "pty": {"size": _terminal_size()}}
            await agent.call("process.Process/Update", message)


async def _end_process(agent: Agent, pid: int, signal_name: str) -> None:
    with suppress(CommandError):
        message = {"process": {"pid": pid}, "signal": signal_name}
        await agent.call("process.Process/SendSignal", message)


async def _keep_alive(client: Client, sandbox: str) -> None:
    """Keep an attached sandbox from expiring: `connect` never shortens a life."""
    while True:
        with suppress(CommandError):
            path = "/v2" + sandbox_path(sandbox, "/connect")
            await client.request("POST", path, body={"timeout": _KEEP_ALIVE_LIFE_S})
        await asyncio.sleep(_KEEP_ALIVE_S)


async def _input_of_pipe() -> AsyncIterator[bytes]:
    """Standard input in chunks, read in a thread because it may be a regular file."""
    while chunk := await asyncio.to_thread(os.read, sys.stdin.fileno(), _INPUT_CHUNK):
        yield chunk


async def _input_of_terminal() -> AsyncIterator[bytes]:
    """Keys as they are pressed, read by the event loop so that the end of the shell is not held up by a read."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes] = asyncio.Queue()
    descriptor = sys.stdin.fileno()
    loop.add_reader(descriptor, lambda: queue.put_nowait(os.read(descriptor, 4096)))
    try:
        while chunk := await queue.get():
            yield chunk
    finally:
        loop.remove_reader(descriptor)


@contextmanager
def _raw_terminal() -> Iterator[None]:
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    tty.setraw(descriptor)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _terminal_size() -> dict[str, int]:
    size = shutil.get_terminal_size()
    return {"cols": size.columns, "rows": size.lines}
