"""Metrics and logs (E2B contract, checklist 32, 33)."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
from api_fakes import NOW, Client, FakeService, make_sandbox

from agentenv.orchestrator.model import LogEntry, MetricSample

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("service")]

FIELDS = {
    "timestamp",
    "timestampUnix",
    "cpuCount",
    "cpuUsedPct",
    "memUsed",
    "memTotal",
    "memCache",
    "diskUsed",
    "diskTotal",
}
UNIX = int(NOW.timestamp())


def fill(service: FakeService) -> str:
    sandbox = service.add(make_sandbox())
    for step in range(3):
        service.samples.append(MetricSample(NOW + timedelta(seconds=5 * step), 2, 12.5, 1, 2, 3, 4, 5))
        service.entries.append(
            LogEntry(NOW + timedelta(seconds=step), "info", "envd", f"line {step} ü", {"pid": "7", "level": "fake"})
        )
    return sandbox.id


async def test_metrics_have_all_fields_and_honour_the_range(client: Client, service: FakeService) -> None:
    sandbox_id = fill(service)
    answer = await client("GET", f"/sandboxes/{sandbox_id}/metrics")
    assert answer.status == 200
    assert all(set(item) == FIELDS for item in answer.json)
    assert [item["timestampUnix"] for item in answer.json] == [UNIX, UNIX + 5, UNIX + 10]
    assert answer.json[0]["timestamp"] == "2026-01-02T03:04:05.678901Z"
    assert isinstance(answer.json[0]["cpuUsedPct"], float)
    ranged = await client("GET", f"/sandboxes/{sandbox_id}/metrics?start={UNIX + 1}&end={UNIX + 6}")
    assert [item["timestampUnix"] for item in ranged.json] == [UNIX + 5]


async def test_metrics_are_empty_at_first(client: Client, service: FakeService) -> None:
    sandbox = service.add(make_sandbox())
    answer = await client("GET", f"/sandboxes/{sandbox.id}/metrics")
    assert (answer.status, answer.json) == (200, [])


@pytest.mark.parametrize(
    "query", ["start=x", "end=nan", "start=inf", "start=5&end=4", "start=1e300", "end=-1e300", "start=99999999999999"]
)
async def test_bad_ranges(client: Client, service: FakeService, query: str) -> None:
    answer = await client("GET", f"/sandboxes/{fill(service)}/metrics?{query}")
    assert (answer.status, answer.json["code"]) == (400, 400)


async def test_latest_metrics_of_several(client: Client, service: FakeService) -> None:
    sandbox_id = fill(service)
    answer = await client("GET", f"/sandboxes/metrics?sandbox_ids={sandbox_id},iunknown")
    assert answer.status == 200
    assert list(answer.json["sandboxes"]) == [sandbox_id]
    assert set(answer.json["sandboxes"][sandbox_id]) == FIELDS
    assert answer.json["sandboxes"][sandbox_id]["timestampUnix"] == UNIX + 10
    many = ",".join(f"i{number}" for number in range(101))
    for bad in ("", "?sandbox_ids=", "?sandbox_ids=A%2FB", f"?sandbox_ids={many}"):
        assert (await client("GET", f"/sandboxes/metrics{bad}")).status == 400


async def test_log_lines_are_what_the_cli_parses(client: Client, service: FakeService) -> None:
    sandbox_id = fill(service)
    answer = await client("GET", f"/sandboxes/{sandbox_id}/logs?start={UNIX * 1000 + 1000}&limit=1")
    assert answer.status == 200
    assert set(answer.json) == {"logs", "logEntries"}
    [line] = answer.json["logs"]
    assert json.loads(line["line"]) == {
        "timestamp": "2026-01-02T03:04:06.678901Z",
        "level": "info",
        "logger": "envd",
        "message": "line 1 ü",
        "pid": "7",
    }
    [entry] = answer.json["logEntries"]
    assert (entry["level"], entry["message"], entry["fields"]["pid"]) == ("info", "line 1 ü", "7")
    empty = await client("GET", f"/sandboxes/{sandbox_id}/logs?limit=0")
    assert empty.json == {"logs": [], "logEntries": []}


async def test_log_pages_read_backward_by_default(client: Client, service: FakeService) -> None:
    sandbox_id = fill(service)
    answer = await client("GET", f"/v2/sandboxes/{sandbox_id}/logs?cursor={UNIX * 1000}&level=warn&search=x&limit=5")
    assert answer.status == 200
    options = service.calls[-1][1]
    assert (options["start"], options["end"], options["backward"]) == (None, NOW.replace(microsecond=0), True)
    assert (options["limit"], options["level"], options["search"]) == (5, "warn", "x")
    await client("GET", f"/v2/sandboxes/{sandbox_id}/logs?cursor={UNIX * 1000}&direction=forward")
    options = service.calls[-1][1]
    assert (options["start"], options["end"], options["backward"]) == (NOW.replace(microsecond=0), None, False)


@pytest.mark.parametrize(
    "query", ["limit=1001", "limit=-1", "direction=up", "level=loud", f"search={'x' * 257}", "cursor=x", "cursor=1e30"]
)
async def test_bad_log_queries(client: Client, service: FakeService, query: str) -> None:
    answer = await client("GET", f"/v2/sandboxes/{fill(service)}/logs?{query}")
    assert (answer.status, answer.json["code"]) == (400, 400)
