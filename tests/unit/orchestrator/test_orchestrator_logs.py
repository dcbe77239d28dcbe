"""Logs of a sandbox: ours and the guest's, in one order, and nothing that a guest writes breaks them."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from fakes import START, Server, wish
from hypothesis import given
from hypothesis import strategies as st

from agentenv.errors import StorageError
from agentenv.orchestrator.logbook import LEVELS, parse

BORN = datetime(2030, 1, 1, tzinfo=UTC)


def agent_line(seconds: float, message: str, level: str = "info", **fields: object) -> str:
    stamp = (START + timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")
    return json.dumps({"timestamp": stamp, "level": level, "logger": "envd", "message": message, **fields})


async def test_guest_and_own_events_in_order_of_time(server: Server) -> None:
    sandbox = await server.orchestrator.create(wish())
    server.world.vms[sandbox.id].console.write_text(
        "\r\n".join(
            [
                "[    0.500000] Linux version 6.12",
                agent_line(2, "listening", port=49983),
                "plain words of a program",
                "[    3.250000] eth0: link up",
                agent_line(4, "process ended", level="warning", pid=7),
                '{"half": "a line',
            ]
        )
    )
    entries = await server.orchestrator.logs(sandbox.id)
    seen = [((one.timestamp - START).total_seconds(), one.level, one.logger, one.message) for one in entries]
    assert seen == [
        (0, "info", "orchestrator", "sandbox start began"),
        (0.5, "info", "kernel", "Linux version 6.12"),
        (2, "info", "envd", "listening"),
        (2, "info", "kernel", "plain words of a program"),
        (3.25, "info", "kernel", "eth0: link up"),
        (4, "warn", "envd", "process ended"),
        (4, "info", "kernel", '{"half": "a line'),
    ]
    assert entries[2].fields == {"port": "49983"}


async def test_filters(server: Server) -> None:
    sandbox = await server.orchestrator.create(wish())
    lines = [agent_line(number, f"line {number}", level=LEVELS[number % 4]) for number in range(1, 41)]
    server.world.vms[sandbox.id].console.write_text("\n".join(lines))
    logs, at = server.orchestrator.logs, lambda seconds: START + timedelta(seconds=seconds)
    assert [one.message for one in await logs(sandbox.id, start=at(3), limit=2)] == ["line 3", "line 4"]
    assert [one.message for one in await logs(sandbox.id, end=at(30), limit=2, backward=True)] == ["line 30", "line 29"]
    assert {one.level for one in await logs(sandbox.id, level="warn")} == {"warn", "error"}
    assert [one.message for one in await logs(sandbox.id, search="line 17")] == ["line 17"]
    assert await logs(sandbox.id, start=at(41)) == []
    assert await logs(sandbox.id, limit=0) == []


async def test_console_that_does_not_exist_yet(server: Server) -> None:
    sandbox = await server.orchestrator.create(wish())
    assert [one.logger for one in await server.orchestrator.logs(sandbox.id)] == ["orchestrator"]


async def test_unreadable_log_is_an_error_not_an_empty_list(server: Server, tmp_path: Path) -> None:
    sandbox = await server.orchestrator.create(wish())
    server.world.vms[sandbox.id].console.mkdir()
    with pytest.raises(StorageError):
        await server.orchestrator.logs(sandbox.id)


async def test_log_that_cannot_be_written_stops_no_create(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentenv.orchestrator.logbook.FILE_NAME", "no/such/directory")
    sandbox = await server.orchestrator.create(wish())
    server.check([sandbox.id])


@given(st.lists(st.one_of(st.text(), st.sampled_from(["{}", '{"message": 1}', "[1e9]", '{"message":"x","level":{}}']))))
def test_anything_can_be_on_a_console(lines: list[str]) -> None:
    latest = BORN
    for entry in parse(lines, BORN, raw_logger="kernel"):
        assert entry.level in LEVELS
        assert entry.timestamp.tzinfo is not None
        assert "\x1b" not in entry.message.replace("\\x1b", "")
        latest = max(latest, entry.timestamp)
    assert latest >= BORN


@pytest.mark.parametrize(
    "line",
    [
        '{"message": "m", "timestamp": "not a time"}',
        '{"message": "m", "timestamp": 12}',
        '{"message": "m", "timestamp": "0001-01-01T00:00:00+23:59"}',
        '{"message": "m", "level": "shout", "logger": null}',
        '{"message": "m", "nested": {"a": [1]}}',
        "[" * 100_000,
        '{"a":' * 100_000,
        '{"message": "m", "n": ' + "9" * 10_000 + "}",
        "[999999999.999999] late",
    ],
)
def test_hostile_lines(line: str) -> None:
    (entry,) = parse([line], BORN, raw_logger="kernel")
    assert entry.level in LEVELS
    assert all(isinstance(value, str) for value in entry.fields.values())


def test_nanoseconds_are_understood() -> None:
    (entry,) = parse(['{"timestamp":"2030-01-01T00:00:01.123456789Z","message":"m"}'], BORN, raw_logger="kernel")
    assert entry.timestamp == BORN + timedelta(seconds=1, microseconds=123456)
