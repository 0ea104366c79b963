"""Reduce-scatter over Gloo that sends each part only once."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.backends.abortable.waiter import wait_abortable
from shoal.backends.process_group.reductions import add_up
from shoal.backends.process_group.transports import is_gloo


def sends_each_part_once(whole: Tensor, group: dist.ProcessGroup, op: Any) -> bool:
    """True if `reduce_scatter` is better than torch's for this tensor."""
    known = op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG)
    return known and whole.device.type == "cpu" and is_gloo(group)


def reduce_scatter(own: Tensor, whole: Tensor, group: dist.ProcessGroup, op: Any) -> None:
    """Fill `own` with this rank's part of the sum or mean over the ranks. Collective. `op`:
    ReduceOp.SUM or AVG.

    torch 2.13 makes Gloo sum the whole on every rank, which sends twice the bytes.
    """
    parts = torch.empty_like(whole)
    wait_abortable(dist.all_to_all_single(parts, whole, group=group, async_op=True), group)
    add_up(parts.view(group.size(), *own.shape), own)
    if op == dist.ReduceOp.AVG:
        own.div_(group.size())
