"""Tensors in the form that MPI reads and writes: flat memory of bytes, or of numbers to reduce."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from shoal.backends.process_group.reductions import check_has_mean
from shoal_proto.errors import InvalidSpec

_Op: Any = dist.ReduceOp.RedOpType  # the stub has no members
_OPS = {
    _Op.SUM: MPI.SUM,
    _Op.AVG: MPI.SUM,
    _Op.PRODUCT: MPI.PROD,
    _Op.MIN: MPI.MIN,
    _Op.MAX: MPI.MAX,
    _Op.BAND: MPI.BAND,
    _Op.BOR: MPI.BOR,
    _Op.BXOR: MPI.BXOR,
}
_TYPES = {
    torch.float64: MPI.DOUBLE,
    torch.float32: MPI.FLOAT,
    torch.int64: MPI.INT64_T,
    torch.int32: MPI.INT32_T,
    torch.int16: MPI.INT16_T,
    torch.int8: MPI.INT8_T,
    torch.uint8: MPI.UINT8_T,
    torch.bool: MPI.UINT8_T,
}
# MPI has no type for these: they are reduced in single precision.
_HALVES = (torch.float16, torch.bfloat16)


class StagedTensor:
    """A tensor's content in memory that MPI can reduce: the tensor's own memory, or a copy. After
    the reduction, `deliver` divides a sum that is to be a mean, and copies back from a copy."""

    def __init__(self, tensor: Tensor, op: Any, size: int) -> None:
        if op not in _OPS or (tensor.dtype not in _TYPES and tensor.dtype not in _HALVES):
            raise InvalidSpec(
                "this reduction is not supported",
                seen=f"{op} of {tensor.dtype}",
                expected="sum, avg, product, min, max, band, bor or bxor, of bool, uint8, int8 to"
                " int64, float16, bfloat16, float32 or float64",
            )
        if op == _Op.AVG:
            check_has_mean(tensor)
        self._tensor, self._divisor = tensor, size if op == _Op.AVG else 1
        # torch's sum of bools is their "or"; MPI's sum of their bytes may be 2.
        self.op = MPI.BOR if tensor.dtype == torch.bool and op == _Op.SUM else _OPS[op]
        wide = tensor.float() if tensor.dtype in _HALVES else tensor
        self._flat = wide.contiguous()
        memory = _checked(self._flat).view(-1)
        self.numbers = [memory.view(torch.uint8).numpy(), memory.numel(), _TYPES[wide.dtype]]

    def deliver(self) -> None:
        if self._divisor > 1:
            self._flat.div_(self._divisor)
        if self._flat is not self._tensor:
            self._tensor.copy_(self._flat)


def deliver(staged: Sequence[StagedTensor]) -> None:
    """Write the results to the caller's tensors."""
    for each in staged:
        each.deliver()


def _checked(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cpu":
        raise InvalidSpec(
            "the backend mpi moves tensors on the CPU only", seen=f"{tensor.device}", expected="cpu"
        )
    return tensor


def octets(tensor: Tensor) -> list[Any]:
    """Return mpi4py's description of the memory of a contiguous tensor, as bytes."""
    return [_checked(tensor).view(-1).view(torch.uint8).numpy(), MPI.BYTE]


def vector(whole: Tensor, parts: Sequence[Tensor]) -> list[Any]:
    """Return mpi4py's description of adjacent parts of `whole`."""
    memory, kind = octets(whole)
    return [memory, [part.numel() * part.element_size() for part in parts], kind]


def joined(parts: Sequence[Tensor], *, fill: bool) -> Tensor:
    """Return memory for all parts, one after the other; with their contents if `fill`."""
    if fill:
        return torch.cat([part.reshape(-1) for part in parts])
    return parts[0].new_empty(sum(part.numel() for part in parts))


def split(whole: Tensor, parts: Sequence[Tensor]) -> None:
    """Copy memory from `joined` back to the parts."""
    pieces = torch.split(whole, [part.numel() for part in parts])
    copy([p.view(part.shape) for p, part in zip(pieces, parts, strict=True)], parts)


def split_all(wholes: Sequence[Tensor], lists: Sequence[Sequence[Tensor]]) -> None:
    for whole, parts in zip(wholes, lists, strict=True):
        split(whole, parts)


def copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy results to their targets, unless MPI wrote to the target itself."""
    for source, target in zip(sources, targets, strict=True):
        if source is not target:
            target.copy_(source)
