"""Of torch itself: trees of tensors, operations on lists of tensors, autograd's running task."""

import torch
from torch.utils import _pytree as pytree

__all__ = ["pytree"]

foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_


def in_backward() -> bool:
    """Whether this thread runs a backward pass at the moment."""
    return bool(torch._C._current_graph_task_id() != -1)
