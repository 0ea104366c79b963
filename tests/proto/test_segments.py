"""Sealed segments: immutable, verified, and shared without a copy."""

import gc
import mmap
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal_proto import CHUNK_BYTES, bulk
from shoal_proto.bulk import FrameKind
from shoal_proto.errors import ChecksumMismatch, InternalError, MalformedMessage, Unavailable
from shoal_proto.segments.digests import DIGEST_BYTES, check_chunk, chunk_digests, root_digest
from shoal_proto.segments.reused import ReusedMemory, ReusedSegment
from shoal_proto.segments.sealed import HUGE_FROM_BYTES, Segment, SegmentWriter
from shoal_proto.segments.transfer import SegmentConnection, StagedSegment
from shoal_proto.v1.parameters_pb2 import OpenBulkReply
from shoal_proto.v1.weights_pb2 import (
    SEGMENT_TRANSFER_CHUNKS,
    FetchSegmentReply,
    FetchSegmentRequest,
)

SIZES = [0, 1, 4096, CHUNK_BYTES, 2 * CHUNK_BYTES + 17]


def segment_of(data: bytes) -> Segment:
    writer = SegmentWriter.prepare(len(data))
    writer.buffer[:] = data
    return writer.seal()


def drawn(num_bytes: int) -> bytes:
    return (os.urandom(1 << 16) * (num_bytes // (1 << 16) + 1))[:num_bytes]


@pytest.mark.parametrize("num_bytes", SIZES)
def test_a_segment_has_the_written_bytes_and_their_digest(num_bytes: int) -> None:
    data = drawn(num_bytes)
    segment = segment_of(data)
    assert segment.view() == data
    assert segment.num_bytes == num_bytes
    assert segment.chunk_digests == chunk_digests(data)
    assert segment.digest == root_digest(chunk_digests(data))


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="a kernel without huge pages"
)
def test_large_segments_ask_for_huge_pages_wherever_they_are_mapped() -> None:
    """ "hg" is the flag of such a mapping: see proc_pid_smaps(5)."""
    writer = SegmentWriter(HUGE_FROM_BYTES)
    assert "hg" in flags_of_mapped_segments()
    segment = writer.seal()
    view = segment.view()
    assert "hg" in flags_of_mapped_segments()
    del view
    segment.close()


def flags_of_mapped_segments() -> str:
    mappings = Path("/proc/self/smaps").read_text().split("memfd:shoal-segment")[1:]
    return " ".join(each.split("VmFlags:")[1].splitlines()[0] for each in mappings)


def test_a_sealed_segment_cannot_be_changed() -> None:
    segment = segment_of(b"weights")
    assert segment.view().readonly
    attempts: list[Callable[[], object]] = [
        lambda: os.pwrite(segment.descriptor, b"x", 0),
        lambda: os.ftruncate(segment.descriptor, 1),
        lambda: os.ftruncate(segment.descriptor, 100),
        lambda: mmap.mmap(segment.descriptor, 7),
        lambda: os.pwrite(os.open(f"/proc/self/fd/{segment.descriptor}", os.O_RDWR), b"x", 0),
    ]
    for attempt in attempts:
        with pytest.raises(PermissionError):
            attempt()
    assert segment.view() == b"weights"


@pytest.mark.long
def test_a_view_is_valid_after_its_segment_is_closed() -> None:
    segment = segment_of(b"weights")
    view = segment.view()
    segment.close()
    del segment
    gc.collect()
    assert view == b"weights"


def test_a_buffer_with_another_reference_is_not_sealed() -> None:
    """The reference could write to the memory; once it is gone, the segment can be sealed."""
    writer = SegmentWriter.prepare(100)
    held = writer.buffer[3:]
    with pytest.raises(InternalError, match="refers to its buffer"):
        writer.seal()
    del held
    assert writer.seal().view() == bytes(100)


def test_writable_memory_is_not_adopted() -> None:
    descriptor = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 8)
    with pytest.raises(MalformedMessage, match="can still be changed"):
        Segment.adopt(descriptor, 8)
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(MalformedMessage, match="not sent as a memory file"):
        Segment.adopt(reading, 8)


def test_a_segment_of_another_size_is_not_adopted() -> None:
    segment = segment_of(b"weights")
    with pytest.raises(MalformedMessage, match="another size"):
        Segment.adopt(os.dup(segment.descriptor), 8)


def test_descriptors_are_closed() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(50):
        segment = segment_of(b"weights")
        with pytest.raises(MalformedMessage):
            Segment.adopt(os.dup(segment.descriptor), 8)
        SegmentWriter(10).close()
        segment.close()
        segment.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def test_a_forked_process_does_not_prevent_sealing_or_freeing() -> None:
    """Data loaders fork while the memory of the next version is already prepared."""
    held, writer = segment_of(b"weights"), SegmentWriter.prepare(100)
    view = held.view()
    numbers = {held.descriptor, writer.descriptor}
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        left = [number for number in numbers if is_open(number)]
        os.write(writing, repr((left, bytes(view))).encode())
        signal.pause()
    try:
        assert os.read(reading, 100) == repr(([], b"weights")).encode()
        assert writer.seal().num_bytes == 100
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)


