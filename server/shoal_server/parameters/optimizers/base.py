"""What every optimizer of a shard can do, and how its state lies beside the values.

The kernels get one view a block, not the flat tensor: they round the last elements of a tensor in
another way than the rest, and each block ends where its parameter ends or at a multiple of the
vector width. So the result equals that of `torch.optim.X(..., fused=True)` to the last bit, and
that of torch's default on CPU (not fused) to within rounding; SGD on 16-bit types equals the
default to the last bit. It also lets a block sit out a step.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from shoal_server.parameters.optimizers.tensors import StatefulRule


class ShardOptimizer(StatefulRule, Protocol):
    """Holds the optimizer's state of one shard, beside the values that it updates.

    Its state has torch's names; flat like the values, but for one `step` a block.
    """

    def step(
        self,
        blocks: Sequence[int],
        gradients: Sequence[Tensor],
        lr: float,
        momentum: float | None = None,
    ) -> None:
        """Update the named blocks in place. `gradients` has one tensor a named block.

        `momentum` stands in for SGD's own; the others do not look at it.
        """
        ...


@runtime_checkable
class StepsWhole(Protocol):
    """An optimizer that can update all blocks at once, with fewer calls of its kernel and the same
    result to the last bit."""

    def step_whole(self, gradient: Tensor, lr: float, momentum: float | None = None) -> bool:
        """Update every block in place; `gradient` has them one after the other. False, and then
        nothing has changed, where they have to be updated one by one."""
        ...
