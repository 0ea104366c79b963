"""Records: pushes as they were applied. Replayed on an image, they give the same shard."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shoal_proto.pieces import Buffer
from shoal_proto.v1.replication_pb2 import PushRecord


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
