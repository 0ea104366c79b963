"""What no request may exceed, checked in one place before any servicer sees it.

Every text has a longest length and every list a largest count: of the field if it is named below,
else the usual one. Every number of seconds is finite and not negative. Who sends something else is
refused by the field's name. What a field means is the servicer's to check.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from shoal_proto.errors import InvalidSpec
from shoal_proto.names import MAX_NAME_LENGTH

TEXT_LENGTH = 4096
"""Of a text that is not named below; reasons, errors and keys of the rendezvous store are some."""
COUNT = 1 << 20
MAX_SECONDS = 1e10
"""Centuries: what waits is bounded by each service far below it."""
SHOWN = 60

TEXTS: Mapping[str, int] = {
    "Token.job": MAX_NAME_LENGTH,
    "Token.member_id": MAX_NAME_LENGTH,
    "Token.incarnation": 64,
    "JobSpec.job": MAX_NAME_LENGTH,
    "MemberInfo.host": 255,
    "MemberInfo.address": 255,
    "MemberInfo.device": 100,
    "MemberInfo.torch_version": 100,
    "MemberInfo.shoal_version": 100,
    "Proposal.fields.key": 256,
    "AnswerRequest.digest": 128,
    "Unreachable.member_id": MAX_NAME_LENGTH,
    "Rejection.field": 256,
    "ReportExitRequest.job": MAX_NAME_LENGTH,
    "ReportExitRequest.member_id": MAX_NAME_LENGTH,
    "ReportExitRequest.host": 255,
    "ReportHaltRequest.job": MAX_NAME_LENGTH,
    "ReportHaltRequest.member_id": MAX_NAME_LENGTH,
    "ReportHaltRequest.host": 255,
    "DrainRequest.job": MAX_NAME_LENGTH,
    "DrainRequest.member_id": MAX_NAME_LENGTH,
    "DrainRequest.incarnation": 64,
    "GetGenerationRequest.job": MAX_NAME_LENGTH,
}
"""By message and field: the most characters."""
COUNTS: Mapping[str, int] = {
    "Proposal.fields": 256,
    "AnswerRequest.rejections": 256,
    "AnswerRequest.unreachable": 1 << 14,
    "HeartbeatRequest.beats": 1 << 14,
}
"""By message and field: the most entries."""

Check = Callable[[Any], None]
"""Of one field's value; raises InvalidSpec."""


@dataclass(frozen=True)
class _Field:
    name: str
    check: Check
    is_set: bool
    """It is looked at only where it is set: a message, which would be made by looking."""


class MessageBounds:
    """Checks of message types, made once for each when it is first seen."""

    def __init__(
        self, texts: Mapping[str, int] = TEXTS, counts: Mapping[str, int] = COUNTS
    ) -> None:
        self._texts = texts
        self._counts = counts
        self._fields: dict[str, tuple[_Field, ...]] = {}

    def check(self, message: object) -> None:
        """Raise InvalidSpec for a message with something in it that is out of bounds."""
        if isinstance(message, Message):
            self._check(message)

    def _check(self, message: Message) -> None:
        descriptor = cast("Descriptor", message.DESCRIPTOR)  # upb has a type of its own for it
        for field in self._of(descriptor):
            if not field.is_set or message.HasField(field.name):
                field.check(getattr(message, field.name))

    def _of(self, descriptor: Descriptor) -> tuple[_Field, ...]:
        known = self._fields.get(descriptor.full_name)
        if known is None:
            made = (self._field(descriptor.name, field) for field in descriptor.fields)
            known = tuple(field for field in made if field is not None)
            self._fields[descriptor.full_name] = known
        return known

    def _field(self, owner: str, field: FieldDescriptor) -> _Field | None:
        name = f"{owner}.{field.name}"
        repeated = field.is_repeated
        entry = field.message_type
        if repeated and entry is not None and entry.GetOptions().map_entry:
            return _Field(field.name, self._map(name, entry), is_set=False)
        one = self._one(name, field)
        if repeated:
            return _Field(field.name, self._each(name, one), is_set=False)
        if one is None:
            return None
        return _Field(field.name, one, is_set=entry is not None)

    def _one(self, name: str, field: FieldDescriptor) -> Check | None:
        if field.message_type is not None:
            return self._check
        if field.type == FieldDescriptor.TYPE_STRING:
            return self._text(name)
        if field.type == FieldDescriptor.TYPE_DOUBLE and field.name.endswith("_s"):
            return _seconds(name)
        return None

    def _text(self, name: str) -> Check:
        most = self._texts.get(name, TEXT_LENGTH)

        def check(value: str) -> None:
            if len(value) > most:
                seen = f"{len(value)} characters, {value[:SHOWN]!r} ..."
                raise _refusal(name, seen, f"at most {most} characters")

        return check

    def _each(self, name: str, one: Check | None) -> Check:
        most = self._counts.get(name, COUNT)

        def check(values: Any) -> None:
            _count(name, values, most)
            if one is not None:
                for value in values:
                    one(value)

        return check

    def _map(self, name: str, entry: Descriptor) -> Check:
        most = self._counts.get(name, COUNT)
        of_key = self._one(f"{name}.key", entry.fields_by_name["key"])
        of_value = self._one(f"{name}.value", entry.fields_by_name["value"])

        def check(values: Any) -> None:
            _count(name, values, most)
            _all(of_key, values)
            _all(of_value, values.values())

        return check


def _all(check: Check | None, values: Iterable[Any]) -> None:
    if check is not None:
        for value in values:
            check(value)


def _count(name: str, values: Any, most: int) -> None:
    if len(values) > most:
        raise _refusal(name, f"{len(values)} entries", f"at most {most}")


def _seconds(name: str) -> Check:
    def check(value: float) -> None:
        if not (math.isfinite(value) and 0 <= value <= MAX_SECONDS):
            raise _refusal(name, f"{value} s", f"a number of seconds from 0 to {MAX_SECONDS:g}")

    return check


def _refusal(name: str, seen: str, expected: str) -> InvalidSpec:
    return InvalidSpec(
        f"{name} is out of bounds", seen=seen, expected=expected, details={"field": name}
    )
