"""Snapshots, forks, rolling back, disk space: codes and bodies (E2B contract §2.2.11, §2.2.12; checklist 28-30)."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from api_fakes import DOMAIN, KEY, Client, FakeService, FakeTemplates, control_plane, make_sandbox, make_snapshot

from agentenv.errors import (
    CapacityError,
    ConflictError,
    GuestUnresponsiveError,
    InsufficientStorageError,
    InvalidRequestError,
    SandboxStartError,
    SnapshotMismatchError,
    TooManyRequestsError,
)
from agentenv.orchestrator.model import PauseMode, SandboxState
from agentenv.templates.store import Template

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("service")]


@pytest.fixture
def sandbox_id(service: FakeService) -> str:
    return service.add(make_sandbox("isource")).id


async def test_a_snapshot_is_created_and_shown(client: Client, service: FakeService, sandbox_id: str) -> None:
    answer = await client("POST", f"/sandboxes/{sandbox_id}/snapshots", json={"name": " Ready "})
    assert answer.status == 201
    assert answer.json == {
        "snapshotID": "ready:default",
        "names": ["ready:default"],
        "buildID": service.taken[0].id,
        "templateID": "tsnap1",
        "sandboxID": sandbox_id,
        "createdAt": "2026-01-02T03:05:05.678901Z",
        "mode": "full",
        "cpuCount": 2,
        "memoryMB": 512,
        "diskSizeMB": 4096,
        "envdVersion": "0.6.7",
    }
    assert (await client("GET", "/snapshots/ready%3Adefault")).json == answer.json
    assert (await client("GET", "/snapshots")).json == [answer.json]


@pytest.mark.parametrize("body", [None, {}, {"name": None, "memory": None}, {"memory": True}])
async def test_a_snapshot_needs_no_name(client: Client, sandbox_id: str, body: Any) -> None:
    answer = await client("POST", f"/sandboxes/{sandbox_id}/snapshots", **({} if body is None else {"json": body}))
    assert answer.status == 201
    assert (answer.json["snapshotID"], answer.json["names"]) == ("tsnap1:default", [])
    assert answer.json["mode"] == "full"


async def test_a_snapshot_of_the_disk_alone(client: Client, service: FakeService, sandbox_id: str) -> None:
    answer = await client("POST", f"/sandboxes/{sandbox_id}/snapshots", json={"memory": False, "name": "a:v.1"})
    assert (answer.status, answer.json["mode"]) == (201, "filesystem")
    assert service.taken[0].kind is PauseMode.FILESYSTEM


@pytest.mark.parametrize("name", ["", " ", "a b", "a:b:c", "../x", "a/b/c", "a:", "ü", "x" * 129, 7, ["a"], "a\0"])
async def test_bad_names(client: Client, service: FakeService, sandbox_id: str, name: Any) -> None:
    answer = await client("POST", f"/sandboxes/{sandbox_id}/snapshots", json={"name": name})
    assert answer.status == 400
    assert "name" in answer.json["message"]
    assert not service.taken


CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "snapshot": ("snapshots", {}),
    "fork": ("fork", {}),
    "rollback": ("rollback", {"snapshotID": "ready"}),
}


@pytest.mark.parametrize("call", CALLS)
async def test_only_of_what_runs(client: Client, service: FakeService, call: str) -> None:
    path, body = CALLS[call]
    assert (await client("POST", f"/sandboxes/inone/{path}", json=body)).status == 404
    assert (await client("POST", f"/sandboxes/No!/{path}", json=body)).status == 400
    service.add(make_sandbox("ipaused", state=SandboxState.PAUSED))
    assert (await client("POST", f"/sandboxes/ipaused/{path}", json=body)).status == 409


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "error",
    [
        ConflictError("pausing"),
        GuestUnresponsiveError("silent"),
        InsufficientStorageError("full"),
        CapacityError("busy"),
        SnapshotMismatchError("other CPU"),
        InvalidRequestError("too many"),
    ],
)
async def test_errors_keep_their_status(
    client: Client, service: FakeService, sandbox_id: str, call: str, error: Any
) -> None:
    path, body = CALLS[call]
    service.fail_with = error
    answer = await client("POST", f"/sandboxes/{sandbox_id}/{path}", json=body)
    assert (answer.status, answer.json["code"], answer.json["message"]) == (error.status, error.status, error.message)
    assert answer.json.get("error_code") == error.error_code
    assert answer.headers.get("Retry-After") == (None if error.retry_after_s is None else str(error.retry_after_s))


async def test_a_fork_has_one_entry_for_each_copy(client: Client, service: FakeService, sandbox_id: str) -> None:
    service.fork_failures = {1: TooManyRequestsError("all places are taken"), 3: SandboxStartError("x" * 5000)}
    answer = await client("POST", f"/sandboxes/{sandbox_id}/fork", json={"count": 4, "timeout": 60})
    assert answer.status == 201
    assert [set(entry) for entry in answer.json] == [{"sandbox"}, {"error"}, {"sandbox"}, {"error"}]
    assert answer.json[1]["error"] == {"code": 429, "message": "all places are taken"}
    assert answer.json[3]["error"] == {"code": 500, "message": "x" * 2000}
    for entry in (answer.json[0], answer.json[2]):
        made = service.get(entry["sandbox"]["sandboxID"])
        assert entry["sandbox"]["envdAccessToken"] == made.envd_access_token
        assert entry["sandbox"]["domain"] == DOMAIN
        assert None not in entry["sandbox"].values()
    assert service.calls == [("fork", (4, 60))]


@pytest.mark.parametrize("body", [None, {}, {"count": None, "timeout": None}])
async def test_a_fork_makes_one_copy_for_300_seconds(
    client: Client, service: FakeService, sandbox_id: str, body: Any
) -> None:
    answer = await client("POST", f"/sandboxes/{sandbox_id}/fork", **({} if body is None else {"json": body}))
    assert (answer.status, len(answer.json)) == (201, 1)
    assert service.calls == [("fork", (1, 300))]


@pytest.mark.parametrize(
    "body",
    [
        {"count": 0},
        {"count": -1},
        {"count": 101},
        {"count": 1000},
        {"count": 2**70},
        {"count": "2"},
        {"count": 1.5},
        {"count": True},
        {"timeout": 0},
        {"timeout": -5},
        {"timeout": 3601},
        [],
    ],
)
async def test_bad_forks(client: Client, service: FakeService, sandbox_id: str, body: Any) -> None:
    assert (await client("POST", f"/sandboxes/{sandbox_id}/fork", json=body)).status == 400
    assert not service.calls


async def test_a_client_that_leaves_amid_a_fork_ends_it(client: Client, service: FakeService, sandbox_id: str) -> None:
    service.slow = asyncio.Event()
    host, port = client.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"count": 3})
    head = f"POST /sandboxes/{sandbox_id}/fork HTTP/1.1\r\nHost: x\r\nX-API-KEY: {KEY}\r\nContent-Length: {len(body)}"
    writer.write(f"{head}\r\n\r\n{body}".encode())
    await service.slow.wait()
    writer.close()
    await service.cancelled.wait()


LINES = {"Accept": "application/x-ndjson"}


async def test_a_fork_tells_each_result_as_it_comes(client: Client, service: FakeService, sandbox_id: str) -> None:
    service.fork_failures = {0: TooManyRequestsError("all places are taken")}
    answer = await client("POST", f"/sandboxes/{sandbox_id}/fork", json={"count": 3}, headers=LINES)
    assert (answer.status, answer.headers["Content-Type"]) == (201, "application/x-ndjson")
    entries = [json.loads(line) for line in answer.raw.splitlines()]
    assert entries[0] == {"error": {"code": 429, "message": "all places are taken"}}
    assert [service.get(entry["sandbox"]["sandboxID"]).id for entry in entries[1:]] == list(service.sandboxes)[1:]

    service.slow, service.fork_pauses_at = asyncio.Event(), 2
    async with client.session.post(
        f"{client.url}/sandboxes/{sandbox_id}/fork", json={"count": 3}, headers={**LINES, "X-API-KEY": KEY}
    ) as response:
        early = [json.loads(await response.content.readline()) for _ in range(2)]
        await service.slow.wait()
        assert [set(entry) for entry in early] == [{"error"}, {"sandbox"}]
        assert not service.cancelled.is_set()
    await service.cancelled.wait()


async def test_a_fork_that_fails_as_a_whole_is_an_error(client: Client, service: FakeService, sandbox_id: str) -> None:
    service.fail_with = CapacityError("busy")
    answer = await client("POST", f"/sandboxes/{sandbox_id}/fork", json={"count": 3}, headers=LINES)
    assert (answer.status, answer.json["message"]) == (503, "busy")
    assert (await client("POST", "/sandboxes/inone/fork", headers=LINES)).status == 404
    assert (await client("POST", f"/sandboxes/{sandbox_id}/fork", json={"count": 0}, headers=LINES)).status == 400


async def test_who_has_all_results_may_leave_at_once(
    client: Client, service: FakeService, sandbox_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = asyncio.Event()

    async def fork(sandbox_id: str, *, count: int, timeout_s: int, on_result: Any) -> list[Any]:
        for _ in range(count):
            on_result(make_sandbox())
        try:
            await asyncio.wait_for(ended.wait(), 60)
        except asyncio.CancelledError:
            service.cancelled.set()
            raise
        return []

    monkeypatch.setattr(service, "fork", fork)
    async with client.session.post(
        f"{client.url}/sandboxes/{sandbox_id}/fork", json={"count": 2}, headers={**LINES, "X-API-KEY": KEY}
    ) as response:
        for _ in range(2):
            await response.content.readline()
    assert (await client("GET", "/health")).status == 200
    ended.set()
    assert (await client("GET", "/health")).status == 200
    assert not service.cancelled.is_set()


async def test_rolling_back(client: Client, service: FakeService, sandbox_id: str) -> None:
    taken = (await client("POST", f"/sandboxes/{sandbox_id}/snapshots", json={"name": "ready"})).json
    before = service.get(sandbox_id)
    for reference in (taken["snapshotID"], " READY:default ", taken["buildID"]):
        answer = await client("POST", f"/sandboxes/{sandbox_id}/rollback", json={"snapshotID": reference})
        assert answer.status == 200
        assert answer.json["sandboxID"] == sandbox_id
        assert answer.json["envdAccessToken"] == before.envd_access_token
    info = (await client("GET", f"/sandboxes/{sandbox_id}")).json
    assert info["checkpointID"] == taken["buildID"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"snapshotID": None}, 400),
        ({"snapshotID": 7}, 400),
        ({"snapshotID": ""}, 400),
        ({"snapshotID": "../x"}, 400),
        ({"snapshotID": "nope"}, 404),
        ({"snapshotID": "others:default"}, 400),
    ],
)
async def test_bad_rollbacks(
    client: Client, service: FakeService, sandbox_id: str, body: dict[str, Any], status: int
) -> None:
    service.taken.append(make_snapshot(name="others:default", sandbox_id="iother"))
    answer = await client("POST", f"/sandboxes/{sandbox_id}/rollback", json=body)
    assert (answer.status, answer.json["code"]) == (status, status)
    assert service.get(sandbox_id).life == 1


@pytest.mark.parametrize("empty", ["", "  "])
async def test_rolling_back_to_nothing_says_so(client: Client, sandbox_id: str, empty: str) -> None:
    answer = await client("POST", f"/sandboxes/{sandbox_id}/rollback", json={"snapshotID": empty})
    assert answer.status == 400
    assert answer.json["message"].startswith("snapshotID is empty")


async def test_snapshots_come_in_pages_newest_first(client: Client, service: FakeService) -> None:
    service.taken = [make_snapshot(number) for number in range(1, 6)]
    seen: list[str] = []
    query = "?limit=2"
    while True:
        answer = await client("GET", f"/snapshots{query}")
        assert answer.status == 200
        seen += [item["snapshotID"] for item in answer.json]
        token = answer.headers.get("X-Next-Token")
        if token is None:
            break
        assert len(answer.json) == 2
        query = f"?limit=2&nextToken={token}"
    assert seen == [f"tsnap{number}:default" for number in (5, 4, 3, 2, 1)]
    for bad in ("limit=0", "limit=101", "limit=x", "nextToken=garbage", "sandboxID=No!", "name=a%20b"):
        assert (await client("GET", f"/snapshots?{bad}")).status == 400


async def test_filters_of_snapshots(client: Client, service: FakeService) -> None:
    service.taken = [
        make_snapshot(1, name="a:default", sandbox_id="i1"),
        make_snapshot(2, name="a:v2", sandbox_id="i2"),
        make_snapshot(3, sandbox_id="i2"),
    ]

    async def found(query: str) -> list[str]:
        return [item["snapshotID"] for item in (await client("GET", f"/snapshots?{query}")).json]

    assert await found("sandboxID=i2") == ["tsnap3:default", "a:v2"]
    assert await found("sandboxID=i2-agentenv&name=") == ["tsnap3:default", "a:v2"]
    assert await found("sandboxID=iunknown") == []
    assert await found("name=A") == ["a:v2", "a:default"]
    assert await found("name=a%3Adefault") == ["a:default"]
    assert service.calls[-1] == ("snapshots", "a:default")


async def test_the_tree_names_parents_before_children(client: Client, service: FakeService) -> None:
    root = make_snapshot(1, name="root:default")
    left = make_snapshot(2, parent=root)
    leaf = make_snapshot(3, parent=left)
    right = make_snapshot(4, parent=root)
    other = make_snapshot(5)
    service.taken = [root, left, leaf, right, other]
    answer = await client("GET", "/snapshots/tree?sandboxID=isource")
    assert answer.status == 200
    assert service.calls[-1] == ("tree", "isource")
    assert [(node["buildID"], node.get("parentID")) for node in answer.json] == [
        (root.id, None),
        (left.id, root.id),
        (leaf.id, left.id),
        (right.id, root.id),
        (other.id, None),
    ]
    assert answer.json[0]["snapshot"]["names"] == ["root:default"]
    assert (answer.json[0]["exclusiveBytes"], answer.json[0]["sharedBytes"]) == (1000, 50)


async def test_a_chain_of_any_length_is_a_tree(client: Client, service: FakeService) -> None:
    service.taken = [make_snapshot(1)]
    for number in range(2, 3000):
        service.taken.append(make_snapshot(number, parent=service.taken[-1]))
    answer = await client("GET", "/snapshots/tree")
    assert answer.status == 200
    assert [node.get("parentID") for node in answer.json[1:]] == [node["buildID"] for node in answer.json[:-1]]


async def test_deleting_snapshots(client: Client, service: FakeService, sandbox_id: str) -> None:
    await client("POST", f"/sandboxes/{sandbox_id}/snapshots", json={"name": "a:v1"})
    await client("POST", f"/sandboxes/{sandbox_id}/snapshots", json={})
    assert (await client("DELETE", "/templates/a%3Av1")).status == 204
    assert (await client("DELETE", "/templates/a%3Av1")).status == 404
    assert (await client("GET", "/snapshots/a%3Av1")).status == 404
    assert (await client("DELETE", "/templates/tsnap2%3Adefault")).status == 204
    assert (await client("GET", "/snapshots")).json == []
    assert (await client("DELETE", "/templates/..%2Fx")).status == 400
    unknown = await client("DELETE", "/templates/nope")
    assert (unknown.status, unknown.json["message"]) == (404, "snapshot 'nope' not found")
    refused = await client("DELETE", "/templates/base")
    assert (refused.status, refused.headers["Should-Retry"]) == (501, "false")
    assert refused.json["message"].startswith("'base' is a template, not a snapshot, and cannot be deleted: ")
    service.fail_with = InvalidRequestError("a sandbox is paused in it")
    assert (await client("DELETE", "/templates/a")).status == 400


async def test_templates_and_snapshots_are_listed_together() -> None:
    base = FakeTemplates().templates[0]
    first = replace(make_snapshot(1, name="mine:v1"), template_id="tmine")
    second = replace(make_snapshot(2, name="mine:default"), template_id="tmine", agent_version="0.6.8")
    latest = Template(
        "tmine", ("mine",), ("sha256:1",), 4, 512, 4096, snapshot_id=second.id, created_at=second.created_at
    )
    service = FakeService(taken=[first, make_snapshot(7), second])
    async with control_plane(service, FakeTemplates((base, latest))) as client:
        listed = (await client("GET", "/templates")).json
        details = (await client("GET", "/templates/mine")).json
        assert [build["status"] for build in (await client("GET", "/templates/base")).json["builds"]] == ["ready"]
    assert [(item["templateID"], item["isDefault"], item["buildCount"]) for item in listed] == [
        ("tbase", True, 0),
        ("tmine", False, 2),
    ]
    assert listed[1]["buildID"] == second.id
    assert listed[1]["aliases"] == ["mine"]
    assert listed[1]["names"] == ["mine:default", "mine:v1"]
    assert listed[1]["cpuCount"] == 4
    assert listed[1]["createdAt"] == "2026-01-02T03:05:05.678901Z"
    assert listed[1]["updatedAt"] == "2026-01-02T03:06:05.678901Z"
    assert [(made["buildID"], made["envdVersion"]) for made in details["builds"]] == [
        (second.id, "0.6.8"),
        (first.id, "0.6.7"),
    ]


async def test_disk_space(client: Client) -> None:
    assert (await client("GET", "/node/space")).json == {
        "layersBytes": 8,
        "garbageBytes": 7,
        "templatesBytes": 6,
        "snapshotsBytes": 5,
        "pausedBytes": 4,
        "disksBytes": 3,
        "freeBytes": 1,
    }
    collected = await client("POST", "/node/space/collect")
    assert (collected.status, collected.json) == (200, {"layers": 3, "bytes": 4096})


async def test_a_sandbox_that_is_captured_runs(client: Client, service: FakeService) -> None:
    service.add(make_sandbox("icaptured", state=SandboxState.CAPTURING))
    listed = await client("GET", "/v2/sandboxes?state=running")
    assert [(item["sandboxID"], item["state"]) for item in listed.json] == [("icaptured", "running")]
    assert listed.headers["X-Total-Running"] == "1"


@pytest.mark.parametrize(("body", "memory"), [({}, True), ({"memory": None}, True), ({"memory": False}, False)])
async def test_created_without_the_memory(
    client: Client, service: FakeService, body: dict[str, Any], memory: bool
) -> None:
    assert (await client("POST", "/v2/sandboxes", json={"templateID": "base", **body})).status == 201
    assert service.created[0].memory is memory
    assert (await client("POST", "/v2/sandboxes", json={"templateID": "base", "memory": "no"})).status == 400


async def test_the_description_has_the_new_calls(client: Client) -> None:
    paths = (await client("GET", "/openapi.json", key=None)).json["paths"]
    paths = {path.replace(":segment", ""): calls for path, calls in paths.items()}
    forked = paths["/sandboxes/{sandbox_id}/fork"]["post"]["responses"]["201"]["content"]
    assert forked["application/json"]["schema"]["items"]["$ref"].endswith("/ForkResult")
    assert "application/x-ndjson" in forked
    assert {
        "/sandboxes/{sandbox_id}/fork",
        "/sandboxes/{sandbox_id}/rollback",
        "/sandboxes/{sandbox_id}/snapshots",
        "/snapshots",
        "/snapshots/tree",
        "/snapshots/{snapshot_id}",
        "/node/space",
        "/node/space/collect",
    } <= set(paths)
