"""In which order a link sends what it has to: a push that is waited for stands behind no more than
one image of another shard, and images go on while pushes come without end."""

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from shoal_server.parameters.image import Record

Copy = TypeVar("Copy")


class Outbox(Generic[Copy]):
    """Records of shards that the other end has, in order, and shards whose image it is to get."""

    def __init__(self) -> None:
        self._images: deque[Copy] = deque()
        self._records: deque[tuple[Copy, Record]] = deque()
        self._before_image: int | None = None
        """Records that go before the next image; None: as many as there are by then."""

    def add_image(self, copy: Copy) -> None:
        self._images.append(copy)

    def add(self, copy: Copy, record: Record) -> None:
        self._records.append((copy, record))

    def put_first(self, copy: Copy, record: Record) -> None:
        """Before all other records."""
        self._records.appendleft((copy, record))

    def next(self) -> tuple[Copy, Record | None] | None:
        """What to send now: a record, or the image of a shard; None if there is nothing."""
        if self._before_image is None:
            self._before_image = len(self._records)
        if self._records and (self._before_image or not self._images):
            self._before_image = max(self._before_image - 1, 0)
            return self._records.popleft()
        self._before_image = None
        return (self._images.popleft(), None) if self._images else None

    def clear(self) -> Iterator[tuple[Copy, Record]]:
        """Send nothing of it; the records that it held."""
        records = list(self._records)
        self._images.clear()
        self._records.clear()
        self._before_image = None
        return iter(records)


__all__ = ["Outbox"]
