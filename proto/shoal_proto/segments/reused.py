"""Memory into which segments are received again and again, since the first touch of a page costs
more than receiving its bytes.

Such memory is not sealed: only its owner may keep a view of it.
"""

import ctypes
import os
import weakref
from collections.abc import Iterator
from queue import Empty, SimpleQueue

from shoal_proto.segments.descriptors import duplicate
from shoal_proto.segments.digests import chunk_digests
from shoal_proto.segments.mapped import Window
from shoal_proto.segments.sealed import Segment, SegmentWriter

MAX_IDLE = 2
"""Maximum number of memory files kept idle; concurrent returns may exceed it a little."""
_owners: weakref.WeakSet["ReusedMemory"] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for owner in list(_owners):
        owner._forget()


os.register_at_fork(after_in_child=_forget_after_fork)


class ReusedMemory:
    """Memory files of one owner. Thread-safe."""

    def __init__(self) -> None:
        # Finalizers return pages, even on a thread that is inside a method of this class. A lock
        # would make that thread wait for itself.
        self._idle: SimpleQueue[_Pages] = SimpleQueue()
        self._is_closed = False
        _owners.add(self)

    def writer(self, num_bytes: int) -> SegmentWriter:
        """Return a writer on idle pages of `num_bytes`, else on new pages. Raises Overloaded if the
        system has no memory."""
        fitting = []
        for each in self._take_idle():
            if each.num_bytes == num_bytes:
                fitting.append(each)
            else:
                each.close()
        pages = fitting.pop() if fitting else _Pages(num_bytes)
        for each in fitting:
            self._give_back(each)
        return _ReusingWriter(pages, self)

    def close(self) -> None:
        """Free the idle memory now, and memory in use as soon as its last view is gone."""
        self._is_closed = True
        for each in self._take_idle():
            each.close()

    def _forget(self) -> None:
        self._idle, self._is_closed = SimpleQueue(), True

    def _take_idle(self) -> "Iterator[_Pages]":
        while True:
            try:
                yield self._idle.get_nowait()
            except Empty:
                return

    def _give_back(self, pages: "_Pages") -> None:
        if self._idle.qsize() >= MAX_IDLE:
            pages.close()
            return
        self._idle.put(pages)
        if self._is_closed:
            self.close()


class _Pages(SegmentWriter):
    is_touched = False

    def window(self) -> Window:
        """Return an object over the same bytes that lives as long as its views."""
        assert self._mapped is not None
        return (ctypes.c_ubyte * self.num_bytes).from_buffer(self._mapped)


class ReusedSegment(Segment):
    """A segment whose memory is reused once the segment is closed and has no views."""

    def __init__(
        self,
        descriptor: int,
        window: Window,
        of_chunks: bytes,
        *,
        is_whole: bool,
    ) -> None:
        """Takes ownership of the descriptor."""
        super().__init__(descriptor, len(window), of_chunks, is_whole=is_whole)
        self._window: Window | None = window

    def memory(self) -> memoryview:
        """Return a writable view of the bytes. They are not reused while the view exists."""
        assert self._window is not None, "closed"
        return memoryview(self._window).cast("B")

    def view(self) -> memoryview:
        return self.memory().toreadonly()

    def duplicate(self) -> Segment:
        assert self._window is not None, "closed"
        return ReusedSegment(
            duplicate(self.descriptor), self._window, self.chunk_digests, is_whole=self.is_whole
        )

    def sealed_copy(self) -> Segment:
        """Return a sealed copy, which may be passed to other processes. Raises Overloaded if there
        is no memory."""
        writer = SegmentWriter(self.num_bytes)
        writer.buffer[:] = self.view()
        return writer.seal(self.chunk_digests, is_whole=self.is_whole)

    def close(self) -> None:
        super().close()
        self._window = None


class _ReusingWriter(SegmentWriter):
    def __init__(self, pages: _Pages, owner: ReusedMemory) -> None:
        self.num_bytes = pages.num_bytes
        self._pages: _Pages | None = pages
        window = pages.window() if pages.num_bytes else (ctypes.c_ubyte * 0)()
        weakref.finalize(window, owner._give_back, pages).atexit = False
        self._window: Window | None = window
        self._buffer = memoryview(window).cast("B")

    @property
    def descriptor(self) -> int:
        assert self._pages is not None, "closed"
        return self._pages.descriptor

    def populate(self, start: int, num_bytes: int) -> bool:
        assert self._pages is not None
        return self._pages.is_touched or self._pages.populate(start, num_bytes)

    def seal(self, of_chunks: bytes | None = None, *, is_whole: bool = True) -> Segment:
        """Return the bytes as an unsealed segment. `of_chunks`: the digests of its chunks; None:
        they are computed."""
        pages, window = self._pages, self._window
        assert pages is not None and window is not None
        if of_chunks is None:
            of_chunks = chunk_digests(self._buffer)
        pages.is_touched = pages.is_touched or is_whole
        descriptor = duplicate(pages.descriptor)
        self.close()
        return ReusedSegment(descriptor, window, of_chunks, is_whole=is_whole)

    def close(self) -> None:
        self._pages, self._window, self._buffer = None, None, memoryview(b"")
