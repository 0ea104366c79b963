"""Bodies of the ranks of backends/test_reduce_scatter.py, in processes of their own."""

from typing import Any

import torch
import torch.distributed as dist

from shoal.backends.abortable.reduce_scatter import reduce_scatter, sends_each_part_once


def sums_and_means() -> dict[str, Any]:
    """Return the distance of each part to torch's own result, and whether `sends_each_part_once`
    holds for each operation."""
    group = dist.group.WORLD
    assert group is not None
    rank, world_size = dist.get_rank(), dist.get_world_size()
    whole = torch.randn(5 * world_size, generator=torch.Generator().manual_seed(rank))
    found: dict[str, Any] = {}
    for name, op in (("sum", dist.ReduceOp.SUM), ("mean", dist.ReduceOp.AVG)):
        own, expected = torch.empty(5), whole.clone()
        found[f"{name} has a better way"] = sends_each_part_once(whole, group, op)
        reduce_scatter(own, whole, group, op)
        dist.all_reduce(expected)
        part = expected[5 * rank : 5 * rank + 5] / (world_size if name == "mean" else 1)
        found[name] = float((own - part).abs().max())
    found["maximum has one"] = sends_each_part_once(whole, group, dist.ReduceOp.MAX)
    return found
