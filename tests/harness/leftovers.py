"""What a server left on the host: processes, namespaces, links, memory files. Empty when all was given back."""

from __future__ import annotations

import hashlib
from pathlib import Path

CLAIMS = Path("/run/aenv/slots")


def leftovers_of(home: Path) -> list[str]:
    """One line per thing that belongs to this home and still exists."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            directory = str((process / "cwd").readlink())
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if "qemu" in command and (directory.startswith(str(home)) or str(home) in command):
            found.append(f"process {process.name}: {command[:120]} in {directory}")
    for claim in CLAIMS.glob("*"):
        try:
            if str(home) in claim.read_text():
                found.append(f"slot claim {claim.name}")
                if (Path("/run/netns") / f"aenv-{claim.name}").exists():
                    found.append(f"namespace aenv-{claim.name}")
        except OSError:
            continue
    sandboxes = home / "sandboxes"
    names = [path.name for path in sandboxes.iterdir()] if sandboxes.is_dir() else []
    found += [f"directory {name}" for name in names]
    found += [f"memory file {memory}" for memory in memory_directory_of(home).glob("*")]
    return found


def memory_directory_of(home: Path) -> Path:
    """Where the guest memory of this home lies; there is no such directory when no server and no machine runs."""
    return Path("/dev/shm", "aenv-" + hashlib.sha256(str(home).encode()).hexdigest()[:12])
