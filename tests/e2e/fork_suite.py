"""Forks of a real guest, in a private host with a world behind its uplink: how they differ, and what they all have.

The server notes what it tells the VMM, so that it is seen how often the source stood still.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio
from e2b import Sandbox

from e2e.network.network_lab import HOST_ADDRESS, PUBLIC, PUBLIC_2, FakeResolver, World, private_host
from harness.fragile import FRAGILE, Steps
from harness.leftovers import leftovers_of
from harness.sandboxes import SMALL, info_of, remains_of_sandboxes, sdk, start_ticking, ticks, until, until_it_ticks
from harness.server import RunningServer

pytestmark = [
    pytest.mark.vm,
    pytest.mark.root,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="module"),
]

COUNT = 16
MOST = 20
RESOLVER_PORT = 5353
CONFIG = f"""{SMALL}max_running = {MOST}
[network]
dns_servers = ["127.0.0.1:{RESOLVER_PORT}"]
"""

WATCHER = """
import errno, json, os, random, socket, sys, time, uuid

def line(path):
    with open(path) as file:
        return file.read().split()

def talk(address):
    try:
        with socket.create_connection((address, 80), 20) as connection:
            connection.sendall(b"tcp")
            return connection.recv(16) == b"tcp"
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))

known = line("/run/aenv/generation")
random.seed(1)
uuid.uuid4()
urandom = open("/dev/urandom", "rb", buffering=0)
urandom.read(16)
print("ready", flush=True)
while True:
    now = line("/run/aenv/generation")
    if now != known:
        known = now
        random.seed()
        distinct = {
            "urandom": urandom.read(16).hex(),
            "getrandom": os.getrandom(16).hex(),
            "uuid4": str(uuid.uuid4()),
            "seeded by generation": random.random(),
            "hostname": socket.gethostname(),
            "machine id": line("/etc/machine-id")[0],
            "generation": now[1],
        }
        network = [talk(sys.argv[1]), talk(sys.argv[2]), socket.gethostbyname("agent.env")]
        with open("/tmp/answer.new", "w") as file:
            json.dump({"distinct": distinct, "network": network, "life": now[0]}, file)
        os.replace("/tmp/answer.new", "/tmp/answer")
    time.sleep(0.2)
"""
"""A process that runs when it is forked, and tells in each copy what a program of that copy sees."""


@dataclass
class Lab:
    """A server in a private host, and what surrounds it."""

    server: RunningServer
    steps: Steps
    world: World


@pytest.fixture(scope="module")
def host() -> Iterator[None]:
    with private_host():
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab(host: None) -> AsyncIterator[Lab]:
    world = World()
    await world.serve()
    resolver = await FakeResolver.start(("127.0.0.1", RESOLVER_PORT))
    server = RunningServer(config=CONFIG, program=FRAGILE)
    try:
        await asyncio.to_thread(server.start)
        yield Lab(server, Steps(server.home), world)
    finally:
        await asyncio.to_thread(server.destroy)
        await resolver.close()
        world.close()
    assert leftovers_of(server.home) == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def source(lab: Lab) -> Sandbox:
    """It may not reach one of the world's addresses."""

    def make() -> Sandbox:
        made = Sandbox.create(
            timeout=900,
            metadata={"kept": "yes"},
            envs={"KEPT": "too"},
            network={"deny_out": [PUBLIC_2]},
            **sdk(lab.server),
        )
        made.files.write("/tmp/watcher.py", WATCHER)
        command = f"exec python3 /tmp/watcher.py {PUBLIC} {PUBLIC_2}"
        for _ in made.commands.run(command, background=True, timeout=0):
            break
        start_ticking(made)
        return made

    return await asyncio.to_thread(make)


def _fork(lab: Lab, source: Sandbox, body: object) -> tuple[int, Any]:
    return lab.server.api("POST", f"/sandboxes/{source.sandbox_id}/fork", body)[:2]


async def test_sixteen_forks_are_distinct_and_have_all_that_their_source_has(lab: Lab, source: Sandbox) -> None:
    await asyncio.to_thread(_sixteen_forks, lab, source)
    assert set(lab.world.peers) == {HOST_ADDRESS}
    assert COUNT <= len(lab.world.peers) < MOST, "each fork reaches the world once"


