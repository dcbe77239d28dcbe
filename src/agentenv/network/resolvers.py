"""Which resolvers the host uses, and asking them one raw DNS message. Knows nothing of slots or firewalls.

Messages are relayed byte for byte (RFC 1035 §4); only the header and the question are looked at, to match answers.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import struct
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import structlog

from agentenv.errors import ConfigurationError

RESOLV_CONF = Path("/etc/resolv.conf")
DNS_PORT = 53
MAX_MESSAGE = 65535

_HEADER = struct.Struct("!HHHHHH")
_QR = 0x8000
_OPCODE = 0x7800
_RD = 0x0100
_RCODE = 0x000F
_SERVFAIL, _NOTIMP, _REFUSED = 2, 4, 5

log = structlog.get_logger(__name__)

_SERVER = re.compile(
    r"(?:\[(?P<six>[^]]+)\]|(?P<four>[0-9.]+))(?::(?P<port>[0-9]{1,5}))?|(?P<bare_six>[^\[\]]*:[^\[\]]*:[^\[\]]*)"
)

Server = tuple[str, int]
"""Address (an IPv6 one may have a `%scope`) and port."""


class MalformedMessageError(ValueError):
    """Bytes that are no DNS query. Internal: such packets are ignored."""


def question_of(message: bytes) -> bytes:
    """The question section (first entry) of a query or answer.

    Raises:
        MalformedMessageError: too short, no question, or a name that does not end.
    """
    if len(message) < _HEADER.size or _HEADER.unpack_from(message)[2] < 1:
        raise MalformedMessageError
    position = _HEADER.size
    while position < len(message):
        length = message[position]
        if length == 0:
            end = position + 5
            if end > len(message) or position - _HEADER.size > 254:
                raise MalformedMessageError
            return message[_HEADER.size : end]
        if length > 63:
            raise MalformedMessageError
        position += length + 1
    raise MalformedMessageError


def check_query(message: bytes) -> None:
    """Accept only what a resolver would answer: a query with a question.

    Raises:
        MalformedMessageError: it is none.
    """
    question_of(message)
    if _HEADER.unpack_from(message)[1] & _QR:
        raise MalformedMessageError


def is_answer(query: bytes, answer: bytes) -> bool:
    """Whether `answer` belongs to `query`: same id, same question, marked as a response."""
    if len(answer) < _HEADER.size or answer[:2] != query[:2] or not answer[2] & 0x80:
        return False
    try:
        # Names in answers may differ in case only if the server is broken; 0x20 mixing must come back as sent.
        return question_of(answer).lower() == question_of(query).lower()
    except MalformedMessageError:
        # Servers may leave the question out of an error.
        return _HEADER.unpack_from(answer)[2] == 0 and bool(_HEADER.unpack_from(answer)[1] & _RCODE)


def servfail(query: bytes) -> bytes:
    """The answer that says that no resolver answered."""
    question = question_of(query)
    identity, flags, *_ = _HEADER.unpack_from(query)
    return _HEADER.pack(identity, _QR | (flags & (_OPCODE | _RD)) | _SERVFAIL, 1, 0, 0, 0) + question


def parse_server(text: str) -> Server:
    """Read `1.2.3.4`, `1.2.3.4:5353`, `2001:db8::1`, `fe80::1%eth0` or `[2001:db8::1]:5353`.

    Raises:
        ConfigurationError: it is no IP address.
    """
    found = _SERVER.fullmatch(text)
    try:
        if found is None:
            raise ValueError(text)
        host, port = found["six"] or found["bare_six"] or found["four"], int(found["port"] or DNS_PORT)
        (IPv6Address if ":" in host else IPv4Address)(host)
        if not 0 < port < 65536:
            raise ValueError(text)
    except ValueError as error:
        raise ConfigurationError(
            f"network.dns_servers: '{text}' is not an IP address (with `:port` or `[address]:port` at most)"
        ) from error
    return host, port


def parse_resolv_conf(text: str) -> tuple[Server, ...]:
    """The `nameserver` lines of a resolv.conf; lines that make no sense are skipped, as libc does (resolv.conf(5))."""
    servers: list[Server] = []
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == "nameserver":
            try:
                (IPv6Address if ":" in words[1] else IPv4Address)(words[1])
            except ValueError:
                continue
            servers.append((words[1], DNS_PORT))
    return tuple(servers)


class HostResolvers:
    """The resolvers that questions go to: the configured ones, else those of the host, read again when they change."""

    def __init__(self, configured: Sequence[str] = (), resolv_conf: Path = RESOLV_CONF, timeout_s: float = 2.5) -> None:
        """Args:
        configured: `NetworkSettings.dns_servers`.
        resolv_conf: read when nothing is configured. The stub of systemd-resolved (127.0.0.53) works as any other.
        timeout_s: how long one server may take before the next is asked.

        Raises:
            ConfigurationError: a configured server is no IP address.
        """
        self._configured = tuple(parse_server(text) for text in configured)
        self._path = resolv_conf
        self._timeout_s = timeout_s
        self._seen: tuple[int, int, int] | None = None
        self._servers: tuple[Server, ...] = ()

    def servers(self) -> tuple[Server, ...]:
        """Those to ask now, best first. Empty when the host has none. A resolv.conf without servers means 127.0.0.1."""
        if self._configured:
            return self._configured
        try:
            status = os.stat(self._path)  # noqa: PTH116
            seen = (status.st_mtime_ns, status.st_ino, status.st_size)
            if seen != self._seen:
                self._servers = parse_resolv_conf(self._path.read_text(errors="replace")) or (("127.0.0.1", DNS_PORT),)
                self._seen = seen
        except OSError as error:
            if self._seen is not None or not self._servers:
                log.warning("resolv_conf_unreadable", path=str(self._path), error=error.strerror)
            self._seen = None
            self._servers = self._servers or (("127.0.0.1", DNS_PORT),)
        return self._servers

    async def ask(self, query: bytes, *, tcp: bool) -> bytes:
        """Relay a checked query and return the answer's bytes.

        A server that is silent, unreachable, or refuses is passed over for the next; if all of them are, the last
        refusal or a SERVFAIL is the answer.
        """
        refusal: bytes | None = None
        for server in self.servers():
            try:
                async with asyncio.timeout(self._timeout_s):
                    answer = await (_ask_tcp if tcp else _ask_udp)(server, query)
            except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
                log.debug("resolver_failed", server=server[0], error=str(error) or type(error).__name__)
                continue
            if _HEADER.unpack_from(answer)[1] & _RCODE not in (_SERVFAIL, _NOTIMP, _REFUSED):
                return answer
            refusal = answer
        return refusal or servfail(query)


class _UdpAsk(asyncio.DatagramProtocol):
    def __init__(self, query: bytes, answer: asyncio.Future[bytes]) -> None:
        self._query = query
        self._answer = answer

    def datagram_received(self, data: bytes, addr: object) -> None:
        if not self._answer.done() and is_answer(self._query, data):
            self._answer.set_result(data)

    def error_received(self, exc: Exception) -> None:
        if not self._answer.done():
            self._answer.set_exception(exc)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("socket closed"))


async def _ask_udp(server: Server, query: bytes) -> bytes:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[bytes] = loop.create_future()
    # A socket of its own, hence a random source port, for every question: a forger would have to guess it.
    transport, _ = await loop.create_datagram_endpoint(lambda: _UdpAsk(query, answer), remote_addr=server)
    try:
        transport.sendto(query)
        return await answer
    finally:
        if not answer.done():
            answer.cancel()
        transport.close()


async def _ask_tcp(server: Server, query: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*server, family=socket.AF_UNSPEC)
    try:
        writer.write(len(query).to_bytes(2, "big") + query)
        await writer.drain()
        answer = await reader.readexactly(int.from_bytes(await reader.readexactly(2), "big"))
    finally:
        writer.close()
    if not is_answer(query, answer):
        raise ConnectionError("the resolver answered something else")
    return answer
