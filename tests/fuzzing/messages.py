"""Unexpected messages, made from the descriptors of the real ones."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

F = FieldDescriptor
INTEGERS: Mapping[int, tuple[int, int]] = {
    F.TYPE_INT32: (-(2**31), 2**31 - 1),
    F.TYPE_SINT32: (-(2**31), 2**31 - 1),
    F.TYPE_SFIXED32: (-(2**31), 2**31 - 1),
    F.TYPE_UINT32: (0, 2**32 - 1),
    F.TYPE_FIXED32: (0, 2**32 - 1),
    F.TYPE_INT64: (-(2**63), 2**63 - 1),
    F.TYPE_SINT64: (-(2**63), 2**63 - 1),
    F.TYPE_SFIXED64: (-(2**63), 2**63 - 1),
    F.TYPE_UINT64: (0, 2**64 - 1),
    F.TYPE_FIXED64: (0, 2**64 - 1),
}
NEAR = (
    0,
    1,
    2,
    3,
    7,
    63,
    64,
    255,
    4096,
    65535,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**53 - 1,
    2**53,
    2**62,
)
REALS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"), 60.0)
TEXTS = (
    "",
    " ",
    "..",
    "/",
    "a/b",
    "../../etc/passwd",
    "\x00",
    "\u202e",
    "x" * 4096,
    "a" * 128,
    "é" * 64,
    "memory://x",
    "reference::data:,x",
    "file:///nowhere",
    "http://127.0.0.1:1/",
    "%00",
    "-1",
    "1e9",
    "None",
    "{}",
    "NaN",
    "sgd",
    "adam",
    "float32",
    "bfloat16",
    "uniform",
    "int8",
)
WAITS = ("wait_s", "timeout_s", "limit_s")
"""Seconds that a caller would have to wait: mostly short."""
MAX_DEPTH = 6


class MessageMaker:
    """Makes messages of any type by a seeded draw. `known`: existing values by a field's name, such
    as jobs and shard ids, and whole messages by their type's name, such as tokens."""

    def __init__(self, draw: random.Random, known: Mapping[str, Sequence[Any]]) -> None:
        self._draw = draw
        self.known = dict(known)

    def make(self, descriptor: Descriptor, depth: int = 0) -> Message:
        whole = self.known.get(descriptor.name)
        if whole and self._draw.random() < 0.8:
            copy = GetMessageClass(descriptor)()
            copy.CopyFrom(self._draw.choice(whole))
            return copy
        message = GetMessageClass(descriptor)()
        chosen = {each.name: self._draw.choice(each.fields) for each in descriptor.oneofs}
        for field in descriptor.fields:
            group = field.containing_oneof
            if group is not None and chosen[group.name] is not field:
                continue
            if self._draw.random() < 0.85:
                self._fill(message, field, depth)
        return message

    def _fill(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        if field.message_type is not None and depth >= MAX_DEPTH:
            return
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._fill_map(message, field)
        elif field.is_repeated:
            into = getattr(message, field.name)
            count = self._draw.choice((0, 1, 1, 1, 2, 3)) if self._draw.random() < 0.99 else 300
            for _ in range(count):
                if field.message_type is not None:
                    into.add().CopyFrom(self.make(field.message_type, depth + 1))
                else:
                    into.append(self._value(field))
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(self.make(field.message_type, depth + 1))
        else:
            setattr(message, field.name, self._value(field))

    def _fill_map(self, message: Message, field: FieldDescriptor) -> None:
        into, entry = getattr(message, field.name), field.message_type
        for _ in range(self._draw.randrange(4)):
            value = entry.fields_by_name["value"]
            if value.message_type is None:
                into[self._value(entry.fields_by_name["key"])] = self._value(value)

    def _value(self, field: FieldDescriptor) -> Any:  # noqa: PLR0911 - one for each kind
        known = self.known.get(field.name)
        if known and self._draw.random() < 0.8:
            value = self._draw.choice(known)
            return (
                value.encode() if field.type == F.TYPE_BYTES and isinstance(value, str) else value
            )
        if field.type in INTEGERS:
            return self._integer(*INTEGERS[field.type])
        if field.type in (F.TYPE_DOUBLE, F.TYPE_FLOAT):
            if field.name in WAITS and self._draw.random() < 0.9:
                return 0.01
            value = self._draw.choice(REALS)
            return value if field.type == F.TYPE_DOUBLE or abs(value) < 1e38 else float("inf")
        if field.type == F.TYPE_BOOL:
            return self._draw.random() < 0.5
        if field.enum_type is not None:
            return self._draw.choice([*field.enum_type.values_by_number, 99])
        if field.type == F.TYPE_BYTES:
            return self.noise()
        return self._draw.choice(TEXTS)

    def _integer(self, low: int, high: int) -> int:
        value = (
            self._draw.choice(NEAR) if self._draw.random() < 0.8 else self._draw.randint(low, high)
        )
        return min(max(value, low), high)

    def noise(self) -> bytes:
        size = self._draw.choice((0, 1, 3, 4, 8, 16, 64, 256, 4096))
        return self._draw.randbytes(size)

    def spoilt(self, data: bytes) -> bytes:
        """The bytes with a few changed, removed, repeated or inserted."""
        return spoilt(self._draw, data)


def spoilt(draw: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(found) + 1)
        kind = draw.randrange(5)
        if kind == 0 and found:
            found[at % len(found)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del found[at : at + draw.choice((1, 2, 8, 64))]
        elif kind == 2:
            found[at:at] = draw.randbytes(draw.choice((1, 2, 8)))
        elif kind == 3:
            found[at:at] = found[at : at + draw.choice((1, 4, 32))]
        elif found:
            found[at % len(found)] = draw.choice((0, 1, 0x7F, 0x80, 0xFF))
    return bytes(found)
