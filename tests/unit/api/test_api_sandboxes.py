"""Sandbox routes: success codes, bodies and refusals (E2B contract, checklist 3-5, 7-11, 13-17, 20, 45, 46)."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from api_fakes import DOMAIN, NOW, Client, FakeService, make_sandbox

from agentenv.errors import CapacityError, SandboxStartError, TooManyRequestsError
from agentenv.orchestrator.model import CreateRequest, NetworkOptions, OnTimeout, PauseMode, SandboxState

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("service")]


async def test_create_v2_has_the_required_fields_and_300_seconds(client: Client, service: FakeService) -> None:
    answer = await client("POST", "/v2/sandboxes", json={"templateID": "base", "metadata": {}, "envVars": {}})
    assert answer.status == 201
    assert {"templateID", "sandboxID", "clientID", "envdVersion"} <= set(answer.json)
    assert all(isinstance(answer.json[name], str) and answer.json[name] for name in ("clientID", "envdAccessToken"))
    assert answer.json["domain"] == DOMAIN
    assert "trafficAccessToken" not in answer.json
    assert service.created[0].timeout_s == 300
    assert not service.created[0].lifecycle_given


async def test_create_legacy_takes_what_old_sdks_send(client: Client, service: FakeService) -> None:
    body = {"templateID": "base", "timeout": 77, "secure": True, "autoPause": False, "allow_internet_access": True}
    assert (await client("POST", "/sandboxes", json=body)).status == 201
    assert (await client("POST", "/sandboxes", json={"templateID": "base"})).status == 201
    assert [request.timeout_s for request in service.created] == [77, 15]
    assert service.created[0].allow_internet_access is True
    assert service.created[0].lifecycle_given


async def test_create_passes_everything_on(client: Client, service: FakeService) -> None:
    body = {
        "templateID": " Base:default ",
        "timeout": 3600,
        "metadata": {"k": "v", "ü &=%": "é"},
        "envVars": {"A": "1"},
        "allow_internet_access": False,
        "network": {
            "allowPublicTraffic": False,
            "allowOut": ["1.2.3.4", "5.6.0.0/16"],
            "denyOut": ["0.0.0.0/0"],
            "maskRequestHost": "localhost:${PORT}",
            "httpsPorts": [443, 8443],
            "dnsServers": [],
            "egressProxy": None,
            "rules": {},
        },
        "someFutureField": [1, {"x": None}],
        "mcp": None,
        "volumeMounts": [],
    }
    answer = await client("POST", "/v2/sandboxes", json=body)
    assert answer.status == 201
    assert answer.json["trafficAccessToken"]
    assert service.created == [
        CreateRequest(
            template="base",
            timeout_s=3600,
            metadata={"k": "v", "ü &=%": "é"},
            env_vars={"A": "1"},
            on_timeout=OnTimeout.KILL,
            allow_internet_access=False,
            network=NetworkOptions(
                allow_public_traffic=False,
                allow_out=("1.2.3.4", "5.6.0.0/16"),
                deny_out=("0.0.0.0/0",),
                mask_request_host="localhost:${PORT}",
                https_ports=(443, 8443),
            ),
        )
    ]


BAD_CREATES: list[tuple[dict[str, Any], int]] = [
    ({}, 400),
    ({"templateID": None}, 400),
    ({"templateID": 7}, 400),
    ({"templateID": ""}, 400),
    ({"templateID": "../etc"}, 400),
    ({"templateID": "a/b/c"}, 400),
    ({"templateID": "nope"}, 404),
    ({"templateID": "base:v7"}, 404),
    ({"templateID": "base", "timeout": 0}, 400),
    ({"templateID": "base", "timeout": -1}, 400),
    ({"templateID": "base", "timeout": 3601}, 400),
    ({"templateID": "base", "timeout": 2**63}, 400),
    ({"templateID": "base", "timeout": "300"}, 400),
    ({"templateID": "base", "timeout": 1.5}, 400),
    ({"templateID": "base", "timeout": True}, 400),
    ({"templateID": "base", "metadata": {"k": 1}}, 400),
    ({"templateID": "base", "metadata": []}, 400),
    ({"templateID": "base", "envVars": {"A=B": "x"}}, 400),
    ({"templateID": "base", "envVars": {"": "x"}}, 400),
    ({"templateID": "base", "envVars": {"A": "x\0y"}}, 400),
    ({"templateID": "base", "autoPauseMemory": False}, 400),
    ({"templateID": "base", "autoPause": True, "autoPauseMemory": False, "autoResume": {"enabled": True}}, 400),
    ({"templateID": "base", "autoResume": {"enabled": True}}, 400),
    ({"templateID": "base", "mcp": {"x": {}}}, 501),
    ({"templateID": "base", "mcp": 5}, 400),
    ({"templateID": "base", "iam": {"tokens": {"a": {"audience": "x", "tokenType": "JWT-SVID"}}}}, 501),
    ({"templateID": "base", "volumeMounts": [{"name": "v", "path": "/v"}]}, 501),
    ({"templateID": "base", "volumeMounts": [{"name": "v"}]}, 400),
]

BAD_NETWORKS: list[tuple[dict[str, Any], int]] = [
    ({"allowOut": ["example.com"]}, 400),
    ({"allowOut": ["example.com"], "denyOut": ["10.0.0.0/8"]}, 400),
    ({"allowOut": ["example.com"], "denyOut": ["0.0.0.0/0"]}, 501),
    ({"allowOut": ["*.example.com"], "denyOut": ["0.0.0.0/0"]}, 501),
    ({"allowOut": ["*"], "denyOut": ["0.0.0.0/0"]}, 400),
    ({"allowOut": ["no good"], "denyOut": ["0.0.0.0/0"]}, 400),
    ({"allowOut": ["1.2.3.444"], "denyOut": ["0.0.0.0/0"]}, 400),
    ({"allowOut": ["1.2.3.4/33"]}, 400),
    ({"denyOut": ["example.com"]}, 400),
    ({"denyOut": ["::/0"]}, 400),
    ({"denyOut": "0.0.0.0/0"}, 400),
    ({"httpsPorts": [49983]}, 400),
    ({"httpsPorts": [0]}, 400),
    ({"httpsPorts": [65536]}, 400),
    ({"maskRequestHost": "a\r\nX: y"}, 400),
    ({"maskRequestHost": ""}, 400),
    ({"dnsServers": ["8.8.8.8"]}, 501),
    ({"dnsServers": ["dns.google"]}, 400),
    ({"dnsServers": ["8.8.8.8"] * 11}, 400),
    ({"egressProxy": {"address": "x:1"}}, 501),
    ({"rules": {"example.com": []}}, 501),
]


@pytest.mark.parametrize(
    ("body", "status"),
    BAD_CREATES + [({"templateID": "base", "network": network}, status) for network, status in BAD_NETWORKS],
)
@pytest.mark.parametrize("path", ["/v2/sandboxes", "/sandboxes"])
async def test_bad_creates_are_refused(
    client: Client, service: FakeService, path: str, body: dict[str, Any], status: int
) -> None:
    answer = await client("POST", path, json=body)
    assert (answer.status, answer.json["code"]) == (status, status)
    assert answer.json["message"]
    assert not service.sandboxes
    if status == 501:
        assert answer.headers["Should-Retry"] == "false"


async def test_a_domain_is_allowed_where_the_internet_is_off(client: Client) -> None:
    body = {"templateID": "base", "allow_internet_access": False, "network": {"allowOut": ["example.com"]}}
    assert (await client("POST", "/v2/sandboxes", json=body)).status == 501  # valid, only not supported


async def test_unknown_template_has_the_documented_message(client: Client) -> None:
    answer = await client("POST", "/v2/sandboxes", json={"templateID": "team/nope"})
    assert answer.json == {"code": 404, "message": "template 'team/nope' not found"}


@pytest.mark.parametrize(
    ("error", "status", "retry_after", "should_retry", "error_code"),
    [
        (TooManyRequestsError("busy"), 429, "1", None, None),
        (CapacityError("no room"), 503, "2", None, "sandbox_capacity_unavailable"),
        (SandboxStartError("it broke"), 500, None, "false", "sandbox_create_failed"),
    ],
)
async def test_errors_of_the_service_keep_their_headers(
    client: Client,
    service: FakeService,
    error: Exception,
    status: int,
    retry_after: str | None,
    should_retry: str | None,
    error_code: str | None,
) -> None:
    service.fail_with = error
    answer = await client("POST", "/v2/sandboxes", json={"templateID": "base"})
    assert (answer.status, answer.json["code"]) == (status, status)
    assert answer.headers.get("Retry-After") == retry_after
    assert answer.headers.get("Should-Retry") == should_retry
    assert answer.json.get("error_code") == error_code


async def test_idempotency_key_replays_and_refuses_another_body(client: Client, service: FakeService) -> None:
    headers = {"Idempotency-Key": "abc-123"}
    first = await client("POST", "/v2/sandboxes", headers=headers, json={"templateID": "base", "metadata": {"a": "1"}})
    text = '{ "unknown": 1, "timeout": 300, "metadata": {"a": "1"}, "envVars": null, "templateID": "base"}'
    again = await client("POST", "/v2/sandboxes", headers=headers, data=text)
    other = await client("POST", "/v2/sandboxes", headers=headers, json={"templateID": "base", "metadata": {"a": "2"}})
    assert first.status == again.status == 201
    assert first.json == again.json
    assert other.status == 422
    assert other.json["code"] == 422
    assert other.json["error_code"] == "idempotency_request_mismatch"
    assert len(service.created) == 1


@pytest.mark.parametrize("key", ["", "UPPER", "a b", "x" * 256, "ünicode"])
async def test_bad_idempotency_keys(client: Client, key: str) -> None:
    answer = await client("POST", "/v2/sandboxes", headers={"Idempotency-Key": key}, json={"templateID": "base"})
    assert (answer.status, answer.json["code"]) == (400, 400)


async def test_connect_running_is_200_and_never_shortens(client: Client, service: FakeService) -> None:
    sandbox = service.add(make_sandbox(started_at=datetime.now(UTC)))
    answer = await client("POST", f"/v2/sandboxes/{sandbox.id}/connect", json={"timeout": 1})
    assert answer.status == 200
    assert answer.json["sandboxID"] == sandbox.id
    assert answer.json["envdAccessToken"] == sandbox.envd_access_token
    assert service.get(sandbox.id).end_at == sandbox.end_at
    assert (await client("POST", f"/sandboxes/{sandbox.id}/connect", json={"timeout": 9})).status == 200


@pytest.mark.parametrize("body", [None, b"{}", b"null", b'{"timeout": null}'])
async def test_connect_without_a_timeout_gives_300_seconds(
    client: Client, service: FakeService, body: bytes | None
) -> None:
    sandbox = service.add(make_sandbox(started_at=NOW))
    before = datetime.now(UTC)
    answer = await client("POST", f"/v2/sandboxes/{sandbox.id}/connect", data=body)
    assert answer.status == 200
    left = service.get(sandbox.id).end_at - before
    assert timedelta(seconds=300) <= left < timedelta(seconds=360)


async def test_connect_paused_is_201(client: Client, service: FakeService) -> None:
    sandbox = service.add(make_sandbox(state=SandboxState.PAUSED))
    answer = await client("POST", f"/v2/sandboxes/{sandbox.id}/connect", json={})
    assert answer.status == 201
    assert answer.json["envdAccessToken"] == sandbox.envd_access_token


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v2/sandboxes/{}/connect", {"timeout": 0}),
        ("/v2/sandboxes/{}/connect", {"timeout": -5}),
        ("/v2/sandboxes/{}/connect", {"timeout": 3601}),
        ("/sandboxes/{}/connect", {}),
        ("/sandboxes/{}/connect", None),
        ("/sandboxes/{}/timeout", {}),
        ("/sandboxes/{}/timeout", {"timeout": "1"}),
        ("/sandboxes/{}/timeout", {"timeout": 2**40}),
        ("/sandboxes/{}/refreshes", {"duration": "x"}),
    ],
)
async def test_bad_timeouts(client: Client, service: FakeService, path: str, body: Any) -> None:
    sandbox = service.add(make_sandbox())
    answer = await client("POST", path.format(sandbox.id), json=body)
    assert (answer.status, answer.json["code"]) == (400, 400)


UNKNOWN_CALLS = [
    ("GET", "/sandboxes/{}", None),
    ("DELETE", "/sandboxes/{}", None),
    ("POST", "/v2/sandboxes/{}/connect", {}),
    ("POST", "/sandboxes/{}/connect", {"timeout": 5}),
    ("POST", "/sandboxes/{}/timeout", {"timeout": 5}),
    ("POST", "/sandboxes/{}/refreshes", {"duration": 50}),
    ("GET", "/sandboxes/{}/metrics", None),
    ("GET", "/sandboxes/{}/logs", None),
    ("GET", "/v2/sandboxes/{}/logs", None),
    ("PUT", "/sandboxes/{}/network", {}),
    ("POST", "/sandboxes/{}/pause", {}),
    ("POST", "/sandboxes/{}/fork", {}),
]


@pytest.mark.parametrize(("method", "path", "body"), UNKNOWN_CALLS)
async def test_unknown_sandboxes_are_404_and_bad_ids_400(client: Client, method: str, path: str, body: Any) -> None:
    unknown = await client(method, path.format("iunknown"), json=body)
    assert unknown.status == 404
    assert unknown.json == {
        "code": 404,
        "message": "Sandbox \"iunknown\" doesn't exist or you don't have access to it",
    }
    for bad in ("..%2Fx", "UPPER", "a" * 58, "a-b-c", "%00", "%ff", "i%20x", "%2e%2e"):
        answer = await client(method, path.format(bad), json=body)
        assert (answer.status, answer.json) == (400, {"code": 400, "message": "Invalid sandbox ID"}), bad


async def test_the_client_id_suffix_is_dropped(client: Client, service: FakeService) -> None:
    sandbox = service.add(make_sandbox())
    answer = await client("GET", f"/sandboxes/{sandbox.id}-agentenv")
    assert (answer.status, answer.json["sandboxID"]) == (200, sandbox.id)


async def test_kill_twice(client: Client, service: FakeService) -> None:
    sandbox = service.add(make_sandbox())
    first = await client("DELETE", f"/sandboxes/{sandbox.id}")
    assert (first.status, first.raw) == (204, b"")
    assert (await client("DELETE", f"/sandboxes/{sandbox.id}")).status == 404
    assert (await client("GET", f"/sandboxes/{sandbox.id}")).status == 404


async def test_kill_in_a_transition_is_a_conflict(client: Client, service: FakeService) -> None:
    sandbox = service.add(make_sandbox(state=SandboxState.STARTING))
    answer = await client("DELETE", f"/sandboxes/{sandbox.id}")
    assert (answer.status, answer.json["code"]) == (409, 409)


@pytest.mark.parametrize("timeout", [0, -10, 30, 2**31 - 1])
async def test_set_timeout(client: Client, service: FakeService, timeout: int) -> None:
    sandbox = service.add(make_sandbox())
    before = datetime.now(UTC)
    answer = await client("POST", f"/sandboxes/{sandbox.id}/timeout", json={"timeout": timeout})
    assert (answer.status, answer.raw) == (204, b"")
    assert service.get(sandbox.id).end_at >= before + timedelta(seconds=timeout)
    paused = service.add(make_sandbox("ipaused", state=SandboxState.PAUSED))
    assert (await client("POST", f"/sandboxes/{paused.id}/timeout", json={"timeout": 5})).status == 404


@pytest.mark.parametrize(
    ("body", "duration"),
    [
        (None, 15),
        ({}, 15),
        ({"duration": 3}, 15),
        ({"duration": -3}, 15),
        ({"duration": 99}, 99),
        ({"duration": 9999}, 3600),
    ],
)
async def test_refresh(client: Client, service: FakeService, body: Any, duration: int) -> None:
    sandbox = service.add(make_sandbox())
    assert (await client("POST", f"/sandboxes/{sandbox.id}/refreshes", json=body)).status == 204
    assert service.calls == [("refresh", duration)]


async def test_info_of_a_plain_sandbox_leaves_out_what_was_never_set(client: Client, service: FakeService) -> None:
    sandbox = service.add(make_sandbox(metadata={"k": "v"}))
    answer = await client("GET", f"/sandboxes/{sandbox.id}")
    assert answer.status == 200
    assert answer.json == {
        "templateID": "tbase",
        "sandboxID": sandbox.id,
        "clientID": "agentenv",
        "alias": "base",
        "startedAt": "2026-01-02T03:04:05.678901Z",
        "endAt": "2026-01-02T03:09:05.678901Z",
        "cpuCount": 2,
        "memoryMB": 512,
        "diskSizeMB": 4096,
        "state": "running",
        "envdVersion": "0.6.7",
        "metadata": {"k": "v"},
        "envdAccessToken": sandbox.envd_access_token,
        "domain": DOMAIN,
    }


async def test_info_shows_what_was_set(client: Client, service: FakeService) -> None:
    request = CreateRequest(
        template="base",
        timeout_s=60,
        lifecycle_given=True,
        allow_internet_access=False,
        network=NetworkOptions(allow_public_traffic=True, deny_out=("1.0.0.0/8",)),
    )
    sandbox = service.add(
        replace(
            make_sandbox(request=request, state=SandboxState.PAUSED),
            pause_mode=PauseMode.FULL,
            agent_unresponsive_at_pause=True,
        )
    )
    info = (await client("GET", f"/sandboxes/{sandbox.id}")).json
    assert info["lifecycle"] == {"onTimeout": "kill", "autoResume": False}
    assert info["allowInternetAccess"] is False
    assert info["network"] == {"allowPublicTraffic": True, "denyOut": ["1.0.0.0/8"]}
    assert (info["state"], info["pauseMode"]) == ("paused", "full")
    assert info["envdUnresponsiveAtPause"] is True


@pytest.mark.parametrize("state", [SandboxState.STARTING, SandboxState.KILLING])
async def test_sandboxes_in_transition_are_hidden(client: Client, service: FakeService, state: SandboxState) -> None:
    sandbox = service.add(make_sandbox(state=state))
    assert (await client("GET", f"/sandboxes/{sandbox.id}")).status == 404
    assert (await client("GET", "/v2/sandboxes")).json == []


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (None, {"memory": True, "require_healthy": False}),
        ({}, {"memory": True, "require_healthy": False}),
        ({"memory": None, "requireHealthyGuest": None}, {"memory": True, "require_healthy": False}),
        ({"memory": False, "requireHealthyGuest": True}, {"memory": False, "require_healthy": True}),
    ],
)
async def test_pause_is_204_and_409_the_second_time(
    client: Client, service: FakeService, body: object, options: dict[str, bool]
) -> None:
    sandbox = service.add(make_sandbox())
    for expected in (204, 409):
        assert (await client("POST", f"/sandboxes/{sandbox.id}/pause", json=body)).status == expected
    assert service.calls == [("pause", options)]
    assert (await client("GET", f"/sandboxes/{sandbox.id}")).json["state"] == "paused"


async def test_legacy_resume_is_201_and_409_when_it_runs(client: Client, service: FakeService) -> None:
    sandbox = service.add(make_sandbox(state=SandboxState.PAUSED))
    answer = await client("POST", f"/sandboxes/{sandbox.id}/resume")
    assert (answer.status, answer.json["sandboxID"]) == (201, sandbox.id)
    assert service.calls == [("resume", (15, {"auto_pause": None, "memory": None}))]
    assert (await client("POST", f"/sandboxes/{sandbox.id}/resume", json={"timeout": 9})).status == 409
    assert (await client("POST", f"/sandboxes/{sandbox.id}/resume", json={"timeout": 0})).status == 400


async def test_connect_passes_what_becomes_of_the_memory(client: Client, service: FakeService) -> None:
    sandbox = service.add(make_sandbox(state=SandboxState.PAUSED))
    for body in ({}, {"memory": False}):
        await client("POST", f"/v2/sandboxes/{sandbox.id}/connect", json=body)
    await client("POST", f"/sandboxes/{sandbox.id}/connect", json={"timeout": 5, "memory": False})
    assert [memory for name, memory in service.calls if name == "connect"] == [None, False, False]


async def test_lifecycle_of_a_create(client: Client, service: FakeService) -> None:
    body = {"templateID": "base", "autoPause": True, "autoPauseMemory": False}
    assert (await client("POST", "/v2/sandboxes", json=body)).status == 201
    body = {"templateID": "base", "autoPause": True, "autoResume": {"enabled": True}}
    assert (await client("POST", "/v2/sandboxes", json=body)).status == 201
    seen = [(one.on_timeout, one.auto_pause_memory, one.auto_resume) for one in service.created]
    assert seen == [(OnTimeout.PAUSE, False, False), (OnTimeout.PAUSE, True, True)]
