"""A rank's own part of a tensor that is sharded over several ranks."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.torch_private.dtensor import cut_as


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part without a graph; all of a tensor that is not sharded."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    # Without gradients DTensor has nothing to derive and dispatch.
    with torch.no_grad():
        return tensor.to_local().detach()


def placed_like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return `local` as this rank's part of a tensor with the sharding of the parameter."""
    if not isinstance(parameter, DTensor):
        return local
    return cut_as(parameter, local)
