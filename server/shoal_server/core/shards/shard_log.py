"""History of a shard since an image: the image's version, and the records after it."""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar


class Record(Protocol):
    """A push as it was applied. The log does not read the push's data."""

    @property
    def version(self) -> int:
        """Version of the shard that the push made."""
        ...

    @property
    def num_bytes(self) -> int:
        """Size of the record in memory."""
        ...


RecordT = TypeVar("RecordT", bound=Record)


class ShardLog(Generic[RecordT]):
    """Records by version, without a gap. The first record that is kept follows the version `start`:
    an image of that version or a later one, and the records after it, give the whole shard."""

    def __init__(self, start: int) -> None:
        """Begin an empty log after the version `start`."""
        self._records: deque[RecordT] = deque()
        self.start = start
        self.version = start
        """Version that the last record made."""
        self.num_bytes = 0
        """Size of all records in the log."""

    def append(self, record: RecordT) -> None:
        assert record.version == self.version + 1, (record.version, self.version)
        self._records.append(record)
        self.version += 1
        self.num_bytes += record.num_bytes

    def trim(self, version: int) -> None:
        """Discard the records up to `version`."""
        while self.start < min(version, self.version):
            self.num_bytes -= self._records.popleft().num_bytes
            self.start += 1

    def restart_after(self, version: int) -> None:
        """Discard all records, and begin again after `version`."""
        self._records.clear()
        self.start = self.version = version
        self.num_bytes = 0

    def records_after(self, version: int) -> Iterator[RecordT]:
        """Yield the records after `version` that were not discarded."""
        yield from islice(self._records, max(0, version - self.start), None)
