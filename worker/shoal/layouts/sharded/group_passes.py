"""Times at which a group of several modules gathers and reduces in backward.

torch's fully_shard assumes a chain of modules. The modules of a group may also be parallel
branches, and each may run several times in a step. So the group gathers when backward enters any of
its modules, and reduces when backward has passed through all calls.
"""

from typing import Any

import torch
from torch import Tensor, nn

from shoal.torch_private.compiling import eager
from shoal.torch_private.fsdp import (
    disable_backward_marks,
    gathering_hook,
    groups_of,
    is_in_backward,
    state_of,
)
from shoal.torch_private.tensors import pytree


class GroupPasses:
    """Counter of a group's forward calls through which backward has not passed yet."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._state: Any = state_of(modules[0])
        self._group: Any = groups_of(self._state)[0]
        disable_backward_marks(self._group)
        self.begin()
        for module in modules:
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave)

    def begin(self) -> None:
        """Begin a step: discard calls without a backward."""
        self._num_open = 0
        self._blind = False  # True after a call that was not counted

    def ended(self) -> None:
        """Note that backward has passed through one call of a module of the group."""
        self._num_open -= 1
        # After a call that was not counted, gradients may follow at any time: torch's callback at
        # the end of backward reduces them.
        if not self._num_open and not self._blind:
            self._group.post_backward()

    @property
    def _recomputes(self) -> bool:
        return is_in_backward(self._state)

    @eager
    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        leaves, tree = pytree.tree_flatten((args, kwargs))
        indices = [i for i, leaf in enumerate(leaves) if _needs_gradient(leaf)]
        if not indices or self._recomputes:
            self._blind = True
            return None
        self._num_open += 1
        begin: Any = _Begin
        passed = begin.apply(self, *(leaves[i] for i in indices))
        for index, tensor in zip(indices, passed, strict=True):
            leaves[index] = tensor
        return pytree.tree_unflatten(leaves, tree)

    @eager
    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if torch.is_grad_enabled() and not self._recomputes:
            for leaf in pytree.tree_leaves(output):
                if _needs_gradient(leaf):
                    leaf.register_hook(gathering_hook(self._state))


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passes: GroupPasses, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.passes = passes
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.passes.ended()
        return None, *gradients


def _needs_gradient(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad
