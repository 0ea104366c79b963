"""Bounds on every request, checked in one place before any servicer sees it. The error names the
field, or the message if that is too large as a whole."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from shoal_proto import MAX_MESSAGE_BYTES
from shoal_proto.errors import InvalidSpec
from shoal_server.serving.bounds import MAX_SECONDS, MESSAGES, Bound, bound_of

SHOWN = 60
_REALS = (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT)
_TEXTS = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_WHOLE_OF_32_BITS = (
    FieldDescriptor.TYPE_UINT32,
    FieldDescriptor.TYPE_INT32,
    FieldDescriptor.TYPE_SINT32,
    FieldDescriptor.TYPE_FIXED32,
    FieldDescriptor.TYPE_SFIXED32,
)
_UNNAMED = Bound(length=4096)
"""Default for a field without a bound: a test reports such fields."""

Check = Callable[[Any], None]


@dataclass(frozen=True)
class _Field:
    name: str
    check: Check
    only_if_set: bool
    """True for a message: an unset one has nothing to check."""


@dataclass(frozen=True)
class _Kind:
    fields: tuple[_Field, ...]
    num_bytes: int | None
    """Maximum size; None if only the fields are bounded."""


class MessageBounds:
    """Checks of messages, made when the first message of a type is checked."""

    def __init__(self) -> None:
        self._known: dict[str, _Kind] = {}

    def check(self, message: object) -> None:
        """Raise InvalidSpec if the message, or a field in it at any depth, is out of bounds."""
        if isinstance(message, Message):
            self._check(message)

    def _check(self, message: Message) -> None:
        descriptor = cast("Descriptor", message.DESCRIPTOR)  # upb has a type of its own for it
        kind = self._kind_of(descriptor)
        for field in kind.fields:
            if not field.only_if_set or message.HasField(field.name):
                field.check(getattr(message, field.name))
        if kind.num_bytes is not None and (size := message.ByteSize()) > kind.num_bytes:
            raise _refusal(descriptor.name, f"{size} bytes", f"at most {kind.num_bytes} bytes")

    def _kind_of(self, descriptor: Descriptor) -> _Kind:
        known = self._known.get(descriptor.full_name)
        if known is None:
            made = (self._field(descriptor.name, field) for field in descriptor.fields)
            fields = tuple(field for field in made if field is not None)
            known = _Kind(fields=fields, num_bytes=MESSAGES.get(descriptor.name))
            self._known[descriptor.full_name] = known
        return known

    def _field(self, owner: str, field: FieldDescriptor) -> _Field | None:
        name, bound = f"{owner}.{field.name}", bound_of(owner, field.name) or _UNNAMED
        repeated, entry = field.is_repeated, field.message_type
        if repeated and entry is not None and entry.GetOptions().map_entry:
            return _Field(field.name, self._map(name, entry, bound), only_if_set=False)
        one = self._one(name, field, bound)
        if repeated:
            return _Field(field.name, _each(name, one, bound.count), only_if_set=False)
        if one is None:
            return None
        return _Field(field.name, one, only_if_set=entry is not None)

    def _one(self, name: str, field: FieldDescriptor, bound: Bound) -> Check | None:
        """Check of a single value; None if every value of the field's type is within bounds."""
        if field.message_type is not None:
            return self._check
        if field.type in _TEXTS:
            is_any = field.type == FieldDescriptor.TYPE_BYTES and bound.length >= MAX_MESSAGE_BYTES
            return None if is_any else _text(name, bound.length)
        if field.type in _REALS:
            return _seconds(name) if bound.seconds else _finite(name)
        if field.enum_type is not None:
            return _known(name, frozenset(field.enum_type.values_by_number))
        highest = 2**32 - 1 if field.type in _WHOLE_OF_32_BITS else math.inf
        if bound.most is None or bound.most >= highest or field.type == FieldDescriptor.TYPE_BOOL:
            return None
        return _whole(name, bound.most)

    def _map(self, name: str, entry: Descriptor, bound: Bound) -> Check:
        checks = []
        for part in ("key", "value"):
            of_part = bound_of(entry.name, part) or _UNNAMED
            checks.append(self._one(f"{name}.{part}", entry.fields_by_name[part], of_part))
        of_key, of_value = checks

        def check(values: Any) -> None:
            _count(name, values, bound.count)
            _all(of_key, values)
            _all(of_value, values.values())

        return check


def _each(name: str, one: Check | None, most: int) -> Check:
    def check(values: Any) -> None:
        _count(name, values, most)
        _all(one, values)

    return check


def _all(check: Check | None, values: Iterable[Any]) -> None:
    if check is not None:
        for value in values:
            check(value)


def _count(name: str, values: Any, most: int) -> None:
    if len(values) > most:
        raise _refusal(name, f"{len(values)} entries", f"at most {most}")


def _text(name: str, most: int) -> Check:
    def check(value: str | bytes) -> None:
        if len(value) > most:
            unit = "characters" if isinstance(value, str) else "bytes"
            seen = f"{len(value)} {unit}, {value[:SHOWN]!r} ..."
            raise _refusal(name, seen, f"at most {most} {unit}")

    return check


def _whole(name: str, most: int) -> Check:
    def check(value: int) -> None:
        if not 0 <= value <= most:
            raise _refusal(name, str(value), f"a number from 0 to {most}")

    return check


def _finite(name: str) -> Check:
    def check(value: float) -> None:
        if not math.isfinite(value):
            raise _refusal(name, str(value), "a finite number")

    return check


def _seconds(name: str) -> Check:
    def check(value: float) -> None:
        if not (math.isfinite(value) and 0 <= value <= MAX_SECONDS):
            raise _refusal(name, f"{value} s", f"a number of seconds from 0 to {MAX_SECONDS:g}")

    return check


def _known(name: str, values: frozenset[int]) -> Check:
    def check(value: int) -> None:
        if value not in values:
            raise _refusal(name, str(value), f"one of {sorted(values)}")

    return check


def _refusal(name: str, seen: str, expected: str) -> InvalidSpec:
    return InvalidSpec(
        f"{name} is out of bounds", seen=seen, expected=expected, details={"field": name}
    )
