"""Connections to guests, kept apart by life: nothing opened for one life of one sandbox ever serves another.

It opens connections (directly, else through the agent's tunnel to the guest's loopback), keeps idle ones for reuse, and
cuts everything when a route is withdrawn. It knows nothing of HTTP semantics.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import httptools

from agentenv.orchestrator.routes import Route
from agentenv.proxy.upstream import UpstreamConnection, UpstreamLostError

CONNECT_TIMEOUT_S = 15.0
"""A guest's kernel answers a SYN at once unless it drops it; this spans three retransmissions."""
MAX_IDLE_PER_LIFE = 64
IDLE_EXPIRY_S = 5.0
"""How long a connection is kept for the next request; most services keep theirs at least that long."""
LAST_WORD_S = 1.0
"""How long a guest may take to close a connection that is not used again. When it closes first, the host's port is free
at once; otherwise the host keeps it for a minute, and many requests in a row would use them up."""


class PortNotOpenError(Exception):
    """Nothing in the guest accepts connections on the port. Stays inside the proxy."""


class RouteGoneError(Exception):
    """The life ended while a connection was being opened. Stays inside the proxy."""


class Stream:
    """One exchange under way, which can be ended from outside."""

    def __init__(self, scope: asyncio.Timeout) -> None:
        self._scope = scope
        self.withdrawn = False
        """The sandbox's life ended."""
        self.client_gone = False

    def withdraw(self) -> None:
        self.withdrawn = True
        self._end()

    def client_left(self) -> None:
        self.client_gone = True
        self._end()

    def _end(self) -> None:
        try:
            self._scope.reschedule(0)
        except RuntimeError:
            # The exchange is already leaving the scope; there is nothing left to cut.
            return


class _Tunnel(asyncio.Protocol):
    """The opening of a tunnel through the guest agent: `GET /tunnel?port=N`, `101`, then the service's own bytes."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._parser = httptools.HttpResponseParser(self)
        self.opened: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        """Bytes of the service that came together with the answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as switch:
            if not self.opened.done():
                # Whoever takes over resumes reading, so that no byte is delivered to this protocol any more.
                self._transport.pause_reading()
                self.opened.set_result(data[switch.args[0] :])
        except httptools.HttpParserError:
            self._refuse(UpstreamLostError("cannot be reached: its agent did not answer in HTTP", answered=True))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status == 502:
            self._refuse(PortNotOpenError())
        elif status != 101:
            self._refuse(UpstreamLostError(f"cannot be reached: its agent answered {status}", answered=True))

    def connection_lost(self, exc: Exception | None) -> None:
        self._refuse(UpstreamLostError("cannot be reached: its agent closed the tunnel", answered=False))

    def _refuse(self, error: Exception) -> None:
        if not self.opened.done():
            self.opened.set_exception(error)


