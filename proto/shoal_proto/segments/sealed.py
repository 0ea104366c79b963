"""Immutable memory that processes of one host share: a memory file, sealed by the kernel.

Processes that have a descriptor of such a file map the same pages, read-only. No process can write
to the file, shrink it or grow it any more, not even the one that made it, and the file outlives
that process. See memfd_create(2).
"""

import ctypes
import errno
import fcntl
import mmap
import os
import time
import weakref
from contextlib import suppress

from shoal_proto.errors import InternalError, MalformedMessage, Overloaded
from shoal_proto.segments.digests import chunk_digests, root_digest

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later; the module `mmap` does not name it."""
_libc = ctypes.CDLL(None)
_open: weakref.WeakSet["Segment | SegmentWriter"] = weakref.WeakSet()
SEAL_ATTEMPTS = 10
SEAL_PAUSE_S = 0.02
POPULATED_BYTES = 4 * 1024 * 1024
"""Number of bytes for which one call allocates and maps pages."""
HUGE_FROM_BYTES = 64 * 1024 * 1024
"""Size from which memory is mapped with huge pages. Part of the last page is wasted."""


def advise_huge_pages(mapped: mmap.mmap) -> None:
    """Ask for pages of 2 MiB, which the kernel gives if `shmem_enabled` is `advise`. Allocating,
    mapping and freeing memory then take a fraction of the time."""
    if len(mapped) >= HUGE_FROM_BYTES:
        with suppress(OSError):  # a kernel without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)


def _closing(
    owner: "Segment | SegmentWriter", descriptor: int
) -> "weakref.finalize[[int], Segment | SegmentWriter]":
    """Return a finalizer that closes the descriptor once: when called, or when the owner is
    deleted."""
    _open.add(owner)
    return weakref.finalize(owner, os.close, descriptor)


def _close_after_fork() -> None:
    """Close the descriptors that a forked process has inherited: as long as it lived, they would
    keep the memory of segments from being freed. Inherited views of sealed segments stay valid; the
    memory of writers and of `ReusedSegment` is not mapped in the child."""
    for owner in list(_open):
        owner._close()


os.register_at_fork(after_in_child=_close_after_fork)


class Segment:
    """A sealed memory file with the digests of its chunks."""

    def __init__(
        self, descriptor: int, num_bytes: int, of_chunks: bytes, *, is_whole: bool = True
    ) -> None:
        """Takes ownership of the descriptor. `is_whole`: False if some chunks were not fetched;
        these read as zeros."""
        self.num_bytes = num_bytes
        self.chunk_digests = of_chunks
        self.digest = root_digest(of_chunks)
        self.is_whole = is_whole
        self.descriptor = descriptor
        self._mapped: mmap.mmap | None = None
        self._close = _closing(self, descriptor)

    @classmethod
    def adopt(cls, descriptor: int, num_bytes: int, *, of_chunks: bytes | None = None) -> "Segment":
        """Return the segment of a descriptor that another process sent; takes ownership of the
        descriptor.

        Checks the seals and the size. Computes the digests, unless a process that computed them
        after sealing has sent them as `of_chunks`. Raises MalformedMessage.
        """
        try:
            _check_sealed(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        segment = cls(descriptor, num_bytes, of_chunks or b"")
        if of_chunks is None:
            segment.chunk_digests = chunk_digests(segment.view())
            segment.digest = root_digest(segment.chunk_digests)
        return segment

    def duplicate(self) -> "Segment":
        """Return another segment over the same memory, to be closed separately."""
        descriptor = os.dup(self.descriptor)
        return Segment(descriptor, self.num_bytes, self.chunk_digests, is_whole=self.is_whole)

    def view(self) -> memoryview:
        """Return a read-only view of the bytes. It stays valid after `close`."""
        if not self.num_bytes:
            return memoryview(b"")
        if self._mapped is None:
            self._mapped = mmap.mmap(self.descriptor, self.num_bytes, prot=mmap.PROT_READ)
            advise_huge_pages(self._mapped)
        return memoryview(self._mapped)

    def close(self) -> None:
        """Close the descriptor. The memory is freed once no process has a descriptor or view."""
        self._close()
        self._mapped = None


def _check_sealed(descriptor: int, num_bytes: int) -> None:
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise MalformedMessage(
            "a segment was not sent as a memory file",
            seen=str(error),
            expected="a descriptor made by memfd_create",
        ) from error
    if seals & SEALS != SEALS:
        raise MalformedMessage(
            "a segment can still be changed",
            seen=f"seals {seals:#x}",
            expected=f"at least {SEALS:#x} (WRITE, SHRINK and GROW)",
        )
    if (size := os.fstat(descriptor).st_size) != num_bytes:
        raise MalformedMessage(
            "a segment has another size than announced",
            seen=f"{size} bytes",
            expected=f"{num_bytes}",
        )


class SegmentWriter:
    """A memory file that is being filled. `seal` makes it a Segment."""

    def __init__(self, num_bytes: int) -> None:
        """Make a memory file of `num_bytes`. Its pages take memory once they are written to. Raises
        Overloaded if the system has no memory, or no file descriptor."""
        self.num_bytes = num_bytes
        try:
            self._descriptor = os.memfd_create(
                "shoal-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            )
        except OSError as error:
            raise _no_memory(num_bytes, error) from error
        self._close = _closing(self, self._descriptor)
        self._mapped: mmap.mmap | None = None
        try:
            os.ftruncate(self._descriptor, num_bytes)
            if num_bytes:
                self._mapped = mmap.mmap(self._descriptor, num_bytes)
                # A writable mapping in a forked process would prevent sealing.
                self._mapped.madvise(mmap.MADV_DONTFORK)
                advise_huge_pages(self._mapped)
        except (OSError, ValueError) as error:
            self._close()
            raise _no_memory(num_bytes, error) from error
        self._buffer = memoryview(bytearray() if self._mapped is None else self._mapped)

    @classmethod
    def prepare(cls, num_bytes: int) -> "SegmentWriter":
        """Return a writer whose memory is allocated and mapped already: filling it costs one copy.

        Takes about a second per gigabyte: call it from a background thread, ahead of time. Raises
        Overloaded if there is not enough memory.
        """
        writer = cls(num_bytes)
        try:
            is_mapped = writer.populate(0, num_bytes)
        except Overloaded:
            writer.close()
            raise
        if not is_mapped and writer._mapped is not None:
            for page in range(0, num_bytes, mmap.PAGESIZE):
                writer._mapped[page] = 0
        return writer

    def populate(self, start: int, num_bytes: int) -> bool:
        """Allocate and map a part before it is written to: that costs less than a fault for each
        page, and may be done on another thread. Existing content is kept.

        Returns False if the kernel only allocates the part. Raises Overloaded if there is not
        enough memory. Do not call it concurrently with `seal` or `close`.
        """
        is_mapped = True
        try:
            for at in range(start, start + num_bytes, POPULATED_BYTES):
                size = min(POPULATED_BYTES, start + num_bytes - at)
                if self._mapped is None or not _is_mapped(self._mapped, at, size):
                    is_mapped = False
                    os.posix_fallocate(self._descriptor, at, size)
        except OSError as error:
            raise _no_memory(num_bytes, error) from error
        return is_mapped

    @property
    def descriptor(self) -> int:
        """File descriptor of the memory file."""
        return self._descriptor

    @property
    def buffer(self) -> memoryview:
        """Writable view of the bytes. Everything made from it must be released before `seal`."""
        return self._buffer

    def seal(self, of_chunks: bytes | None = None, *, is_whole: bool = True) -> Segment:
        """Make the bytes immutable, and return them as a segment. `of_chunks`: the digests of its
        chunks; None: they are computed, and `is_whole` is ignored: the segment is whole. Do not use
        the writer afterwards.

        Raises InternalError while anything else refers to `buffer`, or if the kernel does not seal
        the file.
        """
        self._unmap()
        descriptor = os.dup(self._descriptor)
        self._close()
        try:
            _seal(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise InternalError(
                "a segment cannot be sealed",
                seen=str(error),
                expected="no writable mapping of it in any process",
            ) from error
        if of_chunks is None:
            return Segment.adopt(descriptor, self.num_bytes)
        return Segment(descriptor, self.num_bytes, of_chunks, is_whole=is_whole)

    def close(self) -> None:
        """Free the memory without sealing it."""
        self._close()
        self._mapped, self._buffer = None, memoryview(bytearray())

    def _unmap(self) -> None:
        try:
            self._buffer.release()
            if self._mapped is not None:
                self._mapped.close()
        except BufferError as error:
            raise InternalError(
                "a segment cannot be sealed while something refers to its buffer",
                seen=str(error),
                expected="every view and tensor made from it to be released before",
            ) from error
        self._mapped = None


def _seal(descriptor: int) -> None:
    """Set the seals. While another thread reads a page to forward it, the kernel may refuse, as if
    the page could still be written to (EBUSY): then try again for a moment. Raises OSError."""
    for attempt in range(SEAL_ATTEMPTS):
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or attempt == SEAL_ATTEMPTS - 1:
                raise
        time.sleep(SEAL_PAUSE_S)


def _is_mapped(mapped: mmap.mmap, start: int, num_bytes: int) -> bool:
    """Map the pages, so that writing to them does not fault; False if the kernel cannot, for
    example because it is too old.

    `mapped.madvise` is not used: it holds the GIL, so training on other threads would stop.
    """
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(mapped, start)))
    return not _libc.madvise(address, ctypes.c_size_t(num_bytes), MADV_POPULATE_WRITE)


def _no_memory(num_bytes: int, error: Exception) -> Overloaded:
    return Overloaded(
        "no memory for a segment of published weights",
        seen=str(error),
        expected=f"{num_bytes} bytes of shared memory",
        fix="Keep fewer versions, or give the process a larger memory limit.",
    )
