"""The gradients of a step as they are sent, once nothing is wrong with them."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shoal_proto.errors import DtypeMismatch, NonFiniteGradient


def gradients_of(parameters: Mapping[str, nn.Parameter], step: int) -> dict[str, Tensor]:
    """By name, on the host and contiguous; parameters without one are left out.

    Raises what a server would refuse them with, before any part of the step has left:
    DtypeMismatch or NonFiniteGradient.
    """
    found = {n: p.grad.detach() for n, p in parameters.items() if p.grad is not None}
    for name, gradient in found.items():
        dtype = parameters[name].dtype
        if gradient.layout != torch.strided or gradient.dtype != dtype:
            raise DtypeMismatch(
                f"the gradient of parameter {name} is of another kind than the parameter",
                seen=f"{gradient.dtype}, {gradient.layout}",
                expected=f"{dtype}, {torch.strided}",
            )
    for name in _non_finite(found):
        raise NonFiniteGradient(
            f"the gradient of parameter {name} is not finite in step {step}",
            seen="NaN or Inf",
            expected="finite numbers",
            fix="Look for a division by zero, or lower the learning rate.",
            details={"parameter": name, "step": str(step)},
        )
    return {name: gradient.cpu().contiguous() for name, gradient in found.items()}


def _non_finite(gradients: Mapping[str, Tensor]) -> list[str]:
    """Names of the gradients with NaN or Inf.

    A sum is finite only if all of its terms are, and is much cheaper than to ask each of them;
    where it is not, they are asked, since finite numbers may have overflowed.
    """
    suspects = []
    for name, gradient in gradients.items():
        wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        if not math.isfinite(gradient.sum(dtype=wide).item()):
            suspects.append(name)
    return [name for name in suspects if not torch.isfinite(gradients[name]).all()]
