"""Whatever comes in, the answer is JSON whose `code` is the status (E2B contract, checklist 1, 2, 42, 46)."""

from __future__ import annotations

import asyncio
import json
import re
from email.utils import parsedate_to_datetime
from typing import Any

import pytest
from api_fakes import KEY, Client, FakeService, make_sandbox
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentenv.api.unsupported import _FEATURES
from agentenv.ids import new_uuid

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("service")]

LIMIT = 1024 * 1024
REAL_ROUTES = [
    ("POST", "/v2/sandboxes"),
    ("POST", "/sandboxes"),
    ("GET", "/v2/sandboxes"),
    ("GET", "/sandboxes"),
    ("GET", "/sandboxes/metrics"),
    ("GET", "/sandboxes/ix"),
    ("DELETE", "/sandboxes/ix"),
    ("POST", "/sandboxes/ix/timeout"),
    ("POST", "/sandboxes/ix/refreshes"),
    ("POST", "/sandboxes/ix/connect"),
    ("POST", "/v2/sandboxes/ix/connect"),
    ("GET", "/sandboxes/ix/metrics"),
    ("GET", "/sandboxes/ix/logs"),
    ("GET", "/v2/sandboxes/ix/logs"),
    ("GET", "/templates"),
    ("GET", "/templates/x"),
    ("GET", "/templates/aliases/x"),
    ("DELETE", "/templates/x"),
    ("POST", "/sandboxes/ix/snapshots"),
    ("POST", "/sandboxes/ix/fork"),
    ("POST", "/sandboxes/ix/rollback"),
    ("GET", "/snapshots"),
    ("GET", "/snapshots/tree"),
    ("GET", "/snapshots/x"),
    ("GET", "/node/space"),
    ("POST", "/node/space/collect"),
]
UNSUPPORTED = [
    (method, re.sub(r"\{(\w+):segment\}", r"\1", path), feature)
    for feature, routes in _FEATURES.items()
    for method, path in routes
]


def assert_error(answer: Any, status: int) -> None:
    assert answer.status == status, answer.raw
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json["code"] == status
    assert isinstance(answer.json["message"], str)
    assert answer.json["message"]
    assert set(answer.json) <= {"code", "message", "error_code"}


@pytest.mark.parametrize(("method", "path"), [*REAL_ROUTES, *((m, p) for m, p, _ in UNSUPPORTED), ("GET", "/nowhere")])
async def test_every_route_needs_the_key(client: Client, method: str, path: str) -> None:
    assert_error(await client(method, path, key=None), 401)
    assert_error(await client(method, path, key=KEY[:-1]), 401)
    assert_error(await client(method, path, key="", headers={"Authorization": f"Bearer {KEY}x"}), 401)


async def test_ways_to_present_the_key(client: Client) -> None:
    assert (await client("GET", "/v2/sandboxes")).status == 200
    for value in (f"Bearer {KEY}", f"bearer  {KEY}"):
        assert (await client("GET", "/v2/sandboxes", key=None, headers={"Authorization": value})).status == 200
    for value in (f"Basic {KEY}", KEY, "Bearer", "Bearer \xff\xfe"):
        assert_error(await client("GET", "/v2/sandboxes", key=None, headers={"Authorization": value}), 401)


async def test_health_and_the_description_are_public(client: Client) -> None:
    answer = await client("GET", "/health", key=None)
    assert (answer.status, answer.json["status"]) == (200, "ok")
    assert (await client("HEAD", "/health", key=None)).status == 200
    assert (await client("GET", "/docs", key=None)).status == 200
    schema = (await client("GET", "/openapi.json", key=None)).json
    assert "/v2/sandboxes" in schema["paths"]
    assert "CreateBody" in schema["components"]["schemas"]


@pytest.mark.parametrize(("method", "path", "feature"), UNSUPPORTED)
async def test_what_is_not_offered_says_so(
    client: Client, service: FakeService, method: str, path: str, feature: str
) -> None:
    sandbox = service.add(make_sandbox())
    answer = await client(method, path.replace("sandbox_id", sandbox.id), data=b"\x00not json")
    assert_error(answer, 501)
    assert answer.headers["Should-Retry"] == "false"
    assert feature in answer.json["message"]


@pytest.mark.parametrize(
    "path", ["/", "/nowhere", "/sandboxes/", "/v2/sandboxes/ix/", "//sandboxes", "/v2", "/%2Fsandboxes"]
)
async def test_unknown_paths(client: Client, path: str) -> None:
    assert_error(await client("GET", path), 404)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("PUT", "/sandboxes", {"GET", "POST"}),
        ("PATCH", "/sandboxes/ix", {"GET", "DELETE"}),
        ("GET", "/sandboxes/ix/pause", {"POST"}),
        ("DELETE", "/health", {"GET", "HEAD"}),
    ],
)
async def test_wrong_methods(client: Client, method: str, path: str, allowed: set[str]) -> None:
    answer = await client(method, path)
    assert_error(answer, 405)
    assert set(answer.headers["Allow"].split(", ")) == allowed


BODY_ROUTES = [
    "/v2/sandboxes",
    "/sandboxes",
    "/sandboxes/ix/timeout",
    "/sandboxes/ix/connect",
    "/v2/sandboxes/ix/connect",
    "/sandboxes/ix/snapshots",
    "/sandboxes/ix/fork",
    "/sandboxes/ix/rollback",
]
MAY_BE_EMPTY = ("/v2/sandboxes/ix/connect", "/sandboxes/ix/snapshots", "/sandboxes/ix/fork")
BAD_BODIES = {
    "nothing": b"",
    "truncated": b'{"templateID": "base", "time',
    "no json": b"templateID=base",
    "list": b"[]",
    "string": b'"base"',
    "number": b"1",
    "null": b"null",
    "trailing": b'{"templateID": "base", "timeout": 5} x',
    "invalid UTF-8": b'{"templateID": "base\xff", "timeout": 5}',
    "UTF-16": '{"templateID": "base", "timeout": 5}'.encode("utf-16"),
    "byte order mark": b'\xef\xbb\xbf{"templateID": "base", "timeout": 5}',
    "NaN": b'{"templateID": "base", "timeout": NaN}',
    "infinity": b'{"templateID": "base", "timeout": -Infinity}',
    "too large a float": b'{"templateID": "base", "timeout": 1e999, "name": 1e999}',
    "long integer": b'{"templateID": "base", "timeout": ' + b"9" * 6000 + b"}",
    "deep list": b'{"templateID": "base", "timeout": ' + b"[" * 200_000,
    "deep object": b'{"a":' * 100_000,
    "surrogate": b'{"templateID": "\\ud800", "timeout": 5, "metadata": {"a": "\\udfff"}}',
    "surrogate in an ignored field": b'{"templateID": "base", "timeout": 5, "x": ["\\ud800"]}',
    "NUL": b"\x00",
}


@pytest.mark.parametrize("path", BODY_ROUTES)
@pytest.mark.parametrize("name", BAD_BODIES)
async def test_bad_bodies(client: Client, service: FakeService, path: str, name: str) -> None:
    if path in MAY_BE_EMPTY and name in ("nothing", "null"):
        return  # no body is a valid body there
    service.add(make_sandbox("ix"))
    answer = await client("POST", path, data=BAD_BODIES[name], headers={"Content-Type": "application/json"})
    assert_error(answer, 400)
    assert list(service.sandboxes) == ["ix"]


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "application/json; charset=x", ""]
)
async def test_the_content_type_does_not_matter(client: Client, content_type: str) -> None:
    headers = {"Content-Type": content_type}
    assert (await client("POST", "/v2/sandboxes", data=b'{"templateID":"base"}', headers=headers)).status == 201


async def test_giant_bodies(client: Client, service: FakeService) -> None:
    async def endless() -> Any:
        for _ in range(40):
            yield b" " * 65536

    assert_error(await client("POST", "/v2/sandboxes", data=b" " * (LIMIT + 1)), 413)
    assert_error(await client("POST", "/v2/sandboxes", data=endless()), 413)
    just_fits = json.dumps({"templateID": "base", "x": ""})
    just_fits = just_fits.replace('""', '"' + "y" * (LIMIT - len(just_fits)) + '"')
    assert len(just_fits) == LIMIT
    assert (await client("POST", "/v2/sandboxes", data=just_fits)).status == 201


