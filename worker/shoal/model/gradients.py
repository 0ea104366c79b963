"""Checks of a module's gradients: finite values, and the backward passes that they come from."""

import cmath
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shoal.model.several import optimizers_of
from shoal.torch_private.compiling import eager
from shoal.torch_private.tensors import has_gradient_hooks, pytree
from shoal_proto.errors import InvalidSpec


def is_finite(tensor: Tensor) -> bool:
    """True if all elements are finite."""
    # A sum of finite numbers can overflow: only then the exact test decides.
    return cmath.isfinite(_wide_sum(tensor).item()) or bool(torch.isfinite(tensor).all())


def _wide_sum(tensor: Tensor) -> Tensor:
    is_half = tensor.is_floating_point() and tensor.itemsize < torch.float32.itemsize
    return tensor.sum(dtype=torch.float32) if is_half else tensor.sum()


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """True if all elements of all tensors are finite. On a GPU this usually waits only once."""
    if tensors and not is_on_host(tensors[0]):
        # Sum in float32: fp16 sums soon exceed 65504. A model may be on several devices.
        wide = (_wide_sum(tensor).abs() for tensor in tensors)
        sums = torch.stack([each.to(tensors[0].device, torch.float32) for each in wide])
        if cmath.isfinite(sums.sum().item()):
            return True
    return all(map(is_finite, tensors))


def is_on_host(tensor: Tensor) -> bool:
    """True if a read of the tensor waits for nothing; on a GPU it waits for all queued work."""
    return tensor.is_cpu


def refuse_sparse(strategy: str, model: nn.Module) -> None:
    """Raise InvalidSpec for layers with sparse gradients."""
    names = [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    ]
    if names:
        raise sparse_gradient(strategy, ", ".join(names[:5]))


def refuse_layers(strategy: str, model: nn.Module) -> None:
    """Raise InvalidSpec for layers with sparse gradients, and for layers whose result depends on
    the samples that a member has (`max_norm`, `scale_grad_by_freq`)."""
    refuse_sparse(strategy, model)
    embeddings = [
        (name, part)
        for name, part in model.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
    ]
    if names := [name for name, part in embeddings if part.max_norm is not None]:
        raise scaled_down(strategy, ", ".join(names[:5]))
    if names := [name for name, part in embeddings if part.scale_grad_by_freq]:
        raise scaled_by_frequency(strategy, ", ".join(names[:5]))


def scaled_down(strategy: str, name: str) -> InvalidSpec:
    """Return the refusal of layers, or of a function, with `max_norm`."""
    return InvalidSpec(
        f"{strategy} does not train layers that scale down rows of their weights in a pass",
        seen=f"max_norm of {name}",
        expected="weights that do not depend on which member has which samples: each member scales"
        " down the rows that its own samples use",
        fix="Look rows up without max_norm, and scale all rows down between two steps, on"
        " every member: with torch.no_grad(): weight.copy_(weight.renorm(2, 0, max_norm)).",
    )


def scaled_by_frequency(strategy: str, name: str) -> InvalidSpec:
    """Return the refusal of layers, or of a function, with `scale_grad_by_freq`."""
    return InvalidSpec(
        f"{strategy} does not train embeddings whose gradient is divided by the frequency of an"
        " index in the batch",
        seen=f"scale_grad_by_freq of {name}",
        expected="gradients that add up over the shares of a batch: a member counts how often an"
        " index occurs in its own share",
        fix="Make the layer with scale_grad_by_freq=False. To weight rare indices more, multiply"
        " the embedded rows' losses by weights that are computed from the whole data set.",
    )


def sparse_gradient(strategy: str, name: str) -> InvalidSpec:
    """Return the refusal of layers, or of a parameter, with sparse gradients."""
    return InvalidSpec(
        f"{strategy} does not train layers with sparse gradients",
        seen=f"sparse gradients of {name}",
        expected="gradients of the parameters' own layout",
        fix="Make the layer with sparse=False. Tables with few used rows in a step belong on"
        " parameter servers: shoal.EmbeddingTable with the strategy async-sgd, and in place of"
        " SparseAdam its RowAdam(counts_rows=False) (docs/tables.md).",
    )


