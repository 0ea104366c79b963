"""Weights of shards, for balancing servers."""

from collections.abc import Mapping
from dataclasses import dataclass

UNIT = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardMeasure:
    version: int
    pushed_bytes: int
    """Bytes of pushes applied since this primary began to lead."""


def weights(
    num_bytes: Mapping[int, int], before: Mapping[int, int], after: Mapping[int, int]
) -> dict[int, int]:
    """Weight of each shard: half its share of all bytes, half its share of bytes pushed lately.

    `num_bytes`: sizes, above 0. `before`, `after`: bytes pushed until each of two moments; a total
    that has fallen comes from a new primary, which counts from 0. Without pushes, only sizes count.
    """
    pushed = {i: _grown(before.get(i, 0), after.get(i, 0)) for i in num_bytes}
    all_bytes, all_pushed = sum(num_bytes.values()), sum(pushed.values())
    weight_of = {}
    for i, size in num_bytes.items():
        share = size / all_bytes
        if all_pushed:
            share = (share + pushed[i] / all_pushed) / 2
        weight_of[i] = max(1, round(UNIT * share))
    return weight_of


def _grown(before: int, after: int) -> int:
    return after - before if after >= before else after
