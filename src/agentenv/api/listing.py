"""Lists of sandboxes: what is shown of a state, filters, pages (E2B contract §2.2.3). Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import attrgetter
from urllib.parse import unquote_plus

from agentenv.api.paging import Order, page_of
from agentenv.errors import InvalidRequestError
from agentenv.orchestrator.model import Sandbox, SandboxState

_ID = attrgetter("id")
_STARTED_AT = attrgetter("started_at")
_SHOWN_AS = {
    SandboxState.RUNNING: "running",
    SandboxState.CAPTURING: "running",
    SandboxState.PAUSING: "paused",
    SandboxState.PAUSED: "paused",
    SandboxState.RESUMING: "paused",
}


@dataclass(frozen=True, slots=True)
class Filters:
    """Which sandboxes a list shows. All must match."""

    states: frozenset[str] = frozenset({"running", "paused"})
    metadata: Mapping[str, str] = field(default_factory=dict)
    template: str | None = None
    started_after: datetime | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """One page of a list."""

    items: Sequence[Sandbox]
    next_token: str | None
    total_running: int | None
    """Running sandboxes on all pages; None when the filter leaves them out."""


def shown_state(sandbox: Sandbox) -> str | None:
    """Return `running` or `paused`, or None for a sandbox that clients do not see (being started or killed)."""
    return _SHOWN_AS.get(sandbox.state)


def list_page(
    sandboxes: Iterable[Sandbox],
    filters: Filters,
    *,
    order: Order = Order.DESC,
    limit: int | None = None,
    token: str | None = None,
) -> Page:
    """Return the page that follows `token` (None: the first), of at most `limit` sandboxes (None: all).

    Raises:
        InvalidRequestError: the token is not one of ours, or of another order.
    """
    matching = _matching(sandboxes, filters)
    running = sum(_SHOWN_AS[s.state] == "running" for s in matching) if "running" in filters.states else None
    page = page_of(matching, _STARTED_AT, _ID, order=order, limit=limit, token=token)
    return Page(page.items, page.next_token, running)


def parse_states(values: Sequence[str]) -> frozenset[str]:
    """Read `state` query values, comma-joined or repeated. None given: both states.

    Raises:
        InvalidRequestError: a value is no state.
    """
    states = frozenset(part for value in values for part in value.split(",") if part)
    unknown = states - {"running", "paused"}
    if unknown:
        raise InvalidRequestError(f"state: '{min(unknown)}' is neither running nor paused")
    return states or Filters().states


def parse_metadata_filter(value: str | None) -> dict[str, str]:
    """Read a `metadata` query value, already decoded once as any query value is.

    SDKs percent-encode each key and value, then form-encode the map: so the text is unescaped once as a whole, and
    each key and value once more.

    Raises:
        InvalidRequestError: a part of it is no pair.
    """
    pairs: dict[str, str] = {}
    for part in unquote_plus(value or "").split("&"):
        if not part:
            continue
        key, separator, content = part.partition("=")
        if not separator or not key:
            raise InvalidRequestError("metadata: the filter must have the form key=value&key2=value2")
        pairs[unquote_plus(key)] = unquote_plus(content)
    return pairs


def parse_template_filter(value: str | None) -> str | None:
    """Read a `template` query value.

    Raises:
        InvalidRequestError: it names a tag.
    """
    if value is None or not value.strip():
        return None
    if ":" in value:
        raise InvalidRequestError("template: the filter takes an ID or alias without a tag")
    return value.strip().lower()


def _matching(sandboxes: Iterable[Sandbox], filters: Filters) -> list[Sandbox]:
    # Filter by filter, so that each row costs little: nodes have thousands of paused sandboxes.
    states = tuple(state for state, shown in _SHOWN_AS.items() if shown in filters.states)
    rows = [sandbox for sandbox in sandboxes if sandbox.state in states]
    if filters.template is not None:
        rows = [row for row in rows if filters.template in (row.template_id, row.alias)]
    if filters.started_after is not None:
        rows = [row for row in rows if row.started_at >= filters.started_after]
    if filters.metadata:
        wanted = filters.metadata.items()
        rows = [row for row in rows if wanted <= row.request.metadata.items()]
    return rows
