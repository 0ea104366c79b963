"""The interface of a shard's optimizer, and the layout of its state.

Kernels get a view per block, or per run of blocks (`in_runs`), not the flat tensor. They round a
tensor's last elements differently, but a block ends where its parameter ends, or at a multiple of
the vector width. So the result equals `torch.optim.X(..., fused=True)` to the last bit, and torch's
default on CPU (not fused) to within rounding. SGD on 16-bit types equals the default to the last
bit.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from shoal_server.parameters.optimizers.tensors import StatefulRule


class ShardOptimizer(StatefulRule, Protocol):
    """An optimizer with its state for one shard.

    The state has torch's names; SGD with momentum also has `step`. Its tensors are flat like the
    values, except `step`, with one element per block.
    """

    def step(
        self,
        blocks: Sequence[int],
        gradients: Sequence[Tensor],
        lr: float,
        momentum: float | None = None,
    ) -> None:
        """Update the named blocks in place. `gradients`: a tensor per named block.

        `momentum` replaces the setting of SGD and of the outer step, unless the setting is 0; Adam
        and Adagrad ignore it.
        """
        ...


@runtime_checkable
class WholeStepOptimizer(Protocol):
    """An optimizer that can update all blocks at once, with the same result to the last bit."""

    def step_whole(self, gradient: Tensor, lr: float, momentum: float | None = None) -> bool:
        """Update every block in place. `gradient`: the gradients of all blocks, one after the
        other. False, without a change, if the blocks have to be updated one by one."""
        ...