async def test_an_announced_giant_is_refused_before_it_is_sent(client: Client) -> None:
    host, port = client.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nX-API-KEY: {KEY}\r\nContent-Length: 99999999999\r\n\r\n".encode()
    )
    assert (await reader.readline()).startswith(b"HTTP/1.1 413")
    writer.close()


async def test_a_client_that_leaves_amid_its_body_makes_nothing(client: Client, service: FakeService) -> None:
    host, port = client.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nX-API-KEY: {KEY}\r\nContent-Length: 99\r\n\r\n"
    writer.write(head.encode() + b'{"templateID"')
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await client("GET", "/health")).status == 200
    assert not service.created


async def test_a_client_that_leaves_amid_a_create_ends_it(client: Client, service: FakeService) -> None:
    service.slow = asyncio.Event()
    host, port = client.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    body = b'{"templateID":"base"}'
    head = f"POST /v2/sandboxes HTTP/1.1\r\nHost: x\r\nX-API-KEY: {KEY}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await service.slow.wait()
    assert not service.cancelled.is_set()
    writer.close()
    await service.cancelled.wait()
    assert not service.created


async def test_unforeseen_errors_leak_nothing(client: Client, service: FakeService) -> None:
    for error in (RuntimeError("secret /path"), KeyError("secret"), RecursionError("secret"), ValueError("secret")):
        service.fail_with = error
        answer = await client("POST", "/v2/sandboxes", json={"templateID": "base"}, headers={"Origin": "http://x"})
        assert_error(answer, 500)
        assert answer.json["error_code"] == "internal_server_error"
        assert b"secret" not in answer.raw
        assert answer.headers["Access-Control-Allow-Origin"] == "*"


async def test_cors(client: Client) -> None:
    headers = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "DELETE",
        "Access-Control-Request-Headers": "x-api-key, content-type",
    }
    preflight = await client("OPTIONS", "/sandboxes/ix", key=None, headers=headers)
    assert preflight.status == 204
    assert "DELETE" in preflight.headers["Access-Control-Allow-Methods"]
    assert preflight.headers["Access-Control-Allow-Headers"] == "x-api-key, content-type"
    for path, key, status in (("/v2/sandboxes", KEY, 200), ("/v2/sandboxes", None, 401), ("/nowhere", KEY, 404)):
        answer = await client("GET", path, key=key, headers={"Origin": "https://app.example"})
        assert answer.status == status
        assert answer.headers["Access-Control-Allow-Origin"] == "*"
        assert {"X-Next-Token", "X-Total-Running"} <= set(answer.headers["Access-Control-Expose-Headers"].split(", "))


async def test_each_answer_has_an_id_of_its_own_and_no_server_header(client: Client) -> None:
    answers = [await client("GET", "/health"), await client("GET", "/nowhere")]
    assert len({answer.headers["X-Request-Id"] for answer in answers}) == 2
    assert all("Server" not in answer.headers for answer in answers)
    for answer in answers:
        assert answer.headers.getall("Date") == [answer.headers["Date"]]
        assert parsedate_to_datetime(answer.headers["Date"]).tzinfo is not None


@pytest.mark.parametrize("path", ["/sandboxes", "/v2/sandboxes"])
@pytest.mark.parametrize("field", ["envVars", "metadata"])
@pytest.mark.parametrize("pair", [b'"a": "\\udc80"', b'"\\ud800": "a"', b'"a": "\xed\xa0\x80"'])
async def test_lone_surrogates_reach_no_sandbox(
    client: Client, service: FakeService, path: str, field: str, pair: bytes
) -> None:
    body = b'{"templateID": "base", "%s": {%s}}' % (field.encode(), pair)
    assert_error(await client("POST", path, data=body), 400)
    assert not service.created


