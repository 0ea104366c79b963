"""Gradients of matrices as products of two thin ones.

Vogels et al., PowerSGD, arXiv:1905.13727: one step of the power method from the factors of the
step before. For gradients G (M x N) and rank R: the left factor P = G Q (M x R) is averaged and
made orthonormal, the right one Q = G^T P (N x R) is averaged, and the mean of all G is P Q^T.
"""

from dataclasses import dataclass
from typing import ClassVar
from zlib import crc32

import torch
from torch import Tensor

from shoal.compression.base import Averaging, Compression, Compressor, Packed
from shoal.compression.residuals import Carry, Residuals
from shoal.compression.wire import Wire
from shoal_proto.errors import InvalidSpec


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Compression):
    """Matrices as products of rank `rank`.

    Of a tensor of more dimensions the first makes the rows. Vectors, and matrices of which the two
    factors are not smaller, travel as they are.
    """

    name: ClassVar[str] = "powersgd"
    rank: int = 4

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise InvalidSpec("rank is out of range", seen=str(self.rank), expected="1 or above")

    def compressor(self) -> Compressor:
        return PowerSgdCompressor(self.rank)


@dataclass(frozen=True)
class Matrix:
    """One parameter's gradient, a view of the bucket's."""

    name: str
    gradient: Tensor
    place: slice


class PowerSgdCompressor(Compressor):
    """Two all-reduces: 2 (n-1) / n times 4 (sum of (M + N) R, plus what travels as it is)."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._residuals = Residuals()
        self._factors: Carry[Tensor] = Carry()

    def begin(self, step: int) -> None:
        self._residuals.begin(step)
        self._factors.begin(step)

    def regroup(self) -> None:
        # A newcomer has none, and all must have the same.
        self._factors.clear()

    def is_compressed(self, shape: torch.Size) -> bool:
        if len(shape) < 2 or not shape.numel():
            return False
        rows, columns = shape[0], shape.numel() // shape[0]
        return self._rank * (rows + columns) < shape.numel()

    def _average(self, packed: Packed, wire: Wire) -> Averaging:
        values = self._residuals.added_to(packed)
        matrices, plain = self._parted(packed, values)
        lefts = [matrix.gradient @ self._factor(matrix) for matrix in matrices]
        first = _joined([*lefts, *(values[place] for place in plain)], wire.world_size)
        yield wire.all_reduce(first)
        mean = torch.empty_like(values)
        sizes = [left.numel() for left in lefts] + [place.stop - place.start for place in plain]
        numbers = torch.split(first, sizes)
        for place, average in zip(plain, numbers[len(lefts) :], strict=True):
            mean[place] = average
            values[place] = 0
        if not bool(torch.isfinite(first).all()):
            # The sums are the same everywhere: no rank goes on to the second all-reduce.
            packed.flat.fill_(float("nan"))
            return

        lefts = [_orthonormal(n.view_as(p)) for p, n in zip(lefts, numbers, strict=False)]
        rights = [m.gradient.t() @ p for m, p in zip(matrices, lefts, strict=True)]
        for matrix, left, right in zip(matrices, lefts, rights, strict=True):
            matrix.gradient.addmm_(left, right.t(), alpha=-1)
        self._residuals.keep(packed, values)
        if matrices:
            second = _joined(rights, wire.world_size)
            yield wire.all_reduce(second)
            self._multiply(mean, matrices, lefts, second)
        packed.flat.copy_(mean)

    def _multiply(
        self, mean: Tensor, matrices: list[Matrix], lefts: list[Tensor], rights: Tensor
    ) -> None:
        """Write the products into `mean`, and keep the right factors for the next step."""
        sizes = [matrix.gradient.shape[1] * self._rank for matrix in matrices]
        for matrix, left, right in zip(matrices, lefts, torch.split(rights, sizes), strict=True):
            factor = right.view(-1, self._rank)
            product = mean[matrix.place].view_as(matrix.gradient)
            torch.mm(left, factor.t(), out=product)
            self._factors.put(matrix.name, factor)

    def _release(self, packed: Packed) -> None:
        self._residuals.release(packed)

    def _parted(self, packed: Packed, values: Tensor) -> tuple[list[Matrix], list[slice]]:
        """What is compressed, and the places of what is not."""
        matrices, plain = [], []
        for (name, place), shape in zip(packed.slots(), packed.shapes, strict=True):
            if self.is_compressed(shape):
                matrices.append(Matrix(name, values[place].view(shape[0], -1), place))
            else:
                plain.append(place)
        return matrices, plain

    def _factor(self, matrix: Matrix) -> Tensor:
        """The right factor of the step before; at first random numbers, everywhere the same."""
        factor = self._factors.get(matrix.name)
        if factor is None:
            generator = torch.Generator().manual_seed(crc32(matrix.name.encode()))
            shape = (matrix.gradient.shape[1], self._rank)
            factor = torch.randn(shape, generator=generator).to(matrix.gradient.device)
        return factor


def _joined(tensors: list[Tensor], world_size: int) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).div_(world_size)


def _orthonormal(left: Tensor) -> Tensor:
    """Orthonormal columns that span those given; any columns in the place of zeros."""
    # Scaled, as a vanishing gradient's squares would be zero.
    scale = left.abs().amax()
    orthonormal: Tensor = torch.linalg.qr(left / torch.where(scale == 0, 1.0, scale)).Q
    return orthonormal
