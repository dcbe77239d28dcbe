"""The route table: which sandbox is reachable, where, and with which tokens; and which one traffic may wake.

The orchestrator writes it, the proxy reads it and knows nothing else of a sandbox. A route exists exactly while
traffic may pass; it is replaced, never changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Route:
    """How to reach one life of one sandbox."""

    sandbox_id: str
    life: int
    host: str
    """Address whose TCP ports are the guest's."""
    envd_access_token: str = field(repr=False)
    traffic_access_token: str | None = field(default=None, repr=False)
    """Set when public traffic is off: every port but the agent's demands it."""
    mask_request_host: str | None = None
    https_ports: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Sleeper:
    """A paused sandbox that traffic may wake, and the tokens that the traffic has to show."""

    sandbox_id: str
    envd_access_token: str = field(repr=False)
    traffic_access_token: str | None = field(default=None, repr=False)


RouteListener = Callable[[Route], None]


class RouteTable:
    """Routes by sandbox id. Used from one event loop; not thread-safe."""

    def __init__(self) -> None:
        self._routes: dict[str, Route] = {}
        self._listeners: list[RouteListener] = []
        self._sleepers: dict[str, Sleeper] = {}

    def get(self, sandbox_id: str) -> Route | None:
        return self._routes.get(sandbox_id)

    def __iter__(self) -> Iterator[Route]:
        return iter(tuple(self._routes.values()))

    def __len__(self) -> int:
        return len(self._routes)

    def sleeper(self, sandbox_id: str) -> Sleeper | None:
        """A sandbox without route that traffic may wake."""
        return self._sleepers.get(sandbox_id)

    def let_sleep(self, sleeper: Sleeper) -> None:
        """Let traffic wake a sandbox, until it is published or withdrawn the next time."""
        self._sleepers[sleeper.sandbox_id] = sleeper

    def publish(self, route: Route) -> None:
        """Make a sandbox reachable. A route of an earlier life is withdrawn first."""
        self.withdraw(route.sandbox_id)
        self._routes[route.sandbox_id] = route

    def withdraw(self, sandbox_id: str) -> None:
        """End reachability; listeners close what is open through the route."""
        self._sleepers.pop(sandbox_id, None)
        route = self._routes.pop(sandbox_id, None)
        if route is not None:
            for listener in self._listeners:
                listener(route)

    def on_withdraw(self, listener: RouteListener) -> None:
        """Call `listener` with each route that ends."""
        self._listeners.append(listener)
