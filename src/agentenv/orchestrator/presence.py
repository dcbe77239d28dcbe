"""What the world sees of a sandbox, and what ends it: routes, expiry, samples, the watch over its VM, the kill.

Nothing here decides to start, pause or save a sandbox; whoever does tells this, in the moment when it is so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import structlog

from agentenv.errors import AgentEnvError, GuestAgentError
from agentenv.orchestrator import logbook
from agentenv.orchestrator.cleanup import Cleaner
from agentenv.orchestrator.expiry import Expiry
from agentenv.orchestrator.journal import Journal
from agentenv.orchestrator.launch import Releaser
from agentenv.orchestrator.live import LiveSandbox, LiveSandboxes
from agentenv.orchestrator.model import LogEntry, OnTimeout, PauseMode, Sandbox, SandboxState
from agentenv.orchestrator.ports import Agent, AgentFactory, Clock
from agentenv.orchestrator.routes import Route, RouteTable, Sleeper
from agentenv.orchestrator.sampling import Sampler
from agentenv.orchestrator.states import Event
from agentenv.orchestrator.tasks import OwnedTasks
from agentenv.vmm.base import Machine

_log = structlog.get_logger(__name__)


class Presence:
    """See the module. But for `run` and `close`, nothing waits or fails.

    Args:
        journal, releaser, cleaner, agents, clock: of the node.
        live: all sandboxes.
        routes: where traffic goes.
        operations: owner of kills.
        pause: begins to pause a sandbox whose time is over.
    """

    def __init__(
        self,
        *,
        journal: Journal,
        releaser: Releaser,
        cleaner: Cleaner,
        agents: AgentFactory,
        clock: Clock,
        live: LiveSandboxes,
        routes: RouteTable,
        operations: OwnedTasks,
        pause: Callable[[LiveSandbox], object],
    ) -> None:
        self._journal = journal
        self._releaser = releaser
        self._cleaner = cleaner
        self._agents = agents
        self._clock = clock
        self._live = live
        self._routes = routes
        self._operations = operations
        self._pause = pause
        self._watchers = OwnedTasks()
        self._expiry = Expiry(clock, self._expired)
        self.sampler = Sampler(clock)

    async def run(self) -> None:
        """End sandboxes in time, and sample them, for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._expiry.run(), name="expiry")
            tasks.create_task(self.sampler.run(), name="sampler")

    async def close(self) -> None:
        """Watch and sample no more. Once all operations have ended."""
        await self._watchers.close()
        await self.sampler.close()
        for route in self._routes:
            self._routes.withdraw(route.sandbox_id)

    def publish(self, live: LiveSandbox) -> Agent:
        """Make a running sandbox reachable, watched, sampled and mortal."""
        sandbox, slot, machine = live.sandbox, live.holdings.slot, live.holdings.machine
        assert slot is not None and machine is not None  # noqa: S101 - it runs
        host = str(slot.address)
        network = sandbox.request.network
        agent = self._agents(host, sandbox.envd_access_token)
        self.set_end(live)
        self.sampler.add(sandbox.id, agent)
        live.watcher = self._watchers.spawn(self._watch(live, machine), f"watch {sandbox.id}")
        self._routes.publish(
            Route(
                sandbox_id=sandbox.id,
                life=sandbox.life,
                host=host,
                envd_access_token=sandbox.envd_access_token,
                traffic_access_token=sandbox.traffic_access_token,
                mask_request_host=None if network is None else network.mask_request_host,
                https_ports=frozenset() if network is None else frozenset(network.https_ports),
            )
        )
        return agent

    def set_end(self, live: LiveSandbox) -> None:
        """Let a running sandbox end when its time is over; at once when it is over already."""
        sandbox = live.sandbox
        self._expiry.set(sandbox.id, max(sandbox.end_at, live.not_before or sandbox.end_at))

    def hide(self, live: LiveSandbox) -> None:
        """Make a sandbox unreachable and immortal, until it is published again."""
        self._routes.withdraw(live.sandbox.id)
        self._expiry.clear(live.sandbox.id)
        self.sampler.suspend(live.sandbox.id)

    def let_sleep(self, live: LiveSandbox) -> None:
        """Let traffic wake a sandbox that was hidden, if that is wanted and possible."""
        sandbox = live.sandbox
        if wakes(sandbox):
            self._routes.let_sleep(Sleeper(sandbox.id, sandbox.envd_access_token, sandbox.traffic_access_token))

    def adopt(self, live: LiveSandbox) -> None:
        """Publish a sandbox that outlived the last server."""
        agent = self.publish(live)
        self._watchers.spawn(self._greet(live, agent), f"greet {live.sandbox.id}")
        _log.info("sandbox_adopted", sandbox=live.sandbox.id, end_at=live.sandbox.end_at.isoformat())

    def expire(self, live: LiveSandbox, reason: str) -> None:
        """The time of a running sandbox is over: pause it or kill it, as it was created to be."""
        if live.sandbox.request.on_timeout is OnTimeout.PAUSE:
            self._pause(live)
        else:
            self.end(live, reason)

    def end(self, live: LiveSandbox, reason: str) -> asyncio.Task[None]:
        """Take a sandbox out of sight, at once, and begin to take it down.

        Raises:
            ConflictError: it is being killed already.
        """
        sandbox_id = live.sandbox.id
        live.apply(Event.KILL)
        live.sandbox = replace(live.sandbox, reason=reason)
        self._routes.withdraw(sandbox_id)
        self._expiry.clear(sandbox_id)
        self.sampler.remove(sandbox_id)
        return self._operations.spawn(self._finish_kill(live, reason), f"kill {sandbox_id}")

    async def _finish_kill(self, live: LiveSandbox, reason: str) -> None:
        sandbox_id = live.sandbox.id
        if live.watcher is not None:
            live.watcher.cancel()
        if live.transition is not None and not live.transition.done():
            live.transition.cancel()
            await asyncio.wait([live.transition])
        try:
            await self._journal.begin_kill(sandbox_id, reason, self._clock.now())
        except Exception as error:
            # A full disk must not keep a VM alive. Without this note the next start finds a dead VM, and comes to the
            # same end.
            _log.warning("kill_not_noted", sandbox=sandbox_id, error=str(error))
        try:
            await self._releaser.release(live.holdings)
        except AgentEnvError as error:
            self._cleaner.take_over(live.holdings, error)
            if live.holdings.machine is not None:
                raise
        finally:
            self._live.drop(sandbox_id)
        _log.info("sandbox_ended", sandbox=sandbox_id, reason=reason)

    async def _greet(self, live: LiveSandbox, agent: Agent) -> None:
        """See whether the agent of an adopted guest answers. Silence is written down, and is no reason to kill: a guest
        under load is silent too, and its init restarts an agent that died."""
        try:
            await agent.health()
            entry = LogEntry(self._clock.now(), "info", "orchestrator", "taken over by a new server process")
        except GuestAgentError as error:
            message = f"taken over by a new server process; its agent is silent: {error.message}"
            entry = LogEntry(self._clock.now(), "warn", "orchestrator", message)
            _log.warning("adopted_agent_silent", sandbox=live.sandbox.id, error=error.message)
        if live.state is SandboxState.RUNNING:
            await logbook.append(live.holdings.directory, entry)

    async def _watch(self, live: LiveSandbox, machine: Machine) -> None:
        ended = await machine.wait()
        if live.state in (SandboxState.RUNNING, SandboxState.CAPTURING, SandboxState.PAUSING):
            self.end(live, f"its VM ended by itself: {ended.reason}")

    def _expired(self, sandbox_id: str) -> None:
        live = self._live.find(sandbox_id)
        # One that is being captured is looked at again right after that.
        if live is not None and live.state is SandboxState.RUNNING:
            self.expire(live, "expired")


def wakes(sandbox: Sandbox) -> bool:
    """Whether traffic may wake a sandbox, once it is paused."""
    return (
        sandbox.request.auto_resume
        and sandbox.pause_mode is not PauseMode.FILESYSTEM
        and not sandbox.agent_unresponsive_at_pause
    )
