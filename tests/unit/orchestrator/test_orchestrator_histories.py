"""Random histories of sandboxes and snapshots against a model: callers, failures, servers that die, reboots."""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fakes import Server, World, outcome_of, wish
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_orchestrator_crash import crash

from agentenv.errors import AgentEnvError, InvalidRequestError
from agentenv.orchestrator.model import Sandbox, SandboxState
from agentenv.snapshots.manifest import HIDDEN_PREFIX

RUNNING, PAUSED = SandboxState.RUNNING, SandboxState.PAUSED
STARTS = ("waiting.load", "vmm.load", "vmm.boot")


@dataclass
class Guest:
    """What a sandbox must be: its state, and the counters in its memory and on its disk."""

    state: SandboxState = RUNNING
    memory: int = 0
    disk: int = 0
    saved_memory: int | None = None
    """While it is paused; None: it boots."""
    paused_in: str | None = None
    """The named snapshot that it is paused in."""

    def wake(self, *, warm: bool) -> None:
        self.state, self.memory, self.paused_in = RUNNING, (self.saved_memory or 0) if warm else 0, None


@dataclass(frozen=True)
class Saved:
    """What a named snapshot must hold; no memory: those that go on from it boot."""

    sandbox_id: str
    memory: int | None
    disk: int

    def guest(self, *, warm: bool = True) -> Guest:
        return Guest(RUNNING, (self.memory or 0) if warm else 0, self.disk)


@dataclass
class Model:
    """All of the node."""

    guests: dict[str, Guest] = field(default_factory=dict)
    snapshots: dict[str, Saved] = field(default_factory=dict)

    def guest(self, index: int) -> str:
        return sorted(self.guests)[index % len(self.guests)] if self.guests else "inone"

    def snapshot(self, index: int) -> str:
        return sorted(self.snapshots)[index % len(self.snapshots)] if self.snapshots else "none"


