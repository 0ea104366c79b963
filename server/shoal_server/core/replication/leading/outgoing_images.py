"""Images of shards sent to one server: one at a time, in acknowledged chunks."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shoal_server.core.replication.protocol.effects import CloseImage, Effect, ReleaseChunks
from shoal_server.core.replication.protocol.messages import ImageChunk, ImageStart, Key, Request


@dataclass(slots=True)
class OutgoingImage:
    key: Key
    number: int
    start: ImageStart | None = None
    """The image's header; None until it is taken."""
    sent: int = 0
    acknowledged: int = 0
    breaks: int = 0
    """Breaks since the last acknowledged chunk."""
    is_flowing: bool = False
    """True while chunks are sent. False until the link is open and the peer has stated what it has.
    """


class OutgoingImages:
    """Images for one server. Waiting ones are not taken yet, so they occupy no memory."""

    def __init__(self, window_chunks: int, max_breaks: int) -> None:
        self._window_chunks = window_chunks
        self._max_breaks = max_breaks
        self._waiting: deque[Key] = deque()
        self.current: OutgoingImage | None = None

    def add(self, key: Key) -> None:
        if key not in self._waiting and (self.current is None or self.current.key != key):
            self._waiting.append(key)

    def drop(self, key: Key) -> Iterator[Effect]:
        if key in self._waiting:
            self._waiting.remove(key)
        if self.current is not None and self.current.key == key:
            yield CloseImage(self.current.number)
            self.current = None

    @property
    def waiting(self) -> list[Key]:
        return list(self._waiting)

    def next_image(self, number: int) -> Key | None:
        """Make the next waiting shard current. None if a shard is current, or none waits."""
        if self.current is not None or not self._waiting:
            return None
        self.current = OutgoingImage(self._waiting.popleft(), number)
        return self.current.key

    def begin(self, start: ImageStart) -> Iterator[Request]:
        image = self.current
        assert image is not None
        image.start = start
        yield from self._flow(image)

    def may_continue(self, key: Key, number: int, next_chunk: int) -> bool:
        """True if the peer has part of the current image, and the rest is kept here."""
        image = self.current
        return (
            image is not None
            and (image.key, image.number) == (key, number)
            and image.start is not None
            and image.acknowledged <= next_chunk <= image.start.num_chunks
        )

    def resume_from(self, next_chunk: int) -> Iterator[Request]:
        image = self.current
        assert image is not None
        image.sent = image.acknowledged = next_chunk
        yield from self._flow(image)

    def _flow(self, image: OutgoingImage) -> Iterator[Request]:
        start = image.start
        assert start is not None
        image.is_flowing = True
        yield replace(start, next_chunk=image.sent)
        yield from self._fill_window(image)

    def note_acknowledged(self, number: int, next_chunk: int) -> Iterator[ImageChunk | Effect]:
        """Note that the peer has all chunks before `next_chunk`; release them, and send others."""
        image = self.current
        if image is None or image.number != number or next_chunk <= image.acknowledged:
            return
        image.acknowledged, image.breaks = min(next_chunk, image.sent), 0
        yield ReleaseChunks(number, image.acknowledged)
        yield from self._fill_window(image)

    def _fill_window(self, image: OutgoingImage) -> Iterator[ImageChunk]:
        assert image.start is not None
        end = min(image.acknowledged + self._window_chunks, image.start.num_chunks)
        while image.is_flowing and image.sent < end:
            yield ImageChunk(image.key, image.number, image.sent)
            image.sent += 1

    def record_link_break(self) -> Key | None:
        """Note a break. Return the image's shard after too many breaks in a row, otherwise None."""
        image = self.current
        if image is None or not image.is_flowing:
            return None
        image.is_flowing = False
        image.breaks += 1
        return image.key if image.breaks >= self._max_breaks else None

    def clear(self) -> Iterator[Effect]:
        self._waiting.clear()
        if self.current is not None:
            yield CloseImage(self.current.number)
            self.current = None
