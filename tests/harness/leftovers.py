"""What a server left on the host: processes, namespaces, links, memory files, disks. Empty when all was given back."""

from __future__ import annotations

import hashlib
from pathlib import Path

from harness.storage import daemons_of

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
    found += [f"block daemon {pid}" for pid in daemons_of(home)]
    for kind, directory in (("directory", "sandboxes"), ("disk", "disks"), ("device", "blockd/devices")):
        found += [f"{kind} {path.name}" for path in (home / directory).glob("*")]
    found += [f"socket {path.name}" for path in (home / "run").glob("*.sock")]
    found += [f"memory file {memory}" for memory in memory_directory_of(home).glob("*")]
    return found


def memory_directory_of(home: Path) -> Path:
    """Where the guest memory of this home lies; there is no such directory when no server and no machine runs."""
    return Path("/dev/shm", "aenv-" + hashlib.sha256(str(home).encode()).hexdigest()[:12])
