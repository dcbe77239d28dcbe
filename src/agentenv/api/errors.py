"""The one shape of an error on the wire: `{"code": <status>, "message": …, "error_code"?}` (E2B contract §2.1.1).

Turns errors into responses and decides nothing else; no detail of an unexpected error passes through here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentenv.errors import AgentEnvError

_LONGEST_MESSAGE = 2000

log = structlog.get_logger(__name__)


def error_response(
    status: int, message: str, *, error_code: str | None = None, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """Make an error response whose body's `code` equals `status`."""
    body: dict[str, Any] = {"code": status, "message": printable(message)}
    if error_code is not None:
        body["error_code"] = error_code
    return JSONResponse(body, status_code=status, headers=headers)


def agentenv_error_response(error: AgentEnvError) -> JSONResponse:
    """Make the response of one of our own errors, with `Retry-After` and `Should-Retry` where it has them."""
    headers: dict[str, str] = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.should_retry is not None:
        headers["Should-Retry"] = "true" if error.should_retry else "false"
    return error_response(error.status, error.message, error_code=error.error_code, headers=headers)


def internal_error_response() -> JSONResponse:
    """Make the response of an error that nobody foresaw: the log has the details, the client does not."""
    return error_response(500, "internal server error", error_code="internal_server_error")


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error that FastAPI and Starlette know of in our shape."""

    @app.exception_handler(AgentEnvError)
    async def on_agentenv_error(_request: Request, error: AgentEnvError) -> Response:
        if error.status >= 500 and error.status != HTTPStatus.NOT_IMPLEMENTED:
            log.warning("request_failed", status=error.status, error=type(error).__name__, message=error.message)
        return agentenv_error_response(error)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_request: Request, error: RequestValidationError) -> Response:
        return error_response(400, describe_validation(error.errors()))

    @app.exception_handler(HTTPException)
    async def on_http(request: Request, error: HTTPException) -> Response:
        headers = error.headers
        if error.status_code == HTTPStatus.NOT_FOUND:
            message = f"no such endpoint: {request.method} {request.scope['path']}"
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            message = f"method {request.method} is not allowed for {request.scope['path']}"
            headers = {"Allow": ", ".join(_allowed_methods(request))}
        else:
            message = str(error.detail)
        return error_response(error.status_code, message, headers=headers)

    @app.exception_handler(Exception)
    async def on_unforeseen(_request: Request, _error: Exception) -> Response:
        return internal_error_response()  # Starlette raises the error again, and `ControlPlane` logs it

    @app.exception_handler(ClientDisconnect)
    async def on_disconnect(_request: Request, _error: ClientDisconnect) -> Response:
        return error_response(400, "the client closed the connection")


def describe_validation(errors: Sequence[Mapping[str, Any]]) -> str:
    """Word the first of pydantic's errors: where it is and what is wrong, never the value itself."""
    if not errors:
        return "invalid request"
    first = errors[0]
    where = ".".join(str(part) for part in first.get("loc", ()))
    return f"invalid request: {where}: {first.get('msg', 'invalid value')}"


def _allowed_methods(request: Request) -> list[str]:
    # Starlette names those of the first route that matches the path only.
    path = request.scope["path"]
    routes = [route for route in request.app.routes if isinstance(route, Route) and route.path_regex.match(path)]
    return sorted({method for route in routes for method in route.methods or ()})


def printable(message: str) -> str:
    """Make a message fit for a body: of bounded length, valid UTF-8."""
    return message[:_LONGEST_MESSAGE].encode("utf-8", "replace").decode("utf-8")
