"""Of torch itself: trees of tensors, operations on lists of tensors, autograd's running task, what
its own clipping scales, what its mean losses are means over."""

import functools
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils import clip_grad
from torch.utils import _pytree as pytree

from shoal.torch_private.watching import before_calls

__all__ = ["pytree"]


def foreach_copy_(tensors: list[Tensor], sources: list[Tensor]) -> None:
    """Write each of the sources into the tensor at its place. There may be none."""
    if tensors:
        torch._foreach_copy_(tensors, sources)


def foreach_norm(tensors: list[Tensor], order: float = 2.0) -> Sequence[Tensor]:
    """The norm of each, which may be none at all."""
    return torch._foreach_norm(tensors, order) if tensors else ()


def foreach_mul_(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each by the number, in place. There may be none: a rank need not hold anything."""
    if tensors:
        torch._foreach_mul_(tensors, factor)


def num_writes(tensor: Tensor) -> int:
    """How often it was written to in place; 0 for an inference tensor, which nobody counts."""
    return 0 if tensor.is_inference() else tensor._version


_NUM_WRITES = attrgetter("_version")


def all_writes(tensors: Iterable[Tensor]) -> list[int]:
    """`num_writes` of each, none of which is an inference tensor: some ten times as fast."""
    return list(map(_NUM_WRITES, tensors))


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Whether somebody is called with the gradient of it, to look at it or to change it."""
    behind = getattr(tensor, "_post_accumulate_grad_hooks", None)
    return bool(tensor._backward_hooks or behind)


_WATCHED = "_shoal_watched"


def watch_clipping(look: Callable[[Sequence[Tensor], float], None]) -> None:
    """Call this with the parameters whose gradients torch's `clip_grad_norm_` is about to scale, by
    a norm that it has taken of them, and the norm that it scales them to, from now on. The first
    call counts."""
    plain: Any = clip_grad._clip_grads_with_norm_
    if hasattr(plain, _WATCHED):
        return

    @functools.wraps(plain)
    def watched(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> None:
        each = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        look(each, max_norm)
        plain(each, max_norm, *args, **kwargs)

    setattr(watched, _WATCHED, True)
    clip_grad._clip_grads_with_norm_ = watched


def watch_scaling_down(look: Callable[[Tensor], None]) -> None:
    """Call this with the weight of which an embedding's `max_norm` is about to scale rows down: of
    layers, and of torch's functions. From now on; the first call counts."""
    name = "_no_grad_embedding_renorm_"
    before_calls(functional, name, lambda weight, *_, **__: look(weight))


def divides_by_frequency(node: Any) -> bool:
    """True if a node of a graph is an embedding's, or an embedding bag's, with
    `scale_grad_by_freq`."""
    return bool(getattr(node, "_saved_scale_grad_by_freq", False))


def mixes_parts_and_wholes(error: BaseException) -> bool:
    """True if torch was given a DTensor and a plain tensor for one operation."""
    return isinstance(error, RuntimeError) and "mixed torch.Tensor and DTensor" in str(error)


_MEAN, _SUM = 1, 2
"""Of `_saved_reduction`."""

_ADDING = frozenset(
    {"AddBackward0", "SubBackward0", "NegBackward0", "ToCopyBackward0", "MulBackward1"}
)
"""Nodes that leave what they are given as large as it is. By the last one torch's `cross_entropy`
weighs its two parts where labels are smoothed; what a script multiplies by has another."""


def counted_targets(node: Any) -> Tensor | None:
    """What each target of a mean negative log likelihood, as `cross_entropy` takes it, counts for:
    0 where it is ignored, and else 1, or the weight of its class. None of any other node of a graph
    that was not passed through yet."""
    if getattr(node, "_saved_reduction", None) != _MEAN:
        return None
    ignored: int | None = getattr(node, "_saved_ignore_index", None)
    if ignored is None or node._saved_target.dtype.is_floating_point:
        return None
    targets: Tensor = node._saved_target
    # A negative one comes back without its sign.
    counts = torch.ne(targets, ignored if ignored < 1 << 63 else ignored - (1 << 64))
    weights: Tensor | None = node._saved_weight
    if weights is None:
        return counts.to(torch.float64)
    return torch.where(counts, weights[torch.where(counts, targets, 0)].double(), 0.0)


def plain_sums(loss: Tensor) -> Iterable[torch.Size]:
    """Of each of torch's losses with `reduction="sum"` that this one consists of, the shape of what
    it is a sum over: of those that nothing was multiplied with, or divided by, behind the sum."""
    found: list[Any] = [loss.grad_fn]
    for node in found:
        if node is not None and node.name() in _ADDING:
            found += [before for before, _ in node.next_functions if before not in found]
        elif getattr(node, "_saved_reduction", None) == _SUM:
            # A loss of a parameter itself is not one of samples.
            before = node.next_functions[0][0]
            shape = node._saved_self.shape
            if shape and before is not None and before.name() != "torch::autograd::AccumulateGrad":
                yield shape


def in_backward() -> bool:
    """True if this thread runs a backward pass at the moment."""
    return bool(torch._C._current_graph_task_id() != -1)


def after_backward(call: Callable[[], None]) -> None:
    """Call this when the backward pass under way is over, before whoever began it goes on, on the
    streams that go on; what it raises comes out of the pass. Only within one."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)
