"""Reading JSON request bodies: bounded while they stream in, strict in what counts as JSON.

Knows nothing of what the body means; types are checked by the models.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders

from agentenv.errors import InvalidRequestError, PayloadTooLargeError


class _ParsedRequest(Request):
    """A request whose body was read and parsed already."""

    def __init__(self, request: Request, raw: bytes, value: Any) -> None:
        scope = dict(request.scope)
        # Clients that name no or another content type still mean JSON: these endpoints take nothing else.
        scope["headers"] = list(scope["headers"])
        MutableHeaders(scope=scope)["content-type"] = "application/json"
        super().__init__(scope, request.receive)
        self._raw = raw
        self._value = value

    async def body(self) -> bytes:
        return self._raw

    async def json(self) -> Any:
        return self._value


def json_route(max_bytes: int) -> type[APIRoute]:
    """Make a route class whose endpoints get their body through `read_body` and `parse_json`."""

    class JsonRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            inner = super().get_route_handler()
            if self.body_field is None:
                return inner

            async def handler(request: Request) -> Response:
                raw = await read_body(request, max_bytes)
                value = parse_json(raw) if raw else None
                return await inner(_ParsedRequest(request, raw, value))

            return handler

    return JsonRoute


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Read a request body of at most `max_bytes` bytes.

    Raises:
        PayloadTooLargeError: the body is announced as larger, or turns out to be.
        starlette.requests.ClientDisconnect: the client left before the end.
    """
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > max_bytes:
        raise PayloadTooLargeError(f"the request body is larger than {max_bytes} bytes")
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise PayloadTooLargeError(f"the request body is larger than {max_bytes} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def parse_json(raw: bytes) -> Any:
    """Parse a JSON text (RFC 8259): UTF-8, no NaN or Infinity, no lone surrogates.

    Raises:
        InvalidRequestError: the bytes are not that, or are nested too deeply.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"the request body is not valid UTF-8 (byte {error.start})") from error
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError as error:
        raise InvalidRequestError("the request body is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise InvalidRequestError(
            f"the request body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from error
    except UnicodeEncodeError as error:
        raise InvalidRequestError("the request body has an unpaired surrogate escape") from error
    except ValueError as error:
        # json raises it for integers beyond the interpreter's digit limit.
        raise InvalidRequestError("the request body has a number that is too long") from error
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidRequestError(f"the request body is not valid JSON: {name} is not a JSON number")
