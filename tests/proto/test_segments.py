"""Sealed segments: immutable, verified, and shared without a copy."""

import ctypes
import errno
import gc
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

from shoal_proto import CHUNK_BYTES, bulk
from shoal_proto.bulk import FrameKind
from shoal_proto.errors import (
    ChecksumMismatch,
    InternalError,
    MalformedMessage,
    Overloaded,
    Unavailable,
)
from shoal_proto.segments import sealed
from shoal_proto.segments.descriptors import lacks_descriptor, receive_into
from shoal_proto.segments.digests import (
    DIGEST_BYTES,
    check_chunk,
    check_root,
    chunk_digests,
    chunks_of,
    root_digest,
)
from shoal_proto.segments.mapped import HUGE_BYTES, HUGE_FROM_BYTES, make_huge, map_file
from shoal_proto.segments.reused import ReusedMemory, ReusedSegment
from shoal_proto.segments.sealed import Segment, SegmentWriter
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


@contextmanager
def no_further_file() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("opened", ["new", "duplicate", "received"])
def test_a_segment_without_a_descriptor_is_refused_with_the_limit(opened: str) -> None:
    """The kernel drops a received descriptor without an error."""
    sender, receiver = socket.socketpair()
    with sender, receiver, closing(segment_of(b"abc")) as segment:
        socket.send_fds(sender, [b"!"], [segment.descriptor])
        with no_further_file(), pytest.raises(Overloaded, match=r"limit is 0; .*ulimit") as error:
            if opened == "new":
                SegmentWriter(3)
            elif opened == "duplicate":
                segment.duplicate()
            else:
                receive_into(receiver, memoryview(bytearray(1)))
    assert lacks_descriptor(error.value)


def test_the_error_without_a_descriptor_names_the_process_and_the_limit_of_its_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server's error is read at the publisher, whose own limit is another."""

    def refuse(*_: object) -> NoReturn:
        raise OSError(errno.ENFILE, "the table is full")

    with monkeypatch.context() as patch, pytest.raises(Overloaded) as error:
        patch.setattr(os, "getpid", lambda: 17)
        patch.setattr(os, "memfd_create", refuse)
        SegmentWriter(3)
    assert f"process 17 on host {socket.gethostname()} cannot open a file" in str(error.value)
    assert "of the whole host" in error.value.seen and "fs.file-max" in error.value.fix
    assert not lacks_descriptor(error.value), "this process"


def test_a_segment_is_digested_after_the_script_has_ended() -> None:
    """A publication of the last statement goes on while the process ends."""
    code = (
        "import atexit\n"
        "from shoal_proto.segments.digests import chunk_digests\n"
        "atexit.register(lambda: print(len(chunk_digests(bytes(40 << 20)))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert (done.stdout, done.stderr) == (f"{5 * DIGEST_BYTES}\n", "")


def test_digests_of_chunks_of_another_segment_are_refused() -> None:
    """The error names the digests, and no request: a publisher may have sent them as well."""
    of_chunks = chunk_digests(b"one")
    check_root(of_chunks, 3, root_digest(of_chunks))
    with pytest.raises(ChecksumMismatch, match="do not belong to the segment's digest") as raised:
        check_root(of_chunks, 3, root_digest(chunk_digests(b"two")))
    assert "request" not in str(raised.value)


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


def collapses() -> bool:
    """True if this kernel gives a memory file huge pages when it is asked to."""
    with SegmentMemory(HUGE_FROM_BYTES) as descriptor:
        flags, prot = mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE
        return make_huge(
            map_file(descriptor, HUGE_FROM_BYTES, prot=prot, flags=flags), 0, HUGE_FROM_BYTES
        )


class SegmentMemory:
    """A memory file without any wrapper."""

    def __init__(self, num_bytes: int) -> None:
        self._descriptor = os.memfd_create("memory", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, num_bytes)

    def __enter__(self) -> int:
        return self._descriptor

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)


def mappings_of_segments() -> str:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return "\n".join(line for line in lines if "memfd:shoal-segment" in line)


def huge_kb_of_mapped_segments() -> int:
    mappings = Path("/proc/self/smaps").read_text().split("memfd:shoal-segment")[1:]
    return sum(int(each.split("ShmemPmdMapped:")[1].split()[0]) for each in mappings)


