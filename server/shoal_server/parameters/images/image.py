"""Images of shards: their values at one version.

Images, and records of later pushes, are sent to other servers and kept in journals. A snapshot has
an image of each shard. The same records on the same image give the same shard, to the last bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shoal_proto.v1.replication_pb2 import SessionImage, TensorImage
from shoal_server.parameters.images.tensor_bytes import describe


@dataclass(frozen=True, order=True)
class Stamp:
    shard_id: int
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class TensorStream:
    """A tensor of an image, as it is written to a file."""

    described: TensorImage
    pieces: Iterator[Tensor]
    """Contiguous pieces, in order, which the reader owns."""


class Image(Protocol):
    @property
    def kind(self) -> str:
        """ "dense" or "table"."""
        ...

    @property
    def shard_id(self) -> int: ...

    @property
    def version(self) -> int: ...

    @property
    def spec(self) -> bytes:
        """The shard's specification: a serialized message that depends on the kind."""
        ...

    @property
    def sessions(self) -> Sequence[SessionImage]:
        """Outcomes of remembered pushes: one session for each incarnation."""
        ...

    def streams(self) -> Sequence[TensorStream]:
        """Values and optimizer state, in pieces that are read on request. Unused rows of a table
        are left out."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoadedImage:
    """An image in memory. A table's shard that is restored from it takes over the tensors."""

    kind: str
    shard_id: int
    version: int
    spec: bytes
    tensors: Mapping[str, Tensor]
    """Values and optimizer state, contiguous, on the CPU."""
    sessions: Sequence[SessionImage]
    placement_id: str = ""
    """`JobAssignments.placement_id`, if the image is from a journal."""

    def streams(self) -> Sequence[TensorStream]:
        return [
            TensorStream(describe(name, tensor), iter((tensor.contiguous(),)))
            for name, tensor in self.tensors.items()
        ]
