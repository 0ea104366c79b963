"""Reduction of values over the ranks of a test, as for the members of a session."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from support.collectives.strategy_runs import generation_of
from torch import Tensor

from shoal.session.shared_calls import Reduction, reduce, values_by_name


def reduced(op: Reduction, given: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Reduce the values in `given`, one mapping for each rank. Returns this rank's results by name,
    with tensors as (dtype, list)."""
    group = dist.group.WORLD
    assert group is not None
    names = [f"m{rank}" for rank in range(group.size())]
    generation = generation_of(names, names[group.rank()])
    found = reduce(values_by_name(given[group.rank()], op), op, group, generation)
    return {
        name: (str(each.dtype), each.tolist()) if isinstance(each, Tensor) else each
        for name, each in found.items()
    }
