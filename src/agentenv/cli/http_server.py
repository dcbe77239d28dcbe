"""The HTTP listener: address, socket, and a uvicorn server that leaves signals to us and never cuts a quiet stream.

Knows nothing of what it serves.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable, Generator

import uvicorn
from starlette.types import ASGIApp

from agentenv.cli.http_protocol import BoundedHttpProtocol
from agentenv.errors import ConfigurationError

KEEP_ALIVE_S = 620
"""Idle connections of clients; more than any SDK keeps its own (300 s), so that no request meets a closing socket."""
GRACE_S = 5
"""How long open requests and streams may go on after the server was asked to stop."""
_BACKLOG = 4096
_LARGEST_WEBSOCKET_MESSAGE = 64 * 1024 * 1024


def parse_listen(text: str) -> tuple[str, int]:
    """Split `HOST:PORT` or `[IPV6]:PORT`.

    Raises:
        ConfigurationError: the text has another form.
    """
    host, separator, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not separator or not bare or (":" in bare and bare == host) or not (port.isascii() and port.isdigit()):
        raise ConfigurationError(f"--listen {text}: give HOST:PORT, such as 127.0.0.1:8000 or [::1]:8000")
    if int(port) > 65535:
        raise ConfigurationError(f"--listen {text}: {port} is not a port")
    return bare, int(port)


def bound_socket(host: str, port: int) -> socket.socket:
    """Bind an address, without listening yet: until the server is ready, clients are refused and do not hang.

    Port 0 takes a free one.

    Raises:
        ConfigurationError: the host has no address here, or the port is taken or not allowed.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigurationError(f"cannot listen on {host}: the name has no address") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise _listen_error(f"{host}:{port}", error) from error
    return listener


def _listen_error(address: str, error: OSError) -> ConfigurationError:
    if error.errno == errno.EADDRINUSE:
        return ConfigurationError(
            f"cannot listen on {address}: the port is in use; choose another with --listen (0 takes a free one)"
        )
    return ConfigurationError(f"cannot listen on {address}: {error.strerror}")


def base_url(listener: socket.socket) -> str:
    """Return the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """A uvicorn server without signal handlers.

    uvicorn's own handlers raise the signal again once it has stopped, which would end the process before anything else
    is closed. Use `stop()` instead.
    """

    def __init__(self, app: ASGIApp, listener: socket.socket, on_ready: Callable[[], None]) -> None:
        """
        Args:
            app: what to serve.
            listener: a bound socket; the server closes it.
            on_ready: called once when connections are accepted.
        """
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http=BoundedHttpProtocol,
                ws="wsproto",
                ws_max_size=_LARGEST_WEBSOCKET_MESSAGE,
                ws_ping_interval=None,
                ws_ping_timeout=None,
                ws_per_message_deflate=False,
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=GRACE_S,
            )
        )
        self._listener = listener
        self._on_ready = on_ready

    async def run_until_stopped(self) -> None:
        """Serve until `stop()`.

        Raises:
            ConfigurationError: somebody else listens on the address since it was bound.
        """
        await self.serve(sockets=[self._listener])
        # What did not end in its grace was cancelled at most; nothing of it may run while the rooms below are closed.
        leftovers = set(self.server_state.tasks)
        for task in leftovers:
            task.cancel()
        if leftovers:
            await asyncio.wait(leftovers, timeout=GRACE_S)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        url = base_url(self._listener)
        try:
            await super().startup(sockets)
        except OSError as error:
            raise _listen_error(url.removeprefix("http://"), error) from error
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def stop(self, *, force: bool = False) -> None:
        """Ask the server to stop: open requests get `GRACE_S` seconds, or none when forced. Idempotent."""
        self.should_exit = True
        self.force_exit = self.force_exit or force
