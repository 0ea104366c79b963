"""Images and update records: the content of a shard outside the process that holds it.

A shard is sent to another server as an `Image`, followed by the `UpdateRecord`s applied since, in
order; snapshots and the journal store the same two. The same records replayed on the same image
give the same shard, to the last bit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shoal_proto.pieces import Buffer
from shoal_proto.v1.replication_pb2 import PushRecord, SessionImage


@dataclass(frozen=True, kw_only=True)
class Image:
    """A whole shard at one version. The image owns its tensors: nobody writes to them."""

    kind: str
    """"dense" or "table"."""
    shard_id: int
    version: int
    spec: bytes
    """The shard's specification: a serialized message, by kind."""
    tensors: Mapping[str, Tensor]
    """Values and optimizer state by name, on the CPU, contiguous."""
    sessions: Sequence[SessionImage]
    """The outcomes of pushes that the shard remembers."""
    run: str = ""
    """The run of the job, if a journal has it; shards of another run have the same ids."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """One push as it was applied."""

    push: PushRecord
    data: Buffer
    """The gradient, little-endian, as received."""
    is_lent: bool = False
    """True if the data's memory will be reused soon: copy the data to keep them."""

    @property
    def version(self) -> int:
        """Version of the shard that the push made."""
        return self.push.version

    @property
    def num_bytes(self) -> int:
        """Size of the record in memory while it waits."""
        return len(self.data) + len(self.push.row_ids) + len(self.push.row_births)


Keep = Callable[[Buffer], Buffer]
"""Moves the borrowed data of a push to memory that its sender cannot change: a copy, or memory that
is lent in turn. Returns the data unchanged if they are not needed later."""


class UpdateListener(Protocol):
    """Called with every push that a shard applies, within the shard's lock, so in order."""

    def __call__(self, record: UpdateRecord) -> None: ...