class LifePool:
    """All connections and streams of one life of one sandbox."""

    def __init__(self, route: Route, tls: ssl.SSLContext, agent_port: int) -> None:
        self._route = route
        self._tls = tls
        self._agent_port = agent_port
        self._loop = asyncio.get_running_loop()
        self._open: set[UpstreamConnection] = set()
        self._idle: dict[int, list[tuple[float, UpstreamConnection]]] = {}
        self._idle_count = 0
        self._sweep: asyncio.TimerHandle | None = None
        self._streams: set[Stream] = set()
        self.closed = False

    @contextmanager
    def stream(self, scope: asyncio.Timeout) -> Iterator[Stream]:
        """Register an exchange, so that the end of the life ends it."""
        stream = Stream(scope)
        self._streams.add(stream)
        try:
            yield stream
        finally:
            self._streams.discard(stream)

    def take_idle(self, port: int) -> UpstreamConnection | None:
        """An idle connection to a port that is still good, the most recently used first."""
        waiting = self._idle.get(port)
        while waiting:
            _, connection = waiting.pop()
            self._idle_count -= 1
            if connection.still_idle():
                return connection
            connection.abort()
        return None

    def give_back(self, connection: UpstreamConnection, port: int, *, reuse: bool) -> None:
        """Keep a connection for the next exchange if its last one ended cleanly; drop it otherwise.

        `reuse=False`: the guest was told that nothing follows.
        """
        if self.closed or not connection.settled:
            connection.abort()
            return
        connection.park()
        if not reuse or not connection.reusable or self._idle_count >= MAX_IDLE_PER_LIFE:
            self._loop.call_later(LAST_WORD_S, connection.abort)
            return
        self._idle.setdefault(port, []).append((self._loop.time(), connection))
        self._idle_count += 1
        if self._sweep is None:
            self._sweep = self._loop.call_later(IDLE_EXPIRY_S, self._drop_expired)

    async def connect(self, port: int) -> UpstreamConnection:
        """Open a connection to a port of the guest, on its network address or else on its loopback.

        Raises:
            PortNotOpenError: nothing listens on either.
            RouteGoneError: the life ended meanwhile.
            UpstreamLostError: something listens, but neither TLS nor the tunnel could be set up.
        """
        tls = self._tls if port in self._route.https_ports else None
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                connection = await self._connect(port, tls)
        except ssl.SSLError as error:
            raise UpstreamLostError("does not speak TLS", answered=True) from error
        except (OSError, TimeoutError) as error:
            if self.closed:
                raise RouteGoneError from error
            raise PortNotOpenError from error
        if self.closed:
            connection.abort()
            raise RouteGoneError
        return connection

    def close(self) -> None:
        """Cut every stream and connection. Idempotent."""
        self.closed = True
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        for stream in tuple(self._streams):
            stream.withdraw()
        for connection in tuple(self._open):
            connection.abort()
        self._idle.clear()
        self._idle_count = 0

    def _new_connection(self) -> UpstreamConnection:
        connection = UpstreamConnection(self._forget)
        self._open.add(connection)
        return connection

    async def _connect(self, port: int, tls: ssl.SSLContext | None) -> UpstreamConnection:
        connection = self._new_connection()
        try:
            await self._loop.create_connection(
                lambda: connection,
                self._route.host,
                port,
                ssl=tls,
                server_hostname=self._server_name() if tls is not None else None,
            )
            return connection
        except BaseException as error:
            self._open.discard(connection)
            if port == self._agent_port or not isinstance(error, ConnectionRefusedError):
                raise
        return await self._connect_through_tunnel(port, tls)

    async def _connect_through_tunnel(self, port: int, tls: ssl.SSLContext | None) -> UpstreamConnection:
        request = (
            f"GET /tunnel?port={port} HTTP/1.1\r\nHost: {self._route.host}:{self._agent_port}\r\n"
            f"X-Access-Token: {self._route.envd_access_token}\r\nConnection: Upgrade\r\nUpgrade: aenv-tunnel\r\n\r\n"
        ).encode()
        transport, tunnel = await self._loop.create_connection(
            lambda: _Tunnel(request), self._route.host, self._agent_port
        )
        connection = self._new_connection()
        try:
            early = await tunnel.opened
            if tls is not None:
                secured = await self._loop.start_tls(transport, connection, tls, server_hostname=self._server_name())
                if secured is None:
                    raise ConnectionResetError("the tunnel closed during the TLS handshake")
                connection.connection_made(secured)
                return connection
            transport.set_protocol(connection)
            connection.connection_made(transport)
            if early:
                connection.data_received(early)
            transport.resume_reading()
        except BaseException:
            self._open.discard(connection)
            transport.abort()
            raise
        return connection

    def _server_name(self) -> str:
        """Name for SNI. Without a masked host it is the address, which TLS clients do not send."""
        mask = self._route.mask_request_host
        return mask.partition(":")[0] if mask else self._route.host

    def _forget(self, connection: UpstreamConnection) -> None:
        self._open.discard(connection)
        for waiting in self._idle.values():
            kept = [entry for entry in waiting if entry[1] is not connection]
            self._idle_count -= len(waiting) - len(kept)
            waiting[:] = kept

    def _drop_expired(self) -> None:
        self._sweep = None
        oldest = self._loop.time() - IDLE_EXPIRY_S
        next_due: float | None = None
        for waiting in self._idle.values():
            for since, connection in tuple(waiting):
                if since <= oldest:
                    connection.abort()
                elif next_due is None or since < next_due:
                    next_due = since
        if next_due is not None:
            self._sweep = self._loop.call_at(next_due + IDLE_EXPIRY_S, self._drop_expired)


class Upstreams:
    """The pools of all lives that have a route."""

    def __init__(self, agent_port: int) -> None:
        self._agent_port = agent_port
        self._pools: dict[tuple[str, int], LifePool] = {}
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # Certificates of services inside a sandbox are self-made; the way there is host-internal.
        self._tls.check_hostname = False
        self._tls.verify_mode = ssl.CERT_NONE

    def of(self, route: Route) -> LifePool:
        """The pool of a route that is in the table now."""
        key = (route.sandbox_id, route.life)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = LifePool(route, self._tls, self._agent_port)
        return pool

    def withdraw(self, route: Route) -> None:
        """End everything that runs through a route."""
        pool = self._pools.pop((route.sandbox_id, route.life), None)
        if pool is not None:
            pool.close()

    def close(self) -> None:
        """End everything."""
        while self._pools:
            self._pools.popitem()[1].close()
