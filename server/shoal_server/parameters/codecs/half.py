"""Gradients in 16 bits: the values of all blocks, one after the other, in fp16 or bf16."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal_proto.pieces import Buffer
from shoal_proto.v1.codec_pb2 import GradientCodec

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class HalfDecoder:
    def __init__(self, dtype: torch.dtype, sizes: Sequence[int]) -> None:
        self._dtype = dtype
        self.num_bytes = sum(sizes) * dtype.itemsize

    def decode(self, data: Buffer) -> Tensor:
        return torch.frombuffer(data, dtype=self._dtype).to(torch.float32)


def half_decoder(codec: GradientCodec, sizes: Sequence[int]) -> HalfDecoder:
    return HalfDecoder(HALF[codec.kind], sizes)
