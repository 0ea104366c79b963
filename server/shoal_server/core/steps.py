"""What a cut is made of: pushes, each over all the shards that it touches."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """One push."""

    session: str
    """Who counts it: a member's incarnation, in one count of its pushes."""
    sequence: int


Shards = frozenset[int] | None
"""What a step touches; None: every dense shard of the job."""
Begun = Mapping[Step, Shards]


def merged(reports: Iterable[Begun]) -> dict[Step, Shards]:
    """What has begun anywhere, of what each server tells."""
    begun: dict[Step, Shards] = {}
    for report in reports:
        for step, shards in report.items():
            before = begun.get(step, shards)
            begun[step] = None if shards is None or before is None else before | shards
    return begun


__all__ = ["Begun", "Shards", "Step", "merged"]
