"""Update records: pushes as they were applied. Replaying them on an image gives the same shard."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shoal_proto.pieces import Buffer
from shoal_proto.v1.replication_pb2 import PushRecord


@dataclass(frozen=True, slots=True)
class UpdateRecord:
    push: PushRecord
    data: Buffer
    """Bytes of the push's gradient, as received, with any base values after it."""
    is_lent: bool = False
    """True if the data's memory will be reused soon: copy the data to keep them."""

    @property
    def version(self) -> int:
        return self.push.version

    @property
    def num_bytes(self) -> int:
        """Memory that the record takes."""
        return len(self.data) + len(self.push.row_ids) + len(self.push.row_births)


Keep = Callable[[Buffer], Buffer]
"""Copies borrowed data to memory that their sender cannot change. Returns the data themselves if
they are not needed after the push."""


class UpdateListener(Protocol):
    """Called with every push that a shard applies, in order, within the shard's lock."""

    def __call__(self, record: UpdateRecord) -> None: ...
