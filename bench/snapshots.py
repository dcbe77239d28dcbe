"""What pauses, resumes, forks and snapshots cost, beside the VMM's own calls for the same machine in the same run.

The raw machine has no server: it is stopped, its devices are saved, its memory is copied, and a copy of it is loaded.
Both alternate, so that whatever else the host does meets them alike.

Needs root and built assets. Run: scripts/bench.sh snapshots, or .venv/bin/python bench/snapshots.py [--rounds N]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from e2b import Sandbox, SandboxException

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from agentenv.snapshots.encoding import decode
from agentenv.snapshots.manifest import SnapshotManifest
from agentenv.storage.memory import copy_memory
from harness.sandboxes import kill_all, sdk
from harness.server import RunningServer, new_home
from support.raw_machines import RawMachine, RawMachines
from support.report import percentiles, write_section

MIB = 1 << 20
FORKS = (1, 4, 16)
CHAIN = 10
CHANGED_MIB = 4
"""What a guest changes between two captures."""
TICK_S = 0.01
OUR_SHARE_MS = 15
"""Budget of design §6."""
STOP_SHARE_MS = 10
IDLE_BYTES = 5_000_000


@dataclass
class Raw:
    """Seconds of the VMM's own calls."""

    stop: list[float] = field(default_factory=list)
    save_state: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    """Of the memory, when the machine goes on."""
    window: list[float] = field(default_factory=list)
    """From before the stop to after the guest runs again."""
    load: list[float] = field(default_factory=list)
    """From the start of a process to running vCPUs; the memory is there."""
    fill: list[float] = field(default_factory=list)
    """The memory of the machine that is loaded."""

    @property
    def pause(self) -> float:
        return statistics.median(self.stop) + statistics.median(self.save_state)

    @property
    def resume(self) -> float:
        return statistics.median(self.load) + statistics.median(self.fill)

    async def round(self, machines: RawMachines, source: RawMachine, directory: Path) -> None:
        """Capture a machine that goes on, and load a copy of it."""
        state, image = directory / "state", machines.vmm.prepare_memory("image")
        name, config, slot = await machines.prepare_load(source)
        memory = machines.vmm.prepare_memory(name)
        begun = time.perf_counter()
        await source.machine.pause()
        stopped = time.perf_counter()
        await source.machine.save_state(state)
        saved = time.perf_counter()
        await source.machine.copy_memory(image)
        copied = time.perf_counter()
        await source.machine.resume()
        resumed = time.perf_counter()
        await copy_memory(image, memory)
        filled = time.perf_counter()
        loaded = await machines.vmm.load(config, state, memory)
        await loaded.resume()
        ended = time.perf_counter()
        await machines.end(loaded, name, slot)
        image.unlink()
        state.unlink()
        self.stop.append(stopped - begun)
        self.save_state.append(saved - stopped)
        self.copy.append(copied - saved)
        self.window.append(resumed - begun)
        self.fill.append(filled - resumed)
        self.load.append(ended - filled)


class Silence:
    """The longest time for which nothing came of a process in the guest that writes all the time."""

    def __init__(self, sandbox: Sandbox) -> None:
        program = f"import time\nwhile True:\n    print('.', flush=True)\n    time.sleep({TICK_S})\n"
        sandbox.files.write("/tmp/beat.py", program)
        handle = sandbox.commands.run("exec python3 /tmp/beat.py", background=True, timeout=0)
        self._arrivals: list[float] = []
        self._beating = threading.Event()

        def listen() -> None:
            with suppress(SandboxException):  # it ends with its sandbox
                for _ in handle:
                    self._arrivals.append(time.perf_counter())
                    self._beating.set()

        threading.Thread(target=listen, daemon=True).start()
        self._beating.wait(60)

    @contextmanager
    def measured(self, into: list[float]) -> Iterator[None]:
        """Append the longest silence of the block, which a beat must follow."""
        begun = time.perf_counter()
        yield
        ended = time.perf_counter()
        while self._arrivals[-1] < ended:
            self._beating.clear()
            if not self._beating.wait(60):
                raise RuntimeError("the process in the guest is silent")
        found = [begun, *(at for at in list(self._arrivals) if at >= begun)]
        into.append(max(later - earlier for earlier, later in pairwise(found)))


