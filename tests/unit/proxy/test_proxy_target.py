"""Targets and path rules without sockets, with generated input."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.config import ApiSettings
from agentenv.errors import InvalidRequestError
from agentenv.orchestrator.routes import Route
from agentenv.proxy.headers import head_bytes, request_headers, response_headers
from agentenv.proxy.signatures import find_signer, sign
from agentenv.proxy.target import PRIVATE_SEGMENTS, Target, TargetParser, is_private, normalised_segments

PARSER = TargetParser(ApiSettings(domain="box.localhost"))


def scope(path: bytes = b"/", host: bytes = b"localhost", **more: Any) -> dict[str, Any]:
    headers = [(b"host", host), *more.pop("headers", [])]
    return {"type": "http", "method": "GET", "raw_path": path, "query_string": b"", "headers": headers, **more}


names = st.sampled_from(sorted(PRIVATE_SEGMENTS))
noise = st.sampled_from([b"/", b"//", b"/./", b"/x/../", b"/../", b"/a/b/../../", b"\\", b"/%2e/", b"/y/%2E%2e/"])


@st.composite
def disguised(draw: st.DrawFn) -> bytes:
    """A private path in some spelling."""
    name = draw(names).decode()
    letters = [
        draw(st.sampled_from([c, c.upper(), f"%{ord(c):02x}", f"%{ord(c.upper()):02X}", f"%25{ord(c):02x}"]))
        for c in name
    ]
    tail = draw(st.sampled_from([b"", b"/", b"//", b"/more", b"/.", b";p=1", b"%20", b"%00", b"%2f"]))
    return draw(noise) + "".join(letters).encode() + tail


@given(disguised())
def test_every_spelling_of_a_private_path_is_private(path: bytes) -> None:
    assert is_private(path)


@given(st.binary(max_size=40))
def test_normalising_is_stable_and_leaves_nothing_special(raw: bytes) -> None:
    try:
        segments = normalised_segments(b"/" + raw)
    except InvalidRequestError:
        return
    for segment in segments:
        assert segment not in (b"", b".", b"..")
        assert not set(segment) & set(b"/\\;?#")
    assert normalised_segments(b"/" + quote(b"/".join(segments)).encode()) == segments or b"%" in b"".join(segments)


@given(st.lists(st.text("abcdefghijklmnopqrstuvwxyz_-", min_size=1, max_size=9), min_size=1, max_size=4))
def test_ordinary_paths_are_not_private(parts: list[str]) -> None:
    assert is_private(("/" + "/".join(parts)).encode()) == (parts[0].encode() in PRIVATE_SEGMENTS)


def test_absurdly_nested_escapes_are_refused() -> None:
    with pytest.raises(InvalidRequestError):
        is_private(b"/%" + b"25" * 5000 + b"69nit")


@given(st.integers(-10, 70000), st.text(st.characters(max_codepoint=255, exclude_categories=["Cc"]), max_size=30))
def test_a_target_is_valid_or_refused(port: int, sandbox: str) -> None:
    headers = [(b"e2b-sandbox-id", sandbox.encode("latin-1")), (b"e2b-sandbox-port", str(port).encode())]
    try:
        target = PARSER.parse(scope(headers=headers))
    except InvalidRequestError:
        return
    assert isinstance(target, Target)
    assert 1 <= target.port <= 65535
    assert (
        target.sandbox_id.isascii() and target.sandbox_id.isalnum() and target.sandbox_id == target.sandbox_id.lower()
    )


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_claims_never_raises_and_agrees_with_parse(path: bytes, host: bytes) -> None:
    request = scope(b"/" + path, host + b".box.localhost")
    claimed = PARSER.claims(request)
    try:
        PARSER.parse(request)
    except InvalidRequestError as error:
        assert claimed or "names no sandbox" in error.message
    else:
        assert claimed


@pytest.mark.parametrize("host", [b"box.localhost", b"api.box.localhost", b"80-abc.box.localhost.evil", b"80-abc.evil"])
def test_foreign_hosts_are_not_claimed(host: bytes) -> None:
    assert not PARSER.claims(scope(host=host))


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", b"/a b", []),
        ("GET", b"/a\r\nX: y", []),
        ("GET X", b"/", []),
        ("GET", b"/", [(b"x", b"a\r\nb: c")]),
        ("GET", b"/", [(b"x", b"a\nb")]),
        ("GET", b"/", [(b"x y", b"a")]),
        ("GET", b"/", [(b"", b"a")]),
    ],
)
def test_nothing_breaks_out_of_its_line(method: str, path: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    with pytest.raises(InvalidRequestError):
        head_bytes(method, path, headers)


def test_a_connection_header_cannot_take_the_framing_away() -> None:
    incoming = [
        (b"host", b"h"),
        (b"content-length", b"3"),
        (b"connection", b"content-length, host, x-a"),
        (b"x-a", b"1"),
    ]
    route = Route("abc", 1, "127.0.0.2", "t")
    made = dict(request_headers(scope(headers=incoming), Target("abc", 80, b"/", b""), route))
    assert made[b"content-length"] == b"3" and made[b"host"] and b"x-a" not in made


def test_illegal_answer_headers_are_left_out() -> None:
    given_ = [(b"Good", b"1"), (b"bad name", b"2"), (b"Bad-Value", b"a\x00b"), (b"Content-Length", b"4")]
    assert response_headers(given_, 200) == [(b"good", b"1"), (b"content-length", b"4")]
    assert response_headers(given_, 304) == [(b"good", b"1")]


def test_signature_matches_the_published_form() -> None:
    # printf '/a:read:user:tok:9' | sha256sum, in base64 without padding
    import base64
    import hashlib

    digest = base64.b64encode(hashlib.sha256(b"/a:read:user:tok:9").digest()).decode().rstrip("=")
    assert sign(b"/a", "read", b"user", "tok", b"9") == f"v1_{digest}".encode()
    route = Route("abc", 1, "127.0.0.2", "tok")
    query = f"path=%2Fa&username=user&signature_expiration=9&signature=v1_{quote(digest, safe='')}".encode()
    assert find_signer([Route("x", 1, "h", "other"), route], ("read",), query) is route
    assert find_signer([route], ("write",), query) is None
    assert find_signer([route], ("read",), query.replace(b"user&", b"root&")) is None
