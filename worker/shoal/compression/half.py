"""Gradients in 16 bits, without residuals: rounding errors are lost."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal.compression.base import Averaging, Compression, Compressor, PackedTensors
from shoal.compression.push_encoder import EncodedBlocks, PushBlock, PushEncoder, codec_of
from shoal.compression.wire import Wire


@dataclass(frozen=True, kw_only=True)
class FP16(Compression):
    """Half precision: 11 significant bits, at most 65,504. Half of fp32's bytes."""

    name: ClassVar[str] = "fp16"

    def compressor(self) -> Compressor:
        return HalfCompressor(torch.float16)

    def push_encoder(self) -> PushEncoder:
        return HalfEncoder(self.name, torch.float16)


@dataclass(frozen=True, kw_only=True)
class BF16(Compression):
    """bfloat16: 8 significant bits, the range of fp32. Half of fp32's bytes."""

    name: ClassVar[str] = "bf16"

    def compressor(self) -> Compressor:
        return HalfCompressor(torch.bfloat16)

    def push_encoder(self) -> PushEncoder:
        return HalfEncoder(self.name, torch.bfloat16)


class HalfCompressor(Compressor):
    """Averages by an all-reduce in 16 bits. A rank sends 2 S x 2 (n-1) / n bytes for S values on n
    ranks."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def _average(self, packed: PackedTensors, wire: Wire) -> Averaging:
        # The sum may exceed fp16's range even if the mean does not.
        values = (packed.flat / wire.world_size).to(self._dtype)
        yield wire.all_reduce(values)
        packed.flat.copy_(values)


class HalfEncoder(PushEncoder):
    keeps_residuals: ClassVar[bool] = False

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self._name = name
        self._dtype = dtype

    def encode(self, values: Tensor, blocks: Sequence[PushBlock]) -> EncodedBlocks:
        data = values.to(self._dtype)
        codec = codec_of(self._name, data)
        return EncodedBlocks(codec=codec, data=data, decoded=data.to(torch.float32))
