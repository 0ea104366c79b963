"""Pushes that were applied to a shard here and that a backup may still have to be told of."""

from collections import deque

from shoal_proto.errors import InternalError
from shoal_proto.pieces import Buffer
from shoal_server.parameters.shard.image import UpdateRecord
from shoal_server.parameters.shard.replica import num_bytes_of


class RecordLog:
    """Lives on the event loop. Versions follow one another without a gap."""

    def __init__(self, version: int) -> None:
        """Empty: what follows on that version is kept."""
        self._records: deque[UpdateRecord] = deque()
        self._trimmed = version
        self.num_bytes = 0
        """Of all that is kept."""

    def append(self, record: UpdateRecord) -> None:
        self._records.append(record)
        self.num_bytes += num_bytes_of(record)

    def trim(self, version: int) -> None:
        """Nobody needs what came up to that version."""
        while self._records and self._trimmed < version:
            self.num_bytes -= num_bytes_of(self._records.popleft())
            self._trimmed += 1
        # Of what was not kept at all.
        self._trimmed = max(self._trimmed, version)

    def skip(self, version: int) -> None:
        """That version is not kept, nor anything before it: nobody needs it."""
        self._records.clear()
        self.num_bytes = 0
        self._trimmed = version

    def lies_at(self, version: int, data: Buffer) -> None:
        """The data of a record that is kept lie there too, until `give_back` is called with
        them."""
        self._replace(version, data, is_lent=True)

    def give_back(self, version: int, data: Buffer) -> None:
        """These data are about to be their lender's again: a record that is kept and has them gets
        a copy."""
        index = self._index(version)
        if index is not None and self._records[index].data is data:
            self._replace(version, bytes(data), is_lent=False)

    def owned(self, version: int) -> UpdateRecord | None:
        """As `get`, with data that stay as they are for as long as anybody has them."""
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
        """For this turn of the event loop, if the record is lent: behind it, its data may be those
        of another push. None for one that nobody needs any more: who was to be sent it has been let
        go of since, and would refuse what came behind a gap. Raises InternalError for one that
        never came."""
        if version <= self._trimmed:
            return None
        index = self._index(version)
        if index is None:
            raise InternalError(
                "a push is to be sent to a backup that was not applied here",
                seen=f"version {version}",
                expected=f"at most {self._trimmed + len(self._records)}",
            )
        return self._records[index]