def _sixteen_forks(lab: Lab, source: Sandbox) -> None:
    before = info_of(lab.server, source.sandbox_id)
    counted = ticks(source)
    listening = source.commands.run("touch /tmp/talk && exec tail -f /tmp/talk", background=True, timeout=0)
    lab.steps.clear()

    forks = source.fork(timeout=600, count=COUNT)

    steps = lab.steps.read()
    assert steps.count(f"machine.pause {source.sandbox_id}") == 1, "the source stands still once, whatever the number"
    assert steps.count(f"machine.resume {source.sandbox_id}") == 1
    assert [step for step in steps if step.startswith("draft.commit")] == [], "a fork makes no snapshot"
    running_again = steps.index(f"machine.resume {source.sandbox_id}")
    loads = [index for index, step in enumerate(steps) if step in ("vmm.load", "waiting.load")]
    assert len(loads) == COUNT
    assert running_again < min(loads), "the source runs before its children start"
    children: list[Sandbox] = []
    for fork in forks:
        assert isinstance(fork, Sandbox), fork
        children.append(fork)

    # The source has noticed nothing: its connections, its processes, its end.
    assert info_of(lab.server, source.sandbox_id) == before
    source.files.write("/tmp/talk", "still here\n")
    assert next(iter(listening))[0] == "still here\n"
    until_it_ticks(source, counted)
    assert not source.files.exists("/tmp/answer"), "the source began a new life"

    answers = []
    for child in children:
        until(lambda one=child: one.files.exists("/tmp/answer"), "a fork does not notice that it is one")
        answers.append(json.loads(child.files.read("/tmp/answer")))
    for name in answers[0]["distinct"]:
        assert len({answer["distinct"][name] for answer in answers}) == COUNT, f"{name} is the same in two forks"
    assert [answer["distinct"]["hostname"] for answer in answers] == [child.sandbox_id for child in children]
    assert [answer["network"] for answer in answers] == COUNT * [[True, "ECONNREFUSED", PUBLIC]]
    infos = [info_of(lab.server, child.sandbox_id) for child in children]
    for name in ("sandboxID", "envdAccessToken"):
        assert len({info[name] for info in (before, *infos)}) == COUNT + 1
    same = ("templateID", "metadata", "cpuCount", "memoryMB", "network")
    assert [[info[name] for name in same] for info in infos] == COUNT * [[before[name] for name in same]]
    for child in children[:2]:
        until_it_ticks(child, counted)
        assert child.commands.run("echo $KEPT $E2B_SANDBOX_ID").stdout == f"too {child.sandbox_id}\n"
    # A token of one opens no other.
    foreign = Sandbox.connect(children[0].sandbox_id, **sdk(lab.server))
    tokens = {"X-Access-Token": infos[1]["envdAccessToken"]}
    status = lab.server.api("GET", "/files?path=/tmp/answer", headers={**tokens, **_to(foreign)})[0]
    assert status == 401

    # There is room for some more; what is beyond it is refused for itself.
    status, entries = _fork(lab, source, {"count": 5, "timeout": 300})
    assert status == 201
    made = [entry["sandbox"]["sandboxID"] for entry in entries if "sandbox" in entry]
    refused = [entry["error"]["code"] for entry in entries if "error" in entry]
    assert (len(made), refused) == (MOST - 1 - COUNT, (5 - MOST + 1 + COUNT) * [429])

    for sandbox_id in (*made, *(child.sandbox_id for child in children)):
        assert lab.server.api("DELETE", f"/sandboxes/{sandbox_id}")[0] == 204
    assert [line for line in remains_of_sandboxes(lab.server) if source.sandbox_id not in line] == []
    assert [path for path in (lab.server.home / "snapshots").iterdir() if path.is_dir()] == []


def _to(sandbox: Sandbox) -> dict[str, str]:
    return {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}


async def test_wrong_counts_and_states(lab: Lab, source: Sandbox) -> None:
    await asyncio.to_thread(_wrong_counts_and_states, lab, source)


def _wrong_counts_and_states(lab: Lab, source: Sandbox) -> None:
    lab.steps.clear()
    for count in (0, -1, 101, 1000, "4", 1.5, MOST):
        status, answer = _fork(lab, source, {"count": count})
        assert (status, answer["code"]) == (400, 400), f"count {count!r}: {answer}"
        assert str(count) in answer["message"] or "count" in answer["message"]
    assert _fork(lab, source, {"timeout": 0})[0] == 400
    assert lab.server.api("POST", "/sandboxes/i0000000000000000000/fork", {})[0] == 404
    assert lab.steps.read() == [], "nothing was touched for any of them"

    paused = Sandbox.create(timeout=600, **sdk(lab.server))
    pausing = threading.Thread(target=paused.pause)
    with lab.steps.held("machine.save_state", pausing.start):
        status, answer = _fork(lab, paused, {})
        assert (status, "paus" in answer["message"]) == (409, True), answer
        assert lab.server.api("POST", f"/sandboxes/{paused.sandbox_id}/snapshots", {})[0] == 409
        assert lab.server.api("POST", f"/sandboxes/{paused.sandbox_id}/pause", {})[0] == 409
    pausing.join()
    status, answer = _fork(lab, paused, {})
    assert (status, "paused" in answer["message"]) == (409, True), answer
    assert paused.kill() is True
    assert len(lab.server.api("GET", "/v2/sandboxes")[1]) == 1
    assert source.kill() is True
    assert remains_of_sandboxes(lab.server) == []
