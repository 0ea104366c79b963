"""Compression of the gradients of rows to 16 or 8 bits for each value.

Rounding errors are lost, as the next step has other rows. Rows are encoded separately; with int8
each has its own scale.
"""

import torch
from torch import Tensor

from shoal_proto.v1.codec_pb2 import GradientCodec

ROW_CODECS = ("fp16", "bf16", "int8")
LARGEST = 127
SCALE_BYTES = 4
_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class RowCodec:
    """Encodes gradients of rows. R: rows. C: columns. B: bytes of an encoded row."""

    def __init__(self, kind: str) -> None:
        self.message = GradientCodec(kind=kind)
        self._kind = kind

    def reduces_size(self, dim: int, dtype: torch.dtype) -> bool:
        """True if rows of `dim` values become smaller."""
        num_bytes = SCALE_BYTES + dim if self._kind == "int8" else 2 * dim
        return num_bytes < dim * dtype.itemsize

    def encode(self, gradient_rc: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows as R x B bytes, and True for each row that the codec can represent. With
        int8, a row's scale (float32) comes before its codes."""
        if self._kind != "int8":
            data = gradient_rc.to(_HALF[self._kind])
            return data.view(torch.uint8), torch.isfinite(data).all(dim=1)
        values_rc = gradient_rc.to(torch.float32)
        scales = values_rc.abs().amax(dim=1, keepdim=True) / LARGEST
        divisors = torch.where(scales == 0, 1.0, scales)
        codes = (values_rc / divisors).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
        data = torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], dim=1)
        return data, torch.isfinite(scales).squeeze(1)


def row_codec(compression: str) -> RowCodec | None:
    """Return the codec of rows for this compression; None: rows stay uncompressed."""
    return RowCodec(compression) if compression in ROW_CODECS else None
