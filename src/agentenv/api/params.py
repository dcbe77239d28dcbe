"""Query values and ids that several routes read: times, timeouts, sandbox ids, template references. Pure functions."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from agentenv.errors import InvalidRequestError
from agentenv.templates.store import parse_reference

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_RFC3339 = re.compile(r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(?:\.\d{1,9})?(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII)
_SPACE_FOR_PLUS = re.compile(r" (?=\d\d:\d\d\Z)")


def check_timeout(timeout_s: int, max_timeout_s: int) -> int:
    """Return a time to live in seconds as given.

    Raises:
        InvalidRequestError: it is not above zero, or longer than allowed.
    """
    if timeout_s <= 0:
        raise InvalidRequestError("timeout must be above 0 seconds")
    if timeout_s > max_timeout_s:
        raise InvalidRequestError(f"timeout must not be above {max_timeout_s} seconds")
    return timeout_s


def normal_template_reference(text: str) -> str:
    """Normalise `[namespace/]alias[:tag]`: trimmed, lower case, and without the tag `default`, which means no tag.

    Raises:
        InvalidRequestError: the text has not this form.
    """
    reference = parse_reference(text)
    namespace = f"{reference.namespace}/" if reference.namespace is not None else ""
    tag = f":{reference.tag}" if reference.tag is not None else ""
    return f"{namespace}{reference.name}{tag}"


def snapshot_reference(text: str) -> str:
    """Normalise a reference to a snapshot: trimmed, lower case. `alias` and `alias:default` stay apart.

    Raises:
        InvalidRequestError: the text cannot name a snapshot.
    """
    parse_reference(text)
    return text.strip().lower()


def snapshot_name(text: str) -> str:
    """Normalise the name that a snapshot shall get: `[namespace/]alias[:tag]`.

    Raises:
        InvalidRequestError: the text has not this form.
    """
    try:
        return snapshot_reference(text)
    except InvalidRequestError as error:
        raise InvalidRequestError(
            "name: a snapshot is called alias or alias:tag, made of a-z, 0-9, _ and - (a tag of dots, too)"
        ) from error


def parse_time(name: str, text: str | None) -> datetime | None:
    """Read an RFC 3339 time; a `+` that arrived as a space, as in badly encoded queries, is mended.

    Raises:
        InvalidRequestError: the text is no such time.
    """
    if text is None or not text:
        return None
    mended = _SPACE_FOR_PLUS.sub("+", text)
    if not _RFC3339.fullmatch(mended):
        raise InvalidRequestError(f"{name} must be an RFC 3339 time, such as 2026-01-31T12:00:00Z")
    try:
        return datetime.fromisoformat(mended.upper()).astimezone(UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidRequestError(f"{name} is not a time that exists") from error


def unix_time(name: str, value: float | None, *, milliseconds: bool = False) -> datetime | None:
    """Read a time in seconds (or milliseconds) since 1970.

    Raises:
        InvalidRequestError: it is beyond what the calendar holds.
    """
    if value is None:
        return None
    try:
        return _EPOCH + (timedelta(milliseconds=value) if milliseconds else timedelta(seconds=value))
    except OverflowError as error:
        raise InvalidRequestError(f"{name} is too far from now") from error
