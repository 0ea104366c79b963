"""Quantised gradients: a byte or a bit per value, and a scale per group of values.

K: groups. B: values of a group.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal_proto.errors import InvalidSpec
from shoal_proto.pieces import Buffer
from shoal_proto.v1.codec_pb2 import GradientCodec

SCALE_BYTES = 4
MAX_BLOCK = 1 << 24
BITS = 8


class _Scaled:
    """Base of decoders. The data have the scales of all groups (float32), then the codes of all
    values; the last group is filled up to B codes."""

    def __init__(self, codec: GradientCodec, sizes: Sequence[int], bits: int) -> None:
        """Raises InvalidSpec."""
        if not 0 < codec.block <= MAX_BLOCK or codec.block % BITS:
            raise InvalidSpec(
                f"the block of codec {codec.kind} is out of range",
                seen=f"{codec.block} values",
                expected=f"a multiple of {BITS}, at most {MAX_BLOCK}",
            )
        self._num_values = sum(sizes)
        self._block = codec.block
        self._num_groups = -(-self._num_values // codec.block)
        self.num_bytes = self._num_groups * (SCALE_BYTES + codec.block * bits // BITS)

    def _scales_k1(self, data: Buffer) -> Tensor:
        return torch.frombuffer(data, dtype=torch.float32, count=self._num_groups).view(-1, 1)

    def _codes(self, data: Buffer, dtype: torch.dtype) -> Tensor:
        return torch.frombuffer(data, dtype=dtype, offset=self._num_groups * SCALE_BYTES)

    def _scaled(self, values: Tensor, data: Buffer) -> Tensor:
        values_kb = values.view(-1, self._block)
        return values_kb.mul_(self._scales_k1(data)).view(-1)[: self._num_values]


class Int8Decoder(_Scaled):
    def __init__(self, codec: GradientCodec, sizes: Sequence[int]) -> None:
        super().__init__(codec, sizes, 8)

    def decode(self, data: Buffer) -> Tensor:
        if not self._num_groups:
            return torch.zeros(0)
        return self._scaled(self._codes(data, torch.int8).to(torch.float32), data)


class OneBitDecoder(_Scaled):
    def __init__(self, codec: GradientCodec, sizes: Sequence[int]) -> None:
        super().__init__(codec, sizes, 1)

    def decode(self, data: Buffer) -> Tensor:
        if not self._num_groups:
            return torch.zeros(0)
        codes = self._codes(data, torch.uint8).to(torch.int32)
        return self._scaled(_SIGNS.index_select(0, codes).view(-1), data)


def _signs() -> Tensor:
    """The eight signs of each byte, highest bit first."""
    bits = (torch.arange(256).unsqueeze(1) >> torch.arange(BITS - 1, -1, -1)) & 1
    return bits.to(torch.float32) * 2 - 1


_SIGNS = _signs()
