"""Low-rank gradients: a matrix is sent as two thin factors, and decoded as their product.

M: rows of the matrix. N: its columns. R: rank, the columns of either factor.

Sent in float32, block after block: the values before the block's rows of the matrix, these rows of
P (M x R), and the values after them; or all values of a block without such rows. Then Q (N x R) of
each matrix.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal_proto.errors import InvalidSpec, ShapeMismatch
from shoal_proto.pieces import Buffer
from shoal_proto.v1.codec_pb2 import GradientCodec, LowRankRows

VALUE_BYTES = 4


class LowRankDecoder:
    def __init__(self, codec: GradientCodec, sizes: Sequence[int]) -> None:
        """Raises InvalidSpec or ShapeMismatch."""
        if codec.rank < 1:
            raise InvalidSpec(
                "the rank of codec powersgd is out of range", seen="0", expected="1 or above"
            )
        if len(codec.low_rank) != len(sizes):
            raise ShapeMismatch(
                "a compressed gradient has another number of blocks",
                seen=f"rows of {len(codec.low_rank)} blocks",
                expected=f"{len(sizes)}, with no rows for a block that is not compressed",
            )
        for part, size in zip(codec.low_rank, sizes, strict=True):
            _check(part, codec.columns, size)
        self._rank = codec.rank
        self._columns = codec.columns
        self._parts = codec.low_rank
        self._sizes = sizes
        in_blocks = sum(
            size + part.rows * (self._rank - codec.columns[part.matrix] if part.rows else 0)
            for part, size in zip(codec.low_rank, sizes, strict=True)
        )
        self._num_factors = self._rank * sum(codec.columns)
        self.num_bytes = VALUE_BYTES * (in_blocks + self._num_factors)

    def decode(self, data: Buffer) -> Tensor:
        values = torch.empty(sum(self._sizes))
        if not self.num_bytes:
            return values
        sent = torch.frombuffer(data, dtype=torch.float32)
        taken = len(sent) - self._num_factors
        factors = [
            factor.view(-1, self._rank)
            for factor in torch.split(sent[taken:], [self._rank * n for n in self._columns])
        ]
        at = taken = 0
        for part, size in zip(self._parts, self._sizes, strict=True):
            taken += self._fill(values[at : at + size], part, sent[taken:], factors)
            at += size
        return values

    def _fill(
        self, block: Tensor, part: LowRankRows, sent: Tensor, factors: Sequence[Tensor]
    ) -> int:
        """Write a block; return the number of values that it took from `sent`."""
        if not part.rows:
            block.copy_(sent[: len(block)])
            return len(block)
        right = factors[part.matrix]
        lead, tail = part.lead, part.lead + part.rows * len(right)
        lengths = [lead, part.rows * self._rank, len(block) - tail]
        before, left, after = torch.split(sent[: sum(lengths)], lengths)
        block[:lead] = before
        block[tail:] = after
        multiply(left.view(part.rows, self._rank), right, block[lead:tail])
        return sum(lengths)


def multiply(left_mr: Tensor, right_nr: Tensor, out: Tensor) -> None:
    """Write the M x N values of P Q^T to `out`.

    The R terms are added one by one: torch's matrix product has an order and rounding that depend
    on processor and threads.
    """
    out_mn = out.view(left_mr.shape[0], right_nr.shape[0])
    right_rn = right_nr.t().contiguous()
    torch.mul(left_mr[:, :1], right_rn[0], out=out_mn)
    for i in range(1, left_mr.shape[1]):
        out_mn.add_(left_mr[:, i : i + 1] * right_rn[i])


def _check(part: LowRankRows, columns: Sequence[int], size: int) -> None:
    if not part.rows:
        return
    if part.matrix >= len(columns) or not columns[part.matrix]:
        raise ShapeMismatch(
            "rows of a compressed gradient are of an unknown matrix",
            seen=f"matrix {part.matrix}",
            expected=f"one of {len(columns)}, with a column or more",
        )
    if part.lead + part.rows * columns[part.matrix] > size:
        raise ShapeMismatch(
            "rows of a compressed gradient do not lie in their block",
            seen=f"{part.rows} x {columns[part.matrix]} values after {part.lead}",
            expected=f"at most {size} values in all",
        )
