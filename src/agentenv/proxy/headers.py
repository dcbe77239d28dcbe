"""Header lists on their way to a guest and back.

Only what belongs to one hop is taken off, and the traffic token, which is between client and proxy. Order, duplicates
and values stay (RFC 9110 §7.6.1).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from agentenv.errors import InvalidRequestError
from agentenv.orchestrator.routes import Route
from agentenv.proxy.target import AGENT_PORT, Target, header

Headers = list[tuple[bytes, bytes]]

TRAFFIC_TOKEN = b"e2b-traffic-access-token"

_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
_FRAMING = frozenset({b"host", b"content-length"})
"""Never taken off because a `Connection` header says so: the meaning of the message hangs on them."""
_FORWARDED = frozenset({b"x-forwarded-for", b"x-forwarded-proto", b"x-forwarded-host", b"x-forwarded-prefix"})
_TOKEN = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_BAD_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")


def _hop_names(headers: Iterable[tuple[bytes, bytes]]) -> frozenset[bytes]:
    named: set[bytes] = set()
    for key, value in headers:
        if key == b"connection":
            named.update(token.strip().lower() for token in value.split(b","))
    return _HOP | (frozenset(named) - _FRAMING) if named else _HOP


def request_headers(scope: Any, target: Target, route: Route, *, agent_port: int = AGENT_PORT) -> Headers:
    """Headers for the guest, without any that frame the body anew (`Transfer-Encoding`) or ask for an upgrade."""
    incoming: Sequence[tuple[bytes, bytes]] = scope["headers"]
    dropped = _hop_names(incoming)
    mask = None
    if route.mask_request_host and target.port != agent_port:
        mask = route.mask_request_host.replace("${PORT}", str(target.port)).encode("latin-1", "replace")
    host = header(incoming, b"host")
    headers: Headers = []
    forwarded: dict[bytes, bytes] = {}
    if host is None:
        headers.append((b"host", mask or f"{route.host}:{target.port}".encode()))
    for key, value in incoming:
        if key in dropped or key == TRAFFIC_TOKEN:
            continue
        if key in _FORWARDED:
            forwarded[key] = forwarded[key] + b", " + value if key in forwarded else value
        elif key == b"host" and mask is not None:
            headers.append((key, mask))
        else:
            headers.append((key, value))
    client = scope.get("client")
    if client:
        peer = str(client[0]).encode()
        before = forwarded.get(b"x-forwarded-for")
        forwarded[b"x-forwarded-for"] = before + b", " + peer if before else peer
    secure = scope.get("scheme") in ("https", "wss")
    forwarded.setdefault(b"x-forwarded-proto", b"https" if secure else b"http")
    if host is not None:
        forwarded.setdefault(b"x-forwarded-host", host)
    if target.prefix:
        forwarded[b"x-forwarded-prefix"] = forwarded.get(b"x-forwarded-prefix", b"") + target.prefix
    headers.extend(forwarded.items())
    return headers


def response_headers(headers: Sequence[tuple[bytes, bytes]], status: int) -> Headers:
    """Headers for the client. Names in lower case; lines that are not legal HTTP are left out."""
    lowered = [(key.lower(), value) for key, value in headers]
    dropped = _hop_names(lowered)
    if status in (204, 304):
        # The server in front would demand a body of this length, which these never have.
        dropped |= {b"content-length"}
    return [
        (key, value)
        for key, value in lowered
        if key not in dropped and _TOKEN.fullmatch(key) and not _BAD_VALUE.search(value)
    ]


def head_bytes(method: str, request_target: bytes, headers: Headers) -> bytes:
    """The request line and header lines.

    Raises:
        InvalidRequestError: a part would break out of its line, so that the guest would read another request than we
            checked.
    """
    if not _TOKEN.fullmatch(method.encode("latin-1", "replace")) or re.search(rb"[\x00-\x20\x7f]", request_target):
        raise InvalidRequestError("Malformed request line")
    lines = [method.encode() + b" " + request_target + b" HTTP/1.1\r\n"]
    for key, value in headers:
        if not _TOKEN.fullmatch(key) or _BAD_VALUE.search(value):
            raise InvalidRequestError(f"Malformed header {key.decode('latin-1')!r}")
        lines += (key, b": ", value, b"\r\n")
    lines.append(b"\r\n")
    return b"".join(lines)
