"""The ASGI shell around the routes: request id, CORS, API key, raw-path routing, last resort for errors.

Runs before FastAPI sees a request, so that no route can forget any of it. Knows no route but the public ones.
"""

from __future__ import annotations

import secrets
import time
from email.utils import formatdate
from urllib.parse import unquote

import structlog
from starlette.convertors import Convertor, register_url_convertor
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentenv.api.errors import error_response, internal_error_response
from agentenv.api.keys import key_matches

PUBLIC_PATHS = frozenset({"/health", "/docs", "/openapi.json"})
"""Paths that need no key: liveness, and the description of the API, which holds no data."""

EXPOSED_HEADERS = "X-Next-Token, X-Total-Running, X-Request-Id, Retry-After, Should-Retry"
_CORS_METHODS = "GET, POST, PUT, PATCH, DELETE, OPTIONS"
_CORS_MAX_AGE_S = 86400

log = structlog.get_logger(__name__)


class SegmentConvertor(Convertor[str]):
    """A path parameter that is one segment of the raw path, decoded: `team%2Fname` arrives as `team/name`."""

    regex = "[^/]+"

    def convert(self, value: str) -> str:
        return unquote(value)

    def to_string(self, value: str) -> str:
        return value.replace("%", "%25").replace("/", "%2F")


register_url_convertor("segment", SegmentConvertor())


class ControlPlane:
    """Wraps the FastAPI application; see the module."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await _refuse_websocket(scope, receive, send)
        elif scope["type"] == "http":
            await self._serve(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = secrets.token_hex(8)
        method = scope["method"]
        path = routed_path(scope)
        headers = Headers(scope=scope)
        started_at = time.monotonic()
        status = 0
        complete = False

        async def send_with_headers(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                out = MutableHeaders(scope=message)
                out["X-Request-Id"] = request_id
                # Not left to the server in front: guests send their own, which it would double (RFC 9110 §6.6.1).
                out["Date"] = formatdate(usegmt=True)
                if "origin" in headers:
                    out["Access-Control-Allow-Origin"] = "*"
                    out["Access-Control-Expose-Headers"] = EXPOSED_HEADERS
            elif message["type"] == "http.response.body":
                complete = not message.get("more_body", False)
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                early = self._early_response(method, path, headers)
                if early is not None:
                    await early(scope, receive, send_with_headers)
                else:
                    await self._app({**scope, "path": path}, receive, send_with_headers)
            except Exception:
                log.exception("request_crashed", method=method, path=path)
                if status and not complete:
                    raise  # too late for another answer; the server cuts the connection
                if not status:
                    await internal_error_response()(scope, receive, send_with_headers)
            finally:
                log.debug(
                    "request",
                    method=method,
                    path=path,
                    status=status or None,
                    duration_ms=round((time.monotonic() - started_at) * 1000, 1),
                )

    def _early_response(self, method: str, path: str, headers: Headers) -> Response | None:
        if method == "OPTIONS" and "origin" in headers and "access-control-request-method" in headers:
            return Response(
                status_code=204,
                headers={
                    "Access-Control-Allow-Methods": _CORS_METHODS,
                    "Access-Control-Allow-Headers": headers.get("access-control-request-headers", "*"),
                    "Access-Control-Max-Age": str(_CORS_MAX_AGE_S),
                    "Vary": "Access-Control-Request-Headers",
                },
            )
        if path in PUBLIC_PATHS:
            return None
        presented = headers.get("x-api-key")
        if presented is None:
            scheme, _, credentials = headers.get("authorization", "").partition(" ")
            presented = credentials.strip() if scheme.lower() == "bearer" else ""
        if not presented:
            return _unauthorized("no API key: send it in the header X-API-KEY")
        if not key_matches(presented, self._api_key):
            return _unauthorized("invalid API key")
        return None


def routed_path(scope: Scope) -> str:
    """Return the path that routes are matched on: the raw one, decoded except for `/` and `%` inside a segment."""
    raw: bytes | None = scope.get("raw_path")
    if raw is None:
        path: str = scope["path"]
        return path
    segments = raw.decode("latin-1").partition("?")[0].split("/")
    return "/".join(unquote(segment).replace("%", "%25").replace("/", "%2F") for segment in segments)


def _unauthorized(message: str) -> Response:
    return error_response(401, message, headers={"WWW-Authenticate": "Bearer"})


async def _refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    response = error_response(404, "no such endpoint: the control plane has no WebSockets")
    if "websocket.http.response" in scope.get("extensions", {}):
        await response(scope, receive, send)
    else:
        await send({"type": "websocket.close", "code": 1000})