def test_a_changed_bit_is_found_in_its_chunk() -> None:
    data = bytearray(drawn(2 * CHUNK_BYTES))
    digests = chunk_digests(data)
    data[CHUNK_BYTES + 5] ^= 1
    check_chunk(0, data[:CHUNK_BYTES], digests)
    with pytest.raises(ChecksumMismatch, match="chunk 1"):
        check_chunk(1, data[CHUNK_BYTES:], digests)


def test_received_chunks_are_not_requested_again() -> None:
    data = drawn(3 * CHUNK_BYTES)
    whole = segment_of(data)
    staged = StagedSegment(whole.digest)
    staged.open(whole.chunk_digests, whole.num_bytes)
    assert staged.missing == [0, 1, 2]
    chunk = staged.chunk_buffer(1)
    chunk[:] = data[CHUNK_BYTES : 2 * CHUNK_BYTES]
    staged.verify(1, chunk)
    assert staged.missing == [0, 2]
    assert staged.received_bytes == CHUNK_BYTES


def test_a_segment_whose_chunks_all_arrived_is_not_requested_again() -> None:
    """The first connection breaks between the last chunk and the end. The second one answers
    nothing."""
    whole = segment_of(b"weights")
    staged = StagedSegment(whole.digest)
    reply = FetchSegmentReply(
        num_bytes=whole.num_bytes,
        chunk_digests=whole.chunk_digests,
        transfer=SEGMENT_TRANSFER_CHUNKS,
    )
    own, servers = socket.socketpair()
    with servers, SegmentConnection(own, "the first") as first:
        servers.sendall(bulk.message(FrameKind.MESSAGE, reply.SerializeToString()))
        servers.sendall(bulk.header(FrameKind.CHUNK, num_bytes=whole.num_bytes) + whole.view())
        servers.shutdown(socket.SHUT_WR)
        with pytest.raises(Unavailable, match="the first broke"):
            first.fetch(FetchSegmentRequest(), staged, 10.0)
    own, servers = socket.socketpair()
    servers.close()
    with SegmentConnection(own, "the second") as second:
        assert second.fetch(FetchSegmentRequest(), staged, 10.0).view() == b"weights"


def test_an_offer_stays_as_it_is_if_the_connection_must_not_be_local() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    offer = OpenBulkReply(local_name="name", port=port)
    with pytest.raises(Unavailable):
        SegmentConnection.open(offer, f"127.0.0.1:{port}", may_be_local=False)
    assert offer == OpenBulkReply(local_name="name", port=port)


def test_digests_of_another_segment_are_refused() -> None:
    whole, other = segment_of(b"weights"), segment_of(b"another")
    with pytest.raises(ChecksumMismatch):
        StagedSegment(whole.digest).open(other.chunk_digests, 7)
    with pytest.raises(MalformedMessage):
        StagedSegment(whole.digest).open(bytes(3 * DIGEST_BYTES), 7)


def filled(memory: ReusedMemory, data: bytes) -> ReusedSegment:
    writer = memory.writer(len(data))
    writer.buffer[:] = data
    segment = writer.seal()
    assert isinstance(segment, ReusedSegment)
    return segment


def place_of(segment: Segment) -> int:
    return os.fstat(segment.descriptor).st_ino


@pytest.mark.long
def test_memory_is_reused_once_no_reference_is_left() -> None:
    """References are a segment, a duplicate of it and a view, whichever is released last."""
    memory = ReusedMemory()
    first = filled(memory, b"weights")
    place, digest = place_of(first), first.digest
    view, copy, apart = first.view(), first.duplicate(), first.sealed_copy()
    first.close()
    second = filled(memory, b"WEIGHTS")
    assert place_of(second) != place
    copy.close()
    assert place_of(filled(memory, b"wEIGHTS")) != place
    assert view == b"weights" and view.readonly
    view.release()
    del view
    gc.collect()
    assert place_of(filled(memory, b"Weights")) == place
    assert (second.view(), apart.view(), apart.digest) == (b"WEIGHTS", b"weights", digest)


def test_memory_may_come_back_while_more_is_requested() -> None:
    """Regression: a garbage collection within a request freed the last view, and the thread then
    waited for a lock that it held itself."""
    memory = ReusedMemory()
    done = threading.Event()

    def run() -> None:
        for threshold in range(1, 40):
            cycle: list[object] = [filled(memory, b"weights").view()]
            cycle.append(cycle)
            del cycle
            gc.set_threshold(threshold)
            writer = memory.writer(7)
            gc.set_threshold(*before)
            assert os.fstat(writer.descriptor).st_size == 7
        done.set()

    before = gc.get_threshold()
    try:
        threading.Thread(target=run, daemon=True).start()
        assert done.wait(20.0), "a request for memory waits for ever"
    finally:
        gc.set_threshold(*before)
        gc.collect()


def test_reusable_memory_is_not_shared_with_another_process() -> None:
    segment = filled(ReusedMemory(), b"weights")
    with pytest.raises(MalformedMessage, match="can still be changed"):
        Segment.adopt(os.dup(segment.descriptor), 7)


@pytest.mark.long
def test_memory_of_another_size_or_of_a_closed_owner_is_freed() -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    memory = ReusedMemory()
    for size in (10, 20, 20, 10):
        filled(memory, bytes(size)).close()
        gc.collect()
    late = filled(memory, bytes(10))
    memory.close()
    late.close()
    del late
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