CALLS = [
    "create",
    "create from",
    "create cold from",
    "snapshot",
    "snapshot cold",
    "fork",
    "roll back",
    "delete",
    "pause",
    "pause cold",
    "connect",
    "connect cold",
    "kill",
]
EVENTS = ["work", "work", "failing pause", "failing snapshot", "failing roll back", "die", "reboot", "stop"]
operations = st.lists(
    st.tuples(st.sampled_from([*CALLS, *EVENTS]), st.integers(0, 5), st.integers(0, 5), st.integers(0, 50)),
    max_size=16,
)


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(history=operations, warm=st.sampled_from([0, 2]))
def test_random_histories(history: list[tuple[str, int, int, int]], warm: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(_live_through(World(Path(directory)), history, warm))


async def _live_through(world: World, history: list[tuple[str, int, int, int]], warm: int) -> None:
    model = Model()
    server = await Server(world, warm=warm).start()
    for name, which, what, step in [("create", 0, 0, 0), ("work", 0, 0, 0), *history]:
        if name in CALLS:
            _apply(model, name, which, what, await outcome_of(_call(server, model, name, which, what)))
        elif name == "work":
            world.work()
            for guest in model.guests.values():
                if guest.state is RUNNING:
                    guest.memory, guest.disk = guest.memory + 1, guest.disk + 1
        elif name.startswith("failing"):
            await _fail(server, model, name, which, what)
        elif name == "die":
            server = await _die(server, model, CALLS[step % len(CALLS)], which, what, step)
        else:
            if name == "stop":
                await server.close()
            else:
                await server.vanish()
                world.reboot()
                model.guests = {key: one for key, one in model.guests.items() if one.state is PAUSED}
            server = await Server(world, warm=warm).start()
        await server.orchestrator.settled()
        await server.warm.settled()
        _compare(server, model)
    await server.close()


def _call(server: Server, model: Model, name: str, which: int, what: int) -> Awaitable[Any]:
    node, guest, snapshot = server.orchestrator, model.guest(which), model.snapshot(what)
    calls: dict[str, Callable[[], Awaitable[Any]]] = {
        "create": lambda: node.create(wish()),
        "create from": lambda: node.create(wish(template=snapshot)),
        "create cold from": lambda: node.create(wish(template=snapshot, memory=False)),
        "snapshot": lambda: node.snapshot(guest),
        "snapshot cold": lambda: node.snapshot(guest, memory=False),
        "fork": lambda: node.fork(guest, count=1 + what % 3, timeout_s=300),
        "roll back": lambda: node.rollback(guest, snapshot),
        "delete": lambda: node.delete_snapshot(snapshot),
        "pause": lambda: node.pause(guest),
        "pause cold": lambda: node.pause(guest, memory=False),
        "connect": lambda: node.connect(guest, 300),
        "connect cold": lambda: node.connect(guest, 300, memory=False),
        "kill": lambda: node.kill(guest),
    }
    return calls[name]()


def _apply(model: Model, name: str, which: int, what: int, outcome: Any) -> None:
    """Say whether a call had to succeed, and what it changed."""
    guest_id, snapshot_id = model.guest(which), model.snapshot(what)
    guest, saved = model.guests.get(guest_id), model.snapshots.get(snapshot_id)
    runs = guest is not None and guest.state is RUNNING
    good = not isinstance(outcome, BaseException)
    if name == "create":
        model.guests[outcome.id] = Guest()
    elif name in ("create from", "create cold from"):
        assert good == (saved is not None), outcome
        if saved is not None:
            model.guests[outcome.id] = saved.guest(warm=name == "create from")
    elif name in ("snapshot", "snapshot cold"):
        assert good == runs, outcome
        if good and guest is not None:
            model.snapshots[outcome.id] = Saved(guest_id, guest.memory if name == "snapshot" else None, guest.disk)
    elif name == "fork":
        assert good == runs, outcome
        if good and guest is not None:
            assert len(outcome) == 1 + what % 3
            for child in outcome:
                model.guests[child.id] = Guest(RUNNING, guest.memory, guest.disk)
    elif name == "roll back":
        mine = saved is not None and saved.sandbox_id == guest_id
        assert good == (runs and mine), outcome
        if good and saved is not None:
            model.guests[guest_id] = saved.guest()
    elif name == "delete":
        needed = any(one.paused_in == snapshot_id for one in model.guests.values())
        assert good == (saved is not None and not needed), outcome
        assert isinstance(outcome, InvalidRequestError) == (saved is not None and needed)
        if good:
            del model.snapshots[snapshot_id]
    elif name in ("pause", "pause cold"):
        assert good == runs, outcome
        if good and guest is not None:
            guest.state, guest.saved_memory = PAUSED, guest.memory if name == "pause" else None
    elif name in ("connect", "connect cold"):
        assert good == (guest is not None), outcome
        if guest is not None:
            assert outcome[1] == (guest.state is PAUSED)
            if outcome[1]:
                guest.wake(warm=name == "connect")
    else:
        assert good == (guest is not None), outcome
        model.guests.pop(guest_id, None)


async def _fail(server: Server, model: Model, name: str, which: int, what: int) -> None:
    """Nothing changes, but that one whose roll back fails is paused in the snapshot."""
    call = name.removeprefix("failing ")
    guest_id, snapshot_id = model.guest(which), model.snapshot(what)
    guest, saved = model.guests.get(guest_id), model.snapshots.get(snapshot_id)
    steps = STARTS if call == "roll back" else ("saved.save", "captured.commit")
    for step in steps:
        server.script.failing[step] = AgentEnvError("no room")
    outcome = await outcome_of(_call(server, model, call, which, what))
    server.script.failing.clear()
    assert isinstance(outcome, AgentEnvError)
    runs = guest is not None and guest.state is RUNNING
    if call == "roll back" and runs and saved is not None and saved.sandbox_id == guest_id:
        model.guests[guest_id] = Guest(PAUSED, 0, saved.disk, saved.memory, snapshot_id)


async def _die(server: Server, model: Model, name: str, which: int, what: int, step: int) -> Server:
    """The server dies in the middle of a call: what the call was about is as before, or as after."""
    world = server.world
    task: asyncio.Task[Any] = asyncio.ensure_future(_call(server, model, name, which, what))  # type: ignore[arg-type]
    await crash(server, step, task)
    world.leased.clear()
    server = await Server(world, warm=server.settings.vmm.warm_machines).start()
    await server.orchestrator.settled()
    real = {one.id: one for one in server.orchestrator.list()}
    guest_id, snapshot_id = model.guest(which), model.snapshot(what)
    named = {key for key in world.snapshots if not key.startswith(HIDDEN_PREFIX)}
    new_guests, new_snapshots = set(real) - set(model.guests), named - set(model.snapshots)
    before = model.guests.get(guest_id)
    assert len(new_guests) <= {"create": 1, "create from": 1, "create cold from": 1, "fork": 3}.get(name, 0)
    assert len(new_snapshots) <= int(name.startswith("snapshot"))
    assert set(model.snapshots) - named <= ({snapshot_id} if name == "delete" else set())
    assert set(model.guests) - set(real) <= ({guest_id} if name == "kill" else set())
    model.snapshots = {key: one for key, one in model.snapshots.items() if key in named}
    model.guests = {key: one for key, one in model.guests.items() if key in real}
    source = model.snapshots.get(snapshot_id)
    for key in new_guests:
        if name == "fork" and before is not None:
            model.guests[key] = Guest(RUNNING, before.memory, before.disk)
        else:
            model.guests[key] = (
                Guest() if source is None or name == "create" else source.guest(warm=name != "create cold from")
            )
    for key in new_snapshots:
        assert before is not None
        model.snapshots[key] = Saved(guest_id, before.memory if name == "snapshot" else None, before.disk)
    if guest_id in model.guests and before is not None:
        after = copy.copy(before)
        if name in ("pause", "pause cold") and before.state is RUNNING:
            after.state, after.saved_memory = PAUSED, before.memory if name == "pause" else None
        elif name in ("connect", "connect cold") and before.state is PAUSED:
            after.wake(warm=name == "connect")
        elif name == "roll back" and before.state is RUNNING and source is not None and source.sandbox_id == guest_id:
            after = source.guest()  # the next server goes on with it by itself
        matching = [one for one in (before, after) if _is(world, real[guest_id], one)]
        assert matching, (name, real[guest_id], before, after)
        model.guests[guest_id] = matching[0]
    return server


def _is(world: World, sandbox: Sandbox, guest: Guest) -> bool:
    if sandbox.state is not guest.state:
        return False
    counters = world.content.get(sandbox.id, 0), world.written.get(sandbox.id, 0)
    return guest.state is PAUSED or counters == (guest.memory, guest.disk)


def _compare(server: Server, model: Model) -> None:
    world = server.world
    server.check(model.guests)
    for key, guest in model.guests.items():
        sandbox = server.orchestrator.get(key)
        assert _is(world, sandbox, guest), (sandbox, guest)
        if guest.paused_in is not None:
            assert sandbox.snapshot_id == guest.paused_in
    named = {key: one for key, one in world.snapshots.items() if not key.startswith(HIDDEN_PREFIX)}
    assert set(named) == set(model.snapshots)
    for key, saved in model.snapshots.items():
        found = named[key]
        assert (found.manifest.sandbox_id, found.content, found.written) == (saved.sandbox_id, saved.memory, saved.disk)
