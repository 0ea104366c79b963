"""What every optimizer of a shard can do, and how its state lies beside the values.

The kernels get one view a block, not the flat tensor: they round the last elements of a tensor in
another way than the rest, and each block ends where its parameter ends or at a multiple of the
vector width. So the result equals that of `torch.optim.X(..., fused=True)` to the last bit, and
that of torch's default on CPU (not fused) to within rounding; SGD on 16-bit types equals the
default to the last bit. It also lets a block sit out a step.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal_proto.errors import InternalError


class ShardOptimizer(Protocol):
    """Holds the optimizer's state of one shard, beside the values that it updates."""

    def step(self, blocks: Sequence[int], gradients: Sequence[Tensor], lr: float) -> None:
        """Update the named blocks in place. `gradients` has one tensor a named block."""
        ...

    def state(self) -> Mapping[str, Tensor]:
        """The state by torch's names, not copied; flat like the values, but for one `step` a
        block."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave, by copying it. Raises InternalError if it is not for this
        kind of optimizer on blocks of these sizes."""
        ...


def beside(blocks: Sequence[Tensor], fill: float = 0.0) -> tuple[Tensor, Sequence[Tensor]]:
    """A tensor laid out like the blocks: the flat one, and one view a block."""
    sizes = [block.numel() for block in blocks]
    flat = torch.full((sum(sizes),), fill, dtype=blocks[0].dtype)
    return flat, torch.split(flat, sizes)


def copy_state(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Copy tensor by tensor. Raises InternalError, before any is copied, where they differ in
    names, shapes or dtypes."""
    seen, expected = _outline(given), _outline(own)
    if seen != expected:
        raise InternalError(
            "the state is not that of this shard's optimizer", seen=seen, expected=expected
        )
    for name, tensor in own.items():
        tensor.copy_(given[name])


def _outline(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(
        f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}" for name in sorted(tensors)
    )
