"""Encoding of one member's own gradients for a push to parameter servers.

The server decodes them (`shoal_proto/v1/codec.proto`). The sender keeps residuals, as only the
sender knows which pushes were applied.
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
    """A range of one parameter's elements, within a shard."""

    parameter: str
    offset: int
    num_elements: int
    shape: torch.Size

    @property
    def columns(self) -> int:
        """Columns of a matrix with the first dimension as rows."""
        return self.shape.numel() // self.shape[0]


@dataclass(frozen=True, kw_only=True)
class EncodedBlocks:
    codec: GradientCodec
    data: Tensor
    decoded: Tensor
    """The values as the server decodes them, in fp32; NaN or infinite if out of the codec's
    range."""


class PushEncoder(ABC):
    """Encoder of one member, for all its steps."""

    keeps_residuals: ClassVar[bool] = True
    """True if the sender is to add what the codec leaves out to the next gradients."""

    @abstractmethod
    def encode(self, values: Tensor, blocks: Sequence[PushBlock]) -> EncodedBlocks:
        """Encode the blocks' concatenated values, which must be fp32, finite and on the CPU."""


def codec_of(kind: str, data: Tensor) -> GradientCodec:
    """Return a codec without options."""
    return GradientCodec(kind=kind, num_bytes=data.nbytes)
