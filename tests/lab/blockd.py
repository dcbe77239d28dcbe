"""The block daemon in the emulated host: started, asked over its socket (docs/blockd.md), killed.

Each daemon has a tmpfs of its own for state, uppers and layers; `tear_down` gives all back and says what was left.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from lab.host import Lab
from lab.results import Completed, LabError

BINARY = "/lab/aenv-blockd"
MIB = 1024 * 1024
_numbers = itertools.count(1)
_READY_S = 90
"""An emulated host that shares its processors takes its time, and so does a kernel that notices the end of a daemon."""


class BlockdError(LabError):
    """The daemon answered with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


@dataclass(frozen=True, slots=True)
class Export:
    """A block device in the host."""

    device: str
    path: str

    @property
    def name(self) -> str:
        """As below `/sys/block`."""
        return self.path.removeprefix("/dev/")


class Blockd:
    """One state directory, and the daemon that serves it now."""

    def __init__(self, lab: Lab, size_mib: int = 400) -> None:
        self.lab = lab
        self.directory = f"/lab/blockd-{next(_numbers)}"
        self._process: Future[Completed] | None = None
        self._pid = 0
        lab.shell('mkdir -p "$1"; mount -t tmpfs -o "size=$2" tmpfs "$1"', self.directory, f"{size_mib}m")

    def start(self) -> None:
        """Start the daemon; returns when it is ready, with the devices of the one before."""
        ready = threading.Event()
        seen = bytearray()

        def watch(piece: bytes) -> None:
            sys.stdout.write(piece.decode(errors="replace"))
            seen.extend(piece)
            if b"ready" in seen:
                ready.set()

        self._process = self.lab.start(
            BINARY,
            "serve",
            *("--state", f"{self.directory}/state", "--socket", f"{self.directory}/socket"),
            on_output=watch,
            timeout_s=600,
            check=False,
        )
        self._process.add_done_callback(lambda _: ready.set())
        if not ready.wait(_READY_S) or self._process.done():
            raise LabError(f"the daemon did not start: {seen.decode(errors='replace')}")
        self._pid = int(self._exchange("list", {})[0]["pid"])

    def kill(self) -> None:
        """`kill -9`; returns when the process is gone."""
        self._end("KILL")

    def terminate(self) -> None:
        """Ask the daemon to end; its devices stay."""
        ended = self._end("TERM")
        if ended.code != 0:
            raise LabError(f"the daemon ended with {ended.code}: {ended.stderr.decode(errors='replace')}")

    def signal(self, name: str) -> None:
        """Send the daemon a signal."""
        self.lab.run("kill", f"-{name}", str(self._pid))

    def call(self, method: str, **params: Any) -> Any:
        """One request; its result.

        Raises:
            BlockdError: the daemon's answer is an error.
        """
        return self._exchange(method, params)[1]

    def open_upper(self, device: str, *lowers: str, size_mib: int = 0) -> None:
        """Open a device with an upper in a directory of its own, made here."""
        directory = f"{self.directory}/{device}"
        self.lab.run("mkdir", "-p", directory)
        upper = {"directory": directory, "virtual_size": size_mib * MIB}
        self.call("open", device=device, lowers=list(lowers), upper=upper)

    def export(self, device: str, kind: str, queues: int = 2) -> Export:
        """Export a device as a block device of the host."""
        shape = {"queues": queues} if kind == "ublk" else {"connections": queues}
        return Export(device, self.call("export", device=device, kind=kind, **shape)["export"]["path"])

    def stats(self, device: str) -> dict[str, int]:
        """The device's counters."""
        counters: dict[str, int] = self.call("stats", device=device)["devices"][device]
        return counters

    def tear_down(self) -> list[str]:
        """Close all devices and end the daemon; one line per thing that is left in the host."""
        if self._process is None or self._process.done():
            self.start()
        for device in self.call("list")["devices"]:
            for _ in range(device["opens"] or 1):
                self.call("close", device=device["device"], remove_upper=device["upper"] is not None)
        self.terminate()
        left = self.lab.shell(
            'ls -d /dev/ublk[bc]* /sys/block/nbd*/pid "$1"/state/devices/* "$1"/*/upper.* 2>/dev/null || true',
            self.directory,
            echo=False,
        )
        self.lab.run("umount", self.directory)
        self.lab.run("rmdir", self.directory)
        return left.split("\n") if left else []

    def _exchange(self, method: str, params: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """What the daemon greets with, and the result of a request."""
        request = json.dumps({"id": 1, "method": method, "params": params})
        lines = self.lab.shell(
            'printf "%s\\n" "$2" | socat -t 100 - "UNIX-CONNECT:$1"', f"{self.directory}/socket", request, echo=False
        ).split("\n")
        greeting, answer = (json.loads(line) for line in lines)
        if "error" in answer:
            raise BlockdError(answer["error"]["code"], answer["error"]["message"])
        return greeting["blockd"], answer["result"]

    def _end(self, name: str) -> Completed:
        assert self._process is not None
        self.signal(name)
        return self._process.result(timeout=_READY_S)
