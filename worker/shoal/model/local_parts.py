"""A rank's own part of a tensor that is sharded over several ranks."""

from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.torch_private.dtensor import cut_as, local_of


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's part without a graph; all of a tensor that is not sharded."""
    return (local_of(tensor) if isinstance(tensor, DTensor) else tensor).detach()


def placed_like(parameter: Tensor, local: Tensor) -> Tensor:
    """Return `local` as this rank's part of a tensor with the sharding of the parameter."""
    if not isinstance(parameter, DTensor):
        return local
    return cut_as(parameter, local)
