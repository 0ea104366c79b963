"""Private parts of torch itself: tensors, backward passes, clipping and mean losses."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad
from torch.utils import _pytree as pytree

from shoal.torch_private.watching import before_calls

__all__ = ["pytree"]


def foreach_copy_(
    tensors: list[Tensor], sources: list[Tensor], *, non_blocking: bool = False
) -> None:
    """Copy each source into the tensor of the same index. The lists may be empty."""
    if tensors:
        torch._foreach_copy_(tensors, sources, non_blocking)


def foreach_norm(tensors: list[Tensor], order: float = 2.0) -> Sequence[Tensor]:
    """Return the norm of each tensor. The list may be empty."""
    return torch._foreach_norm(tensors, order) if tensors else ()


def foreach_mul_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by `factor` in place. The list may be empty."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def num_writes(tensor: Tensor) -> int:
    """Return the number of in-place writes; 0 for an inference tensor: torch counts none."""
    return 0 if tensor.is_inference() else tensor._version


_NUM_WRITES = attrgetter("_version")


def all_writes(tensors: Iterable[Tensor]) -> list[int]:
    """Return `num_writes` of each tensor, ten times as fast; inference tensors raise."""
    return list(map(_NUM_WRITES, tensors))


def has_gradient_hooks(tensor: Tensor) -> bool:
    """True if the tensor has hooks on its gradient, which may read or change it."""
    after_accumulation = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return bool(tensor._backward_hooks or after_accumulation)


_WATCHED = "_shoal_watched"


def watch_clipping(look: Callable[[Sequence[Tensor], float | None], None]) -> None:
    """Install `look`, called with parameters and maximum norm before `clip_grad_norm_` or
    `clip_grads_with_norm_` scales gradients, and with None as norm before `clip_grad_value_`.

    Only the first call of this function has an effect.
    """
    _look_before(clip_grad._clip_grads_with_norm_, look)
    _look_before(clip_grad.clip_grad_value_, lambda parameters, _: look(parameters, None))


def _look_before(call: Any, look: Callable[[Sequence[Tensor], Any], None]) -> None:
    """Make a function that torch has decorated call `look` with its first two arguments."""
    if hasattr(call, _WATCHED):
        return
    plain = call.__wrapped__
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def watched(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        (name, parameters), (_, limit) = islice(given.arguments.items(), 2)
        # Listed once: the parameters may come from a generator.
        each = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        given.arguments[name] = each
        look(each, limit)
        return plain(*given.args, **given.kwargs)

    # Within the decorated function: modules have imported it under names of their own.
    next(cell for cell in call.__closure__ if cell.cell_contents is plain).cell_contents = watched
    setattr(call, _WATCHED, True)


def watch_scaling_down(look: Callable[[Tensor], None]) -> None:
    """Install `look`, called with each weight whose rows an embedding's `max_norm` may scale down.

    Only the first call of this function has an effect.
    """
    name = "_no_grad_embedding_renorm_"
    before_calls(functional, name, lambda weight, *_, **__: look(weight))


def divides_by_frequency(node: Any) -> bool:
    """True if the node belongs to an embedding (bag) with `scale_grad_by_freq`."""
    return bool(getattr(node, "_saved_scale_grad_by_freq", False))


def mixes_parts_and_wholes(error: BaseException) -> bool:
    """True if one operation of torch was given both a DTensor and a plain tensor."""
    return isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error)


_MEAN, _SUM = 1, 2

_ADDING = frozenset(
    {"AddBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0", "MulBackward1"}
)
"""Nodes that add terms without scaling them, and `MulBackward1`: `cross_entropy` makes it to weight
its two terms if labels are smoothed. A factor of the script makes another node."""


def counted_targets(node: Any) -> Tensor | None:
    """Return the weight of each target in a mean negative log likelihood, as in `cross_entropy`.

    0 for an ignored target, else 1 or the weight of its class. None: another node. The graph must
    not have had its backward pass.
    """
    if getattr(node, "_saved_reduction", None) != _MEAN:
        return None
    ignored: int | None = getattr(node, "_saved_ignore_index", None)
    if ignored is None or node._saved_target.dtype.is_floating_point:
        return None
    targets: Tensor = node._saved_target
    # A negative index is saved as unsigned.
    counts = torch.ne(targets, ignored if ignored < 1 << 63 else ignored - (1 << 64))
    weights: Tensor | None = node._saved_weight
    if weights is None:
        return counts.to(torch.float64)
    return torch.where(counts, weights[torch.where(counts, targets, 0)].double(), 0.0)


def plain_sums(loss: Tensor) -> Iterable[torch.Size]:
    """Yield the shape that each sum loss (`reduction="sum"`) in this loss sums over.

    Sums that were multiplied or divided afterwards are left out.
    """
    nodes: list[Any] = [loss.grad_fn]
    for node in nodes:
        if node is not None and node.name() in _ADDING:
            nodes += [before for before, _ in node.next_functions if before not in nodes]
        elif getattr(node, "_saved_reduction", None) == _SUM:
            # A loss of a parameter itself is not over samples.
            before = node.next_functions[0][0]
            shape = node._saved_self.shape
            if shape and before is not None and before.name() != "torch::autograd::AccumulateGrad":
                yield shape


def in_backward() -> bool:
    """True while this thread runs a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def num_nodes() -> int:
    """Return the number of autograd nodes that this thread has made."""
    return int(torch._C._autograd._get_sequence_nr())


def node_in_progress() -> int:
    """Return the number of nodes that were made before the one whose backward this thread runs."""
    node: Any = torch._C._current_autograd_node()
    return int(node._sequence_nr())


def after_backward(call: Callable[[], None]) -> None:
    """Call `call` at the end of the backward pass in progress, on the streams of the pass's caller.

    `backward` raises the errors of `call`. Valid only within a pass.
    """
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def returns_new_memory(operator: str) -> bool:
    """True if torch has an operator of this name, and no result of it is a view of an argument."""
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{operator}")
    views = (each.alias_info for schema in schemas for each in schema.returns)
    return bool(schemas) and all(view is None or view.is_write for view in views)


def returns_tensor(operator: str) -> bool:
    """True if torch has an operator of this name whose overloads, as far as they return tensors,
    return a single tensor."""
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{operator}")
    returned = [[str(each.type) for each in schema.returns] for schema in schemas]
    returned = [types for types in returned if any("Tensor" in each for each in types)]
    return bool(returned) and all(types == ["Tensor"] for types in returned)


def takes_tensor(operator: str) -> bool:
    """True if torch has an operator of this name, and its first argument is a tensor, not a list of
    tensors."""
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{operator}")
    first = {str(schema.arguments[0].type) for schema in schemas if schema.arguments}
    return "Tensor" in first and "Tensor[]" not in first
