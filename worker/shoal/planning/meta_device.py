"""Models and inputs on the meta device, without memory, to compute shapes."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from shoal.torch_private.tensors import pytree


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of the model on the meta device; copying allocates no memory for parameters."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        for parameter in model.parameters()
    }
    return copy.deepcopy(model, memo).to("meta")


def to_meta(tree: Any) -> Any:
    """Move the tensors in tuples, lists and dicts to the meta device."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), tree)
