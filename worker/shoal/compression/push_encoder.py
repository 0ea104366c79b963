"""Encoding of one member's own gradients for a push to parameter servers.

No average is made on the way: a shard's gradients are encoded here, and decoded by the server that
holds the shard (`shoal_proto/v1/codec.proto`). Encoders keep no residuals. The sender does, as only
it knows which pushes were applied.
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
    """A run of one parameter's elements, in the shard it lies in."""

    parameter: str
    offset: int
    """Offset of its first element in the flattened parameter."""
    num_elements: int
    shape: torch.Size
    """The parameter's."""

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
    """Values as the server decodes them, in fp32: NaN or infinite beyond the codec's range."""


class PushEncoder(ABC):
    """Encoder of one member; it lives as long as the member trains."""

    keeps_residuals: ClassVar[bool] = True
    """True if what the codec leaves out is to be added to the next gradients."""

    @abstractmethod
    def encode(self, values: Tensor, blocks: Sequence[PushBlock]) -> EncodedBlocks:
        """`values`: of the blocks, one after the other, in fp32, on the CPU and finite."""


def codec_of(kind: str, data: Tensor) -> GradientCodec:
    """A codec whose options are still to be set."""
    return GradientCodec(kind=kind, num_bytes=data.nbytes)
