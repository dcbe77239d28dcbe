"""The running server: puts the rooms together, serves them on one address, and stops in order.

Decides nothing about sandboxes. Standard output gets one line, `listening on http://…`; all else goes to standard
error.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import structlog
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from agentenv import __version__
from agentenv.api.app import create_app
from agentenv.api.keys import load_or_create_api_key
from agentenv.cli.http_server import HttpServer, base_url, bound_socket, parse_listen
from agentenv.cli.log_setup import set_up_logging
from agentenv.cli.provision import provision_new_home
from agentenv.config import Settings, load_settings
from agentenv.errors import ConfigurationError
from agentenv.guest.assets import load_assets
from agentenv.guest.client import GuestAgents
from agentenv.network.pool import SlotPool
from agentenv.orchestrator.host import SystemHostProbe
from agentenv.orchestrator.launch import WarmPool, interface_of
from agentenv.orchestrator.lock import ServerLock
from agentenv.orchestrator.orchestrator import Orchestrator
from agentenv.orchestrator.orphans import HostOrphans
from agentenv.orchestrator.space import NodeSpace
from agentenv.proxy.app import SandboxProxy
from agentenv.snapshots.machines import SavedMachines
from agentenv.snapshots.repository import LocalSnapshots
from agentenv.snapshots.service import SnapshotService
from agentenv.storage.daemon import BlockDaemonProcess
from agentenv.storage.disks import DiskStore
from agentenv.storage.layers import LayerStore
from agentenv.templates.snapshots import SnapshotCatalog
from agentenv.templates.store import TemplateStore
from agentenv.templates.store import owner_of as owner_of_template
from agentenv.vmm.host import filesystem_is_tmpfs
from agentenv.vmm.memory import choose_memory_dir
from agentenv.vmm.probe import choose_vmm
from agentenv.vmm.warm import WaitingVmm, WarmMachines

INTERRUPTED = 130
"""Exit code when the server was told to stop before it was ready."""

log = structlog.get_logger(__name__)


def serve(listen: str, *, drain: bool = False, config: Path | None = None) -> int:
    """Run the server until SIGTERM or SIGINT; a second signal does not wait for open requests.

    Args:
        listen: `HOST:PORT`; port 0 takes a free one.
        drain: end all sandboxes that run when the server stops. Otherwise they go on, and the next server takes them
            over. Paused ones stay in any case.
        config: a TOML file; None takes `AENV_CONFIG`, else the one in the home.

    Returns:
        The exit code.

    Raises:
        AgentEnvError: the server cannot start; the message says what is missing.
    """
    settings = load_settings(config)
    set_up_logging(settings.log_level)
    host, port = parse_listen(listen)
    if os.geteuid() != 0:
        raise ConfigurationError("the server must run as root, it makes network namespaces; try: sudo aenv serve")
    _raise_file_limit()
    with ServerLock(settings.paths.lock), contextlib.closing(bound_socket(host, port)) as listener:
        api_key = load_or_create_api_key(settings)
        provision_new_home(settings)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_run(settings, api_key, listener, drain=drain))
        except (asyncio.CancelledError, KeyboardInterrupt):
            return INTERRUPTED
    return 0


class Ingress:
    """One origin for both planes: sandbox traffic goes to the proxy before any control-plane route is looked at."""

    def __init__(self, proxy: SandboxProxy, control_plane: ASGIApp) -> None:
        self._proxy = proxy
        self._control_plane = control_plane

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._proxy if self._proxy.claims(scope) else self._control_plane
        await app(scope, receive, send)


class StopSignals:
    """What SIGTERM and SIGINT do: cancel a start, stop a running server, hurry a stopping one."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task
        self._server: HttpServer | None = None
        self._closing = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[StopSignals]:
        """Handle the signals while the context lasts."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received, number)
        try:
            yield self
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    @contextlib.contextmanager
    def stopping(self, server: HttpServer) -> Iterator[None]:
        """Let signals stop this server while the context lasts, and hurry what is closed after it."""
        self._server = server
        try:
            yield
        finally:
            self._closing = True

    def _received(self, number: int) -> None:
        log.info("stop_requested", signal=signal.Signals(number).name)
        if self._server is None or self._closing:
            self._task.cancel()
        else:
            self._server.stop(force=self._server.should_exit)


async def _run(settings: Settings, api_key: str, listener: socket.socket, *, drain: bool) -> None:
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - this is a coroutine
    with StopSignals(task).handled() as signals:
        async with AsyncExitStack() as stack:
            ingress = await _assemble(stack, settings, api_key, listener, drain=drain)
            url = base_url(listener)

            def announce() -> None:
                settings.paths.listening.parent.mkdir(exist_ok=True)
                settings.paths.listening.write_text(f"{url}\n")
                stack.callback(settings.paths.listening.unlink, missing_ok=True)
                sys.stdout.write(f"listening on {url}\n")
                sys.stdout.flush()
                log.info("server_ready", url=url, version=__version__, home=str(settings.home))

            server = HttpServer(ingress, listener, announce)
            with signals.stopping(server):
                await server.run_until_stopped()
            log.info("server_stopping", drain=drain)
    log.info("server_stopped")


async def _assemble(
    stack: AsyncExitStack, settings: Settings, api_key: str, listener: socket.socket, *, drain: bool
) -> Ingress:
    """Make and start all rooms; the stack closes them, upper ones first, also when a later one does not start."""
    assets = load_assets(settings)
    disks, layers = await _storage(stack, settings, assets.blockd)
    vmm = await choose_vmm(settings, assets.kernel)
    stack.push_async_callback(vmm.close)
    agents = GuestAgents()
    stack.push_async_callback(agents.close)
    memory_dir = choose_memory_dir(settings)
    slots = SlotPool(settings.network, settings.home)
    stack.push_async_callback(slots.close)
    budget_mib = settings.snapshots.budget_mib
    snapshots = SnapshotService(
        await asyncio.to_thread(
            LocalSnapshots,
            settings.paths.snapshots,
            layers,
            budget_mib=budget_mib,
            free_owners=owner_of_template(""),
        )
    )
    await snapshots.recover()
    saved = SavedMachines(snapshots, layers, disks, assets, vmm.facts)
    catalog = SnapshotCatalog(snapshots, saved.remove)
    templates = TemplateStore(settings.paths, settings, layers, catalog)
    host = SystemHostProbe(settings.home, memory_dir if filesystem_is_tmpfs(memory_dir) else None)
    warm = _warm_pool(settings, vmm, slots)
    orchestrator = Orchestrator(
        settings,
        vmm=vmm,
        slots=slots,
        disks=disks,
        templates=templates,
        assets=assets,
        agents=agents,
        orphans=HostOrphans(settings.paths.sandboxes, memory_dir),
        host=host,
        saved=saved,
        catalog=catalog,
        space=NodeSpace(settings, layers, host),
        warm=warm,
    )
    await orchestrator.start()
    stack.push_async_callback(orchestrator.close, drain=drain)
    if warm is not None:  # what the last server's pool left is gone now
        warm.start()
        stack.push_async_callback(warm.close)
    proxy = SandboxProxy(orchestrator.routes, settings, orchestrator.wake)
    await proxy.start()
    stack.push_async_callback(proxy.close)
    port = listener.getsockname()[1]
    domain = settings.api.advertise_domain or f"{settings.api.domain}:{port}"
    return Ingress(proxy, create_app(orchestrator, templates, settings, api_key, domain=domain))


def _warm_pool(settings: Settings, vmm: WaitingVmm, slots: SlotPool) -> WarmPool | None:
    if settings.vmm.warm_machines == 0:
        return None
    return WarmMachines(
        vmm,
        settings.paths.sandboxes,
        lend=slots.acquire,
        give_back=slots.release,
        interface_of=interface_of,
        most=settings.vmm.warm_machines,
        idle_s=settings.vmm.warm_idle_s,
    )


async def _storage(stack: AsyncExitStack, settings: Settings, blockd: Path) -> tuple[DiskStore, LayerStore]:
    """The block daemon, taken over or started, and what is built on it. It goes on after us while it has disks."""
    paths = settings.paths
    layers = LayerStore(paths.layers)
    stack.callback(layers.close)
    daemon = BlockDaemonProcess(blockd, state=paths.blockd, socket=paths.blockd_socket, log_file=paths.blockd_log)
    await daemon.start()
    stack.push_async_callback(daemon.close)
    disks = DiskStore(daemon, layers, paths.disks, max_chain_depth=settings.storage.max_chain_depth)
    await disks.start()
    stack.push_async_callback(disks.close)
    return disks, layers


def _raise_file_limit() -> None:
    """Allow as many open files as the host lets us: each connection through the proxy takes two."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
