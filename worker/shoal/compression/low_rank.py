"""Gradients of matrices as products of two thin matrices.

Vogels et al., PowerSGD, arXiv:1905.13727: one step of the power method from the previous step's
factors. For gradients G (M x N) and rank R, the left factor P = G Q (M x R) is averaged and made
orthonormal, the right factor Q = G^T P (N x R) is averaged, and P Q^T approximates the mean of all
G.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar
from zlib import crc32

import torch
from torch import Tensor

from shoal.compression.base import Averaging, Compression, Compressor, PackedTensors
from shoal.compression.push_encoder import EncodedBlocks, PushBlock, PushEncoder
from shoal.compression.residuals import Residuals, StepValues
from shoal.compression.wire import Wire
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import convert_fields
from shoal_proto.v1.codec_pb2 import GradientCodec, LowRankRows


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Compression):
    """Matrices as products of two factors, each with `rank` columns.

    A tensor of more dimensions is a matrix with its first dimension as rows. Vectors, and matrices
    that would not become smaller, are sent uncompressed. Raises InvalidSpec for a `rank` below 1.
    """

    name: ClassVar[str] = "powersgd"
    rank: int = 4

    def __post_init__(self) -> None:
        convert_fields(self, indices=("rank",))
        if self.rank < 1:
            raise InvalidSpec("rank is out of range", seen=str(self.rank), expected="1 or above")

    def compressor(self) -> Compressor:
        return PowerSgdCompressor(self.rank)

    def push_encoder(self) -> PushEncoder:
        return LowRankEncoder(self.rank)


@dataclass(frozen=True)
class Matrix:
    """A matrix to average. `gradient`: a parameter's gradient plus its residual, as a view of the
    packed values; `span`: its position there."""

    name: str
    gradient: Tensor
    span: slice


class PowerSgdCompressor(Compressor):
    """Averages by one or two all-reduces. A rank sends 2 (n-1) / n times 4 V bytes for V values: (M
    + N) R for each matrix, and all other values."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._residuals = Residuals()
        self._factors: StepValues[Tensor] = StepValues()

    def begin(self, step: int) -> None:
        self._residuals.begin(step)
        self._factors.begin(step)

    def regroup(self) -> None:
        # All ranks must have the same factors, and a member that joins has none.
        self._factors.clear()

    def is_compressed(self, shape: torch.Size) -> bool:
        if len(shape) < 2 or not shape.numel():
            return False
        rows, columns = shape[0], shape.numel() // shape[0]
        return self._rank * (rows + columns) < shape.numel()

    def _average(self, packed: PackedTensors, wire: Wire) -> Averaging:
        values = self._residuals.compensate(packed)
        matrices, plain = self._parted(packed, values)
        lefts = [matrix.gradient @ self._factor(matrix) for matrix in matrices]
        first = _joined([*lefts, *(values[span] for span in plain)], wire.world_size)
        yield wire.all_reduce(first)
        mean = torch.empty_like(values)
        sizes = [left.numel() for left in lefts] + [span.stop - span.start for span in plain]
        numbers = torch.split(first, sizes)
        for span, average in zip(plain, numbers[len(lefts) :], strict=True):
            mean[span] = average
            values[span] = 0
        if not bool(torch.isfinite(first).all()):
            # The sums are the same on all ranks, so no rank begins the second all-reduce.
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
        sizes = [matrix.gradient.shape[1] * self._rank for matrix in matrices]
        for matrix, left, right in zip(matrices, lefts, torch.split(rights, sizes), strict=True):
            factor = right.view(-1, self._rank)
            product = mean[matrix.span].view_as(matrix.gradient)
            torch.mm(left, factor.t(), out=product)
            self._factors.put(matrix.name, factor)

    def _release(self, packed: PackedTensors) -> None:
        self._residuals.release(packed)

    def _parted(self, packed: PackedTensors, values: Tensor) -> tuple[list[Matrix], list[slice]]:
        matrices, plain = [], []
        for (name, span), shape in zip(packed.slots(), packed.shapes, strict=True):
            if self.is_compressed(shape):
                matrices.append(Matrix(name, values[span].view(shape[0], -1), span))
            else:
                plain.append(span)
        return matrices, plain

    def _factor(self, matrix: Matrix) -> Tensor:
        """Return the previous right factor; at first random numbers, the same on all ranks."""
        factor = self._factors.get(matrix.name)
        if factor is None:
            columns = matrix.gradient.shape[1]
            factor = _random_factor(matrix.name, columns, self._rank).to(matrix.gradient.device)
        return factor