class Served:
    """One server, and what its calls take."""

    def __init__(self, server: RunningServer) -> None:
        self.server = server

    def timed(self, method: str, path: str, body: object, expected: int) -> tuple[float, Any]:
        begun = time.perf_counter()
        status, answer, _ = self.server.api(method, path, body)
        took = time.perf_counter() - begun
        if status != expected:
            raise RuntimeError(f"{method} {path}: {status} {answer}")
        return took, answer

    def pause(self, sandbox: Sandbox) -> float:
        return self.timed("POST", f"/sandboxes/{sandbox.sandbox_id}/pause", {}, 204)[0]

    def resume(self, sandbox: Sandbox) -> float:
        return self.timed("POST", f"/sandboxes/{sandbox.sandbox_id}/connect", {"timeout": 3600}, 201)[0]

    def fork(self, sandbox: Sandbox, count: int) -> tuple[float, list[str]]:
        body = {"count": count, "timeout": 3600}
        took, entries = self.timed("POST", f"/sandboxes/{sandbox.sandbox_id}/fork", body, 201)
        return took, [entry["sandbox"]["sandboxID"] for entry in entries]

    def kill(self, sandbox_ids: list[str]) -> None:
        for sandbox_id in sandbox_ids:
            self.timed("DELETE", f"/sandboxes/{sandbox_id}", None, 204)

    def snapshot(self, sandbox: Sandbox) -> tuple[float, SnapshotManifest]:
        before = self._snapshots()
        took, _ = self.timed("POST", f"/sandboxes/{sandbox.sandbox_id}/snapshots", {}, 201)
        (made,) = (path for name, path in self._snapshots().items() if name not in before)
        return took, decode((made / "manifest.json").read_bytes(), str(made))

    def stopped(self) -> list[float]:
        """How long each captured sandbox stood still, by the server's own log; seconds."""
        found = []
        for line in self.server.log.read_text().splitlines():
            entry = json.loads(line) if line.startswith("{") else {}
            if "stopped_s" in entry:
                found.append(float(entry["stopped_s"]))
        return found

    def _snapshots(self) -> dict[str, Path]:
        directory = self.server.home / "snapshots"
        return {path.name: path for path in directory.iterdir() if (path / "manifest.json").is_file()}


def template_layers(home: Path) -> set[str]:
    """Digests of what is there before anything is captured."""
    return set(json.loads((home / "templates" / "base" / "template.json").read_text())["layers"])


def own_bytes(manifest: SnapshotManifest, known: set[str]) -> int:
    """What a capture wrote: its layers that were not known before, and its state."""
    layers = sum(layer.size for layer in manifest.layers if layer.digest not in known)
    return layers + (manifest.state.size if manifest.state is not None else 0)


def ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"


def busy() -> str:
    """What else the host does, in words."""
    return f"Load average of the host before the run: {os.getloadavg()[0]:.1f}."


def of(measured: float, bound: float) -> str:
    return f"{measured / bound:.2f}"


