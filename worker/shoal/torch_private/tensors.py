"""Of torch itself: trees of tensors, operations on lists of tensors, autograd's running task."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["pytree"]

foreach_norm = torch._foreach_norm
foreach_mul_ = torch._foreach_mul_


def in_backward() -> bool:
    """Whether this thread runs a backward pass at the moment."""
    return bool(torch._C._current_graph_task_id() != -1)


def after_backward(call: Callable[[], None]) -> None:
    """Call this when the backward pass under way is over, before whoever began it goes on, on the
    streams that go on; what it raises comes out of the pass. Only within one."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)
