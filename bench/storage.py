"""What layered storage costs: devices of the block daemon beside the same image served raw, and work on layer files.

Everything is in the page cache; what reaches the disk says so. Servers take turns, load by load, in every round.

Run: scripts/bench.sh storage (builds the programs for the load); `bench/storage.py --quick` only shows that it works.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from agentenv import _native
from support.block_servers import (
    DAEMON,
    BlockDaemon,
    Load,
    Outcome,
    Server,
    block_daemon,
    program,
    raw_server,
    raw_servers,
)
from support.layer_files import change, layers_over, random_image, real_content
from support.report import write_section

MIB = 1 << 20
DEPTHS = (1, 8, 32)
READS = (
    Load("read", "sequential", MIB, 4),
    Load("read", "sequential", 128 << 10, 8),
    Load("read", "random", 4096, 1),
    Load("read", "random", 4096, 16),
)
WRITES = (
    Load("write", "sequential", 128 << 10, 8),
    Load("write", "random", 4096, 1),
    Load("write", "random", 4096, 16),
)
Outcomes = dict[tuple[Load, str], list[Outcome]]


@dataclass(frozen=True)
class Scale:
    """How much is done."""

    image: int
    """Bytes of the image that is served."""
    content: int
    """Bytes of the image that layer files are made of."""
    fresh: int
    """Bytes of the device that is written for the first time."""
    seconds: float
    """Of one run of a load."""
    rounds: int
    seal_bytes: tuple[int, ...]
    seal_records: tuple[int, ...]


REAL = Scale(
    image=256 * MIB,
    content=128 * MIB,
    fresh=1024 * MIB,
    seconds=0.25,
    rounds=9,
    seal_bytes=(16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB),
    seal_records=(1_000, 10_000, 100_000, 500_000),
)
QUICK = Scale(
    image=16 * MIB,
    content=16 * MIB,
    fresh=64 * MIB,
    seconds=0.05,
    rounds=2,
    seal_bytes=(16 * MIB, 32 * MIB),
    seal_records=(1_000, 2_000),
)
SEAL_RECORDS_FIXED = 4096


# --- devices --------------------------------------------------------------------------------------------------------


def measure_devices(directory: Path, scale: Scale, binary: Path) -> list[list[str]]:
    raw = random_image(directory / "raw", scale.image)
    with ExitStack() as stack:
        daemon = stack.enter_context(block_daemon(binary, directory))
        kinds = raw_servers()
        readers = [stack.enter_context(raw_server(kind, raw, directory / f"{kind}.sock")) for kind in kinds]
        for depth in DEPTHS:
            name = f"stack of {depth}"
            server = daemon.open(f"stack-{depth}", layers_over(raw, directory, depth), name=name)
            # The upper of a disk in use is not empty.
            server.run(Load("write", "random", 65536, 8), requests=scale.image // 16 // 65536)
            readers.append(server)
        writers = [server for server in readers if server.name in (*kinds, "stack of 1")]
        outcomes = _take_turns(READS, readers, scale)
        rows = _rows(outcomes, kinds, "")
        # Once before, so that every block of it is the upper's.
        for server in writers:
            server.run(Load("write", "sequential", MIB, 4), requests=scale.image // MIB)
        rows += _rows(_take_turns(WRITES, writers, scale), kinds, "again: ")
        for depth in DEPTHS:
            daemon.close(f"stack-{depth}")
        outcomes = _first_writes(daemon, kinds, directory, scale)
    return rows + _rows(outcomes, kinds, "first: ")


def _take_turns(loads: Sequence[Load], servers: Sequence[Server], scale: Scale) -> Outcomes:
    outcomes: Outcomes = {}
    for number in range(scale.rounds + 1):
        for load in loads:
            turn = number % len(servers)
            for server in (*servers[turn:], *servers[:turn]):
                # The first round fills caches.
                seconds = scale.seconds if number > 0 else scale.seconds / 5
                outcome = server.run(load, seconds=seconds, seed=number + 1)
                if number > 0:
                    outcomes.setdefault((load, server.name), []).append(outcome)
    return outcomes


def _first_writes(daemon: BlockDaemon, kinds: Sequence[str], directory: Path, scale: Scale) -> Outcomes:
    """Writes to blocks that were never written: of a fresh upper, and of a raw image that is one hole."""
    outcomes: Outcomes = {}
    for number in range(scale.rounds):
        for load in (WRITES[0], WRITES[-1]):
            for kind in kinds:
                hole = directory / "hole"
                hole.touch()
                os.truncate(hole, scale.fresh)
                with raw_server(kind, hole, directory / "hole.sock") as server:
                    outcome = server.run(load, seconds=scale.seconds, seed=number + 1)
                hole.unlink()
                outcomes.setdefault((load, kind), []).append(outcome)
            server = daemon.open("fresh", [], virtual_size=scale.fresh, name="stack of 0")
            outcome = server.run(load, seconds=scale.seconds, seed=number + 1)
            daemon.close("fresh")
            outcomes.setdefault((load, server.name), []).append(outcome)
    return outcomes


def _rows(outcomes: Outcomes, baselines: Sequence[str], prefix: str) -> list[list[str]]:
    loads = dict.fromkeys(load for load, _ in outcomes)
    others = dict.fromkeys(name for _, name in sorted(outcomes, key=_by_depth) if name not in baselines)
    return [
        _row(f"{prefix}{load.name}", name, outcomes[load, name], [outcomes[load, base] for base in baselines])
        for load in loads
        for name in (*baselines, *others)
    ]


def _by_depth(key: tuple[Load, str]) -> int:
    return int(key[1].rpartition(" ")[2]) if key[1].startswith("stack of ") else 0


def _row(load: str, name: str, runs: Sequence[Outcome], baselines: Sequence[Sequence[Outcome]]) -> list[str]:
    def median(value: Callable[[Outcome], float]) -> str:
        return f"{statistics.median(value(run) for run in runs):.0f}"

    ratios = []
    for others in baselines:
        pairs = zip(runs, others, strict=True)
        ratio = statistics.median(run.requests_per_s / other.requests_per_s for run, other in pairs)
        ratios.append("" if others is runs else f"{ratio:.2f}")
    return [
        load,
        name,
        median(lambda run: run.megabytes_per_s),
        median(lambda run: run.requests_per_s),
        median(lambda run: run.p50_us),
        median(lambda run: run.p99_us),
        f"{sum(run.cpu_seconds for run in runs) / sum(run.bytes for run in runs) * 1e9:.2f}",
        *ratios,
    ]


# --- index ----------------------------------------------------------------------------------------------------------


def measure_index() -> list[list[str]]:
    printed = subprocess.run([str(program("lookup"))], capture_output=True, text=True, check=True).stdout
    rows = []
    for line in printed.splitlines():
        found = json.loads(line)
        rate = found["lookups_per_s"]
        rows.append([str(found["records"]), f"{rate / 1e6:.2f}", f"{1e9 / rate:.0f}", f"{found['merge_ms']:.2f}"])
    return rows


# --- restack --------------------------------------------------------------------------------------------------------


def measure_restack(directory: Path, scale: Scale, binary: Path) -> list[list[str]]:
    rows = []
    with block_daemon(binary, directory) as daemon:
        for size in scale.seal_bytes:
            length = size // SEAL_RECORDS_FIXED
            rows.append(_restack(daemon, directory, SEAL_RECORDS_FIXED, length))
        for records in scale.seal_records:
            rows.append(_restack(daemon, directory, records, 512))
        rows.append(
            _restack(daemon, directory, SEAL_RECORDS_FIXED, scale.seal_bytes[-2] // SEAL_RECORDS_FIXED, busy=True)
        )
    return rows


def _restack(daemon: BlockDaemon, directory: Path, records: int, length: int, *, busy: bool = False) -> list[str]:
    """Write so many records, each apart from the next, flush, and restack, three times."""
    fill = Load("write", "sequential", length, 32)
    flushes, takes, pauses, waits = [], [], [], []
    for _ in range(3):
        server = daemon.open("restacked", [], virtual_size=4 * records * max(length, 4096), name="restacked")
        server.run(fill, requests=records, stride=2 * length)
        begun = time.perf_counter()
        daemon.request("flush", device="restacked")
        flushes.append(time.perf_counter() - begun)
        writer = None
        if busy:
            # On the blocks that are there, so that there are no more records.
            load = Load("write", "random", 4096, 16)
            command = server.command(load, seconds=1.0, span=2 * length * records, stride=2 * length)
            writer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            _wait_for_writes(daemon)
        begun = time.perf_counter()
        layer = directory / "captured"
        result = daemon.request("restack", device="restacked", layer=str(layer))
        takes.append(time.perf_counter() - begun)
        pauses.append(result["paused_us"] / 1000)
        if result["layer"]["records"] != records:
            raise RuntimeError(f"the layer has {result['layer']['records']} records instead of {records}")
        if writer is not None:
            waits.append(Server.outcome(json.loads(writer.communicate()[0]), 0).max_us / 1000)
        daemon.close("restacked")
        layer.unlink()
    return [
        f"{records}{', written to meanwhile' if busy else ''}",
        f"{records * length / MIB:.1f}",
        f"{statistics.median(flushes) * 1000:.1f}",
        f"{statistics.median(takes) * 1000:.1f}",
        f"{statistics.median(pauses):.2f}",
        f"{max(pauses):.2f}",
        f"{statistics.median(waits):.1f}" if waits else "",
    ]


def _wait_for_writes(daemon: BlockDaemon) -> None:
    def written() -> int:
        counts: int = daemon.request("stats", device="restacked")["devices"]["restacked"]["writes"]
        return counts

    before = written()
    while written() < before + 1000:
        time.sleep(0.001)


# --- layer files ----------------------------------------------------------------------------------------------------


def measure_layers(directory: Path, scale: Scale, binary: Path) -> list[list[str]]:
    """Every operation three times. In memory, so that the disk is not measured."""
    image = real_content(directory / "image", scale.content)
    out = directory / "out"
    stack = layers_over(image, directory, 8)
    base = directory / "memory-base"
    _native.pack_memory(image, [], base)
    changed = directory / "changed"
    changed.write_bytes(image.read_bytes())
    pages = scale.content // 4096
    change(changed, range(0, pages, 8), 4096, seed=1)
    difference = directory / "memory-difference"
    _native.pack_memory(changed, [base], difference)
    with block_daemon(binary, directory) as daemon:
        server = daemon.open("committed", [], virtual_size=scale.content)
        server.run(Load("write", "random", 65536, 8), requests=scale.content // 65536)
        upper = daemon.close("committed", keep_upper=True)
    compressed = {kind: directory / f"{kind}.layer" for kind in ("lz4", "zstd")}
    for kind, path in compressed.items():
        _native.create_from_raw(image, path, zfile="lz4" if kind == "lz4" else "zstd")

    def commit() -> int:
        return _native.commit(upper / "upper.data", upper / "upper.index", out)["data_bytes"]

    def of_image(work: Callable[[], object]) -> Callable[[], int]:
        def run() -> int:
            work()
            return scale.content

        return run

    def ratio(path: Path) -> str:
        return f"{stack[0].stat().st_size / path.stat().st_size:.2f} times smaller"

    operations: list[tuple[str, str, Callable[[], int]]] = [
        ("copy with sha256, one thread of Python", "the image", of_image(lambda: _copy(image, out))),
        ("create from raw", "the image", of_image(lambda: _native.create_from_raw(image, out))),
        (
            "create from raw, lz4",
            f"the image, {ratio(compressed['lz4'])}",
            of_image(lambda: _native.create_from_raw(image, out, zfile="lz4")),
        ),
        (
            "create from raw, zstd",
            f"the image, {ratio(compressed['zstd'])}",
            of_image(lambda: _native.create_from_raw(image, out, zfile="zstd")),
        ),
        ("verify", "a plain layer", of_image(lambda: _native.verify(stack[0]))),
        ("verify, lz4", "plain bytes", of_image(lambda: _native.verify(compressed["lz4"]))),
        ("verify, zstd", "plain bytes", of_image(lambda: _native.verify(compressed["zstd"]))),
        ("commit", "an upper of 64 KiB pieces", commit),
        ("merge", "8 layers, what is left of them", lambda: _native.merge(stack, out)["data_bytes"]),
        ("pack memory, all", "the image", of_image(lambda: _native.pack_memory(image, [], out))),
        (
            "pack memory, every 8th page differs",
            "the image",
            of_image(lambda: _native.pack_memory(changed, [base], out)),
        ),
        ("compare memory, every 8th page differs", "the image", of_image(lambda: _native.compare(changed, [base]))),
        ("unpack memory, 2 layers", "the image", of_image(lambda: _native.unpack([base, difference], out))),
    ]
    rates: dict[str, list[float]] = {}
    costs: dict[str, list[float]] = {}
    for _ in range(3):
        for name, _, work in operations:
            out.unlink(missing_ok=True)
            begun, busy = time.perf_counter(), time.process_time()
            done = work()
            rates.setdefault(name, []).append(done / 1e6 / (time.perf_counter() - begun))
            costs.setdefault(name, []).append((time.process_time() - busy) / done * 1e9)
    baseline = operations[0][0]
    rows = []
    for name, what, _ in operations:
        against = statistics.median(one / base for one, base in zip(rates[name], rates[baseline], strict=True))
        rows.append(
            [
                name,
                what,
                f"{statistics.median(rates[name]):.0f}",
                f"{statistics.median(costs[name]):.2f}",
                "" if name == baseline else f"{against:.2f}",
            ]
        )
    return rows


def _copy(source: Path, out: Path) -> str:
    digest = hashlib.sha256()
    with source.open("rb") as reader, out.open("wb") as writer:
        while chunk := reader.read(MIB):
            digest.update(chunk)
            writer.write(chunk)
    return digest.hexdigest()


# --- report ---------------------------------------------------------------------------------------------------------


def report(scale: Scale, tables: dict[str, list[list[str]]], load: float) -> None:
    after = os.getloadavg()[0]
    busy = (
        f" Other work kept the machine busy meanwhile (load average {load:.1f} before, {after:.1f} after): rates and "
        "their ratios vary with it, those of servers with one thread per client most; processor time hardly does."
        if max(load, after) > (os.cpu_count() or 1)
        else ""
    )
    write_section(
        "storage",
        "Block devices over NBD",
        f"One client process ({scale.seconds:g} s per run, {scale.rounds} rounds in which the servers take turns; "
        f"medians over the rounds, also of ratios within a round) on a device of {scale.image // MIB} MiB, all of it "
        "in the page cache. Depth is the number of requests in flight. `qemu-nbd` and `nbdkit` serve a plain raw file. "
        "`stack of N` is the block daemon with N sealed layers and an upper that holds 1/16 of the blocks; the layers "
        "above the bottom one hold a quarter of the blocks in pieces of 64 KiB. `again` rewrites blocks that the file "
        f"or the upper has; `first` writes blocks that it has not, on an empty device of {scale.fresh // MIB} MiB. "
        "Processor time is the server's, user and system.",
        [
            "load",
            "server",
            "MB/s",
            "requests/s",
            "p50 µs",
            "p99 µs",
            "CPU s/GB",
            *(f"of {kind}" for kind in raw_servers()),
        ],
        tables["devices"],
        "Goal: sequential reads from the page cache at least 0.90 of the raw file's throughput, random 4 KiB reads at "
        "least 0.80. The client shares the cores with the servers." + busy,
    )
    write_section(
        "storage-index",
        "Index lookups",
        "Random lookups of 4 KiB in the merged index of two layers, whose records alternate, in one thread; and the "
        "time to merge the two indexes, best of five.",
        ["records", "million lookups/s", "ns per lookup", "merge ms"],
        tables["index"],
        busy.strip(),
    )
    write_section(
        "storage-restack",
        "Restack",
        "A hybrid upper gets so many records, none adjacent, is flushed, and restacked over the daemon's socket; "
        "median of three, on disk. `pause` is how long requests wait (`paused_us`); `worst request` the slowest of a "
        "client that writes 4 KiB at depth 16 throughout.",
        ["records", "data MiB", "flush before, ms", "restack ms", "pause ms", "longest pause ms", "worst request ms"],
        tables["restack"],
        "Must be flat over the amount of data. Restack time has the syncs of the sealed layer's index, of the fresh "
        "upper and of the daemon's records in it." + busy,
    )
    write_section(
        "storage-layers",
        "Layer files",
        f"Functions of `agentenv._native` on {scale.content // MIB} MiB of programs and libraries, in memory "
        "(`/dev/shm`), median of three; every output is hashed with sha256 on the way. Processor time is the whole "
        "process's.",
        ["operation", "MB of", "MB/s", "CPU s/GB", "of the copy"],
        tables["layers"],
        busy.strip(),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tiny sizes; prints the tables and keeps the results")
    parser.add_argument("--daemon", type=Path, default=DAEMON, help="another build of the block daemon")
    arguments = parser.parse_args()
    scale = QUICK if arguments.quick else REAL
    load = os.getloadavg()[0]
    tables = {}
    with tempfile.TemporaryDirectory(prefix="aenv-bench-") as directory:
        tables["devices"] = measure_devices(Path(directory), scale, arguments.daemon)
    tables["index"] = measure_index()
    with tempfile.TemporaryDirectory(prefix="aenv-bench-") as directory:
        tables["restack"] = measure_restack(Path(directory), scale, arguments.daemon)
    with tempfile.TemporaryDirectory(prefix="aenv-bench-", dir="/dev/shm") as directory:
        tables["layers"] = measure_layers(Path(directory), scale, arguments.daemon)
    if scale is QUICK:
        for name, rows in tables.items():
            print(name, *(" | ".join(row) for row in rows), sep="\n")
        return
    report(scale, tables, load)


if __name__ == "__main__":
    main()
