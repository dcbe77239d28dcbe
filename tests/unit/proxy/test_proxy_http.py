"""Requests through a real uvicorn: routing, headers, tokens, refusals, answers of every framing."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import quote

import pytest
from proxy_world import DOMAIN, SANDBOX, TOKEN, Guest, Peer, World, ok, request, serve_echo

from agentenv.errors import AgentEnvError, CapacityError, SandboxNotFoundError, SnapshotError
from agentenv.orchestrator.routes import Route, Sleeper
from agentenv.proxy.signatures import sign

NOT_FOUND = {"sandboxId": SANDBOX, "message": "The sandbox was not found", "code": 502}


async def test_headers_host_and_path_reach_the_same_port(world: World) -> None:
    world.publish()
    line = "GET /a%2Fb//c/../d?x=%20&&y=1 HTTP"
    async with Guest(serve_echo).listening() as guest:
        forms = {
            "headers": request(guest.port, path="/a%2Fb//c/../d?x=%20&&y=1"),
            "alias": f"{line}/1.1\r\nHost: h\r\nX-AgentENV-Sandbox-Id: {SANDBOX}\r\n"
            f"x-agentenv-sandbox-port: {guest.port}\r\n\r\n".encode(),
            "host": f"{line}/1.1\r\nHost: {guest.port}-{SANDBOX}.{DOMAIN}:1\r\n\r\n".encode(),
            "legacy host": f"{line}/1.1\r\nHost: {guest.port}-{SANDBOX}-agentenv.PUBLIC.example\r\n\r\n".encode(),
            "path": f"GET /proxy/{SANDBOX}/{guest.port}/a%2Fb//c/../d?x=%20&&y=1 HTTP/1.1\r\nHost: h\r\n\r\n".encode(),
        }
        for name, raw in forms.items():
            answer = await world.ask(raw)
            assert answer.status == 200, name
            assert answer.body.startswith(b"GET /a%2Fb//c/../d?x=%20&&y=1 HTTP/1.1\n"), name
        assert f"x-forwarded-prefix: /proxy/{SANDBOX}/{guest.port}".encode() in answer.body


async def test_path_without_trailing_slash_is_the_root(world: World) -> None:
    world.publish()
    async with Guest(serve_echo).listening() as guest:
        answer = await world.ask(f"GET /proxy/{SANDBOX}/{guest.port}?q HTTP/1.1\r\nHost: h\r\n\r\n".encode())
        assert answer.body.startswith(b"GET /?q HTTP/1.1\n")


async def test_control_plane_requests_are_not_claimed(world: World) -> None:
    for raw in (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
        f"GET /sandboxes HTTP/1.1\r\nHost: api.{DOMAIN}\r\n\r\n".encode(),
        b"GET /files HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /proxyx HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ):
        assert (await world.ask(raw)).status == 418


async def test_with_sandbox_header_no_control_plane_route_is_hit(world: World) -> None:
    answer = await world.ask(request(49983, path="/health"))
    assert (answer.status, json.loads(answer.body)) == (502, NOT_FOUND)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("E2b-Sandbox-Id: abc", "must be sent together"),
        ("E2b-Sandbox-Port: 80", "must be sent together"),
        ("E2b-Sandbox-Id: ../x\r\nE2b-Sandbox-Port: 80", "Invalid sandbox ID"),
        ("E2b-Sandbox-Id: ABC\r\nE2b-Sandbox-Port: 80", "Invalid sandbox ID"),
        ("E2b-Sandbox-Id: a-b-c\r\nE2b-Sandbox-Port: 80", "Invalid sandbox ID"),
        ("E2b-Sandbox-Id: abc\r\nE2b-Sandbox-Port: 0", "Invalid sandbox port"),
        ("E2b-Sandbox-Id: abc\r\nE2b-Sandbox-Port: 65536", "Invalid sandbox port"),
        ("E2b-Sandbox-Id: abc\r\nE2b-Sandbox-Port: 8o", "Invalid sandbox port"),
        ("E2b-Sandbox-Id: abc\r\nE2b-Sandbox-Id: def\r\nE2b-Sandbox-Port: 80", "more than once"),
        (f"Host: abc-def.{DOMAIN}", "Invalid sandbox port"),
        (f"Host: 80-.{DOMAIN}", "Invalid sandbox ID"),
        (f"Host: x.80-abc.{DOMAIN}", "Invalid"),
    ],
)
async def test_malformed_targets_are_refused(world: World, head: str, message: str) -> None:
    answer = await world.ask(f"GET / HTTP/1.1\r\n{head}\r\n\r\n".encode())
    body = json.loads(answer.body)
    assert (answer.status, body["code"]) == (400, 400)
    assert message in body["message"]


@pytest.mark.parametrize("path", ["/proxy/", "/proxy/abc", "/proxy/abc/", "/proxy/AB/80/", "/proxy/a%62c/80/"])
async def test_malformed_paths_are_refused(world: World, path: str) -> None:
    assert (await world.ask(f"GET {path} HTTP/1.1\r\nHost: h\r\n\r\n".encode())).status == 400


async def test_closed_port_is_named(world: World, agent_port: int) -> None:
    world.publish()
    for port in (agent_port, 1):
        answer = await world.ask(request(port))
        assert answer.status == 502
        assert answer.get("content-type") == "application/json"
        assert json.loads(answer.body) == {
            "sandboxId": SANDBOX,
            "message": "The sandbox is running but port is not open",
            "port": port,
            "code": 502,
        }


async def test_browsers_get_a_page_with_the_same_text(world: World) -> None:
    browser = [("Accept", "text/html,*/*"), ("User-Agent", "Mozilla/5.0 (X11)")]
    answer = await world.ask(request(80, headers=browser))
    assert answer.status == 502
    assert (answer.get("content-type") or "").startswith("text/html")
    assert b"The sandbox was not found" in answer.body
    assert SANDBOX.encode() in answer.body
    plain = await world.ask(request(80, headers=[("Accept", "text/html"), ("User-Agent", "python-httpx/0.28")]))
    assert plain.get("content-type") == "application/json"


async def test_sleeping_sandbox_is_woken_once_and_served(world: World) -> None:
    async with Guest(serve_echo).listening() as guest:
        world.routes.let_sleep(Sleeper(SANDBOX, TOKEN))
        world.wakes[SANDBOX] = Route(SANDBOX, 1, "127.0.0.2", TOKEN)
        assert (await world.ask(request(guest.port))).status == 200
        assert (await world.ask(request(guest.port))).status == 200
        assert world.woken == [SANDBOX]


async def test_sandbox_that_does_not_sleep_is_not_woken(world: World) -> None:
    assert (await world.ask(request(1234))).status == 502
    world.routes.let_sleep(Sleeper(SANDBOX, TOKEN))
    world.routes.withdraw(SANDBOX)
    assert (await world.ask(request(1234))).status == 502
    assert world.woken == []


async def test_traffic_for_the_agent_wakes_with_its_token_only(world: World, agent_port: int) -> None:
    world.routes.let_sleep(Sleeper(SANDBOX, TOKEN))
    wrong: list[list[tuple[str, str]]] = [[], [("X-Access-Token", "x")], [("X-Access-Token", "\xe9")]]
    for headers in wrong:
        answer = await world.ask(request(agent_port, path="/health", headers=headers))
        assert (answer.status, b"was not found" in answer.body) == (502, True)
    assert (await world.ask(request(agent_port, path="/files?path=/a&signature=v1_x"))).status == 502
    assert world.woken == []
    await world.ask(request(agent_port, path="/health", headers=[("X-Access-Token", TOKEN)]))
    assert world.woken == [SANDBOX]
    signature = sign(b"/a", "read", b"user", TOKEN).decode()
    await world.ask(request(agent_port, path=f"/files?path=/a&username=user&signature={quote(signature)}"))
    assert world.woken == [SANDBOX, SANDBOX]


async def test_private_path_wakes_nothing(world: World, agent_port: int) -> None:
    world.routes.let_sleep(Sleeper(SANDBOX, TOKEN))
    answer = await world.ask(request(agent_port, path="/init", headers=[("X-Access-Token", TOKEN)]))
    assert (answer.status, world.woken) == (403, [])


async def test_private_traffic_wakes_with_its_token_only(world: World) -> None:
    world.routes.let_sleep(Sleeper(SANDBOX, TOKEN, "secret"))
    for headers in ([], [("E2B-Traffic-Access-Token", "wrong")]):
        answer = await world.ask(request(1234, headers=headers))
        assert (answer.status, b"was not found" in answer.body) == (502, True)
    assert world.woken == []
    await world.ask(request(1234, headers=[("E2B-Traffic-Access-Token", "secret")]))
    assert world.woken == [SANDBOX]


@pytest.mark.parametrize(
    ("error", "status"),
    [(CapacityError("no room"), 503), (SnapshotError("damaged"), 503), (SandboxNotFoundError("i1"), 502)],
)
async def test_sandbox_that_cannot_be_woken(world: World, error: AgentEnvError, status: int) -> None:
    world.routes.let_sleep(Sleeper(SANDBOX, TOKEN))
    world.wake_error = error
    answer = await world.ask(request(1234))
    assert answer.status == status
    assert json.loads(answer.body)["code"] == status


async def test_traffic_token_guards_every_port_but_the_agents(world: World, agent_port: int) -> None:
    world.publish(traffic_access_token="secret")
    async with Guest(serve_echo).listening() as guest, Guest(serve_echo).listening(port=agent_port):
        for headers in ([], [("E2B-Traffic-Access-Token", "wrong")], [("E2B-Traffic-Access-Token", "\xe9")]):
            answer = await world.ask(request(guest.port, headers=headers))
            assert (answer.status, json.loads(answer.body)["code"]) == (403, 403)
        assert guest.connections == 0
        answer = await world.ask(request(guest.port, headers=[("e2b-traffic-access-token", "secret")]))
        assert answer.status == 200
        assert b"secret" not in answer.body
        assert (await world.ask(request(agent_port))).status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/init",
        "//init",
        "/%69nit",
        "/./init",
        "/x/../init",
        "/INIT",
        "/init/",
        "/init/x",
        "/init?a=b",
        "/%2e/init",
        "/%2finit",
        "/%2569nit",
        "/..%2finit",
        "/\\init",
        "/init;a",
        "/init%20",
        "/tunnel?port=1",
        "/Freeze",
        "/unfreeze",
        "/collapse",
        "/fsfreeze",
        "/fsthaw",
        "/upgrade",
        "/a/b/../../init",
        "/" + "%25" * 1 + "25" * 12 + "69nit",
    ],
)
async def test_private_paths_of_the_agent_are_refused(world: World, agent_port: int, path: str) -> None:
    world.publish()
    async with Guest(serve_echo).listening(port=agent_port) as agent:
        raw = request(agent_port, path=path, method="POST", headers=[("X-Access-Token", TOKEN)], body=b"{}")
        answer = await world.ask(raw)
        assert answer.status in (400, 403)
        assert json.loads(answer.body)["code"] == answer.status
        assert agent.connections == 0


async def test_private_names_are_ordinary_elsewhere(world: World, agent_port: int) -> None:
    world.publish()
    async with Guest(serve_echo).listening() as guest, Guest(serve_echo).listening(port=agent_port):
        assert (await world.ask(request(guest.port, path="/init"))).status == 200
        for path in ("/files?path=/init", "/initial", "/x/init", "/init/../health"):
            assert (await world.ask(request(agent_port, path=path))).status == 200


async def test_headers_pass_with_duplicates_and_order(world: World) -> None:
    world.publish()
    sent = [
        ("X-Dup", "1"),
        ("X-Api-Key", "k"),
        ("X-Dup", "2"),
        ("Cookie", "a=b"),
        ("Connection", "keep-alive, X-Hop, Host"),
        ("X-Hop", "gone"),
        ("Keep-Alive", "timeout=5"),
        ("X-Forwarded-For", "9.9.9.9"),
        ("Accept-Encoding", "gzip"),
    ]
    async with Guest(serve_echo).listening() as guest:
        lines = (await world.ask(request(guest.port, headers=sent))).body.decode().split("\n")
    assert lines[1:] == [
        "host: localhost",
        f"e2b-sandbox-id: {SANDBOX}",
        f"e2b-sandbox-port: {guest.port}",
        "x-dup: 1",
        "x-api-key: k",
        "x-dup: 2",
        "cookie: a=b",
        "accept-encoding: gzip",
        "x-forwarded-for: 9.9.9.9, 127.0.0.1",
        "x-forwarded-proto: http",
        "x-forwarded-host: localhost",
        "",
        "",
    ]


async def test_answer_headers_pass_with_duplicates(world: World) -> None:
    async def serve(peer: Peer, _: int) -> None:
        await peer.read_request()
        extra = b"Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nDate: today\r\nServer: mine\r\n"
        extra += b"Connection: close, X-Gone\r\nX-Gone: 1\r\n"
        await peer.write(ok(b"", extra + b"Keep-Alive: timeout=1\r\n"))

    world.publish()
    async with Guest(serve).listening() as guest, world.client() as client:
        await client.write(request(guest.port))
        answer = await client.read_answer()
        assert answer.headers == [
            ("content-length", "0"),
            ("set-cookie", "a=1"),
            ("set-cookie", "b=2"),
            ("date", "today"),
            ("server", "mine"),
        ]
        await client.write(request(guest.port))
        assert (await client.read_answer()).status == 200, "the guest's close is not the client's"


async def test_masked_host_expands_the_port_except_for_the_agent(world: World, agent_port: int) -> None:
    world.publish(mask_request_host="app.internal:${PORT}")
    async with Guest(serve_echo).listening() as guest, Guest(serve_echo).listening(port=agent_port):
        body = (await world.ask(request(guest.port))).body.decode()
        assert f"\nhost: app.internal:{guest.port}\n" in body
        assert "\nx-forwarded-host: localhost\n" in body
        assert "\nhost: localhost\n" in (await world.ask(request(agent_port))).body.decode()


ANSWERS = {
    "length": (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello", "5"),
    "chunked": (b"HTTP/1.1 201 C\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", b"hello", None),
    "trailers": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nT: x\r\n\r\n",
        b"hello",
        None,
    ),
    "until close": (b"HTTP/1.0 200 OK\r\n\r\nhello", b"hello", None),
    "interim": (b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx", b"x", "1"),
    "204": (b"HTTP/1.1 204 No Content\r\n\r\n", b"", None),
    "304": (b'HTTP/1.1 304 Not Modified\r\nETag: "x"\r\nContent-Length: 9\r\n\r\n', b"", None),
    "error": (b"HTTP/1.1 500 E\r\nContent-Length: 2\r\n\r\nno", b"no", "2"),
}


@pytest.mark.parametrize("name", ANSWERS)
async def test_answers_of_every_framing(world: World, name: str) -> None:
    raw, body, length = ANSWERS[name]

    async def serve(peer: Peer, _: int) -> None:
        await peer.read_request()
        await peer.write(raw)

    world.publish()
    async with Guest(serve).listening() as guest, world.client() as client:
        for _ in range(2):
            await client.write(request(guest.port))
            answer = await client.read_answer()
            final = raw.split(b"\r\n\r\n")[1] if name == "interim" else raw
            assert answer.status == int(final.split(b" ")[1])
            assert answer.body == body
            assert answer.get("content-length") == length


async def test_head_keeps_the_length_and_the_connection(world: World) -> None:
    async def serve(peer: Peer, number: int) -> None:
        while True:
            head, _ = await peer.read_request()
            body = b"" if head.first_line.startswith("HEAD") else b"x" * 12
            await peer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 12\r\nX-Connection: %d\r\n\r\n" % number, body)

    world.publish()
    async with Guest(serve).listening() as guest, world.client() as client:
        for method, has_body in (("HEAD", False), ("GET", True), ("HEAD", False), ("GET", True)):
            await client.write(request(guest.port, method=method))
            answer = await client.read_answer(has_body=has_body)
            assert (answer.get("content-length"), answer.get("x-connection")) == ("12", "0")


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
        b"HTTP/1.1 999 X\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
    ],
)
async def test_useless_answers_are_a_bad_gateway(world: World, raw: bytes) -> None:
    async def serve(peer: Peer, _: int) -> None:
        await peer.read_request()
        await peer.write(raw)

    world.publish()
    async with Guest(serve).listening() as guest:
        answer = await world.ask(request(guest.port))
        body = json.loads(answer.body)
        assert (answer.status, body["code"], body["port"]) == (502, 502, guest.port)
        assert "not open" not in body["message"] and "not found" not in body["message"]
        assert body["message"].removeprefix("The sandbox is running but the service on the port ") in {
            "closed the connection without a complete answer",
            "did not answer in HTTP",
            "answered with status 101",
            "answered with status 999",
        }


@pytest.mark.parametrize("framing", ["length", "chunked", "close"])
async def test_a_broken_answer_never_looks_complete(world: World, framing: str) -> None:
    head = {"length": b"Content-Length: 10", "chunked": b"Transfer-Encoding: chunked", "close": b"X: y"}[framing]
    body = {"length": b"hello", "chunked": b"5\r\nhello\r\n", "close": b"hello"}[framing]

    async def serve(peer: Peer, _: int) -> None:
        await peer.read_request()
        await peer.write(b"HTTP/1.1 200 OK\r\n%s\r\n\r\n%s" % (head, body))
        await peer.reader.readexactly(1)

    world.publish()
    async with Guest(serve).listening() as guest, world.client() as client:
        await client.write(request(guest.port))
        answer = await client.read_head()
        assert answer.status == 200
        if answer.get("transfer-encoding"):
            assert await client.read_chunk() == b"hello"
        else:
            assert await client.reader.readexactly(5) == b"hello"
        world.routes.withdraw(SANDBOX)
        assert await client.reader.read() == b"", "no last chunk, no missing byte"


async def test_expect_100_reaches_the_guest_and_its_refusal_comes_before_the_body(world: World) -> None:
    async def serve(peer: Peer, number: int) -> None:
        head = await peer.read_head()
        assert head.get("expect") == "100-continue"
        if number == 0:
            await peer.write(b"HTTP/1.1 417 No\r\nContent-Length: 0\r\n\r\n")
            return
        if number == 1:
            await peer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await peer.write(ok(await peer.read_body(head)))

    world.publish()
    async with Guest(serve).listening() as guest:
        raw = request(guest.port, method="POST", headers=[("Expect", "100-continue"), ("Content-Length", "3")])
        async with world.client() as client:
            await client.write(raw)
            assert (await client.read_head()).status == 417
        for number in (1, 2):  # the last guest knows nothing of Expect and just waits for the body
            async with world.client() as client:
                await client.write(raw)
                assert (await client.read_head()).status == 100, number
                await client.write(b"abc")
                answer = await client.read_answer()
                assert (answer.status, answer.body) == (200, b"abc")


async def test_bodies_keep_their_framing(world: World) -> None:
    world.publish()
    async with Guest(serve_echo).listening() as guest:
        answer = await world.ask(request(guest.port, method="PUT", body=b"\x00\xff" * 10))
        assert b"\ncontent-length: 20\n" in answer.body and answer.body.endswith(b"\n\n" + b"\x00\xff" * 10)
        chunked = request(guest.port, method="POST", headers=[("Transfer-Encoding", "chunked")])
        answer = await world.ask(chunked + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
        assert b"\ntransfer-encoding: chunked\n" in answer.body and answer.body.endswith(b"\n\nabcde")
        assert b"content-length" not in answer.body
        answer = await world.ask(request(guest.port, method="POST"))
        assert b"transfer-encoding" not in answer.body and answer.body.endswith(b"\n\n")


def signed(path: bytes, operation: str, token: str, *, user: bytes = b"", expiry: bytes | None = None) -> str:
    value = sign(path, operation, user, token, expiry).decode().replace("+", "%2B").replace("/", "%2F")
    query = f"path={path.decode().replace('/', '%2F')}&signature={value}"
    if user:
        query += f"&username={user.decode()}"
    return query + (f"&signature_expiration={expiry.decode()}" if expiry else "")


async def test_signed_urls_find_their_sandbox_by_token(world: World, agent_port: int) -> None:
    world.publish(sandbox_id="other", envd_access_token="o" * 64, host="127.0.0.3")
    world.publish(sandbox_id="third", envd_access_token="", host="127.0.0.3")
    world.publish()
    async with Guest(serve_echo).listening(port=agent_port):
        for method, operation in (("GET", "read"), ("POST", "write"), ("HEAD", "read")):
            query = signed(b"/tmp/a b", operation, TOKEN, user=b"root", expiry=b"1").replace(" ", "+")
            raw = f"{method} /files?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
            answer = await world.ask(raw, has_body=method != "HEAD")
            assert answer.status == 200
            if method != "HEAD":
                assert answer.body.startswith(f"{method} /files?{query} HTTP/1.1\n".encode())
        for bad in (
            signed(b"/a", "write", TOKEN),
            signed(b"/a", "read", "x"),
            signed(b"/a", "read", ""),
            "signature=v1_",
        ):
            answer = await world.ask(f"GET /files?{bad} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert (answer.status, json.loads(answer.body)) == (401, {"message": "invalid signature", "code": 401})


async def test_closed_proxy_takes_nothing(world: World) -> None:
    await world.proxy.close()
    assert (await world.ask(request(80))).status == 503
    await world.proxy.start()
    assert (await world.ask(request(80))).status == 502


async def test_a_hundred_at_once_do_not_mix(world: World) -> None:
    world.publish()
    async with Guest(serve_echo).listening() as guest:
        raws = [request(guest.port, method="POST", path=f"/{n}", body=b"b%d" % n) for n in range(100)]
        for n, answer in enumerate(await asyncio.gather(*map(world.ask, raws))):
            assert answer.body.startswith(b"POST /%d HTTP" % n) and answer.body.endswith(b"\n\nb%d" % n)
