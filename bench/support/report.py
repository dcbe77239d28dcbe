"""Writes what a benchmark measured into its own section of bench/RESULTS.md, and prints it.

A section is replaced as a whole, so that the file never mixes two runs of one benchmark.
"""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "RESULTS.md"
_HEADER = """# Benchmark results

Each section is written by one file of `bench/` and says how it was measured. Absolute numbers belong to the machine
that is named; compare only within a section, whose rows come from one run.
"""


def machine() -> str:
    """One line about the machine: processor, cores, kernel."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    return (
        f"{model}, {os.cpu_count()} cores, Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    )


def percentiles(samples: Sequence[float], scale: float = 1000.0) -> tuple[str, str, str]:
    """Median, 95th and 99th percentile as text; `scale` 1000 turns seconds into milliseconds."""
    ordered = sorted(samples)

    def at(fraction: float) -> str:
        return f"{ordered[min(len(ordered) - 1, int(len(ordered) * fraction))] * scale:.2f}"

    return f"{statistics.median(ordered) * scale:.2f}", at(0.95), at(0.99)


def write_section(
    name: str, title: str, method: str, columns: Sequence[str], rows: Sequence[Sequence[str]], caveats: str = ""
) -> None:
    """Replace the section `name` of RESULTS.md by this table."""
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    lines = [
        f"<!-- {name} -->",
        f"## {title}",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, revision {revision.stdout.strip() or 'unknown'}. {machine()}.",
        "",
        method.strip(),
        "",
        "| " + " | ".join(columns) + " |",
        "| " + " | ".join("---" for _ in columns) + " |",
        *("| " + " | ".join(row) + " |" for row in rows),
    ]
    if caveats:
        lines += ["", caveats.strip()]
    lines += [f"<!-- end {name} -->", ""]
    section = "\n".join(lines)
    text = RESULTS.read_text() if RESULTS.exists() else _HEADER
    pattern = re.compile(rf"<!-- {re.escape(name)} -->.*?<!-- end {re.escape(name)} -->\n", re.DOTALL)
    text = pattern.sub(lambda _: section, text) if pattern.search(text) else f"{text.rstrip()}\n\n{section}"
    RESULTS.write_text(text)
    print("\n".join(lines[1:-2]))
