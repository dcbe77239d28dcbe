"""The sandbox proxy in a process of its own, in front of one address of this host. Run by the benchmarks."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SANDBOX = "ibench"


@contextmanager
def ingress(guest: str) -> Iterator[str]:
    """Run the proxy for a sandbox `SANDBOX` at the address `guest`; yields its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        descriptor = listener.fileno()
        os.set_inheritable(descriptor, True)
        process = subprocess.Popen([sys.executable, __file__, str(descriptor), guest], pass_fds=[descriptor])
    try:
        yield url
    finally:
        process.terminate()
        process.wait()


def _serve(descriptor: int, guest: str) -> None:
    import uvicorn

    from agentenv.config import Settings
    from agentenv.orchestrator.routes import Route, RouteTable
    from agentenv.proxy import UVICORN_OPTIONS, SandboxProxy

    routes = RouteTable()

    async def wake(_: str) -> Route | None:
        return None

    proxy = SandboxProxy(routes, Settings(), wake)
    routes.publish(Route(SANDBOX, 1, guest, "t" * 64))
    config = uvicorn.Config(proxy, lifespan="off", log_level="critical", **UVICORN_OPTIONS)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=descriptor)])


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2])
