"""What a cut is made of: steps, each over all the shards that it touches."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class StepId:
    """One push; or the pushes of gradients and of rows that one training step makes."""

    session: str
    """Who counts it: a member's incarnation, in one count of its pushes."""
    sequence: int


Shards = frozenset[int] | None
"""What a step touches; None: every dense shard of the job."""
Begun = Mapping[StepId, Shards]


def merged(reports: Iterable[Begun]) -> dict[StepId, Shards]:
    """What has begun anywhere, of what each server tells."""
    begun: dict[StepId, Shards] = {}
    for report in reports:
        for step, shards in report.items():
            before = begun.get(step, shards)
            begun[step] = None if shards is None or before is None else before | shards
    return begun


def to_bits(shards: Collection[int]) -> bytes:
    """Shard ids as messages and shards keep them: bit i % 8 of byte i // 8 for shard i."""
    bits = bytearray(max(shards, default=-1) // 8 + 1)
    for shard_id in shards:
        bits[shard_id // 8] |= 1 << shard_id % 8
    return bytes(bits)


def from_bits(bits: bytes) -> frozenset[int]:
    """What `to_bits` was given."""
    return frozenset(
        8 * place + bit for place, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1
    )
