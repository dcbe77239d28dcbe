"""The door for sandbox traffic: an ASGI application that finds the sandbox, decides whether to admit, and streams.

It reads the route table and asks the orchestrator for one thing only, to wake a sandbox. The agent checks its own
access token; here only the private-traffic token of other ports is checked, and the agent's private paths are refused.
Of a sandbox that sleeps both tokens are checked here, before it is woken.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from agentenv.config import Settings
from agentenv.errors import AgentEnvError, InvalidRequestError
from agentenv.ids import secrets_equal
from agentenv.orchestrator.routes import Route, RouteTable
from agentenv.proxy import replies
from agentenv.proxy.exchange import HttpExchange, send_reply
from agentenv.proxy.headers import TRAFFIC_TOKEN
from agentenv.proxy.pool import Upstreams
from agentenv.proxy.replies import Reply
from agentenv.proxy.signatures import find_signer
from agentenv.proxy.target import AGENT_PORT, SignedFile, Target, TargetParser, header, is_private
from agentenv.proxy.websocket import MAX_MESSAGE_BYTES, WebSocketExchange, refuse_websocket

Wake = Callable[[str], Awaitable[Route | None]]

UVICORN_OPTIONS: dict[str, Any] = {
    "loop": "uvloop",
    "http": "httptools",
    "ws": "wsproto",
    "ws_max_size": MAX_MESSAGE_BYTES,
    "ws_ping_interval": None,
    "ws_per_message_deflate": False,
    "server_header": False,
    "date_header": False,
    "proxy_headers": False,
    "timeout_keep_alive": 620,
}
"""How the server in front must be set: no cut of quiet sockets, no second `Date`, the peer's own address, and idle
client connections kept longer than the SDKs keep theirs (300 s), so that they never send into a closing one."""


class SandboxProxy:
    """Routes sandbox traffic by the table and forwards it. An ASGI application for `http` and `websocket` scopes."""

    def __init__(self, routes: RouteTable, settings: Settings, wake: Wake, *, agent_port: int = AGENT_PORT) -> None:
        """
        Args:
            routes: read for every request; its withdrawals cut what runs.
            settings: the domains below which hosts name sandboxes.
            wake: called with a sandbox id that has no route and sleeps, for traffic that may wake it; publishes a route
                and returns it, or returns None.
            agent_port: where the guest agent listens.
        """
        self._routes = routes
        self._wake = wake
        self._agent_port = agent_port
        self._parser = TargetParser(settings.api)
        self._upstreams = Upstreams(agent_port)
        self._open = True
        routes.on_withdraw(self._upstreams.withdraw)

    async def start(self) -> None:
        """Take requests (again, after `close`)."""
        self._open = True

    async def close(self) -> None:
        """Cut all traffic and take no more. Idempotent."""
        self._open = False
        self._upstreams.close()

    def claims(self, scope: Any) -> bool:
        """Whether an ASGI `http` or `websocket` scope is sandbox traffic; ask it before any control-plane route."""
        return scope["type"] in ("http", "websocket") and self._parser.claims(scope)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request or WebSocket."""
        if scope["type"] == "websocket" and (await receive())["type"] != "websocket.connect":
            return
        admitted = await self._admit(scope)
        if isinstance(admitted, Reply):
            await self._refuse(admitted, scope, send)
            return
        target, route = admitted
        # No await stands between the look-up of the route and the pool, so a withdrawn life is never opened again.
        pool = self._upstreams.of(route)
        kind = WebSocketExchange if scope["type"] == "websocket" else HttpExchange
        try:
            exchange = kind(scope, receive, send, target, route, pool, self._agent_port)
        except InvalidRequestError as error:
            await self._refuse(Reply(400, error.message), scope, send)
            return
        await exchange.run()

    async def _admit(self, scope: Any) -> tuple[Target, Route] | Reply:
        if not self._open:
            return Reply(503, "The server is shutting down")
        try:
            target = self._parser.parse(scope)
            if isinstance(target, SignedFile):
                return self._admit_signed(target)
            if target.port == self._agent_port and is_private(target.path):
                return replies.private_path(target.sandbox_id)
        except InvalidRequestError as error:
            return Reply(400, error.message)
        route = self._routes.get(target.sandbox_id)
        if route is None:
            refusal = await self._wake_up(target, scope)
            if refusal is not None:
                return refusal
            route = self._routes.get(target.sandbox_id)
        if route is None:
            return replies.sandbox_not_found(target.sandbox_id)
        if route.traffic_access_token is not None and target.port != self._agent_port:
            given = header(scope["headers"], TRAFFIC_TOKEN) or b""
            if not secrets_equal(given.decode("latin-1"), route.traffic_access_token):
                return replies.traffic_token_refused(target.sandbox_id, target.port)
        return target, route

    def _admit_signed(self, file: SignedFile) -> tuple[Target, Route] | Reply:
        route = find_signer(self._routes, file.operations, file.query)
        if route is None:
            return Reply(401, "invalid signature")
        return Target(route.sandbox_id, self._agent_port, file.path, file.query), route

    async def _wake_up(self, target: Target, scope: Any) -> Reply | None:
        """Wake a sandbox that sleeps, for traffic that shows the token which it needs. Returns a refusal, or None."""
        sleeper = self._routes.sleeper(target.sandbox_id)
        if sleeper is None:
            return None
        headers = scope["headers"]
        if target.port == self._agent_port:
            given = header(headers, b"x-access-token") or b""
            proven = secrets_equal(given.decode("latin-1"), sleeper.envd_access_token)
            # Without the right proof it is as if the sandbox did not run (contract §2.2.10).
            if not proven and find_signer((sleeper,), ("read", "write"), target.query) is None:
                return None
        elif sleeper.traffic_access_token is not None:
            given = header(headers, TRAFFIC_TOKEN) or b""
            if not secrets_equal(given.decode("latin-1"), sleeper.traffic_access_token):
                return None
        try:
            await self._wake(target.sandbox_id)
        except AgentEnvError as error:
            return replies.not_woken(target.sandbox_id, error)
        return None

    @staticmethod
    async def _refuse(reply: Reply, scope: Any, send: Any) -> None:
        if scope["type"] == "websocket":
            await refuse_websocket(reply, scope, send)
        else:
            await send_reply(reply, scope, send)
