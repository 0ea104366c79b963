"""Compression of the gradients of rows to 16 or 8 bits for each value.

Rounding errors are not added to later gradients, as the next step has other rows. Every row is
encoded separately; with int8 it has its own scale.
"""

import torch
from torch import Tensor

from shoal_proto.v1.codec_pb2 import GradientCodec

ROW_CODECS = ("fp16", "bf16", "int8")
LARGEST = 127
SCALE_BYTES = 4
_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class RowCodec:
    """Encodes gradients of rows of one dtype and length. R: rows. C: columns. B: bytes of an
    encoded row."""

    def __init__(self, kind: str) -> None:
        self.message = GradientCodec(kind=kind)
        self._kind = kind

    def reduces_size(self, dim: int, dtype: torch.dtype) -> bool:
        """True if this codec makes rows of `dim` values smaller."""
        num_bytes = SCALE_BYTES + dim if self._kind == "int8" else 2 * dim
        return num_bytes < dim * dtype.itemsize

    def encode(self, gradient_rc: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bytes of the rows, as R x B, and for each row True if the codec can represent
        its values."""
        if self._kind != "int8":
            data = gradient_rc.to(_HALF[self._kind])
            return data.view(torch.uint8), torch.isfinite(data).all(dim=1)
        values_rc = gradient_rc.to(torch.float32)
        scales = values_rc.abs().amax(dim=1, keepdim=True) / LARGEST
        divisors = torch.where(scales == 0, 1.0, scales)
        # In a row of tiny numbers the scale is rounded, so a code may exceed the range.
        codes = (values_rc / divisors).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
        data = torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)], dim=1)
        return data, torch.isfinite(scales).squeeze(1)


def row_codec(compression: str) -> RowCodec | None:
    """Return the codec of rows for this compression of gradients; None: rows stay uncompressed."""
    return RowCodec(compression) if compression in ROW_CODECS else None
