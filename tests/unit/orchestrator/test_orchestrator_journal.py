"""The journal's file: its mode, its versions, full disks, and what a process leaves that dies while it writes."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from datetime import timedelta
from ipaddress import IPv4Address
from pathlib import Path

import pytest
from fakes import START, outcome_of, read_journal, wish
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import ConfigurationError, InsufficientStorageError, StorageError
from agentenv.network.base import Slot
from agentenv.orchestrator import codec
from agentenv.orchestrator.database import MIGRATIONS, Database
from agentenv.orchestrator.journal import Journal, KeyClaim, Outcome, Resource, ResourceKind
from agentenv.orchestrator.model import CreateRequest, NetworkOptions, OnTimeout, Sandbox, SandboxState
from agentenv.vmm.base import MachineRecord


def sandbox(name: str = "i1", request: CreateRequest | None = None) -> Sandbox:
    return Sandbox(
        id=name,
        state=SandboxState.STARTING,
        template_id="base",
        alias=None,
        started_at=START + timedelta(microseconds=1),
        end_at=START + timedelta(seconds=300),
        vcpus=2,
        memory_mib=512,
        disk_mib=1024,
        envd_version="0.6.7",
        envd_access_token="secret",
        traffic_access_token=None,
        life=1,
        request=request or wish(),
    )


_words = st.dictionaries(st.text(), st.text(), max_size=3)
_requests = st.builds(
    CreateRequest,
    template=st.text(),
    timeout_s=st.integers(1, 10**6),
    metadata=_words,
    env_vars=_words,
    on_timeout=st.sampled_from(OnTimeout),
    auto_resume=st.booleans(),
    lifecycle_given=st.booleans(),
    allow_internet_access=st.none() | st.booleans(),
    network=st.none()
    | st.builds(
        NetworkOptions,
        allow_public_traffic=st.none() | st.booleans(),
        allow_out=st.lists(st.text(), max_size=2).map(tuple),
        mask_request_host=st.none() | st.text(),
        https_ports=st.lists(st.integers(1, 65535), max_size=2).map(tuple),
    ),
    idempotency_key=st.none() | st.text(),
)


@given(_requests, st.datetimes().map(lambda moment: moment.replace(tzinfo=START.tzinfo)))
def test_sandboxes_survive_the_journal_unchanged(request: CreateRequest, moment: object) -> None:
    one = sandbox(request=request)
    assert codec.decode_sandbox(codec.encode_sandbox(one)) == one
    assert codec.from_micros(codec.to_micros(moment)) == moment  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"state": "asleep"}', "{"])
def test_damaged_rows_are_errors(text: str) -> None:
    for decode in (codec.decode_sandbox, codec.decode_request, codec.decode_record, codec.decode_slot):
        with pytest.raises(StorageError):
            decode(text)


@pytest.fixture
async def journal(tmp_path: Path):
    journal = Journal(tmp_path / "state.db")
    await journal.open()
    yield journal
    await journal.close()


async def test_file_is_for_its_owner_only(journal: Journal, tmp_path: Path) -> None:
    await journal.begin_start(sandbox(), [], None, START)
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


async def test_one_whole_life(journal: Journal) -> None:
    one, claim = sandbox(), KeyClaim("k", "digest")
    taken = [Resource(kind, "i1") for kind in (ResourceKind.DIRECTORY, ResourceKind.DISK, ResourceKind.MACHINE)]
    slot = Slot(3, "aenv3", IPv4Address("10.200.0.14"), IPv4Address("10.200.0.13"), "aenv3h")
    record = MachineRecord("qemu", "7.2", 42, 99, "/d", "/dev/shm/i1.mem")
    await journal.begin_start(one, taken, claim, START)
    (entry,) = await journal.load()
    assert (entry.sandbox, entry.slot, entry.machine, entry.intent) == (one, None, None, ("create", "prepare"))
    await journal.note_slot(one.id, slot, START)
    await journal.note_machine(one.id, record, "boot", START)
    (entry,) = await journal.load()
    assert (entry.slot, entry.machine, entry.boot_id) == (slot, record, "boot")
    assert {resource.kind for resource in entry.resources} == set(ResourceKind) - {ResourceKind.SNAPSHOT}
    key = await journal.find_key("k")
    assert key is not None
    assert (key.outcome, key.sandbox, key.claim) == (Outcome.IN_PROGRESS, None, claim)
    await journal.set_end(one.id, START)  # not running yet: nothing to move
    (entry,) = await journal.load()
    assert entry.sandbox.end_at == one.end_at
    await journal.begin_kill(one.id, "because", START)
    (entry,) = await journal.load()
    assert (entry.sandbox.state, entry.sandbox.reason) == (SandboxState.KILLING, "because")
    await journal.forget(one.id)
    await journal.forget(one.id)
    assert await journal.load() == []
    assert await journal.find_key("k") is None


async def test_writes_of_a_killed_process_are_whole(tmp_path: Path) -> None:
    """A second connection sees what was committed, without the first one being closed."""
    journal = Journal(tmp_path / "state.db")
    await journal.open()
    await asyncio.gather(*(journal.begin_start(sandbox(f"i{number}"), [], None, START) for number in range(50)))
    assert len(read_journal(tmp_path / "state.db")["sandboxes"]) == 50
    await journal.close()


async def test_one_bad_operation_does_not_spoil_those_committed_with_it(journal: Journal) -> None:
    works = [journal.begin_start(sandbox(name), [], None, START) for name in ("a", "b", "a", "c")]
    outcomes = await asyncio.gather(*(outcome_of(work) for work in works))
    assert [isinstance(outcome, StorageError) for outcome in outcomes] == [False, False, True, False]
    assert [entry.sandbox.id for entry in await journal.load()] == ["a", "b", "c"]


async def test_cancelled_caller_does_not_stop_the_others(journal: Journal) -> None:
    task = asyncio.create_task(journal.begin_start(sandbox("a"), [], None, START))
    await asyncio.sleep(0)
    task.cancel()
    await journal.begin_start(sandbox("b"), [], None, START)
    assert [entry.sandbox.id for entry in await journal.load()] == ["a", "b"]


async def test_newer_schema_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "state.db") as connection:
        connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    with pytest.raises(ConfigurationError, match="newer"):
        await Journal(tmp_path / "state.db").open()


async def test_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_text("this is no database, and long enough to be sure of it" * 100)
    with pytest.raises(StorageError, match=r"state\.db"):
        await Journal(tmp_path / "state.db").open()
    with pytest.raises(StorageError):
        await Journal(tmp_path).open()


async def test_full_disk_is_told_apart_and_passes(tmp_path: Path) -> None:
    database = Database(tmp_path / "state.db")
    await database.open()

    async def set_limit(pages: int) -> None:
        """SQLite's own limit of pages gives the same error as a full disk."""
        await database.run(lambda db: db.execute(f"PRAGMA max_page_count = {pages}").fetchone())

    def fill(db: sqlite3.Connection) -> None:
        db.execute(
            "INSERT INTO idempotency (key, digest, outcome, sandbox_id, claimed_at) VALUES (?, 'd', 'done', 's', 0)",
            ("k" * 100_000,),
        )

    await set_limit(1)
    with pytest.raises(InsufficientStorageError, match="full"):
        await database.run(fill)
    await set_limit(1_000_000)
    await database.run(fill)
    await database.close()


async def test_closed_journal_says_so(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "state.db")
    with pytest.raises(StorageError, match="closed"):
        await journal.load()
    await journal.open()
    await journal.close()
    await journal.close()
    with pytest.raises(StorageError, match="closed"):
        await journal.load()