def test_large_segments_have_huge_pages_without_a_system_setting() -> None:
    """Huge pages are mapped in each process: an aligned part of the address space is needed."""
    if not collapses():
        pytest.skip("this kernel collapses no memory files")
    num_bytes = HUGE_FROM_BYTES + HUGE_BYTES // 2
    writer = SegmentWriter.prepare(num_bytes)
    assert huge_kb_of_mapped_segments() == HUGE_FROM_BYTES // 1024
    writer.buffer[:] = b"x" * num_bytes
    assert writer.populate(HUGE_BYTES, HUGE_BYTES)
    segment = writer.seal()
    assert huge_kb_of_mapped_segments() == HUGE_FROM_BYTES // 1024, "digested in huge pages"
    private = segment.private_memory()
    assert private == b"x" * num_bytes
    assert huge_kb_of_mapped_segments() == 2 * HUGE_FROM_BYTES // 1024
    private[HUGE_BYTES] = 0
    assert segment.view() == b"x" * num_bytes


def test_parts_that_are_populated_again_keep_their_content() -> None:
    """A chunk that arrived before its connection broke is populated again for the rest."""
    data = drawn(HUGE_FROM_BYTES)
    writer = SegmentWriter(HUGE_FROM_BYTES)
    writer.buffer[: 3 * HUGE_BYTES] = data[: 3 * HUGE_BYTES]
    for start in (0, HUGE_BYTES + 4096, 2 * HUGE_BYTES):
        writer.populate(start, 2 * HUGE_BYTES)
    writer.buffer[3 * HUGE_BYTES :] = data[3 * HUGE_BYTES :]
    assert writer.seal().view() == data


def test_a_kernel_without_huge_pages_populates_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def refused(*part: object) -> bool:
        attempts.append(part)
        return False

    monkeypatch.setattr(sealed, "make_huge", refused)
    writer = SegmentWriter(HUGE_FROM_BYTES)
    assert writer.populate(0, HUGE_BYTES)
    assert writer.populate(HUGE_BYTES, HUGE_BYTES)
    assert len(attempts) == 1, "asked again after a refusal"


def test_a_forked_process_does_not_unmap_what_it_has_not_inherited() -> None:
    """The addresses of a writer are free in a forked process, and may be used for something
    else."""
    writer = SegmentWriter(HUGE_BYTES)
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(writer.buffer))
    child = os.fork()
    if not child:
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x100000  # MAP_FIXED_NOREPLACE
        other = libc.mmap(
            ctypes.c_void_p(address),
            ctypes.c_size_t(HUGE_BYTES),
            mmap.PROT_READ | mmap.PROT_WRITE,
            flags,
            -1,
            ctypes.c_long(0),
        )
        writer.close()
        del writer
        gc.collect()
        ctypes.memset(other, 1, HUGE_BYTES)
        os._exit(0 if other == address else 1)
    _, status = os.waitpid(child, 0)
    assert status == 0


@pytest.mark.parametrize("num_bytes", [1, CHUNK_BYTES, 2 * CHUNK_BYTES + 17])
def test_digests_in_place_are_those_of_the_whole(num_bytes: int) -> None:
    data = drawn(num_bytes)
    writer = SegmentWriter(num_bytes)
    writer.buffer[:] = data
    found = writer.digest_in_place()
    assert found == chunk_digests(data)
    assert " rw-s " not in mappings_of_segments(), "digested memory is write-protected"
    assert writer.seal(found).digest == root_digest(found)


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


def test_a_fetch_may_take_longer_than_its_limit_while_chunks_arrive() -> None:
    whole = segment_of(drawn(4 * CHUNK_BYTES))
    reply = FetchSegmentReply(
        num_bytes=whole.num_bytes,
        chunk_digests=whole.chunk_digests,
        transfer=SEGMENT_TRANSFER_CHUNKS,
    )
    own, servers = socket.socketpair()
    limit_s, has_ended = 1.5, threading.Event()

    def send() -> None:
        servers.sendall(bulk.message(FrameKind.MESSAGE, reply.SerializeToString()))
        for index, chunk in enumerate(chunks_of(whole.view())):
            has_ended.wait(limit_s / 3)
            start = index * CHUNK_BYTES
            servers.sendall(bulk.header(FrameKind.CHUNK, offset_bytes=start, num_bytes=len(chunk)))
            servers.sendall(chunk)
        servers.sendall(bulk.header(FrameKind.END))

    with (
        servers,
        ThreadPoolExecutor(1) as pool,
        SegmentConnection(own, "the server") as connection,
    ):
        sent = pool.submit(send)
        staged = StagedSegment(whole.digest)
        try:
            found = connection.fetch(FetchSegmentRequest(), staged, limit_s)
        finally:
            has_ended.set()
            own.close()
        sent.result(10.0)
        assert found.view() == whole.view()


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
