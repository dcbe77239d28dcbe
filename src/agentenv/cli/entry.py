"""Entry point of the `aenv` program: Ctrl-C ends it quietly, also while the commands are still being imported."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from agentenv.cli.main import main as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)