async def test_names_with_slashes_are_one_segment(client: Client) -> None:
    for path in ("/templates/aliases/team%2Fbase", "/templates/aliases/base%3Adefault", "/templates/aliases/base"):
        answer = await client("GET", path)
        assert (answer.status, answer.json) == (200, {"templateID": "tbase", "public": False})
    answer = await client("GET", "/templates/team%2fdebian%3Av1")
    assert_error(answer, 404)
    assert answer.json["message"] == "template 'team/debian:v1' not found"
    assert_error(await client("GET", "/templates/aliases/a%252Fb"), 400)
    assert_error(await client("GET", "/templates/aliases/a/b"), 404)
    assert_error(await client("DELETE", "/templates/team%2Fsnap%3Av1"), 404)
    assert (await client("GET", "/%76%32/sandboxes")).status == 200


async def test_templates_have_the_fields_that_clients_demand(client: Client) -> None:
    [listed] = (await client("GET", "/templates?teamID=x")).json
    assert {"createdBy", "lastSpawnedAt", "spawnCount", "buildCount", "public", "updatedAt"} <= set(listed)
    assert (listed["templateID"], listed["aliases"], listed["buildStatus"]) == ("tbase", ["base", "debian"], "ready")
    details = (await client("GET", "/templates/base")).json
    assert listed.items() <= details.items()
    assert [build["buildID"] for build in details["builds"]] == [listed["buildID"]]


async def test_control_plane_websockets_are_refused(client: Client) -> None:
    import aiohttp

    with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
        await client.session.ws_connect(client.url + "/v2/sandboxes")
    assert refused.value.status == 404


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=12,
)
create_bodies = st.fixed_dictionaries(
    {"templateID": st.just("base") | json_values},
    optional={
        name: json_values | st.sampled_from(likely)
        for name, likely in {
            "timeout": [1, 0, 3600],
            "autoPause": [True, False],
            "autoPauseMemory": [True, False],
            "autoResume": [{"enabled": True}],
            "allow_internet_access": [True, False],
            "network": [{"allowOut": ["a.b"], "denyOut": ["0.0.0.0/0"]}, {"allowOut": ["::1"]}, {"rules": {}}],
            "metadata": [{"a": "b"}],
            "envVars": [{"a": "b"}],
            "mcp": [{}],
            "iam": [{"tokens": {}}],
            "volumeMounts": [[], [{"name": "a", "path": "/a"}]],
            "memory": [True, False],
        }.items()
    },
)
fuzzing = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@fuzzing
@given(body=create_bodies, path=st.sampled_from(["/v2/sandboxes", "/sandboxes"]))
async def test_no_create_body_breaks_the_server(client: Client, body: dict[str, Any], path: str) -> None:
    answer = await client("POST", path, json=body, headers={"Idempotency-Key": new_uuid()})
    assert answer.status in (201, 400, 404, 501)
    if answer.status != 201:
        assert_error(answer, answer.status)
    else:
        assert None not in answer.json.values()


@fuzzing
@given(body=st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
async def test_no_bytes_break_the_server(client: Client, service: FakeService, body: bytes) -> None:
    service.add(make_sandbox("ix"))
    for path in (*BODY_ROUTES, "/sandboxes/ix/refreshes"):
        answer = await client("POST", path, data=body)
        assert answer.status < 500
        if answer.status >= 300:
            assert_error(answer, answer.status)


@fuzzing
@given(segment=st.text(min_size=1, max_size=20), query=st.text(max_size=20))
async def test_no_path_breaks_the_server(client: Client, segment: str, query: str) -> None:
    from urllib.parse import quote

    raw = quote(segment.encode("utf-8", "surrogatepass"), safe="")
    extra = quote(query.encode("utf-8", "surrogatepass"), safe="&=")
    for path in (
        f"/sandboxes/{raw}",
        f"/{raw}",
        f"/templates/{raw}",
        f"/snapshots/{raw}",
        f"/v2/sandboxes?limit=1&{extra}",
        f"/snapshots?limit=1&{extra}",
        f"/snapshots/tree?{extra}",
    ):
        answer = await client("GET", path)
        assert answer.status < 500
        if answer.status >= 300:
            assert_error(answer, answer.status)