def refuse_parameter_hooks(model: nn.Module) -> None:
    """Raise InvalidSpec if the script has hooks on gradients of parameters: these would get
    gradients of this member's samples only."""
    hooked = [name for name, each in model.named_parameters() if has_gradient_hooks(each)]
    if hooked:
        raise InvalidSpec(
            "parameters have hooks of the script's on their gradients",
            seen=f"register_hook or register_post_accumulate_grad_hook of {', '.join(hooked[:5])}",
            expected="changes to the whole batch's gradients, after they were reduced",
            fix="Change parameter.grad after session.backward in the step, for example to mask or"
            " clamp it. Hooks on modules and on what they compute are not a problem.",
        )


class StepGradients:
    """Gradients of all parameters of a model, dropped when a step begins. Gradients of parameters
    that the optimizer does not hold are dropped too: they count in the norm for clipping."""

    def __init__(self, parameters: Iterable[nn.Parameter], optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        self._unheld = [each for each in parameters if each.requires_grad and id(each) not in held]

    def forget(self) -> None:
        """Drop all gradients."""
        for optimizer in optimizers_of(self._optimizer).values():
            if _zeroes_as_torch(optimizer):
                # As `zero_grad`, without its slow record for the profiler.
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
            else:
                optimizer.zero_grad(set_to_none=True)
        for parameter in self._unheld:
            parameter.grad = None


def _zeroes_as_torch(optimizer: Optimizer) -> bool:
    return type(optimizer).zero_grad is Optimizer.zero_grad and "zero_grad" not in vars(optimizer)


def bare_backward() -> InvalidSpec:
    """Return the refusal of a backward pass in a step without `session.backward`."""
    return InvalidSpec(
        "a backward pass in a step did not go through the session",
        seen="loss.backward()",
        expected="session.backward(loss), which weights it by this member's share of the batch",
        fix="Add up the losses, or pass each to session.backward; for a gradient that is not to"
        " train the model, call torch.autograd.grad.",
    )


_Backward = Callable[..., Any]
_DIFFERENTIATES_AGAIN = "ddp and zero1 can do so; zero1 needs less memory."


def _refuse_create_graph(why: str, fix: str = _DIFFERENTIATES_AGAIN) -> None:
    if torch.is_grad_enabled():
        raise InvalidSpec(
            f"{why}, so no pass can be differentiated again",
            seen="torch.autograd.grad(..., create_graph=True) through the distributed model",
            expected="first derivatives only",
            fix=fix,
        )


def first_order(why: str, fix: str = _DIFFERENTIATES_AGAIN) -> Callable[[_Backward], _Backward]:
    """Decorate the backward of a torch.autograd.Function that exchanges values with other ranks:
    with `create_graph=True` it raises InvalidSpec. (torch's `once_differentiable` raises only in
    the second backward pass, and names no alternative.)"""

    def decorate(backward: _Backward) -> _Backward:
        @wraps(backward)
        def checked(context: Any, *gradients: Any) -> Any:
            _refuse_create_graph(why, fix)
            return backward(context, *gradients)

        return checked

    return decorate


def refuse_second_derivatives(model: nn.Module) -> None:
    """Make backward passes with `create_graph=True` raise InvalidSpec when they enter the model:
    the weights that they use are freed after the pass."""

    def look(gradient: Tensor) -> None:
        _refuse_create_graph("a sharded model frees its weights after each backward pass")

    @eager
    def watch(module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    leaf.register_hook(look)  # type: ignore[no-untyped-call]

    model.register_forward_hook(watch)


def watch_parameters(
    parameters: Iterable[nn.Parameter], ours: Callable[[], bool]
) -> list[RemovableHandle]:
    """Watch gradients: a pass that adds to them raises `bare_backward` unless `ours()` is true, and
    `sparse_gradient` if a gradient is sparse. Returns the handles of the hooks."""

    def look(parameter: Tensor) -> None:
        if not ours():
            raise bare_backward()
        if parameter.grad is not None and parameter.grad.is_sparse:
            raise sparse_gradient("the strategy", f"a parameter of {tuple(parameter.shape)}")

    return [
        parameter.register_post_accumulate_grad_hook(look)  # type: ignore[no-untyped-call]
        for parameter in parameters
        if parameter.requires_grad
    ]
