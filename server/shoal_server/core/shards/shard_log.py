"""History of a shard: the version of an image, and the records after it."""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar


class Record(Protocol):
    """A push as it was applied. The log does not read its data."""

    @property
    def version(self) -> int: ...

    @property
    def num_bytes(self) -> int: ...


RecordT = TypeVar("RecordT", bound=Record)


class ShardLog(Generic[RecordT]):
    """Records by version, without a gap. An image of version `start` or later, and the records
    after it, give the whole shard."""

    def __init__(self, start: int) -> None:
        self._records: deque[RecordT] = deque()
        self.start = start
        self.version = start
        """Version that the last record made."""
        self.num_bytes = 0

    def append(self, record: RecordT) -> None:
        assert record.version == self.version + 1, (record.version, self.version)
        self._records.append(record)
        self.version += 1
        self.num_bytes += record.num_bytes

    def trim(self, version: int) -> None:
        while self.start < min(version, self.version):
            self.num_bytes -= self._records.popleft().num_bytes
            self.start += 1

    def restart_after(self, version: int) -> None:
        self._records.clear()
        self.start = self.version = version
        self.num_bytes = 0

    def records_after(self, version: int) -> Iterator[RecordT]:
        yield from islice(self._records, max(0, version - self.start), None)
