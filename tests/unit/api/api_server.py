"""Runs the real `serve` with fake rooms, so that its start, its signals and its stop can be tested without machines.

Usage: api_server.py LISTEN MODE, where MODE is `ready`, `drain`, or `hang` (a start that never ends). Reports on
standard error what is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from typing import Any

from api_fakes import FakeService, FakeTemplates

from agentenv.api.app import create_app
from agentenv.cli import serve as module
from agentenv.errors import AgentEnvError


def report(text: str) -> None:
    sys.stderr.write(f"TEST {text}\n")
    sys.stderr.flush()


class FakeProxy:
    """Claims what names a sandbox and answers with a stream that ends with its client."""

    def claims(self, scope: Any) -> bool:
        return any(name == b"e2b-sandbox-id" for name, _ in scope.get("headers", ()))

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 299, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        try:
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:
            report("stream ended")


async def assemble(stack: Any, settings: Any, api_key: str, listener: Any, *, drain: bool) -> Any:
    async def closed(name: str) -> None:
        report(f"closed {name}")

    stack.push_async_callback(closed, f"orchestrator drain={drain}")
    if sys.argv[2] == "hang":
        print("hanging", flush=True)
        await asyncio.Event().wait()
    stack.push_async_callback(closed, "proxy")
    domain = f"{settings.api.domain}:{listener.getsockname()[1]}"
    return module.Ingress(FakeProxy(), create_app(FakeService(), FakeTemplates(), settings, api_key, domain=domain))


module._assemble = assemble
with contextlib.suppress(AttributeError):
    os.geteuid = lambda: 0
try:
    code = module.serve(sys.argv[1], drain=sys.argv[2] == "drain")
except AgentEnvError as error:
    report(f"error: {error.message}")
    code = 1
sys.exit(code)
