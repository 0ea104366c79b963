"""The record of a push that may still have to be sent to a backup."""

from collections.abc import Callable
from functools import partial
from weakref import ReferenceType, ref

from shoal_proto.pieces import Buffer
from shoal_server.parameters.shard.record import UpdateRecord


class OutgoingRecord:
    """An update record whose data may be in memory that a later push overwrites (*lent* memory).
    The replication core owns it until no backup needs it; links have weak references."""

    __slots__ = ("__weakref__", "_record", "num_bytes", "version")

    def __init__(self, record: UpdateRecord) -> None:
        self._record = record
        self.version: int = record.push.version
        self.num_bytes = record.num_bytes

    def get(self) -> UpdateRecord:
        """The record. Lent data are valid for this turn of the event loop only."""
        return self._record

    def owned(self) -> UpdateRecord:
        """The record with data that are never overwritten."""
        if self._record.is_lent:
            self._replace(bytes(self._record.data), is_lent=False)
        return self._record

    def set_lent_data(self, data: Buffer) -> Callable[[], None]:
        """Use a copy in lent memory as the record's data. Return the function to call before that
        memory is used again."""
        self._replace(data, is_lent=True)
        return self.before_reuse()

    def before_reuse(self) -> Callable[[], None]:
        """The function to call before the data's memory is used again. It copies the data if the
        record still exists and uses that memory."""
        return partial(_copy_data, ref(self), self._record.data)

    def _replace(self, data: Buffer, *, is_lent: bool) -> None:
        self._record = UpdateRecord(self._record.push, data, is_lent)


def _copy_data(reference: "ReferenceType[OutgoingRecord]", data: Buffer) -> None:
    record = reference()
    if record is not None and record.get().data is data:
        record._replace(bytes(data), is_lent=False)
