"""The gradients of a step, checked and ready to be sent."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shoal.state.host_copies import on_host
from shoal_proto.errors import DtypeMismatch, NonFiniteGradient


def gradients_of(parameters: Mapping[str, nn.Parameter], step: int) -> dict[str, Tensor]:
    """Return the gradients by name, on the host and contiguous; parameters without one are left
    out.

    Raises DtypeMismatch or NonFiniteGradient.
    """
    gradients = {n: p.grad.detach() for n, p in parameters.items() if p.grad is not None}
    for name, gradient in gradients.items():
        dtype = parameters[name].dtype
        if gradient.layout != torch.strided or gradient.dtype != dtype:
            raise DtypeMismatch(
                f"the gradient of parameter {name} has another dtype or layout than the parameter",
                seen=f"{gradient.dtype}, {gradient.layout}",
                expected=f"{dtype}, {torch.strided}",
            )
    for name in _non_finite(gradients):
        raise NonFiniteGradient(
            f"the gradient of parameter {name} is not finite in step {step}",
            seen="NaN or Inf",
            expected="finite numbers",
            fix="Look for a division by zero, or lower the learning rate.",
            details={"parameter": name, "step": str(step)},
        )
    return on_host(gradients)


def _non_finite(gradients: Mapping[str, Tensor]) -> list[str]:
    """Name the gradients with NaN or Inf.

    A sum is much cheaper than a check of each gradient, but finite numbers may overflow in it.
    """
    sums: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients.values():
        wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        sums.setdefault(gradient.device, []).append(gradient.sum(dtype=wide).double())
    # Read once for each device: on a GPU a read waits for all work in progress.
    if all(math.isfinite(torch.stack(own).sum().item()) for own in sums.values()):
        return []
    return [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()]
