"""Tensors that lie beside a shard's values, and how a copy of them is taken over."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal_proto.errors import InternalError

VECTOR_ELEMENTS = 64
"""A multiple of what any vector register has of any dtype."""


class StatefulRule(Protocol):
    """Keeps tensors from one update to the next."""

    def state(self) -> Mapping[str, Tensor]:
        """The tensors by name, not copied."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave, by copying it. Raises InternalError if it is of another
        kind, or laid out in another way."""
        ...


def beside(
    blocks: Sequence[Tensor], fill: float = 0.0, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Sequence[Tensor]]:
    """A tensor laid out like the blocks: the flat one, and one view a block."""
    sizes = [block.numel() for block in blocks]
    flat = torch.full((sum(sizes),), fill, dtype=dtype or blocks[0].dtype)
    return flat, torch.split(flat, sizes)


class StepCounts:
    """How many steps each block has had, as torch.optim counts them: a float32 tensor of one
    element a parameter, here views of one tensor."""

    def __init__(self, num_blocks: int) -> None:
        self.all = torch.zeros(num_blocks, dtype=torch.float32)
        self._each = self.all.unbind()

    def advance(self, blocks: Sequence[int]) -> list[Tensor]:
        """Count a step of these blocks; the views of their counts."""
        counts = [self._each[b] for b in blocks]
        torch._foreach_add_(counts, 1)
        return counts


def in_runs(blocks: Sequence[Tensor]) -> Sequence[Tensor]:
    """The same memory in as few tensors as a vector kernel rounds in the same way: it treats only
    what is beyond the last whole vector in another way. The blocks lie one after the other."""
    runs: list[Tensor] = []
    start = num_elements = 0
    for i, block in enumerate(blocks):
        num_elements += block.numel()
        if block.numel() % VECTOR_ELEMENTS or i == len(blocks) - 1:
            runs.append(blocks[start].as_strided((num_elements,), (1,)))
            start, num_elements = i + 1, 0
    return runs


def wide(dtype: torch.dtype) -> torch.dtype:
    """What to compute with: in 16 bits, squares vanish and small changes are lost."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def copy_state(own: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Copy tensor by tensor. Raises InternalError, before any is copied, where they differ in
    names, shapes or dtypes."""
    seen, expected = _outline(given), _outline(own)
    if seen != expected:
        raise InternalError("the state is not of this kind of shard", seen=seen, expected=expected)
    for name, tensor in own.items():
        tensor.copy_(given[name])


def _outline(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(
        f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}" for name in sorted(tensors)
    )
