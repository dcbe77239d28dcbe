"""The `aenv` command: its tree, and how failures are shown (one line on standard error, a non-zero exit code)."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from agentenv import __version__
from agentenv.cli import assets, copy, doctor, execute, layer, sandboxes, snapshots, space
from agentenv.cli.connection import CommandError
from agentenv.cli.output import write
from agentenv.errors import AgentEnvError

app = typer.Typer(
    name="aenv",
    help="Real Linux computers for AI agents.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.command()
def serve(
    listen: Annotated[str, typer.Option(help="HOST:PORT; port 0 takes a free one.")] = "127.0.0.1:8000",
    drain: Annotated[bool, typer.Option("--drain", help="End all running sandboxes when the server stops.")] = False,
    config: Annotated[Path | None, typer.Option(help="Configuration file (TOML); else AENV_CONFIG.")] = None,
) -> None:
    """Run the server. Sandboxes outlive it unless --drain is given."""
    from agentenv.cli.serve import serve as run_server  # the server's imports are not needed by other commands

    raise typer.Exit(run_server(listen, drain=drain, config=config))


app.command()(sandboxes.start)
app.command()(sandboxes.ls)
app.command()(sandboxes.info)
app.command("exec", context_settings={"allow_interspersed_args": False})(execute.exec_)
app.command()(execute.shell)
app.command()(copy.cp)
app.command()(sandboxes.logs)
app.command()(sandboxes.pause)
app.command()(sandboxes.resume)
app.command()(sandboxes.rm)
app.command()(snapshots.snapshot)
app.command()(snapshots.fork)
app.command()(snapshots.rollback)
app.command(context_settings={"ignore_unknown_options": True})(sandboxes.timeout)
app.command()(space.du)
app.command()(space.gc)
app.command()(doctor.doctor)
app.command()(assets.env)
app.command()(assets.home)
app.add_typer(snapshots.app, name="snapshots")
app.add_typer(assets.app, name="assets")
app.add_typer(layer.app, name="layer")


@app.command()
def version() -> None:
    """Print the version."""
    write(f"{__version__}\n")


def main() -> None:
    """Entry point of the `aenv` program."""
    command = typer.main.get_command(app)
    try:
        outcome = command.main(args=sys.argv[1:], prog_name="aenv", standalone_mode=False)
        code = outcome if isinstance(outcome, int) else 0
    except typer.Exit as exit_:
        code = exit_.exit_code
    except (CommandError, AgentEnvError) as error:
        code = _fail(str(error), error.exit_code if isinstance(error, CommandError) else 1)
    except BaseExceptionGroup as group:
        code = _fail_group(group)
    except (KeyboardInterrupt, typer.Abort, asyncio.CancelledError):
        code = 130
    except BrokenPipeError:
        # What is still buffered has no reader; Python's own flush at the end must not complain about it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except Exception as error:
        # Usage errors of the command-line library carry an exit code; all else is a defect and shows its traceback.
        if not hasattr(error, "format_message"):
            raise
        code = _fail(error.format_message(), getattr(error, "exit_code", 2))
    sys.exit(code)


def _fail(message: str, code: int) -> int:
    sys.stderr.write("aenv: " + " ".join(message.split()) + "\n")
    return code


def _fail_group(group: BaseExceptionGroup[BaseException]) -> int:
    known = group.subgroup((CommandError, AgentEnvError))
    if known is None:
        raise group
    error: BaseException = known
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return _fail(str(error), error.exit_code if isinstance(error, CommandError) else 1)
