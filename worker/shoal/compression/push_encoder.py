"""Encoding of one member's own gradients for a push to parameter servers.

Members do not average these gradients: an encoder encodes the gradients of a shard, and the server
that holds the shard decodes them (`shoal_proto/v1/codec.proto`). Residuals are kept by the sender
and not by the encoder, as only the sender knows which pushes were applied.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shoal_proto.v1.codec_pb2 import GradientCodec


@dataclass(frozen=True, kw_only=True)
class PushBlock:
    """A contiguous range of one parameter's elements, within a shard."""

    parameter: str
    offset: int
    """Offset of the block's first element in the flattened parameter."""
    num_elements: int
    shape: torch.Size
    """Shape of the parameter."""

    @property
    def columns(self) -> int:
        """Columns of the parameter as a matrix, with its first dimension as rows."""
        return self.shape.numel() // self.shape[0]


@dataclass(frozen=True, kw_only=True)
class EncodedBlocks:
    codec: GradientCodec
    data: Tensor
    """The encoded values to send, a flat tensor."""
    decoded: Tensor
    """The values as the server decodes them, in fp32; NaN or infinite if out of the codec's
    range."""


class PushEncoder(ABC):
    """Encoder of one member; it lives as long as the member trains."""

    keeps_residuals: ClassVar[bool] = True
    """True if the sender is to add what the codec leaves out to the next gradients."""

    @abstractmethod
    def encode(self, values: Tensor, blocks: Sequence[PushBlock]) -> EncodedBlocks:
        """Encode the values of the blocks, concatenated; they are fp32, on the CPU and finite."""


def codec_of(kind: str, data: Tensor) -> GradientCodec:
    """Return a codec for the encoded data; the caller sets its options."""
    return GradientCodec(kind=kind, num_bytes=data.nbytes)
