"""Steps in progress at a cut, and the shards that they touch."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True, order=True)
class StepId:
    """Identity of one push, or of all pushes of a training step."""

    session: str
    """The sender, an incarnation of a member. Pushes to tables alone are numbered separately, under
    a session with the prefix `step_scope.TABLES`."""
    sequence: int


Shards = frozenset[int] | None
"""Ids of shards that a step touches; None: every dense shard of the job."""
Begun = Mapping[StepId, Shards]


def merged(reports: Iterable[Begun]) -> dict[StepId, Shards]:
    """Steps that have begun on any server."""
    begun: dict[StepId, Shards] = {}
    for report in reports:
        for step, shards in report.items():
            before = begun.get(step, shards)
            if before is not shards:
                before = None if shards is None or before is None else before | shards
            begun[step] = before
    return begun


def to_bits(shards: Collection[int]) -> bytes:
    """Encode ids as a bitmap: bit i % 8 of byte i // 8 for shard i."""
    bits = bytearray(max(shards, default=-1) // 8 + 1)
    for shard_id in shards:
        bits[shard_id // 8] |= 1 << shard_id % 8
    return bytes(bits)


@lru_cache(maxsize=128)
def from_bits(bits: bytes) -> frozenset[int]:
    """Decode a bitmap. Cached: most steps of a job touch the same shards."""
    return frozenset(
        8 * index + bit
        for index, byte in enumerate(bits)
        if byte
        for bit in range(8)
        if byte >> bit & 1
    )
