"""Images of shards: the values of a shard at one version.

A shard is sent to another server as an image, followed by the records of the pushes applied since,
in order. A journal consists of images and records too; a snapshot has an image of each shard. The
same records replayed on the same image give the same shard, to the last bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shoal_proto.v1.replication_pb2 import SessionImage, TensorImage
from shoal_server.parameters.images.tensor_bytes import describe


@dataclass(frozen=True, order=True)
class Stamp:
    """Identifies an image of a shard of one job."""

    shard_id: int
    epoch: int
    version: int


@dataclass(frozen=True, slots=True)
class TensorStream:
    """A tensor of an image as it is written to a file: its description, and its content in
    pieces."""

    described: TensorImage
    pieces: Iterator[Tensor]
    """Contiguous pieces, in order; the reader owns each piece."""


class Image(Protocol):
    """A whole shard at one version."""

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
        """The shard's specification: a serialized message, of a type that depends on the kind."""
        ...

    @property
    def sessions(self) -> Sequence[SessionImage]:
        """The outcomes of pushes that the shard remembers: one session for each incarnation."""
        ...

    def streams(self) -> Sequence[TensorStream]:
        """Return values and optimizer state, each in pieces that are read when they are requested.
        Unused rows of a table are left out."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoadedImage:
    """An image in memory. A table's shard that is restored from it takes over the tensors."""

    kind: str
    shard_id: int
    version: int
    spec: bytes
    tensors: Mapping[str, Tensor]
    """Values and optimizer state by name, on the CPU, contiguous."""
    sessions: Sequence[SessionImage]
    placement_id: str = ""
    """`JobAssignments.placement_id`, if the image is from a journal: shards of another placement
    have the same ids."""

    def streams(self) -> Sequence[TensorStream]:
        return [
            TensorStream(describe(name, tensor), iter((tensor.contiguous(),)))
            for name, tensor in self.tensors.items()
        ]
