"""Reads fields of decoded JSON that nobody vouches for: each has the wanted type and size, or an error names it.

It knows nothing of what the fields mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TypeVar

from agentenv.errors import SnapshotError

LONGEST_TEXT = 1 << 20
"""Characters."""
MOST_ITEMS = 4096
"""In one list or object."""

T = TypeVar("T")


class Fields:
    """The fields of one object. Each method takes one out; `close` refuses what is left.

    Args:
        values: the object.
        prefix: of the names in errors, like `machine.`.
    """

    def __init__(self, values: object, prefix: str = "") -> None:
        if not isinstance(values, dict):
            raise SnapshotError(f"field '{prefix.rstrip('.')}' is no object" if prefix else "it is no object")
        self._values: dict[str, object] = dict(values)
        self._prefix = prefix

    def close(self) -> None:
        """Refuse fields that nobody asked for: another version may mean something by them."""
        for name in sorted(self._values):
            raise SnapshotError(f"field '{self._prefix}{name[:80]}' is unknown")

    def text(self, name: str, *, longest: int = LONGEST_TEXT, empty: bool = False) -> str:
        """A text of Unicode characters without NUL."""
        return _text(self._take(name), self._named(name), longest, empty=empty)

    def number(self, name: str) -> int:
        """A whole number that is not negative and fits into 63 bits."""
        value = self._take(name)
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise SnapshotError(f"field '{self._named(name)}' is no whole number from 0 to 2**63-1")
        return value

    def flag(self, name: str) -> bool:
        value = self._take(name)
        if not isinstance(value, bool):
            raise SnapshotError(f"field '{self._named(name)}' is neither true nor false")
        return value

    def time(self, name: str) -> datetime:
        """A time in ISO 8601, with its time zone."""
        value = self.text(name, longest=64)
        try:
            time = datetime.fromisoformat(value)
            if time.tzinfo is not None:
                return time
        except ValueError:
            pass
        raise SnapshotError(f"field '{self._named(name)}' is no time with a time zone")

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts."""
        return tuple(
            _text(value, f"{self._named(name)}[{position}]", LONGEST_TEXT, empty=False)
            for position, value in enumerate(self._list(name))
        )

    def mapping(self, name: str) -> Mapping[str, str]:
        """An object of texts."""
        value = self._take(name)
        if not isinstance(value, dict) or len(value) > MOST_ITEMS:
            raise SnapshotError(f"field '{self._named(name)}' is no object of at most {MOST_ITEMS} fields")
        return {
            _text(key, f"{self._named(name)} (a name)", LONGEST_TEXT, empty=False): _text(
                item, f"{self._named(name)}.{key[:80]}", LONGEST_TEXT, empty=True
            )
            for key, item in value.items()
        }

    def record(self, name: str, read: Callable[[Fields], T]) -> T:
        """An object that `read` takes apart, to its last field."""
        return _object(self._take(name), self._named(name), read)

    def records(self, name: str, read: Callable[[Fields], T]) -> tuple[T, ...]:
        """A list of such objects."""
        return tuple(
            _object(value, f"{self._named(name)}[{position}]", read) for position, value in enumerate(self._list(name))
        )

    def is_null(self, name: str) -> bool:
        """Whether a field is there and null; then it is taken out."""
        if self._values.get(name, ...) is not None:
            return False
        del self._values[name]
        return True

    def optional_text(self, name: str) -> str | None:
        return None if self.is_null(name) else self.text(name)

    def text_if_there(self, name: str) -> str | None:
        """A text, or None where there is no such field: of one that older versions did not write."""
        return self.text(name) if name in self._values else None

    def optional_record(self, name: str, read: Callable[[Fields], T]) -> T | None:
        return None if self.is_null(name) else self.record(name, read)

    def _list(self, name: str) -> list[object]:
        value = self._take(name)
        if not isinstance(value, list) or len(value) > MOST_ITEMS:
            raise SnapshotError(f"field '{self._named(name)}' is no list of at most {MOST_ITEMS}")
        return value

    def _take(self, name: str) -> object:
        try:
            return self._values.pop(name)
        except KeyError as error:
            raise SnapshotError(f"field '{self._named(name)}' is missing") from error

    def _named(self, name: str) -> str:
        return self._prefix + name


def _object(value: object, name: str, read: Callable[[Fields], T]) -> T:
    fields = Fields(value, f"{name}.")
    result = read(fields)
    fields.close()
    return result


def _text(value: object, name: str, longest: int, *, empty: bool) -> str:
    if not isinstance(value, str):
        raise SnapshotError(f"field '{name}' is no text")
    if len(value) > longest:
        raise SnapshotError(f"field '{name}' has more than {longest} characters")
    if not value and not empty:
        raise SnapshotError(f"field '{name}' is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise SnapshotError(f"field '{name}' has half of a character") from error
    if "\0" in value:
        raise SnapshotError(f"field '{name}' has a NUL character")
    return value
