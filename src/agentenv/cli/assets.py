"""Commands for what a server needs before it can start sandboxes: guest assets, the base template, the home."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from agentenv.cli.connection import CommandError
from agentenv.config import load_settings
from agentenv.errors import AgentEnvError

app = typer.Typer(no_args_is_help=True, help="Kernel, initramfs and base template.")


@app.command()
def build(
    guest_binary: Annotated[Path, typer.Option("--guest-binary", help="The built aenv-guest program.")],
) -> None:
    """Make the kernel, the initramfs and the base template; what is up to date is left alone."""
    from agentenv.guest.assets import build_assets  # heavy imports only where needed
    from agentenv.templates.base import ensure_base_template

    shown = ""

    def progress(phase: str, detail: str, fraction: float | None) -> None:
        nonlocal shown
        percent = "" if fraction is None else f" {fraction:4.0%}"
        line = f"{phase}: {detail}"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{line}{percent}")
        elif line != shown:
            sys.stderr.write(f"{line}{percent}\n")
        shown = line
        sys.stderr.flush()

    try:
        settings = load_settings()
        if not guest_binary.is_file():
            raise CommandError(f"{guest_binary} does not exist; build it with `make setup`")
        assets = build_assets(settings, guest_binary, progress)
        template = ensure_base_template(settings, progress)
        ensure_base_template(settings, progress)
    except AgentEnvError as error:
        raise CommandError(str(error)) from error
    finally:
        if shown and sys.stderr.isatty():
            sys.stderr.write("\n")
    sys.stdout.write(f"kernel {assets.kernel_version}, template {template.template_id}, in {settings.home}\n")


def home() -> None:
    """Print the home directory of this configuration."""
    try:
        sys.stdout.write(f"{load_settings().home}\n")
    except AgentEnvError as error:
        raise CommandError(str(error)) from error


def env(
    url: Annotated[str | None, typer.Option(help="Address to print; default: the running server.")] = None,
) -> None:
    """Print the environment for the E2B SDKs: `eval "$(aenv env)"`."""
    from agentenv.cli.connection import find_server

    server = find_server()
    address = url or server.url
    sys.stdout.write(
        f"export E2B_API_URL={address}\nexport E2B_SANDBOX_URL={address}\nexport E2B_API_KEY={server.api_key}\n"
    )
