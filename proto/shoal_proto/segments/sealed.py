"""Immutable memory that processes of one host share: a memory file, sealed by the kernel.

No process can write to the file or resize it any more; the file outlives its maker. See
memfd_create(2).
"""

import errno
import fcntl
import mmap
import os
import time
import weakref

from shoal_proto.errors import InternalError, MalformedMessage, Overloaded
from shoal_proto.segments.descriptors import duplicate, is_out_of_descriptors, no_descriptor
from shoal_proto.segments.digests import chunk_digests, root_digest
from shoal_proto.segments.mapped import (
    HUGE_FROM_BYTES,
    Window,
    make_huge,
    map_file,
    populate,
    protect,
)

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_open: weakref.WeakSet["Segment | SegmentWriter"] = weakref.WeakSet()
SEAL_ATTEMPTS = 10
SEAL_PAUSE_S = 0.02
POPULATED_BYTES = 4 * 1024 * 1024


def _closing(
    owner: "Segment | SegmentWriter", descriptor: int
) -> "weakref.finalize[[int], Segment | SegmentWriter]":
    _open.add(owner)
    return weakref.finalize(owner, os.close, descriptor)


def _close_after_fork() -> None:
    """Close descriptors that a forked process has inherited, which would keep memory from being
    freed. Inherited views of sealed segments stay valid."""
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
        self._mapped: Window | None = None
        self._close = _closing(self, descriptor)

    @classmethod
    def adopt(cls, descriptor: int, num_bytes: int, *, of_chunks: bytes | None = None) -> "Segment":
        """Return the segment of a descriptor from another process; takes ownership of the
        descriptor.

        Checks the seals and the size; computes the digests unless they are given. Raises
        MalformedMessage.
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
        """Return another segment over the same memory, to be closed separately. Raises Overloaded
        without a descriptor for it."""
        descriptor = duplicate(self.descriptor)
        return Segment(descriptor, self.num_bytes, self.chunk_digests, is_whole=self.is_whole)

    def view(self) -> memoryview:
        """Return a read-only view of the bytes. It stays valid after `close`."""
        if not self.num_bytes:
            return memoryview(b"")
        if self._mapped is None:
            self._mapped = map_file(
                self.descriptor, self.num_bytes, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED
            )
        return memoryview(self._mapped).cast("B").toreadonly()

    def private_memory(self) -> memoryview:
        """Return a writable view of a private mapping: writes change only this process's copy of
        the pages. The view stays valid after `close`."""
        if not self.num_bytes:
            return memoryview(bytearray())
        mapped = map_file(
            self.descriptor,
            self.num_bytes,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
            flags=mmap.MAP_PRIVATE,
        )
        return memoryview(mapped).cast("B")

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
    """A memory file that is being filled."""

    def __init__(self, num_bytes: int) -> None:
        """Make a memory file of `num_bytes`, whose pages take memory once written to. Raises
        Overloaded if the system has no memory or file descriptor."""
        self.num_bytes = num_bytes
        try:
            self._descriptor = os.memfd_create(
                "shoal-segment", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            )
        except OSError as error:
            raise _no_memory(num_bytes, error) from error
        self._close = _closing(self, self._descriptor)
        self._mapped: Window | None = None
        self._may_be_huge = num_bytes >= HUGE_FROM_BYTES
        try:
            os.ftruncate(self._descriptor, num_bytes)
            if num_bytes:
                # A writable mapping in a forked process would prevent sealing.
                self._mapped = map_file(
                    self._descriptor,
                    num_bytes,
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                    flags=mmap.MAP_SHARED,
                    is_inherited=False,
                )
        except (OSError, ValueError, OverflowError) as error:
            self._close()
            raise _no_memory(num_bytes, error) from error
        self._buffer = memoryview(bytearray() if self._mapped is None else self._mapped).cast("B")

    @classmethod
    def prepare(cls, num_bytes: int) -> "SegmentWriter":
        """Return a writer whose memory is allocated and mapped: filling it costs one copy.

        Takes up to a second per gigabyte: call it ahead of time, from a background thread. Raises
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
        """Allocate and map a part before it is written to, in huge pages if possible; keeps its
        content.

        May be called from another thread, but not concurrently with `seal` or `close`. Returns
        False if the kernel only allocates the part. Raises Overloaded if there is not enough
        memory.
        """
        is_mapped = True
        if self._mapped is not None and self._may_be_huge:
            self._may_be_huge = make_huge(self._mapped, start, num_bytes)
        try:
            for at in range(start, start + num_bytes, POPULATED_BYTES):
                size = min(POPULATED_BYTES, start + num_bytes - at)
                if self._mapped is None or not populate(self._mapped, at, size):
                    is_mapped = False
                    os.posix_fallocate(self._descriptor, at, size)
        except OSError as error:
            raise _no_memory(num_bytes, error) from error
        return is_mapped

    @property
    def descriptor(self) -> int:
        """The memory file's descriptor."""
        return self._descriptor

    @property
    def buffer(self) -> memoryview:
        """Writable view of the bytes. Release everything made from it before `seal`."""
        return self._buffer

    def digest_in_place(self) -> bytes:
        """Write-protect the memory, and return its chunk digests for `seal`."""
        if self._mapped is not None:
            protect(self._mapped, self.num_bytes)
        return chunk_digests(self._buffer)

    def seal(self, of_chunks: bytes | None = None, *, is_whole: bool = True) -> Segment:
        """Make the bytes immutable, and return them as a segment. Do not use the writer afterwards.

        `of_chunks`: the digests of its chunks; None: they are computed, and the segment is whole
        whatever `is_whole` says. Raises InternalError while anything refers to `buffer`, or if the
        kernel does not seal the file.
        """
        self._unmap()
        descriptor = duplicate(self._descriptor)
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
        if self._mapped is None:
            return
        mapped = weakref.ref(self._mapped)
        self._mapped, self._buffer = None, memoryview(b"")
        if (kept := mapped()) is not None:
            self._mapped, self._buffer = kept, memoryview(kept).cast("B")
            raise InternalError(
                "a segment cannot be sealed while something refers to its buffer",
                expected="every view and tensor made from it to be released before",
            )


def _seal(descriptor: int) -> None:
    """Set the seals; retry briefly on EBUSY: another thread may be reading a page, to pass it
    on."""
    for attempt in range(SEAL_ATTEMPTS):
        try:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_SEAL)
            return
        except OSError as error:
            if error.errno != errno.EBUSY or attempt == SEAL_ATTEMPTS - 1:
                raise
        time.sleep(SEAL_PAUSE_S)


def _no_memory(num_bytes: int, error: Exception) -> Overloaded:
    if is_out_of_descriptors(error):
        return no_descriptor(error.errno)
    return Overloaded(
        "no memory for a segment of published weights",
        seen=str(error),
        expected=f"{num_bytes} bytes of shared memory",
        fix="Keep fewer versions, or give the process a larger memory limit.",
    )
