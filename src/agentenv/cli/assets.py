"""Commands for what a server needs before it can start sandboxes: guest assets, the base template, the home."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentenv.cli.connection import CommandError
from agentenv.cli.output import write
from agentenv.config import load_settings
from agentenv.errors import AgentEnvError

app = typer.Typer(no_args_is_help=True, help="Guest kernel, initramfs, block daemon and base template.")


@app.command()
def build(
    guest_binary: Annotated[
        Path | None, typer.Option("--guest-binary", help="The aenv-guest program; default: what make setup built.")
    ] = None,
    blockd_binary: Annotated[
        Path | None, typer.Option("--blockd-binary", help="The aenv-blockd program; default: what make setup built.")
    ] = None,
) -> None:
    """Make the kernel, the initramfs and the base template; what is up to date is left alone."""
    from agentenv.cli.provision import Programs, provision  # heavy imports only where needed

    try:
        programs = Programs.find(guest=guest_binary, blockd=blockd_binary)
        settings = load_settings()
        assets = provision(settings, programs)
    except AgentEnvError as error:
        raise CommandError(str(error)) from error
    write(f"kernel {assets.kernel_version}, template base, in {settings.home}\n")


@app.command()
def link(
    source: Annotated[Path, typer.Argument(help="Another home of this host, which has them.")],
) -> None:
    """Take kernel, initramfs, block daemon and base template over from another home: by hard links where possible."""
    from agentenv.cli.provision import link_home

    try:
        settings = load_settings()
        link_home(settings, source)
    except AgentEnvError as error:
        raise CommandError(str(error)) from error
    write(f"assets and template base of {source}, in {settings.home}\n")


def home() -> None:
    """Print the home directory of this configuration."""
    try:
        write(f"{load_settings().home}\n")
    except AgentEnvError as error:
        raise CommandError(str(error)) from error


def env(
    url: Annotated[str | None, typer.Option(help="Address to print; default: the running server.")] = None,
) -> None:
    """Print the environment for the E2B SDKs: `eval "$(aenv env)"`."""
    from agentenv.cli.connection import find_server

    server = find_server()
    address = url or server.url
    write(f"export E2B_API_URL={address}\nexport E2B_SANDBOX_URL={address}\nexport E2B_API_KEY={server.api_key}\n")
