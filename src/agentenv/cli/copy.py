"""The command cp: files and directories between this machine and a sandbox.

A directory travels as one tar stream, so that modes and symbolic links survive; the guest needs `tar` for that.
Nothing here may follow a path of the archive out of the destination: Python's `data` filter guards extraction.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
import secrets
import stat
import sys
import tarfile
import tempfile
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from agentenv.cli.connection import Agent, CommandError, connect
from agentenv.cli.execute import UserOption

_CHUNK = 256 * 1024
_MODE_OF_UPLOADS = 0o644


def cp(
    source: Annotated[str, typer.Argument(help="PATH here, or SANDBOX:PATH.")],
    destination: Annotated[str, typer.Argument(help="PATH here, or SANDBOX:PATH. A trailing / means a directory.")],
    user: UserOption = None,
) -> None:
    """Copy a file or a directory into or out of a sandbox."""
    source_sandbox, source_path = _split(source)
    destination_sandbox, destination_path = _split(destination)
    if (source_sandbox is None) == (destination_sandbox is None):
        raise CommandError("exactly one side must be SANDBOX:PATH", exit_code=2)

    async def run() -> None:
        async with connect() as client:
            agent = await client.agent(source_sandbox or destination_sandbox or "", user)
            with _progress() as progress:
                if destination_sandbox is not None:
                    await _copy_in(agent, Path(source_path), destination_path, progress)
                else:
                    await _copy_out(agent, source_path, Path(destination_path), progress)

    try:
        asyncio.run(run())
    except OSError as error:
        raise CommandError(f"{error.filename or source_path}: {error.strerror or error}") from error


def _split(text: str) -> tuple[str | None, str]:
    """`ID:PATH` or a local path. A colon after a slash belongs to the path."""
    head, colon, rest = text.partition(":")
    if colon and "/" not in head and head:
        return head, rest or "."
    return None, text


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
        transient=True,
    )


# --- into the sandbox -----------------------------------------------------------------------------------------------


async def _copy_in(agent: Agent, source: Path, destination: str, progress: Progress) -> None:
    if source.is_dir():
        await _copy_directory_in(agent, source, destination, progress)
        return
    status = source.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CommandError(f"{source} is neither a file nor a directory")
    if destination.endswith("/") or destination in (".", "~") or await _is_directory(agent, destination):
        destination = posixpath.join(destination, source.name)
    task = progress.add_task(source.name, total=status.st_size)
    await agent.upload(destination, _read_file(source, progress, task))
    mode = stat.S_IMODE(status.st_mode) & 0o777
    if mode != _MODE_OF_UPLOADS:
        entry = await agent.call("filesystem.Filesystem/Stat", {"path": destination})
        # As root: the file may lie where its owner cannot reach it.
        await _run(agent.as_user("root"), ["chmod", "--", format(mode, "o"), entry["entry"]["path"]])


async def _copy_directory_in(agent: Agent, source: Path, destination: str, progress: Progress) -> None:
    # As with `cp -r`: into an existing directory under our name, else as the new name.
    if destination.endswith("/") or await _is_directory(agent, destination):
        destination = posixpath.join(destination, source.resolve().name)
    try:
        await agent.call("filesystem.Filesystem/MakeDir", {"path": destination})
    except CommandError as error:
        if "exist" not in str(error):
            raise
    target = (await agent.call("filesystem.Filesystem/Stat", {"path": destination}))["entry"]["path"]
    archive = f"/tmp/.aenv-cp-{secrets.token_hex(8)}.tar"  # noqa: S108  a path in the guest
    task = progress.add_task(source.name, total=await asyncio.to_thread(_tree_size, source))
    try:
        await agent.upload(archive, _tar_stream(source, progress, task))
        await _run(agent, ["tar", "-xf", archive, "-C", target])
    finally:
        await agent.call("filesystem.Filesystem/Remove", {"path": archive})


async def _read_file(path: Path, progress: Progress, task: TaskID) -> AsyncIterator[bytes]:
    file = await asyncio.to_thread(path.open, "rb")
    try:
        while chunk := await asyncio.to_thread(file.read, _CHUNK):
            yield chunk
            progress.advance(task, len(chunk))
    finally:
        file.close()


def _tree_size(root: Path) -> int:
    return sum(path.lstat().st_size for path in root.rglob("*") if path.is_file() and not path.is_symlink())


async def _tar_stream(root: Path, progress: Progress, task: TaskID) -> AsyncIterator[bytes]:
    """The tree as a tar archive, made while it is sent. Owners are left to the receiving user."""
    reader, writer = os.pipe()

    def forget_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    def write() -> None:
        with os.fdopen(writer, "wb") as sink, tarfile.open(fileobj=sink, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            for child in sorted(root.iterdir()):
                tar.add(child, arcname=child.name, filter=forget_owner)

    with os.fdopen(reader, "rb") as source:
        making = asyncio.create_task(asyncio.to_thread(write))
        try:
            while chunk := await asyncio.to_thread(source.read, _CHUNK):
                yield chunk
                progress.advance(task, len(chunk))
        finally:
            source.close()  # a writer that is still at work gets EPIPE and ends
            with suppress(BrokenPipeError):
                await making


# --- out of the sandbox ---------------------------------------------------------------------------------------------


async def _copy_out(agent: Agent, source: str, destination: Path, progress: Progress) -> None:
    entry = (await agent.call("filesystem.Filesystem/Stat", {"path": source}))["entry"]
    if destination.is_dir():
        destination = destination / entry["name"]
    if entry.get("type") == "FILE_TYPE_DIRECTORY":
        await _copy_directory_out(agent, entry["path"], destination, progress)
        return
    task = progress.add_task(entry["name"], total=int(entry.get("size", 0)))
    await _download(agent, source, destination, progress, task)
    destination.chmod(int(entry.get("mode", 0o644)) & 0o777)


async def _copy_directory_out(agent: Agent, source: str, destination: Path, progress: Progress) -> None:
    archive = f"/tmp/.aenv-cp-{secrets.token_hex(8)}.tar"  # noqa: S108  a path in the guest
    try:
        await _run(agent, ["tar", "-cf", archive, "-C", source, "."])
        size = int((await agent.call("filesystem.Filesystem/Stat", {"path": archive}))["entry"].get("size", 0))
        task = progress.add_task(destination.name, total=size)
        with tempfile.NamedTemporaryFile(suffix=".tar") as received:
            await _download(agent, archive, Path(received.name), progress, task)
            destination.mkdir(parents=True, exist_ok=True)

            def extract() -> None:
                with tarfile.open(received.name) as tar:
                    tar.extractall(destination, filter="data")

            await asyncio.to_thread(extract)
    except tarfile.TarError as error:
        raise CommandError(f"{source}: the archive from the sandbox cannot be unpacked here: {error}") from error
    finally:
        await agent.call("filesystem.Filesystem/Remove", {"path": archive})


async def _download(agent: Agent, source: str, destination: Path, progress: Progress, task: TaskID) -> None:
    async with agent.download(source) as response:
        file = await asyncio.to_thread(destination.open, "wb")
        try:
            async for chunk in response.content.iter_chunked(_CHUNK):
                await asyncio.to_thread(file.write, chunk)
                progress.advance(task, len(chunk))
        finally:
            file.close()


# --- helpers of both ------------------------------------------------------------------------------------------------


async def _is_directory(agent: Agent, path: str) -> bool:
    try:
        entry = await agent.call("filesystem.Filesystem/Stat", {"path": path})
    except CommandError:
        return False
    return bool(entry["entry"].get("type") == "FILE_TYPE_DIRECTORY")


async def _run(agent: Agent, command: list[str]) -> None:
    """Run a small program in the guest; a failure becomes an error with its last words."""
    words = b""
    async for event in agent.start({"process": {"cmd": command[0], "args": command[1:]}, "stdin": False}):
        if event.kind == "stderr":
            words = (words + event.data)[-2000:]
        elif event.kind == "end" and event.exit_code != 0:
            last = words.decode(errors="replace").strip().splitlines()[-1:] or [f"exit code {event.exit_code}"]
            raise CommandError(f"{command[0]} in the sandbox failed: {last[0]}")
