"""The index of a journal: which segments have records that are still needed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal_server.parameters.journal.images import StoredImage
from shoal_server.parameters.journal.segment_format import JournalEntry

Key = tuple[str, int]
"""Job and shard id."""


@dataclass(frozen=True, slots=True)
class EntryLocation:
    """Log number of an entry, and the epoch and version of its record."""

    number: int
    epoch: int
    version: int


@dataclass(slots=True)
class JournalSegment:
    index: int
    first_number: int
    num_bytes: int = 0
    last: dict[Key, EntryLocation] = field(default_factory=dict)
    """Last entry of each shard in this segment."""

    @property
    def file(self) -> str:
        return f"segment-{self.index:09d}.log"


class JournalIndex:
    """Segments and images of a journal. An image replaces the shard's records up to its version; an
    end entry replaces the shard's image and earlier entries. Segments are removed oldest first, so
    an end entry outlasts the entries that it replaces."""

    def __init__(self) -> None:
        self.segments: list[JournalSegment] = []
        self._images: dict[Key, StoredImage] = {}
        self._ended: dict[Key, int] = {}
        """Log number of each shard's last end entry."""
        self._only: Key | None = None
        """The only shard of this index; None: all."""

    @property
    def images(self) -> Mapping[Key, StoredImage]:
        return self._images

    def of(self, key: Key) -> "JournalIndex":
        """A copy as of now for one shard. It has only segments that the shard needs: the files of
        other segments may be removed at any time."""
        one = JournalIndex()
        one.segments = [each for each in self.segments if key in self._needing(each)]
        one._images = {each: kept for each, kept in self._images.items() if each == key}
        one._ended = dict(self._ended)
        one._only = key
        return one

    @property
    def num_bytes(self) -> int:
        return sum(segment.num_bytes for segment in self.segments)

    def note(self, number: int, entry: JournalEntry) -> StoredImage | None:
        """Add an entry of the newest segment. Return the image that it makes superfluous, or
        None."""
        version = 0 if entry.record is None else entry.record.push.version
        self.segments[-1].last[entry.key] = EntryLocation(number, entry.epoch, version)
        if entry.record is not None:
            return None
        self._ended[entry.key] = number
        kept = self._images.get(entry.key)
        if kept is None or kept.number > number:
            return None
        return self._images.pop(entry.key)

    def put(self, image: StoredImage) -> StoredImage | None:
        """Add an image. Return the image that is superfluous now, perhaps the added one, or
        None."""
        before = self._images.get(image.key)
        if image.number <= self._ended.get(image.key, 0):
            return image
        if before is not None and _order(before) > _order(image):
            return image
        self._images[image.key] = image
        return before if before != image else None

    def is_needed(self, key: Key, location: EntryLocation) -> bool:
        """True if neither the shard's image nor an end entry replaces the entry."""
        if self._only not in (None, key) or location.number <= self._ended.get(key, 0):
            return False
        image = self._images.get(key)
        return image is None or (location.epoch, location.version) > (image.epoch, image.version)

    def removable(self) -> Sequence[JournalSegment]:
        """The segments before the first that is needed; never the newest."""
        removable: list[JournalSegment] = []
        for segment in self.segments[:-1]:
            if self._needing(segment):
                break
            removable.append(segment)
        return removable

    def discard(self, removed: Sequence[JournalSegment]) -> None:
        self.segments[:] = [each for each in self.segments if each not in removed]
        first = self.segments[0].first_number if self.segments else 0
        self._ended = {key: number for key, number in self._ended.items() if number >= first}

    def overdue(self) -> Sequence[Key]:
        return self._needing(self.segments[0]) if self.segments else ()

    def _needing(self, segment: JournalSegment) -> Sequence[Key]:
        return [key for key, location in segment.last.items() if self.is_needed(key, location)]


def _order(image: StoredImage) -> tuple[int, int]:
    return image.epoch, image.version
