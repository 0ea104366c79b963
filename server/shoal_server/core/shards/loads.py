"""What a shard weighs when servers are evened out: its size, corrected by what is pushed to it."""

from collections.abc import Mapping
from dataclasses import dataclass

UNIT = 1_000_000
"""Weights of a job sum up to about so much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMeasure:
    """How a shard is, as its primary says."""

    version: int
    pushed_bytes: int
    """Of pushes applied since that server leads it."""


def weights(
    num_bytes: Mapping[int, int], before: Mapping[int, int], after: Mapping[int, int]
) -> dict[int, int]:
    """By shard: half its share of all bytes, half its share of what was pushed lately.

    `num_bytes` has each shard's size; `before` and `after` the bytes ever pushed to it, at two
    times. A shard whose count fell has another primary since, which began to count anew. Where
    nothing was pushed, sizes alone count.
    """
    pushed = {i: _grown(before.get(i, 0), after.get(i, 0)) for i in num_bytes}
    all_bytes, all_pushed = sum(num_bytes.values()), sum(pushed.values())
    found = {}
    for i, size in num_bytes.items():
        share = size / all_bytes
        if all_pushed:
            share = (share + pushed[i] / all_pushed) / 2
        found[i] = max(1, round(UNIT * share))
    return found


def _grown(before: int, after: int) -> int:
    return after - before if after >= before else after
