"""How things in the emulated host end. Data and errors only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that ended."""

    words: tuple[str, ...]
    code: int
    """Exit code; above 128 by a signal, -1 when its end is not known."""
    stdout: bytes
    stderr: bytes
    problem: str
    """What the agent said besides, such as that the time was up; empty when nothing."""

    @property
    def text(self) -> str:
        """Standard output as text, without the last line's end."""
        return self.stdout.decode(errors="replace").rstrip("\n")


class LabError(Exception):
    """The emulated host does not do what a host must: it did not boot, or does not answer."""


class CommandFailed(LabError):  # noqa: N818 - reads as what happened
    """A command ended with another exit code than 0, or never."""

    def __init__(self, completed: Completed) -> None:
        self.completed = completed
        super().__init__(
            f"{' '.join(completed.words)[:300]}\nexit code {completed.code} {completed.problem}\n"
            f"{completed.stdout.decode(errors='replace')[-4000:]}{completed.stderr.decode(errors='replace')[-4000:]}"
        )
