"""The resolver that guests see at the gateway: relays raw DNS messages from a slot's namespace to the host's resolvers.

The sockets were bound inside the namespace by a thread (`slots.py`); here they are served by the server's own loop.
Whether a guest may ask at all is the firewall's business, names and answers are the resolver's.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import structlog

from agentenv.network.resolvers import HostResolvers, MalformedMessageError, check_query

TCP_IDLE_S = 10.0

log = structlog.get_logger(__name__)


class DnsForwarder:
    """Serves one slot. Owns its tasks and, from `start` on, the two sockets; `close` ends both."""

    def __init__(
        self,
        udp: socket.socket,
        tcp: socket.socket,
        resolvers: HostResolvers,
        *,
        max_queries: int = 128,
        max_connections: int = 32,
    ) -> None:
        """Args:
        udp: bound datagram socket.
        tcp: listening stream socket.
        resolvers: whom to ask.
        max_queries: datagram questions in flight; more are dropped, and the guest asks again.
        max_connections: TCP connections at once; more are closed at once.
        """
        self._udp_socket = udp
        self._tcp_socket = tcp
        self._resolvers = resolvers
        self._max_queries = max_queries
        self._max_connections = max_connections
        self._tasks: set[asyncio.Task[None]] = set()
        self._queries = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._transport: asyncio.DatagramTransport | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Begin to serve.

        Raises:
            OSError: a socket is closed.
        """
        loop = asyncio.get_running_loop()
        try:
            self._transport, _ = await loop.create_datagram_endpoint(lambda: _Datagrams(self), sock=self._udp_socket)
            self._server = await loop.create_server(
                lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader(limit=2**17), self._accepted),
                sock=self._tcp_socket,
            )
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Stop serving, cancel what is under way, close the sockets. Idempotent."""
        # A transport owns its socket once it has it; abort, because nobody is left to read what is still queued.
        if self._transport is not None:
            self._transport.abort()
        else:
            self._udp_socket.close()
        if self._server is not None:
            self._server.close()
        else:
            self._tcp_socket.close()
        for writer in self._writers:
            writer.transport.abort()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def datagram(self, query: bytes, peer: tuple[str, int]) -> None:
        """Take one datagram from the guest."""
        if self._queries >= self._max_queries:
            return
        try:
            check_query(query)
        except MalformedMessageError:
            return
        self._queries += 1
        self._own(self._answer_datagram(query, peer))

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._writers) >= self._max_connections:
            writer.transport.abort()
            return
        self._writers.add(writer)
        self._own(self._serve_connection(reader, writer))

    def _own(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_datagram(self, query: bytes, peer: tuple[str, int]) -> None:
        try:
            answer = await self._resolvers.ask(query, tcp=False)
            if self._transport is not None and not self._transport.is_closing():
                self._transport.sendto(answer, peer)
        finally:
            self._queries -= 1

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                async with asyncio.timeout(TCP_IDLE_S):
                    query = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
                check_query(query)
                answer = await self._resolvers.ask(query, tcp=True)
                writer.write(len(answer).to_bytes(2, "big") + answer)
                async with asyncio.timeout(TCP_IDLE_S):
                    await writer.drain()
        except TimeoutError:
            writer.transport.abort()
        except (OSError, asyncio.IncompleteReadError, MalformedMessageError) as error:
            log.debug("dns_connection_ended", reason=type(error).__name__)
        finally:
            self._writers.discard(writer)
            writer.close()


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, forwarder: DnsForwarder) -> None:
        self._forwarder = forwarder

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._forwarder.datagram(data, (addr[0], addr[1]))

    def error_received(self, exc: Exception) -> None:
        log.debug("dns_socket_error", error=str(exc))
