"""The log of pushes to a primary that may still have to be sent to a backup."""

from collections import deque

from shoal_proto.errors import InternalError
from shoal_proto.pieces import Buffer
from shoal_server.parameters.shard.image import UpdateRecord
from shoal_server.parameters.shard.replica import num_bytes_of


class RecordLog:
    """Update records by version, without a gap. Lives on the event loop."""

    def __init__(self, version: int) -> None:
        """Begin an empty log after `version`."""
        self._records: deque[UpdateRecord] = deque()
        self._trimmed = version
        self.num_bytes = 0
        """Size of all records in the log."""

    def append(self, record: UpdateRecord) -> None:
        self._records.append(record)
        self.num_bytes += num_bytes_of(record)

    def trim(self, version: int) -> None:
        """Drop the records up to that version: no backup needs them."""
        while self._records and self._trimmed < version:
            self.num_bytes -= num_bytes_of(self._records.popleft())
            self._trimmed += 1
        # The log may have no records up to that version.
        self._trimmed = max(self._trimmed, version)

    def skip(self, version: int) -> None:
        """Skip that version, and drop all before it: no backup needs them."""
        self._records.clear()
        self.num_bytes = 0
        self._trimmed = version

    def lies_at(self, version: int, data: Buffer) -> None:
        """Note that a record's data lie in `data`, until `give_back` is called with them."""
        self._replace(version, data, is_lent=True)

    def give_back(self, version: int, data: Buffer) -> None:
        """Copy the record's data if they still are `data`: the lender is about to reuse that
        memory."""
        index = self._index(version)
        if index is not None and self._records[index].data is data:
            self._replace(version, bytes(data), is_lent=False)

    def owned(self, version: int) -> UpdateRecord | None:
        """Return the record as `get` does, with data that are never overwritten."""
        record = self.get(version)
        if record is not None and record.is_lent:
            self._replace(version, bytes(record.data), is_lent=False)
        return self.get(version)

    def _replace(self, version: int, data: Buffer, *, is_lent: bool) -> None:
        index = self._index(version)
        assert index is not None
        self._records[index] = UpdateRecord(self._records[index].push, data, is_lent)

    def _index(self, version: int) -> int | None:
        index = version - self._trimmed - 1
        return index if 0 <= index < len(self._records) else None

    def get(self, version: int) -> UpdateRecord | None:
        """Return the record of a version. A lent record is valid for this turn of the event loop:
        afterwards its memory may be used for another push. None if no backup needs the record any
        more: the backup that it was for has been dropped, and would refuse updates after a gap.
        Raises InternalError if the version was never applied."""
        if version <= self._trimmed:
            return None
        index = self._index(version)
        if index is None:
            raise InternalError(
                "a push that was not applied here is to be sent to a backup",
                seen=f"version {version}",
                expected=f"at most {self._trimmed + len(self._records)}",
            )
        return self._records[index]
