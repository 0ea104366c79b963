"""Gradients of a module: whether they are finite, and whose backward pass brought them."""

import cmath
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shoal_proto.errors import InvalidSpec


def is_finite(tensor: Tensor) -> bool:
    """Whether all elements are finite."""
    # A NaN or Inf anywhere makes the sum one, so the usual case is a single pass; the sum of
    # finite numbers can overflow, so only the exact test condemns.
    return cmath.isfinite(tensor.sum().item()) or bool(torch.isfinite(tensor).all())


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all elements of all of them are; on a GPU this waits once and not for each."""
    if tensors and not is_on_host(tensors[0]):
        sums = torch.stack([tensor.sum().abs().float() for tensor in tensors])
        if cmath.isfinite(sums.sum().item()):
            return True
    return all(map(is_finite, tensors))


def is_on_host(tensor: Tensor) -> bool:
    """Whether to look at the tensor is to wait for nothing. On a GPU it is to wait until all that
    was begun there is done."""
    return tensor.device.type == "cpu"


def bare_backward() -> InvalidSpec:
    """What is told of a backward pass in a step that the session does not know of."""
    return InvalidSpec(
        "a backward pass in a step that went past the session",
        seen="loss.backward()",
        expected="session.backward(loss), which weighs this member's share of the batch",
        fix="Add up the losses, or pass each to session.backward; for a gradient that is not to"
        " train the model, ask torch.autograd.grad for it.",
    )


def watch_parameters(
    parameters: Iterable[nn.Parameter], ours: Callable[[], bool]
) -> list[RemovableHandle]:
    """Raise `bare_backward` in a pass that adds to these gradients where it is not `ours`."""

    def look(_: Tensor) -> None:
        if not ours():
            raise bare_backward()

    return [
        parameter.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
        for parameter in parameters
        if parameter.requires_grad
    ]
