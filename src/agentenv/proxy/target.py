"""Which sandbox, port and path a request is for: pure functions over an ASGI scope.

Nothing here knows routes, sockets or tokens' values. Raw path and query bytes pass through untouched; decoding happens
only in order to compare. Source: E2B contract §1.4 and §3.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote_to_bytes

from agentenv.config import ApiSettings
from agentenv.errors import InvalidRequestError
from agentenv.ids import parse_sandbox_id

AGENT_PORT = 49983
"""TCP port of the guest agent (envd)."""

_ID_HEADERS = (b"e2b-sandbox-id", b"x-agentenv-sandbox-id")
_PORT_HEADERS = (b"e2b-sandbox-port", b"x-agentenv-sandbox-port")
_PATH_PREFIX = b"/proxy/"
_PORT = re.compile(r"[0-9]{1,5}")
_MAX_ESCAPE_LAYERS = 8

PRIVATE_SEGMENTS = frozenset(b"init tunnel freeze unfreeze collapse fsfreeze fsthaw upgrade private internal".split())
"""First path segments on the agent's port that only the host may ask for."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where one request goes. `path` and `query` are the bytes for the guest's request line."""

    sandbox_id: str
    port: int
    path: bytes
    query: bytes
    prefix: bytes = b""
    """What was taken off the front of the path, for `X-Forwarded-Prefix`."""

    @property
    def request_target(self) -> bytes:
        return self.path + b"?" + self.query if self.query else self.path


@dataclass(frozen=True, slots=True)
class SignedFile:
    """A request for `/files` that names no sandbox and carries a signature instead (contract §1.4, §3.6)."""

    operations: tuple[str, ...]
    """`read` or `write`; both for a preflight, which does not say what it prepares."""
    path: bytes
    query: bytes


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes | None:
    """First value of a header; `name` in lower case."""
    for key, value in headers:
        if key == name:
            return value
    return None


def raw_path(scope: Any) -> bytes:
    """The path as the client wrote it. Servers that do not keep it get it encoded again."""
    path = scope.get("raw_path")
    if path:
        return bytes(path)
    return str(scope["path"]).encode("utf-8", "surrogateescape") or b"/"


def parse_port(text: str) -> int:
    """Read a TCP port.

    Raises:
        InvalidRequestError: not a decimal number from 1 to 65535.
    """
    port = int(text) if _PORT.fullmatch(text) else 0
    if not 1 <= port <= 65535:
        raise InvalidRequestError("Invalid sandbox port: it must be a number from 1 to 65535")
    return port


def _text(value: bytes) -> str:
    return value.strip().decode("latin-1")


class TargetParser:
    """Finds the target of requests for one set of domains."""

    def __init__(self, settings: ApiSettings) -> None:
        names = [settings.domain, settings.advertise_domain or ""]
        self._suffixes = tuple({"." + _host_name(name) for name in names if name})

    def claims(self, scope: Any) -> bool:
        """Whether the request is sandbox traffic. Never raises: a malformed one is claimed and refused later."""
        headers = scope["headers"]
        for key, _ in headers:
            if key in _ID_HEADERS or key in _PORT_HEADERS:
                return True
        path = raw_path(scope)
        return self._host_label(headers) is not None or path.startswith(_PATH_PREFIX) or _is_signed_file(scope, path)

    def parse(self, scope: Any) -> Target | SignedFile:
        """Find the target: routing headers, then host, then path, then a signature.

        Raises:
            InvalidRequestError: the request names a sandbox or port in a malformed way.
        """
        headers = scope["headers"]
        path, query = raw_path(scope), bytes(scope.get("query_string", b""))
        sandbox, port = _routing_header(headers, _ID_HEADERS), _routing_header(headers, _PORT_HEADERS)
        if sandbox is not None or port is not None:
            if sandbox is None or port is None:
                raise InvalidRequestError("E2b-Sandbox-Id and E2b-Sandbox-Port must be sent together")
            return Target(parse_sandbox_id(sandbox), parse_port(port), path, query)
        label = self._host_label(headers)
        if label is not None:
            port_text, hyphen, sandbox = label.partition("-")
            if not hyphen:
                raise InvalidRequestError("Invalid host: it must be <port>-<sandbox id>.<domain>")
            return Target(parse_sandbox_id(sandbox), parse_port(port_text), path, query)
        if path.startswith(_PATH_PREFIX):
            return _from_path(path, query)
        if _is_signed_file(scope, path):
            return SignedFile(_operations(scope["method"]), path, query)
        raise InvalidRequestError("The request names no sandbox")

    def _host_label(self, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
        """What stands before our domain, when it is meant to name a sandbox. `api.<domain>` and the like do not."""
        value = header(headers, b"host")
        if value is None:
            return None
        host = _host_name(_text(value))
        for suffix in self._suffixes:
            if host.endswith(suffix):
                label = host[: -len(suffix)]
                return label if "-" in label or "." in label else None
        return None


def _host_name(host: str) -> str:
    """Lower-case host without port and without a final dot."""
    name, colon, port = host.rpartition(":")
    if not colon or not (port == "" or port.isdigit()):
        name = host
    return name.rstrip(".").lower()


def _routing_header(headers: Iterable[tuple[bytes, bytes]], names: tuple[bytes, ...]) -> str | None:
    values = {_text(value) for key, value in headers if key in names}
    if len(values) > 1:
        raise InvalidRequestError(f"{names[0].decode()} was sent more than once with different values")
    return values.pop() if values else None


def _from_path(path: bytes, query: bytes) -> Target:
    sandbox, _, rest = path[len(_PATH_PREFIX) :].partition(b"/")
    port, slash, rest = rest.partition(b"/")
    prefix = _PATH_PREFIX + sandbox + b"/" + port
    return Target(parse_sandbox_id(_text(sandbox)), parse_port(_text(port)), slash + rest or b"/", query, prefix)


def _operations(method: str) -> tuple[str, ...]:
    return {"GET": ("read",), "HEAD": ("read",), "POST": ("write",)}.get(method, ("read", "write"))


def _is_signed_file(scope: Any, path: bytes) -> bool:
    return (
        scope["type"] == "http"
        and path == b"/files"
        and scope["method"] in ("GET", "HEAD", "POST", "OPTIONS")
        and b"signature=" in scope.get("query_string", b"")
        and any(key == b"signature" for key, _ in parse_qsl(bytes(scope["query_string"]), keep_blank_values=True))
    )


def normalised_segments(path: bytes) -> list[bytes]:
    """The segments that a server might see in a path after any decoding it does.

    Percent-escapes are undone until none is left, backslashes count as slashes, empty and `.` segments vanish, `..`
    takes its predecessor, parameters after `;` and surrounding blanks and control bytes go, letters become lower-case.

    Raises:
        InvalidRequestError: escapes are nested deeper than any client has reason to.
    """
    for _ in range(_MAX_ESCAPE_LAYERS):
        decoded = unquote_to_bytes(path)
        if decoded == path:
            break
        path = decoded
    else:
        raise InvalidRequestError("Malformed path: escaped too many times")
    path = path.partition(b"?")[0].partition(b"#")[0]
    segments: list[bytes] = []
    for segment in path.replace(b"\\", b"/").split(b"/"):
        name = segment.partition(b";")[0].strip(bytes(range(33)) + b"\x7f").lower()
        if name == b"..":
            if segments:
                segments.pop()
        elif name not in (b"", b"."):
            segments.append(name)
    return segments


def is_private(path: bytes) -> bool:
    """Whether a path on the agent's port is only for the host. Any spelling of it counts, also with more behind it."""
    segments = normalised_segments(path)
    return bool(segments) and segments[0] in PRIVATE_SEGMENTS
