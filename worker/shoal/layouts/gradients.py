"""A rank's gradients: norms and faults."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.torch_private.dtensor import gradient_cut_as, local_of
from shoal.torch_private.tensors import foreach_norm
from shoal_proto.errors import InvalidSpec


def sum_of_squares(norms: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares as a float64 tensor [1]; 0 if `norms` is empty."""
    total = torch.zeros(1, dtype=torch.float64, device=device)
    # `stack` needs one device and dtype.
    for kind in dict.fromkeys((norm.device, norm.dtype) for norm in norms):
        alike = torch.stack([norm for norm in norms if (norm.device, norm.dtype) == kind])
        total += alike.double().square().sum().to(device)
    return total


def not_reduced(step: int, unreached: Sequence[str], strategy: str) -> InvalidSpec:
    """Return the error of a step whose gradients were not reduced.

    `unreached`: parameters without a gradient. `strategy`: name of the strategy's class.
    """
    if unreached:
        return InvalidSpec(
            f"parameters without a gradient in step {step}",
            seen=", ".join(unreached[:5]),
            expected="every parameter to take part in the loss",
            fix="If the model leaves some out on purpose: "
            f"session.distribute(..., strategy=shoal.{strategy}(find_unused_parameters=True)).",
        )
    return InvalidSpec(
        f"the gradients of step {step} were not reduced",
        seen="a loss that the distributed model did not compute, or that leaves out parameters"
        " of an earlier pass of the step",
        expected="a call of the model that session.distribute returned, in the step before"
        " session.backward, and every parameter to take part in each loss",
        fix="If passes leave parameters out on purpose: "
        f"session.distribute(..., strategy=shoal.{strategy}(find_unused_parameters=True)).",
    )


def name_of_fault(parameters: Mapping[str, nn.Parameter]) -> str:
    """Return the first parameter whose gradient on this rank has a NaN or Inf; empty if there is
    none."""
    gradients = local_gradients(parameters)
    # One pass over all gradients. A norm of finite numbers may overflow, so each element is tested
    # then.
    norms = foreach_norm(list(gradients.values()))
    if math.isfinite(sum_of_squares(norms, torch.device("cpu")).item()):
        return ""
    return next((name for name, g in gradients.items() if not bool(torch.isfinite(g).all())), "")


def local_gradients(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return this rank's parts of the gradients, not copied, without empty ones. A sharded
    parameter's replicated gradient is replaced by this rank's part."""
    gradients = {}
    for name, parameter in parameters.items():
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            own = gradient_cut_as(parameter, gradient)
            if own is not gradient:
                # Keep only this rank's part: else each rank would count all elements.
                parameter.grad = gradient = own
        if gradient is not None:
            gradients[name] = local_of(gradient) if isinstance(gradient, DTensor) else gradient
    return {name: gradient for name, gradient in gradients.items() if gradient.numel()}
