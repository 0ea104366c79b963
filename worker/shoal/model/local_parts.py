"""A rank's own part of a tensor that is cut over several."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.torch_private.dtensor import cut_as


def local_part(tensor: Tensor) -> Tensor:
    """What this rank holds, without a graph; of a tensor that is not cut, all of it."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    # Where no gradient is asked for, DTensor has nothing to derive and to dispatch.
    with torch.no_grad():
        return tensor.to_local().detach()


def placed_like(parameter: nn.Parameter, local: Tensor) -> Tensor:
    """`local` as this rank's part of a tensor that is cut as the parameter is."""
    if not isinstance(parameter, DTensor):
        return local
    return cut_as(parameter, local)
