"""Clipping and scaling of a layout's gradients."""

from collections.abc import Collection

import torch
from torch import Tensor

from shoal.backends.abortable.waiter import all_reduce
from shoal.layouts.base import Layout
from shoal.layouts.gradients import local_gradients, sum_of_squares
from shoal.torch_private.tensors import foreach_mul_, foreach_norm


@torch.no_grad()
def clip(layout: Layout, max_norm: float, among: Collection[str] | None = None) -> Tensor:
    """Scale gradients so that their common 2-norm is at most `max_norm`. Returns the earlier norm.

    Collective, unless the layout `is_replicated`. Equals torch.nn.utils.clip_grad_norm_ on one
    process: each element counts once. The all-reduce carries the flags of `non_finite_check` too.
    `among`: names of parameters to clip; None: all.
    """
    gradients = local_gradients(
        {k: p for k, p in layout.parameters.items() if among is None or k in among}
    )
    counted = list(gradients.values())
    if not layout.is_replicated:
        counted = [gradient for name, gradient in gradients.items() if layout.is_counted_here(name)]
    message = sum_of_squares(foreach_norm(counted), layout.world.device)
    non_finite_check = layout.non_finite_check
    if non_finite_check is not None:
        message = torch.cat([message, non_finite_check.flags(layout.parameters)])
    if not layout.is_replicated:
        all_reduce(message, layout.world.group)
    if non_finite_check is not None:
        non_finite_check.set_flags(message[1:])
    total = message[0].sqrt()
    # torch's own constant and order, so that the result equals that of one process.
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    held = list(gradients.values())
    # Gradients may be on the host although the layout's device is a GPU.
    foreach_mul_(held, factor.to(held[0].device) if held else factor)
    return total


@torch.no_grad()
def scale(layout: Layout, factor: float) -> None:
    """Multiply all gradients of this rank."""
    foreach_mul_(
        list(local_gradients(layout.parameters).values()),
        torch.tensor(factor, dtype=torch.float64),
    )
