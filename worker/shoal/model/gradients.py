"""Gradients of a module: whether they are finite, and whose backward pass brought them."""

import cmath
from collections.abc import Callable, Iterable, Sequence
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
    """Whether all elements are finite."""
    # A NaN or Inf anywhere makes the sum one, so the usual case is a single pass; the sum of
    # finite numbers can overflow, so only the exact test condemns.
    return cmath.isfinite(_wide_sum(tensor).item()) or bool(torch.isfinite(tensor).all())


def _wide_sum(tensor: Tensor) -> Tensor:
    is_half = tensor.is_floating_point() and tensor.itemsize < torch.float32.itemsize
    return tensor.sum(dtype=torch.float32) if is_half else tensor.sum()


def are_finite(tensors: Sequence[Tensor]) -> bool:
    """Whether all elements of all of them are; on a GPU this waits once and not for each."""
    if tensors and not is_on_host(tensors[0]):
        # In the width of a float at least: the sum of fp16 numbers passes 65504 soon.
        sums = torch.stack([_wide_sum(tensor).abs().float() for tensor in tensors])
        if cmath.isfinite(sums.sum().item()):
            return True
    return all(map(is_finite, tensors))


def is_on_host(tensor: Tensor) -> bool:
    """Whether to look at the tensor is to wait for nothing. On a GPU it is to wait until all that
    was begun there is done."""
    return tensor.is_cpu


def refuse_sparse(strategy: str, model: nn.Module) -> None:
    """Raise InvalidSpec for layers whose gradients are sparse tensors."""
    found = [
        name
        for name, part in model.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
    ]
    if found:
        raise sparse_gradient(strategy, ", ".join(found[:5]))


def refuse_layers(strategy: str, model: nn.Module) -> None:
    """Raise InvalidSpec for layers whose members would train another model than one process does:
    as `refuse_sparse`, those that write to their weights by the samples of a pass, and those whose
    gradient depends on how often an index occurs in the batch."""
    refuse_sparse(strategy, model)
    embeddings = [
        (name, part)
        for name, part in model.named_modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
    ]
    if found := [name for name, part in embeddings if part.max_norm is not None]:
        raise scaled_down(strategy, ", ".join(found[:5]))
    if found := [name for name, part in embeddings if part.scale_grad_by_freq]:
        raise scaled_by_frequency(strategy, ", ".join(found[:5]))


def scaled_down(strategy: str, name: str) -> InvalidSpec:
    """What is told of layers, or of a function, that write to weights by the samples of a pass."""
    return InvalidSpec(
        f"{strategy} does not train layers that scale down rows of their weights in a pass",
        seen=f"max_norm of {name}",
        expected="weights that do not depend on which member has which samples: each scales"
        " down the rows that its own samples use",
        fix="Look rows up without max_norm, and scale all rows down between two steps, on"
        " every member: with torch.no_grad(): weight.copy_(weight.renorm(2, 0, max_norm)).",
    )


def scaled_by_frequency(strategy: str, name: str) -> InvalidSpec:
    """The refusal of layers, or of a function, that divide the gradient of a row by how often its
    index occurs."""
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
    """What is told of layers, or of a parameter, with sparse gradients."""
    return InvalidSpec(
        f"{strategy} does not train layers with sparse gradients",
        seen=f"sparse gradients of {name}",
        expected="gradients of the parameters' own layout",
        fix="Make the layer with sparse=False. Tables of which a step uses few rows belong on"
        " parameter servers: shoal.EmbeddingTable with the strategy async-sgd, and in place of"
        " SparseAdam its RowAdam(counts_rows=False) (docs/tables.md).",
    )


def refuse_parameter_hooks(model: nn.Module) -> None:
    """Raise InvalidSpec for parameters whose gradients the script has hooks on.

    They would be called with what this member's samples give, n times what these are worth to the
    whole batch, and only where parameters are the script's own at all.
    """
    hooked = [name for name, each in model.named_parameters() if has_gradient_hooks(each)]
    if hooked:
        raise InvalidSpec(
            "parameters have hooks of the script's on their gradients",
            seen=f"register_hook or register_post_accumulate_grad_hook of {', '.join(hooked[:5])}",
            expected="gradients that are changed once they are those of the whole batch",
            fix="Change parameter.grad behind session.backward in the step: to mask or to clamp it,"
            " say. Hooks on modules and on what they compute are no problem.",
        )


class StepGradients:
    """The gradients that a step begins without: those of all parameters of a model.

    Also of those that the optimizer does not hold: they count in the norm by which gradients are
    clipped, and what a member had added up in them another one would not have that joined later.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        self._unheld = [each for each in parameters if each.requires_grad and id(each) not in held]

    def forget(self) -> None:
        """There are none from here on."""
        for optimizer in optimizers_of(self._optimizer).values():
            if _zeroes_as_torch(optimizer):
                # What `zero_grad` comes to, without the records that a profiler would have of it,
                # which take several times as long.
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = None
            else:
                optimizer.zero_grad(set_to_none=True)
        for parameter in self._unheld:
            parameter.grad = None


def _zeroes_as_torch(optimizer: Optimizer) -> bool:
    """Whether its `zero_grad` is that of all optimizers, and no class's or script's own."""
    return type(optimizer).zero_grad is Optimizer.zero_grad and "zero_grad" not in vars(optimizer)


def bare_backward() -> InvalidSpec:
    """What is told of a backward pass in a step that the session does not know of."""
    return InvalidSpec(
        "a backward pass in a step that went past the session",
        seen="loss.backward()",
        expected="session.backward(loss), which weighs this member's share of the batch",
        fix="Add up the losses, or pass each to session.backward; for a gradient that is not to"
        " train the model, ask torch.autograd.grad for it.",
    )


def refuse_second_derivatives(model: nn.Module) -> None:
    """Let a pass that is to be differentiated itself, as that of a gradient penalty is
    (`torch.autograd.grad(..., create_graph=True)`), raise InvalidSpec where it enters the model:
    what it has used is freed behind it."""

    def look(gradient: Tensor) -> None:
        if torch.is_grad_enabled():
            raise InvalidSpec(
                "a sharded model lets go of its weights behind each backward pass, so that none"
                " can be differentiated once more",
                seen="torch.autograd.grad(..., create_graph=True) through the distributed model",
                expected="first derivatives only",
                fix="ddp, zero1 and tensor can do so; of these zero1 and tensor need less memory.",
            )

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
    """Raise `bare_backward` in a pass that adds to these gradients where it is not `ours`, and
    `sparse_gradient` for one that a function asked to be sparse."""

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
