"""Lists: pages, order, filters (E2B contract, checklist 24-27) over HTTP."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import quote

import pytest
from api_fakes import NOW, Client, FakeService, make_sandbox

from agentenv.orchestrator.model import SandboxState

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("service")]


async def test_default_list_has_both_states_newest_first(client: Client, service: FakeService) -> None:
    for minute, (sandbox_id, state) in enumerate(
        [
            ("a", SandboxState.RUNNING),
            ("b", SandboxState.PAUSED),
            ("c", SandboxState.PAUSING),
            ("d", SandboxState.RUNNING),
        ]
    ):
        service.add(make_sandbox(sandbox_id, state=state, started_at=NOW + timedelta(minutes=minute)))

    async def ids(query: str) -> list[str]:
        answer = await client("GET", f"/v2/sandboxes{query}")
        assert answer.status == 200
        return [item["sandboxID"] for item in answer.json]

    assert await ids("") == ["d", "c", "b", "a"]
    assert await ids("?order=asc") == ["a", "b", "c", "d"]
    assert await ids("?state=running") == ["d", "a"]
    assert await ids("?state=paused") == ["c", "b"]
    assert await ids("?state=running,paused") == ["d", "c", "b", "a"]
    assert await ids("?state=running&state=paused") == ["d", "c", "b", "a"]
    assert await ids("?startedAfter=2026-01-02T03:06:05.678901Z") == ["d", "c"]
    assert await ids("?startedAfter=2026-01-02T05:06:05.678901%2B02:00") == ["d", "c"]
    assert await ids("?startedAfter=2026-01-02T05:06:05.678901+02:00") == ["d", "c"]
    assert await ids("?startedAfter=2026-01-02T03:06:05.678901999Z") == ["d", "c"]
    states = {item["state"] for item in (await client("GET", "/v2/sandboxes")).json}
    assert states == {"running", "paused"}
    assert (await client("GET", "/v2/sandboxes?limit=1")).headers["X-Total-Running"] == "2"
    assert "X-Total-Running" not in (await client("GET", "/v2/sandboxes?state=paused")).headers
    legacy = await client("GET", "/sandboxes")
    assert [item["sandboxID"] for item in legacy.json] == ["d", "a"]


async def test_template_filter(client: Client, service: FakeService) -> None:
    service.add(make_sandbox("a", template="base"))
    service.add(make_sandbox("b", template="other"))
    for query, expected in (("base", ["a"]), ("tother", ["b"]), ("nope", []), ("", ["a", "b"])):
        answer = await client("GET", f"/v2/sandboxes?template={query}")
        assert [item["sandboxID"] for item in answer.json] == expected
    assert (await client("GET", "/v2/sandboxes?template=base:v1")).status == 400


async def test_paging_over_http(client: Client, service: FakeService) -> None:
    for number in range(5):
        service.add(make_sandbox(f"s{number}", started_at=NOW + timedelta(seconds=number // 2)))
    seen: list[str] = []
    path = "/v2/sandboxes?limit=1"
    for _ in range(5):
        answer = await client("GET", path)
        seen += [item["sandboxID"] for item in answer.json]
        if "X-Next-Token" in answer.headers:
            path = f"/v2/sandboxes?limit=1&nextToken={quote(answer.headers['X-Next-Token'])}"
    assert seen == ["s4", "s2", "s3", "s0", "s1"]
    assert "X-Next-Token" not in answer.headers


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=101",
        "limit=x",
        "limit=1.5",
        "nextToken=garbage",
        "nextToken=%ff%fe",
        "nextToken=MTIzX19h",
        "nextToken=" + "9" * 5000,
        "order=sideways",
        "state=dead",
        "startedAfter=yesterday",
        "startedAfter=2026-01-02",
        "startedAfter=2026-13-02T00:00:00Z",
        "startedAfter=0001-01-01T00:00:00%2B14:00",
        "metadata=novalue",
        "metadata==x",
    ],
)
async def test_bad_queries(client: Client, query: str) -> None:
    answer = await client("GET", f"/v2/sandboxes?{query}")
    assert (answer.status, answer.json["code"]) == (400, 400)


async def test_a_token_of_the_other_order_is_refused(client: Client, service: FakeService) -> None:
    for number in range(3):
        service.add(make_sandbox(f"s{number}"))
    token = (await client("GET", "/v2/sandboxes?limit=1")).headers["X-Next-Token"]
    assert (await client("GET", f"/v2/sandboxes?order=asc&nextToken={quote(token)}")).status == 400


async def test_metadata_filter_as_seen_on_the_wire(client: Client, service: FakeService) -> None:
    odd = {"a b": "c&d=é", "k": "v", "100%": "+"}
    service.add(make_sandbox("match", metadata=odd))
    service.add(make_sandbox("half", metadata={"k": "v"}))
    service.add(make_sandbox("none"))

    async def ids(path: str) -> Any:
        return sorted(item["sandboxID"] for item in (await client("GET", path)).json)

    for route in ("/v2/sandboxes", "/sandboxes"):
        wire = "metadata=a%252520b%3Dc%252526d%25253D%2525C3%2525A9%26k%3Dv"
        assert await ids(f"{route}?{wire}") == ["match"]
        assert await ids(f"{route}?metadata=k%3Dv") == ["half", "match"]
        assert await ids(f"{route}?metadata=k%3Dw") == []
        assert await ids(f"{route}?metadata=") == ["half", "match", "none"]
