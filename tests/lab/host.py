"""What tests see of the emulated host: commands, scripts, files. A thin face over the machine and its agent."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

from lab.agent import Agent
from lab.machine import EmulatedHost
from lab.results import Completed


class Lab:
    """The running host. All methods may be used from any thread; they raise `LabError`."""

    def __init__(self, host: EmulatedHost) -> None:
        self.host = host
        self.agent = Agent(host.port)

    def run(self, *words: str, **options: Any) -> Completed:
        """Run a program as root to its end; options as of `Agent.run`."""
        return self.agent.run(words, **options)

    def shell(self, script: str, *arguments: str, **options: Any) -> str:
        """Run a script with `/bin/sh -eu`, its arguments as `$1`…; what it printed."""
        return self.agent.run(["/bin/sh", "-euc", script, "sh", *arguments], **options).text

    def start(self, *words: str, **options: Any) -> Future[Completed]:
        """Run a program beside the test."""
        return self.agent.start(words, **options)

    def start_shell(self, script: str, *arguments: str, **options: Any) -> Future[Completed]:
        """Run a script beside the test."""
        return self.agent.start(["/bin/sh", "-euc", script, "sh", *arguments], **options)

    def put(self, source: Path, path: str, mode: int = 0o644) -> None:
        """Copy a file into the host."""
        self.agent.put(source.read_bytes(), path, mode)

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a text file in the host."""
        self.agent.put(text.encode(), path, mode)

    def read(self, path: str) -> str:
        """Read a text file of the host."""
        return self.agent.get(path).decode()

    def fetch(self, path: str, destination: Path) -> None:
        """Copy a file out of the host."""
        self.agent.fetch(path, destination)
