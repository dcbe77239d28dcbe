"""Pages of lists by time: order, and the opaque tokens that lead from one to the next (E2B contract §2.1.4).

Pure functions. Newest first; the id breaks ties; ascending is the exact reverse.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Generic, TypeVar

from agentenv.errors import InvalidRequestError

T = TypeVar("T")

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class Order(StrEnum):
    """By time."""

    ASC = "asc"
    DESC = "desc"


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list."""

    items: Sequence[T]
    next_token: str | None


def page_of(
    items: Iterable[T],
    moment_of: Callable[[T], datetime],
    id_of: Callable[[T], str],
    *,
    order: Order = Order.DESC,
    limit: int | None = None,
    token: str | None = None,
) -> Page[T]:
    """Return the page that follows `token` (None: the first), of at most `limit` items (None: all).

    Args:
        items: the whole list, in any order.
        moment_of: the time of an item.
        id_of: its id; no two have the same.
        order: by time.
        limit: of the page.
        token: what the last page gave.

    Raises:
        InvalidRequestError: the token is not one of ours, or of another order.
    """
    after = _decode_token(token, order) if token is not None else None
    found = sorted(items, key=id_of)
    found.sort(key=moment_of, reverse=True)  # stable also in reverse: ids stay ascending
    if order is Order.ASC:
        found.reverse()
    if after is not None:
        places = ((_position(moment_of(item), id_of(item)), item) for item in found)
        found = [item for place, item in places if (place < after if order is Order.ASC else place > after)]
    if limit is None or len(found) <= limit:
        return Page(found, None)
    last = found[limit - 1]
    return Page(found[:limit], _encode_token(_position(moment_of(last), id_of(last)), order))


def _position(moment: datetime, item_id: str) -> tuple[int, str]:
    return (-((moment - _EPOCH) // _MICROSECOND), item_id)


def _encode_token(position: tuple[int, str], order: Order) -> str:
    text = f"{-position[0]}__{position[1]}__{order}"
    return base64.urlsafe_b64encode(text.encode("ascii")).decode("ascii")


def _decode_token(token: str, order: Order) -> tuple[int, str]:
    try:
        text = base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True).decode("ascii")
        microseconds, item_id, token_order = text.split("__")
        position = (-int(microseconds), item_id)
    except (ValueError, UnicodeError, binascii.Error) as error:
        raise InvalidRequestError("nextToken is not a token of this list") from error
    if token_order != order:
        raise InvalidRequestError(f"nextToken belongs to a list in the order '{token_order}'")
    return position
