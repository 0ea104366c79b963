"""Parsing of JSON records from etcd.

A person, another release or a broken disk may have written them. Readers raise `UnreadableRecord`
for unusable values, and ignore unknown fields: a later release may have added them. A record with a
field that older releases must not ignore has a higher `format`.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from google.protobuf.json_format import ParseError

MAX_COUNT = 2**53 - 1
"""Highest accepted count: larger JSON numbers are not exact everywhere."""


class UnreadableRecord(ValueError):
    """Raised if a key's value is not a valid record of its kind; the text says what was seen."""


class LaterFormat(UnreadableRecord):
    """Raised for a format of a later release."""


def check_format(value: Mapping[str, object], newest: int = 1) -> None:
    """Raise LaterFormat for a `format` above `newest`, and UnreadableRecord unless it is a positive
    integer. A missing `format` counts as 1."""
    found = value.get("format", 1)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise UnreadableRecord(f"format is {_shown(found)}; expected an integer from 1")
    if found > newest:
        raise LaterFormat(f"format {found}, of a later release; this release reads up to {newest}")


@contextmanager
def as_unreadable() -> Iterator[None]:
    """Turn errors of parsing into `UnreadableRecord`, except protobuf's DecodeError."""
    try:
        yield
    except UnreadableRecord:
        raise
    except (
        ValueError,  # includes UnicodeDecodeError and JSONDecodeError
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
        ParseError,
    ) as error:
        raise UnreadableRecord(f"{type(error).__name__}: {str(error)[:200]}") from error


class Fields:
    def __init__(self, value: Mapping[str, object]) -> None:
        self._value = value
        self._asked = {"format"}

    @classmethod
    def parsed(cls, data: bytes, newest_format: int = 1) -> "Fields":
        """Fields of a JSON object. Raises UnreadableRecord or LaterFormat."""
        with as_unreadable():
            value = json.loads(data)
        if not isinstance(value, dict):
            raise UnreadableRecord(f"JSON {type(value).__name__}; expected an object")
        check_format(value, newest_format)
        return cls(value)

    def text(self, name: str, default: str | None = None) -> str:
        found = self._get(name, default)
        if not isinstance(found, str):
            raise UnreadableRecord(f"{name} is {_shown(found)}; expected a string")
        return found

    def has(self, name: str) -> bool:
        return self._get(name) is not None

    def unread_fields(self) -> dict[str, object]:
        """Fields that no call has read, such as those of a later release."""
        return {name: value for name, value in self._value.items() if name not in self._asked}

    def _get(self, name: str, default: object = None) -> object:
        self._asked.add(name)
        return self._value.get(name, default)

    def flag(self, name: str) -> bool:
        found = self._get(name)
        if not isinstance(found, bool):
            raise UnreadableRecord(f"{name} is {_shown(found)}; expected true or false")
        return found

    def count(self, name: str, default: int | None = None, most: int = MAX_COUNT) -> int:
        found = self._get(name, default)
        if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= most:
            raise UnreadableRecord(
                f"{name} is {_shown(found)}; expected an integer from 0 to {most}"
            )
        return found

    def seconds(self, name: str) -> float:
        found = self._get(name, 0.0)
        if not isinstance(found, int | float) or isinstance(found, bool) or abs(found) > MAX_COUNT:
            raise UnreadableRecord(f"{name} is {_shown(found)}; expected a number of seconds")
        if not math.isfinite(found):
            raise UnreadableRecord(f"{name} is {found}; expected a finite number of seconds")
        return float(found)

    def texts(self, name: str) -> tuple[str, ...]:
        found = self._get(name)
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            raise UnreadableRecord(f"{name} is {_shown(found)}; expected a list of strings")
        return tuple(found)

    def object(self, name: str) -> "Fields":
        found = self._get(name)
        if not isinstance(found, dict):
            raise UnreadableRecord(f"{name} is {_shown(found)}; expected an object")
        return Fields(found)


def _shown(value: object) -> str:
    return "missing" if value is None else repr(value)[:60]
