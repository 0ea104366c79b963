"""Codes for values in blocks: a scale for each block, and a byte or a bit for each value.

P: parts, one for each rank or a single one. N: values of a part. B: bytes of a coded part: its
scales in fp32, then its bytes or bits. The first of eight bits is the highest of its byte.
"""

from typing import Protocol

import torch
from torch import Tensor

LARGEST = 127
SCALE_BYTES = 4
# Factor that packs eight bytes of 0 or 1 into the product's highest byte. Term i shifts the bit of
# byte i there, and no two terms share a bit.
_GATHER_BITS = sum(1 << (63 - 9 * byte) for byte in range(8)) - (1 << 64)


class Code(Protocol):
    """Encodes blocks of values approximately as bytes."""

    def num_bytes(self, num_values: int, block: int) -> int:
        """Return B for `num_values` values. `num_values`: a multiple of `block`; `block`: of 8."""

    def encode(self, values: Tensor, block: int) -> Tensor:
        """Encode P x N fp32 values as P x B bytes. A NaN or an infinity makes its whole block NaN
        or infinite."""

    def decode(self, codes: Tensor, block: int) -> Tensor:
        """Decode into P x N values, in fp32."""


class Int8Code:
    """A byte for each value: the nearest multiple of 1/127 of the block's largest magnitude."""

    def num_bytes(self, num_values: int, block: int) -> int:
        return num_values // block * SCALE_BYTES + num_values

    def encode(self, values: Tensor, block: int) -> Tensor:
        blocks = values.view(-1, block)
        scales = blocks.abs().amax(1, keepdim=True) / LARGEST
        # A block of zeros has the scale zero. A tiny scale is rounded, so a code may exceed the
        # range.
        divisors = torch.where(scales == 0, 1.0, scales)
        codes = (blocks / divisors).round_().clamp_(-LARGEST, LARGEST)
        # The integer for NaN depends on the processor. The scale stays NaN.
        codes = codes.nan_to_num_(0.0).to(torch.int8)
        return _joined(scales, codes.view(torch.uint8), values.shape[0])

    def decode(self, codes: Tensor, block: int) -> Tensor:
        scales, steps = _parted(codes, codes.shape[1] // (SCALE_BYTES + block))
        values = steps.view(torch.int8).view(-1, block).to(torch.float32)
        return values.mul_(scales).view(codes.shape[0], -1)


class OneBitCode:
    """A bit for each value: its sign, decoded as plus or minus the block's mean absolute value."""

    def num_bytes(self, num_values: int, block: int) -> int:
        return num_values // block * SCALE_BYTES + num_values // 8

    def encode(self, values: Tensor, block: int) -> Tensor:
        scales = values.view(-1, block).abs().mean(1, keepdim=True)
        eights = (values >= 0).view(-1).view(torch.int64)
        codes = ((eights * _GATHER_BITS) >> 56).to(torch.uint8)
        return _joined(scales, codes, values.shape[0])

    def decode(self, codes: Tensor, block: int) -> Tensor:
        scales, bits = _parted(codes, codes.shape[1] // (SCALE_BYTES + block // 8))
        signs = _signs(codes.device).index_select(0, bits.to(torch.int32))
        return signs.view(-1, block).mul_(scales).view(codes.shape[0], -1)


def _joined(scales: Tensor, codes: Tensor, num_parts: int) -> Tensor:
    scale_bytes = scales.contiguous().view(torch.uint8).view(num_parts, -1)
    return torch.cat([scale_bytes, codes.view(num_parts, -1)], dim=1)


def _parted(codes: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
    cut = num_blocks * SCALE_BYTES
    scales = codes[:, :cut].reshape(-1).view(torch.float32).view(-1, 1)
    return scales, codes[:, cut:].reshape(-1)


_tables: dict[torch.device, Tensor] = {}


def _signs(device: torch.device) -> Tensor:
    if device not in _tables:
        codes = torch.arange(256, device=device).unsqueeze(1)
        bits = (codes >> torch.arange(7, -1, -1, device=device)) & 1
        _tables[device] = bits.to(torch.float32) * 2 - 1
    return _tables[device]