async def measure_moves(home: Path, raw_home: Path, directory: Path, rounds: int) -> None:
    """Pause, resume, fork; with processes that wait already, and without."""
    raw = Raw()
    load = busy()
    pauses: dict[str, list[float]] = {}
    resumes: dict[str, list[float]] = {}
    forks: dict[int, list[float]] = {}
    stops: list[float] = []
    silences: list[float] = []
    calm: list[float] = []
    with (
        RunningServer(config="[vmm]\nwarm_machines = 0\n") as cold,
        RunningServer(home) as warm,
    ):
        async with RawMachines(raw_home) as machines:
            source = await machines.boot()
            servers = {"no process waits": Served(cold), "warm pool": Served(warm)}
            made = {
                name: await asyncio.to_thread(lambda one=served: Sandbox.create(timeout=3600, **sdk(one.server)))
                for name, served in servers.items()
            }
            for number in range(rounds + 1):
                await raw.round(machines, source, directory)
                for name, served in servers.items():
                    paused = await asyncio.to_thread(served.pause, made[name])
                    resumed = await asyncio.to_thread(served.resume, made[name])
                    if number > 0:  # the first stores the whole image, and wakes the pool
                        pauses.setdefault(name, []).append(paused)
                        resumes.setdefault(name, []).append(resumed)
                    await asyncio.to_thread(settle, served.server)
            forked = made["warm pool"]
            served = servers["warm pool"]
            for _ in range(max(1, rounds // 2)):
                for count in FORKS:
                    known = len(served.stopped())
                    took, children = await asyncio.to_thread(served.fork, forked, count)
                    forks.setdefault(count, []).append(took)
                    stops += served.stopped()[known:]
                    await asyncio.to_thread(served.kill, children)
                    await raw.round(machines, source, directory)
            # Last, since every fork has the process, too.
            silence = await asyncio.to_thread(Silence, forked)
            for _ in range(rounds):
                with silence.measured(calm):
                    await asyncio.sleep(1)
                with silence.measured(silences):
                    _, children = await asyncio.to_thread(served.fork, forked, 1)
                await asyncio.to_thread(served.kill, children)
            await machines.end(source.machine, source.name, source.slot)
            description = f"{machines.description}. {load}"
        kill_all(cold)
        kill_all(warm)
    write_moves(description, rounds, raw, pauses, resumes, forks, stops, silences, calm)


def settle(server: RunningServer) -> None:
    """Wait until no process is being started for the pool."""
    seen = -1
    while (now := len(list((server.home / "sandboxes").glob("warm-*")))) != seen:
        seen = now
        time.sleep(0.5)


def write_moves(
    description: str,
    rounds: int,
    raw: Raw,
    pauses: dict[str, list[float]],
    resumes: dict[str, list[float]],
    forks: dict[int, list[float]],
    stops: list[float],
    silences: list[float],
    calm: list[float],
) -> None:
    rows = [
        ["raw: stop", *percentiles(raw.stop), ""],
        ["raw: save the devices", *percentiles(raw.save_state), ""],
        ["raw: copy the memory", *percentiles(raw.copy), ""],
        ["raw: stop, save, copy, run on", *percentiles(raw.window), ""],
        ["raw: fill the memory of a copy", *percentiles(raw.fill), ""],
        ["raw: start a process, load, run", *percentiles(raw.load), ""],
    ]
    for name in pauses:
        for what, samples, own in (("pause", pauses[name], raw.pause), ("resume", resumes[name], raw.resume)):
            share = (statistics.median(samples) - own) * 1000
            rows.append([f"{what}, {name}", *percentiles(samples), f"{share:+.1f}"])
    for count, samples in forks.items():
        rows.append(
            [f"fork of {count}", *percentiles(samples), f"{statistics.median(samples) / count * 1000:.1f} each"]
        )
    rows.append(["source of a fork stopped, by the server's log", *percentiles(stops), ""])
    rows.append(["longest silence of the source in a fork of 1", *percentiles(silences), ""])
    rows.append(["longest silence in a second without a fork", *percentiles(calm), ""])
    shares = [
        f"our share of a {what} ({name}), of {OUR_SHARE_MS} ms native: "
        + of((statistics.median(samples[name]) - own) * 1000, OUR_SHARE_MS)
        for name in pauses
        for what, samples, own in (("pause", pauses, raw.pause), ("resume", resumes, raw.resume))
    ]
    bound = statistics.median(raw.window) * 1000 + STOP_SHARE_MS
    shares.append(
        f"source of a fork stopped, of one raw capture + {STOP_SHARE_MS} ms: "
        + of(statistics.median(stops) * 1000, bound)
    )
    write_section(
        "snapshots",
        "Pause, resume, fork",
        f"{description} {rounds} rounds, in each the raw calls on a machine without a server, then a pause and a "
        "resume on a server without and on one with waiting processes; then forks, each beside the raw calls. Times "
        "from request to answer, as a client on this host sees them. A process in the source writes every "
        f"{TICK_S * 1000:.0f} ms; its longest silence is seen by that client, too.",
        ["step", "p50 ms", "p95 ms", "p99 ms", "beyond raw, ms"],
        rows,
        f"Budgets (design §6) as ratios, 1 is the bound: {'; '.join(shares)}. Beyond raw is the difference of medians: "
        "a pause beside stop and save, a resume beside filling and loading. A resume holds the agent's `/init`, and a "
        "fork the `/init` of every child, which under emulation cost translation of guest code; so the bounds in "
        "milliseconds are those of native guests.",
    )


def measure_chain(rounds: int, home: Path) -> None:
    """Captures one after another: time, bytes, and how long the source stood still."""
    kinds = {
        "nothing": "true",
        f"{CHANGED_MIB} MiB of memory": f"dd if=/dev/urandom of=/dev/shm/it bs=1M count={CHANGED_MIB} conv=notrunc",
        f"{CHANGED_MIB} MiB of the disk": f"dd if=/dev/urandom of=it bs=1M count={CHANGED_MIB} conv=notrunc,fsync",
    }
    rows: list[list[str]] = []
    notes: list[str] = []
    load = busy()
    with RunningServer(home) as server:
        served = Served(server)
        for kind, command in kinds.items():
            took: dict[int, list[float]] = {}
            written: dict[int, list[int]] = {}
            stopped: dict[int, list[float]] = {}
            for _ in range(rounds):
                sandbox = Sandbox.create(timeout=3600, **sdk(server))
                layers = template_layers(server.home)
                for number in range(1, CHAIN + 1):
                    sandbox.commands.run(command, timeout=300)
                    known = len(served.stopped())
                    seconds, manifest = served.snapshot(sandbox)
                    took.setdefault(number, []).append(seconds)
                    written.setdefault(number, []).append(own_bytes(manifest, layers))
                    stopped.setdefault(number, []).extend(served.stopped()[known:])
                    layers |= {layer.digest for layer in manifest.layers}
                sandbox.kill()
                for one in server.api("GET", "/snapshots")[1]:
                    server.api("DELETE", f"/templates/{one['snapshotID'].replace(':', '%3A')}")
            for number in took:
                still = ms(statistics.median(stopped[number]))
                size = f"{statistics.median(written[number]) / 1e6:.2f}"
                rows.append([kind, str(number), ms(statistics.median(took[number])), still, size])
            middle = [statistics.median(took[number]) for number in range(3, 9)]
            notes.append(f"eighth of second capture, {kind}: {of(middle[-1], statistics.median(took[2]))} of its time")
            if kind == "nothing":
                idle = statistics.median(size for number in range(2, 9) for size in written[number])
                notes.append(f"idle capture, of {IDLE_BYTES / 1e6:.0f} MB: {of(idle, IDLE_BYTES)}")
    write_section(
        "snapshots-chain",
        "Captures in a chain",
        f"Named snapshots of one sandbox of 512 MiB, one after another; before each the guest changes what is named. "
        f"Medians of {rounds} chains. {load} Bytes are those of the new layers and of the saved devices. The first "
        "stores the whole memory.",
        ["changed before it", "capture", "request to 201, ms", "source stopped, ms", "written, MB"],
        rows,
        f"Budgets (design §6) as ratios, 1 is the bound: {'; '.join(notes)}.",
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    homes = [new_home() for _ in range(3)]
    directory = homes[0] / "bench"
    directory.mkdir()
    try:
        asyncio.run(measure_moves(homes[1], homes[0], directory, arguments.rounds))
        measure_chain(max(1, arguments.rounds // 3), homes[2])
    finally:
        for home in homes:
            shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