class LowRankEncoder(PushEncoder):
    """Encodes a parameter's rows that are whole in a block of the shard: as one matrix over all
    blocks, if that is smaller. All other values are sent as they are."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._factors: dict[tuple[str, int], Tensor] = {}
        """Factors by parameter and offset of its first block. A factor is kept even if its push was
        not applied."""

    def encode(self, values: Tensor, blocks: Sequence[PushBlock]) -> EncodedBlocks:
        decoded = values.clone()
        spans = self._spans(blocks)
        sent = [[values[span]] for span in spans.values()]
        codec = GradientCodec(kind=PowerSGD.name, rank=self._rank)
        codec.low_rank.extend(LowRankRows() for _ in blocks)
        rights = []
        for matrix, members in enumerate(low_rank_matrices(blocks, self._rank)):
            parts = [rows_of(blocks[i], matrix) for i in members]
            columns = blocks[members[0]].columns
            rows = [
                slice(spans[i].start + part.lead, spans[i].start + part.lead + part.rows * columns)
                for i, part in zip(members, parts, strict=True)
            ]
            gradient = torch.cat([values[span] for span in rows]).view(-1, columns)
            left, right = self._factorise(blocks[members[0]], gradient)
            lefts = torch.split(left, [part.rows for part in parts])
            for i, part, span, left_rows in zip(members, parts, rows, lefts, strict=True):
                codec.low_rank[i].CopyFrom(part)
                sent[i] = [values[spans[i].start : span.start], left_rows]
                sent[i].append(values[span.stop : spans[i].stop])
                _multiply(left_rows, right, decoded[span].view(part.rows, columns))
            codec.columns.append(columns)
            rights.append(right)
        pieces = [tensor for block in sent for tensor in block] + rights
        data = torch.cat([piece.reshape(-1) for piece in pieces])
        codec.num_bytes = data.nbytes
        return EncodedBlocks(codec=codec, data=data, decoded=decoded)

    def _spans(self, blocks: Sequence[PushBlock]) -> dict[int, slice]:
        spans, start = {}, 0
        for i, block in enumerate(blocks):
            spans[i] = slice(start, start + block.num_elements)
            start += block.num_elements
        return spans

    def _factorise(self, first: PushBlock, gradient: Tensor) -> tuple[Tensor, Tensor]:
        key = first.parameter, first.offset
        factor = self._factors.get(key)
        if factor is None:
            name = f"{first.parameter}+{first.offset}"
            factor = _random_factor(name, gradient.shape[1], self._rank)
        left = _orthonormal(gradient @ factor)
        right = gradient.t() @ left
        self._factors[key] = right
        return left, right


def low_rank_matrices(blocks: Sequence[PushBlock], rank: int) -> list[list[int]]:
    """Return the matrices to compress, each as the indices of its blocks.

    A matrix consists of the rows of one parameter that are whole in their block.
    """
    by_parameter: dict[str, list[int]] = {}
    for i, block in enumerate(blocks):
        if rows_of(block, 0).rows:
            by_parameter.setdefault(block.parameter, []).append(i)

    def shrinks(members: list[int]) -> bool:
        columns = blocks[members[0]].columns
        rows = sum(rows_of(blocks[i], 0).rows for i in members)
        # The left factor has `rank` orthonormal columns, so it needs at least as many rows.
        return rank <= rows and rank * (rows + columns) < rows * columns

    return [members for members in by_parameter.values() if shrinks(members)]


def rows_of(block: PushBlock, matrix: int) -> LowRankRows:
    """Return the parameter's rows that are whole in the block; none for a vector."""
    if len(block.shape) < 2 or not block.shape.numel():
        return LowRankRows()
    lead = -block.offset % block.columns
    rows = max(block.num_elements - lead, 0) // block.columns
    return LowRankRows(lead=lead, rows=rows, matrix=matrix) if rows else LowRankRows()


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Compute P Q^T bit for bit as a server does."""
    torch.mul(left[:, :1], right[:, 0], out=out)
    for i in range(1, left.shape[1]):
        out.add_(left[:, i : i + 1] * right[:, i])


def _random_factor(name: str, columns: int, rank: int) -> Tensor:
    """Return random numbers that depend only on the name."""
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    return torch.randn((columns, rank), generator=generator)


def _joined(tensors: list[Tensor], world_size: int) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]).div_(world_size)


def _orthonormal(left: Tensor) -> Tensor:
    """Return orthonormal columns that span the given ones."""
    # The squares of a vanishing gradient would underflow.
    scale = left.abs().amax()
    orthonormal: Tensor = torch.linalg.qr(left / torch.where(scale == 0, 1.0, scale)).Q
    return orthonormal
