"""Ends work whose caller has left: nobody would learn the id of what it makes."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

T = TypeVar("T")


async def while_client_waits(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`; cancel it, and wait until it has cleaned up, when the client closes the connection.

    The body of the request must have been read before.

    Raises:
        starlette.requests.ClientDisconnect: the client left and the work was cancelled.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        left = not task.done()
        if left:
            task.cancel()
        await asyncio.wait((task, gone))
    if left and task.cancelled():
        raise ClientDisconnect
    return task.result()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
