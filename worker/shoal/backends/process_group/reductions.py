"""torch's reductions over ranks, computed in the order of ranks (large sums: see `add_up`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal_proto.errors import InvalidSpec

MANY_ELEMENTS = 1024
"""Number of elements from which `add_up` lets torch choose the order: that is faster."""
_Op: Any = dist.ReduceOp.RedOpType
_FOLDS: Mapping[Any, Callable[..., Tensor]] = {
    _Op.SUM: torch.add,
    _Op.AVG: torch.add,
    _Op.PRODUCT: torch.mul,
    _Op.MIN: torch.minimum,
    _Op.MAX: torch.maximum,
    _Op.BAND: torch.bitwise_and,
    _Op.BOR: torch.bitwise_or,
    _Op.BXOR: torch.bitwise_xor,
}


def check_has_mean(tensor: Tensor) -> None:
    """Raise InvalidSpec for a tensor of whole numbers."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise InvalidSpec(
            "this reduction is not supported",
            seen=f"avg of {tensor.dtype}",
            expected="sum, or avg of floating point or complex numbers",
        )


def reduced(parts: Sequence[Tensor], op: Any) -> Tensor:
    """Reduce the ranks' tensors, in the order of ranks: every rank computes the same bits.

    Raises InvalidSpec for an unsupported reduction, and ValueError if shapes or dtypes differ.
    """
    fold = _FOLDS.get(op)
    if fold is None:
        raise InvalidSpec(
            "this reduction is not supported",
            seen=str(op),
            expected="sum, avg, product, min, max, band, bor or bxor",
        )
    first = parts[0]
    for part in parts:
        if part.shape != first.shape or part.dtype != first.dtype:
            raise ValueError(
                f"the ranks' tensors differ: {tuple(first.shape)} {first.dtype} "
                f"and {tuple(part.shape)} {part.dtype}"
            )
    if op == _Op.AVG:
        check_has_mean(first)
    total = first.clone()
    for part in parts[1:]:
        fold(total, part, out=total)
    return total.div_(len(parts)) if op == _Op.AVG else total


def add_up(parts: Tensor, total: Tensor) -> None:
    """Fill `total` with the sum of the parts, over their first dimension.

    torch adds eight or more parts in several partial sums: two may overflow to infinities of
    different signs, and make NaN. A small total is added part by part instead.
    """
    if total.numel() >= MANY_ELEMENTS:
        torch.sum(parts, dim=0, out=total)
        return
    is_half = parts.dtype in (torch.float16, torch.bfloat16)
    # Rounded once, as by torch.
    wide = parts[0].to(torch.float32 if is_half else parts.dtype, copy=True)
    for part in parts[1:]:
        wide.add_(part)
    total.copy_(wide)
