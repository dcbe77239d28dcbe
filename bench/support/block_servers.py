"""Servers of block devices on unix sockets: the block daemon, `qemu-nbd` and `nbdkit`, and the load for all of them.

Each server is a process of its own, started here and ended by its pid, so that its processor time can be read. This
file must not know what is compared with what.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUILD = Path(__file__).resolve().parents[2] / "build"
DAEMON = BUILD / "aenv-blockd"
PROGRAMS = BUILD / "bench"
_START_TIMEOUT_S = 20.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Load:
    """What a client asks for, over and over. Sizes in bytes."""

    operation: str
    """`read` or `write`."""
    pattern: str
    """`sequential` or `random`."""
    size: int
    """Of a request."""
    depth: int
    """Requests in flight."""

    @property
    def name(self) -> str:
        unit = f"{self.size >> 20} MiB" if self.size >= 1 << 20 else f"{self.size >> 10} KiB"
        return f"{self.pattern} {self.operation}, {unit}, depth {self.depth}"


@dataclass(frozen=True)
class Outcome:
    """What came of one run of a load."""

    bytes: int
    seconds: float
    requests_per_s: float
    p50_us: float
    p99_us: float
    max_us: float
    cpu_seconds: float
    """Of the server."""

    @property
    def megabytes_per_s(self) -> float:
        return self.bytes / self.seconds / 1e6


@dataclass(frozen=True)
class Server:
    """Where a process serves a device."""

    name: str
    pid: int
    socket: Path

    def cpu_seconds(self) -> float:
        """All threads, those that have ended included."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def run(self, load: Load, **options: object) -> Outcome:
        """Run the load once. Options are those of the program: `seconds` or `requests`, `span`, `stride`, `seed`."""
        begun = self.cpu_seconds()
        done = subprocess.run(self.command(load, **options), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{load.name} on {self.name} failed: {done.stderr.strip()}")
        return self.outcome(json.loads(done.stdout), self.cpu_seconds() - begun)

    def command(self, load: Load, **options: object) -> list[str]:
        """The command line that runs the load."""
        settings = {
            "socket": self.socket,
            "operation": load.operation,
            "pattern": load.pattern,
            "size": load.size,
            "depth": load.depth,
            **options,
        }
        words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
        return [str(program("nbd_load")), *words]

    @staticmethod
    def outcome(printed: dict[str, Any], cpu_seconds: float) -> Outcome:
        return Outcome(
            bytes=printed["requests"] * printed["size"],
            seconds=printed["seconds"],
            requests_per_s=printed["iops"],
            p50_us=printed["p50_us"],
            p99_us=printed["p99_us"],
            max_us=printed["max_us"],
            cpu_seconds=cpu_seconds,
        )


class BlockDaemon:
    """A running block daemon, asked over its control socket."""

    def __init__(self, pid: int, directory: Path, connection: socket.socket) -> None:
        self.pid = pid
        self._directory = directory
        self._stream = connection.makefile("rw")
        self._stream.readline()

    def request(self, method: str, **params: object) -> dict[str, Any]:
        print(json.dumps({"id": 1, "method": method, "params": params}), file=self._stream, flush=True)
        answer = json.loads(self._stream.readline())
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, device: str, lowers: Sequence[Path], *, virtual_size: int = 0, name: str = "") -> Server:
        """Open layers, bottom first, with a new upper on top, and serve them."""
        upper = self._directory / f"{device}.upper"
        upper.mkdir()
        path = self._directory / f"{device}.sock"
        self.request(
            "open",
            device=device,
            lowers=[str(layer) for layer in lowers],
            upper={"directory": str(upper), "virtual_size": virtual_size},
        )
        self.request("export", device=device, kind="nbd", path=str(path))
        return Server(name or device, self.pid, path)

    def close(self, device: str, *, keep_upper: bool = False) -> Path:
        """End a device. Returns the directory of its upper, which is empty unless kept."""
        self.request("close", device=device, remove_upper=not keep_upper)
        upper = self._directory / f"{device}.upper"
        if not keep_upper:
            upper.rmdir()
        return upper


@contextmanager
def block_daemon(binary: Path, directory: Path) -> Iterator[BlockDaemon]:
    """Run a block daemon, with its sockets, state and uppers in `directory`, until the block ends."""
    path = directory / "control.sock"
    command = [str(binary), "serve", "--state", str(directory / "state"), "--socket", str(path)]
    with _running(command, path) as (pid, connection):
        yield BlockDaemon(pid, directory, connection)


@contextmanager
def raw_server(kind: str, image: Path, path: Path) -> Iterator[Server]:
    """Serve a raw image by `qemu-nbd` or `nbdkit` until the block ends; several clients, one after another."""
    if kind == "qemu-nbd":
        command = ["qemu-nbd", "--format=raw", "--persistent", "--shared=4", "--discard=unmap"]
        command += [f"--socket={path}", str(image)]
    else:
        command = ["nbdkit", "--foreground", "--unix", str(path), "file", str(image)]
    with _running(command, path) as (pid, connection):
        connection.close()
        yield Server(kind, pid, path)


def raw_servers() -> list[str]:
    """The kinds of `raw_server` that are installed."""
    if shutil.which("qemu-nbd") is None:
        raise RuntimeError("qemu-nbd is not installed: there is nothing to compare with")
    return [kind for kind in ("qemu-nbd", "nbdkit") if shutil.which(kind) is not None]


def program(name: str) -> Path:
    """A compiled helper of the benchmarks."""
    path = PROGRAMS / name
    if not path.exists():
        raise RuntimeError(f"{path} is missing: scripts/bench.sh builds it")
    return path


@contextmanager
def _running(command: Sequence[str], path: Path) -> Iterator[tuple[int, socket.socket]]:
    """A process, once it accepts connections on `path`, and the first of them."""
    log = path.with_suffix(".log")
    with log.open("w") as stderr:
        process = subprocess.Popen(command, stderr=stderr)
    try:
        with _first_connection(process, path, log) as connection:
            yield process.pid, connection
    finally:
        process.terminate()
        process.wait()


def _first_connection(process: subprocess.Popen[bytes], path: Path, log: Path) -> socket.socket:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
            return connection
        except OSError as error:
            connection.close()
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{process.args!r} does not serve: {log.read_text().strip()}") from error
            time.sleep(0.01)
