"""Top-k sparsification: only the values of largest magnitude are sent; the other values accumulate
as residuals.

Lin et al., Deep Gradient Compression, arXiv:1712.01887, without its momentum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import ClassVar

import torch
from torch import Tensor

from shoal.compression.base import Averaging, Compression, Compressor, PackedTensors
from shoal.compression.push_encoder import EncodedBlocks, PushBlock, PushEncoder, codec_of
from shoal.compression.residuals import Residuals
from shoal.compression.wire import Wire
from shoal_proto.errors import InvalidSpec
from shoal_proto.numbers_given import convert_fields

SAMPLE = 1 << 14
"""Minimum size of the sample that estimates the threshold."""


@dataclass(frozen=True, kw_only=True)
class TopK(Compression):
    """The largest values of a bucket or shard, a fraction `ratio`, with their indices. Raises
    InvalidSpec if `ratio` is not above 0 and at most 1."""

    name: ClassVar[str] = "top-k"
    ratio: float = 0.01

    def __post_init__(self) -> None:
        convert_fields(self, numbers=("ratio",))
        if not 0 < self.ratio <= 1:
            raise InvalidSpec(
                "ratio is out of range", seen=str(self.ratio), expected="above 0, at most 1"
            )

    def compressor(self) -> Compressor:
        return TopKCompressor(self.ratio)

    def push_encoder(self) -> PushEncoder:
        return TopKEncoder(self.ratio)


class TopKCompressor(Compressor):
    """Averages by an all-gather of values and indices. A rank sends 8 (n-1) ceil(ratio S) bytes for
    S values on n ranks."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._residuals = Residuals()

    def begin(self, step: int) -> None:
        self._residuals.begin(step)

    def _average(self, packed: PackedTensors, wire: Wire) -> Averaging:
        values = self._residuals.compensate(packed)
        positions = largest_indices(values.abs(), ceil(self._ratio * values.numel()))
        chosen = values[positions]
        values[positions] = 0
        self._residuals.keep(packed, values)
        sent = torch.cat([chosen.view(torch.int32), positions.to(torch.int32)])
        received = sent.new_empty(wire.world_size, sent.numel())
        yield wire.all_gather(received, sent)

        mean = torch.zeros_like(values)
        # Rows are added in the same order on all ranks. An index occurs once in each row.
        for row in received:
            numbers, at = row.chunk(2)
            mean[at.to(torch.int64)] += numbers.view(torch.float32) / wire.world_size
        packed.flat.copy_(mean)

    def _release(self, packed: PackedTensors) -> None:
        self._residuals.release(packed)


class TopKEncoder(PushEncoder):
    """Encodes the largest of a shard's values."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    def encode(self, values: Tensor, blocks: Sequence[PushBlock]) -> EncodedBlocks:
        positions = largest_indices(values.abs(), ceil(self._ratio * values.numel())).sort().values
        chosen = values[positions]
        data = torch.cat([chosen.view(torch.int32), positions.to(torch.int32)])
        decoded = torch.zeros_like(values)
        decoded[positions] = chosen
        return EncodedBlocks(codec=codec_of(TopK.name, data), data=data, decoded=decoded)


def largest_indices(magnitudes: Tensor, number: int) -> Tensor:
    """Return the indices of the `number` largest values, in any order; NaN is largest."""
    size = magnitudes.numel()
    if size <= SAMPLE or number * 4 > size:
        return magnitudes.topk(number, sorted=False).indices
    sample = magnitudes[:: size // SAMPLE]
    # Generous: with too few candidates, all values must be examined.
    rank = min(ceil(1.5 * number / size * sample.numel()) + 16, sample.numel())
    candidates = (~(magnitudes <= sample.topk(rank).values[-1])).nonzero().squeeze(1)
    if candidates.numel() < number:
        return magnitudes.topk(number, sorted=False).indices
    return candidates[magnitudes[candidates].topk(number, sorted=False).indices]
