"""Compressed gradients of a table's rows, 16 or 8 bits a value, each row by itself.

A row in int8 is sent as its scale (float32), followed by C codes. R: rows. C: columns.
"""

import torch
from torch import Tensor

from shoal_proto.pieces import Buffer
from shoal_proto.v1.codec_pb2 import GradientCodec
from shoal_server.parameters.codecs.codec import unknown_codec
from shoal_server.parameters.codecs.half import HALF
from shoal_server.parameters.codecs.quantised import SCALE_BYTES

ROW_CODECS = ("fp16", "bf16", "int8")


def row_bytes(codec: GradientCodec, dim: int) -> int:
    """Size of an encoded row. Raises InvalidSpec if the codec is not for rows."""
    if codec.kind not in ROW_CODECS:
        raise unknown_codec(codec.kind, ROW_CODECS)
    return SCALE_BYTES + dim if codec.kind == "int8" else 2 * dim


def decode_rows(codec: GradientCodec, data: Buffer, dim: int) -> Tensor:
    """R x C gradients in fp32, perhaps infinite or NaN. `data` has whole rows."""
    if codec.kind != "int8":
        return torch.frombuffer(data, dtype=HALF[codec.kind]).to(torch.float32).view(-1, dim)
    raw = torch.frombuffer(data, dtype=torch.uint8).view(-1, SCALE_BYTES + dim)
    scales = raw[:, :SCALE_BYTES].contiguous().view(torch.float32)
    values_rc = raw[:, SCALE_BYTES:].contiguous().view(torch.int8).to(torch.float32)
    return values_rc.mul_(scales)
