"""What a compression makes of one member's own gradients, pushed to parameter servers.

Nothing is averaged on the way: a shard's gradients are encoded here, and the server that holds the
shard reads them (`shoal_proto/v1/codec.proto`). Encoders keep no residuals; whoever pushes does,
as only that one knows what was applied.
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
    """Of its first element, in the flattened parameter."""
    num_elements: int
    shape: torch.Size
    """The parameter's."""

    @property
    def columns(self) -> int:
        """Of the parameter as a matrix, whose rows its first dimension makes."""
        return self.shape.numel() // self.shape[0]


@dataclass(frozen=True, kw_only=True)
class Encoded:
    codec: GradientCodec
    data: Tensor
    """What is sent, of one dimension."""
    decoded: Tensor
    """What the server makes of it, in fp32: NaN or infinite where a value is beyond the codec."""


class PushEncoder(ABC):
    """One member's own; it lives as long as the member trains."""

    keeps_residuals: ClassVar[bool] = True
    """Whether what the codec leaves out is to be added to the next gradients."""

    @abstractmethod
    def encode(self, values: Tensor, blocks: Sequence[PushBlock]) -> Encoded:
        """`values`: of the blocks, one after the other, in fp32, on the CPU and finite."""


def codec_of(kind: str, data: Tensor) -> GradientCodec:
    """A codec whose options are still to be set."""
    return GradientCodec(kind=kind, num_bytes=data.nbytes)
