"""What one shard is made of, apart from the process that holds it.

A shard goes from server to server as an `Image` and what was applied to it since as
`UpdateRecord`s, in order; snapshots and the journal keep the same two. Whoever replays the same
records on the same image has the same shard, to the last bit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shoal_proto.pieces import Buffer
from shoal_proto.v1.replication_pb2 import PushRecord, SessionImage


@dataclass(frozen=True, kw_only=True)
class Image:
    """A whole shard as of one version. The tensors are its own: nobody writes to them."""

    kind: str
    """"dense" or "table"."""
    shard_id: int
    version: int
    spec: bytes
    """What the shard was made from: a serialized message that its kind knows."""
    tensors: Mapping[str, Tensor]
    """Values and optimizer state by name, on the CPU, contiguous."""
    sessions: Sequence[SessionImage]
    """What it remembers of pushes."""
    run: str = ""
    """Of the job, where a journal says of which; shards of another have the same numbers."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    """One push as it was applied."""

    push: PushRecord
    data: Buffer
    """The gradient, little-endian, as it came."""
    is_lent: bool = False
    """The data are somebody else's again soon: who keeps them for longer copies them."""


Keep = Callable[[Buffer], Buffer]
"""Gives the data of a push, which its sender lends, in memory in which it cannot change them any
more: bytes of one's own, or memory that is lent in turn. Where nobody needs them: as given."""


class UpdateListener(Protocol):
    """Told of every push that a shard applies, within the shard's lock, so in order."""

    def __call__(self, record: UpdateRecord) -> None: ...
