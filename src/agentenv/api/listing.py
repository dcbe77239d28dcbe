"""Lists of sandboxes: filters, order, pages and their opaque tokens (E2B contract §2.1.4, §2.2.3). Pure functions.

Newest first; the id breaks ties; ascending is the exact reverse.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from operator import attrgetter
from urllib.parse import unquote_plus

from agentenv.errors import InvalidRequestError
from agentenv.orchestrator.model import Sandbox, SandboxState

_ID = attrgetter("id")
_STARTED_AT = attrgetter("started_at")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SHOWN_AS = {
    SandboxState.RUNNING: "running",
    SandboxState.PAUSING: "paused",
    SandboxState.PAUSED: "paused",
    SandboxState.RESUMING: "paused",
}


class Order(StrEnum):
    """By start time."""

    ASC = "asc"
    DESC = "desc"


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
    after = _decode_token(token, order) if token is not None else None
    matching = sorted(_matching(sandboxes, filters), key=_ID)
    matching.sort(key=_STARTED_AT, reverse=True)  # stable also in reverse: ids stay ascending
    if order is Order.ASC:
        matching.reverse()
    running = sum(s.state is SandboxState.RUNNING for s in matching) if "running" in filters.states else None
    if after is not None:
        matching = [s for s in matching if (_position(s) < after if order is Order.ASC else _position(s) > after)]
    if limit is None or len(matching) <= limit:
        return Page(matching, None, running)
    items = matching[:limit]
    return Page(items, _encode_token(_position(items[-1]), order), running)


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


def _position(sandbox: Sandbox) -> tuple[int, str]:
    return (-((sandbox.started_at - _EPOCH) // _MICROSECOND), sandbox.id)


def _encode_token(position: tuple[int, str], order: Order) -> str:
    text = f"{-position[0]}__{position[1]}__{order}"
    return base64.urlsafe_b64encode(text.encode("ascii")).decode("ascii")


def _decode_token(token: str, order: Order) -> tuple[int, str]:
    try:
        text = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True).decode("ascii")
        microseconds, sandbox_id, token_order = text.split("__")
        position = (-int(microseconds), sandbox_id)
    except (ValueError, UnicodeError, binascii.Error) as error:
        raise InvalidRequestError("nextToken is not a token of this list") from error
    if token_order != order:
        raise InvalidRequestError(f"nextToken belongs to a list in the order '{token_order}'")
    return position
