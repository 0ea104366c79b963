"""State tensors laid out like a shard's values."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from shoal_proto.errors import InternalError

VECTOR_ELEMENTS = 64
"""A multiple of the elements in any vector register, for any dtype."""


class StatefulRule(Protocol):
    """A part of an update rule that keeps tensors between updates."""

    def state(self) -> Mapping[str, Tensor]:
        """The tensors by name, not copied."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy tensors of `state`. Raises InternalError if `copy_state` does."""
        ...


def allocate_like(
    blocks: Sequence[Tensor], fill: float = 0.0, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Sequence[Tensor]]:
    """A tensor laid out like the blocks: flat, and as one view per block."""
    sizes = [block.numel() for block in blocks]
    flat = torch.full((sum(sizes),), fill, dtype=dtype or blocks[0].dtype)
    return flat, torch.split(flat, sizes)


class StepCounts:
    def __init__(self, num_blocks: int) -> None:
        self.all = torch.zeros(num_blocks, dtype=torch.float32)
        self._each = self.all.unbind()

    def advance(self, blocks: Sequence[int]) -> list[Tensor]:
        counts = [self._each[b] for b in blocks]
        torch._foreach_add_(counts, 1)
        return counts


def in_runs(blocks: Sequence[Tensor]) -> Sequence[Tensor]:
    """Join blocks, adjacent in memory, into as few tensors as give the same results. Kernels round
    the elements after a tensor's last whole vector differently, so a tensor ends after each block
    whose size is not a multiple of VECTOR_ELEMENTS."""
    runs: list[Tensor] = []
    start = num_elements = 0
    for i, block in enumerate(blocks):
        num_elements += block.numel()
        if block.numel() % VECTOR_ELEMENTS or i == len(blocks) - 1:
            runs.append(blocks[start].as_strided((num_elements,), (1,)))
            start, num_elements = i + 1, 0
    return runs


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to compute in: in 16 bits, squares underflow and small changes are lost."""
    return torch.float32 if dtype.itemsize < 4 else dtype


def copy_state(target: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    """Copy the tensors of `given` to `target`. Raises InternalError, without a change, if names,
    shapes or dtypes differ."""
    seen, expected = _outline(given), _outline(target)
    if seen != expected:
        raise InternalError("the state is not of this kind of shard", seen=seen, expected=expected)
    for name, tensor in target.items():
        tensor.copy_(given[name])


def _outline(tensors: Mapping[str, Tensor]) -> str:
    return ", ".join(
        f"{name} {tuple(tensors[name].shape)} {tensors[name].dtype}" for name in sorted(tensors)
    )
