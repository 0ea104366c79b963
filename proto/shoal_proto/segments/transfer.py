"""The caller's side of segment transfers over a bulk connection. Blocks."""

import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from shoal_proto import CHUNK_BYTES, bulk
from shoal_proto.bulk import SILENCE_S, Frame, FrameKind, FrameReader
from shoal_proto.bulk_opening import connect_to_offer, present_key
from shoal_proto.errors import (
    DeadlineExceeded,
    InvalidSpec,
    MalformedMessage,
    ShoalError,
    Unavailable,
)
from shoal_proto.segments.descriptors import is_out_of_descriptors, no_descriptor, receive_into
from shoal_proto.segments.digests import check_chunk, check_root, chunks_of, num_chunks
from shoal_proto.segments.sealed import Segment, SegmentWriter
from shoal_proto.status import from_detail
from shoal_proto.tls.names import SERVER_NAME
from shoal_proto.tls.sockets import secured
from shoal_proto.v1.identity_pb2 import ErrorDetail
from shoal_proto.v1.parameters_pb2 import OpenBulkReply
from shoal_proto.v1.weights_pb2 import (
    SEGMENT_TRANSFER_CHUNKS,
    SEGMENT_TRANSFER_DESCRIPTOR,
    SEGMENT_TRANSFER_NONE,
    ChunkRange,
    FetchSegmentReply,
    FetchSegmentRequest,
    PutSegmentReply,
    PutSegmentRequest,
)

AHEAD = 2

M = TypeVar("M", bound=Message)


def _nothing() -> None:
    pass


class StagedSegment:
    """A segment that is being received, possibly over several connections."""

    def __init__(
        self,
        digest: bytes,
        wanted: Sequence[range] = (),
        new_writer: Callable[[int], SegmentWriter] = SegmentWriter,
        on_progress: Callable[[], object] = _nothing,
    ) -> None:
        """`wanted`: ranges of chunk indices, in rising order; empty: all. `new_writer` returns
        memory of a given size. `on_progress` is called when the segment is open, after each chunk,
        and for each BEAT of the sender."""
        self.digest = digest
        self._on_progress = on_progress
        self._new_writer = new_writer
        self.wanted = wanted
        self.received_bytes = 0
        self.chunk_digests = b""
        self._writer: SegmentWriter | None = None
        self._verified: set[int] = set()
        self._buffers: list[memoryview] = []

    def open(self, of_chunks: bytes, num_bytes: int) -> None:
        """Verify a holder's chunk digests; the first call allocates the memory. Raises
        MalformedMessage, ChecksumMismatch, or Overloaded if there is no memory."""
        check_root(of_chunks, num_bytes, self.digest)
        if self._writer is None:
            self._writer, self.chunk_digests = self._new_writer(num_bytes), of_chunks
            self._on_progress()

    @property
    def descriptor(self) -> int | None:
        """Descriptor of the memory that receives the segment; None before `open`."""
        return None if self._writer is None else self._writer.descriptor

    def has(self, index: int) -> bool:
        """True if the chunk has arrived, and is verified."""
        return index in self._verified

    @property
    def missing(self) -> list[int]:
        """Indices of the wanted chunks that are not verified yet; empty before `open`."""
        if self._writer is None:
            return []
        last = num_chunks(self._writer.num_bytes)
        wanted = self.wanted or [range(last)]
        return [i for each in wanted for i in each if i < last and i not in self._verified]

    @property
    def is_complete(self) -> bool:
        """True once all wanted chunks are verified; False before `open`."""
        return self._writer is not None and not self.missing

    def chunk_buffer(self, index: int) -> memoryview:
        """Return a chunk's memory."""
        assert self._writer is not None
        start = index * CHUNK_BYTES
        view = self._writer.buffer[start : start + CHUNK_BYTES]
        self._buffers.append(view)
        return view

    def populate(self, index: int) -> None:
        """Prepare the memory for a chunk. Raises Overloaded if there is not enough."""
        assert self._writer is not None
        start = index * CHUNK_BYTES
        self._writer.populate(start, min(CHUNK_BYTES, self._writer.num_bytes - start))

    def progressed(self) -> None:
        """Note a BEAT of the sender. A relay's BEAT means that the relay itself still receives
        bytes."""
        self._on_progress()

    def verify(self, index: int, chunk: memoryview) -> None:
        """Verify a chunk that has arrived, and count it. Raises ChecksumMismatch."""
        check_chunk(index, chunk, self.chunk_digests)
        self._verified.add(index)
        self.received_bytes += len(chunk)
        self._on_progress()

    def seal(self) -> Segment:
        """Return the sealed segment, and release all buffers of `chunk_buffer`. Call it only if no
        chunk is `missing`."""
        assert self._writer is not None
        # A failed connection's error may refer to these views, which would prevent sealing.
        for view in self._buffers:
            view.release()
        return self._writer.seal(self.chunk_digests, is_whole=not self.wanted)

    def close(self) -> None:
        """Discard the chunks that have arrived."""
        if self._writer is not None:
            self._writer.close()


class SegmentConnection:
    """A connection for one call at a time, on one thread. Unusable after an error."""

    def __init__(
        self, connected: socket.socket, address: str, *, chunk_within_s: float | None = None
    ) -> None:
        """Takes ownership of the socket, on which a server has accepted the key."""
        self._socket = connected
        self._chunk_within_s = chunk_within_s
        self._on_beat: Callable[[], object] = _nothing
        self._address = address
        self.is_local = connected.family == socket.AF_UNIX
        """True if descriptors can be passed."""
        self._reader = FrameReader(self._buffer_for)
        self._next_buffer: Callable[[int], memoryview] | None = None
        self._descriptors: list[int] = []
        connected.settimeout(SILENCE_S)

    @classmethod
    def open(
        cls,
        offer: OpenBulkReply,
        address: str,
        *,
        may_be_local: bool = True,
        name: str = SERVER_NAME,
        chunk_within_s: float | None = None,
    ) -> "SegmentConnection":
        """Connect to the server that made the offer. Raises Unavailable, ChecksumMismatch for a
        damaged answer, or Overloaded if this process can open no further file.

        `address`: host:port of its gRPC service. `name`: the name that its TLS certificate must
        have. `may_be_local`: False to use TCP on this host too. `chunk_within_s`: for a relay, the
        longest time until the next frame, BEAT included; None for a server. If a relay passes a
        descriptor, the chunk digests are computed here; those of a server are trusted.
        """
        try:
            if not offer.port:
                raise ConnectionRefusedError("the server accepts no bulk connections")
            reachable = OpenBulkReply()
            reachable.CopyFrom(offer)
            if not may_be_local:
                reachable.local_name = ""
            connected = secured(connect_to_offer(reachable, address), name)
            try:
                present_key(connected, offer.key, 0)
                return cls(connected, address, chunk_within_s=chunk_within_s)
            except BaseException:
                connected.close()
                raise
        except (OSError, MalformedMessage) as error:
            if is_out_of_descriptors(error):
                raise no_descriptor(error.errno) from error
            raise Unavailable(
                f"no bulk connection to the parameter server or relay at {address}",
                seen=repr(error),
                expected=f"its port {offer.port} to be reachable from this host",
                fix="Weights are sent over this port only. Open it in the firewall. A parameter"
                " server's --bulk-port sets its number; a relay takes a free port.",
            ) from error

    @property
    def is_open(self) -> bool:
        """True unless the server has closed the connection. Valid only between calls."""
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return not waiting.poll(0)

    def __enter__(self) -> "SegmentConnection":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def abort(self) -> None:
        """Make another thread's call fail; that thread closes the connection."""
        with suppress(OSError):
            # SSLSocket.shutdown would also turn TLS off: the other thread would read encrypted
            # bytes.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. Call it on the thread that made the calls."""
        self._socket.close()
        self._drop_descriptors()

    def put(
        self, request: PutSegmentRequest, segment: Segment, timeout_s: float
    ) -> PutSegmentReply:
        """Send a segment unless the server has it. Returns once the server holds the segment and
        has forwarded it; the reply names its holders.

        `timeout_s`: limit of the whole call; a silent server may delay the error by up to twice
        SILENCE_S. Raises what the server raises, MalformedMessage, Unavailable or DeadlineExceeded.
        """
        give_up_s = time.monotonic() + timeout_s
        sent = PutSegmentRequest()
        sent.CopyFrom(request)
        sent.chunk_digests = segment.chunk_digests if self.is_local else b""
        try:
            self._send(bulk.message(FrameKind.SEGMENT_PUT, sent.SerializeToString()))
            transfer = self._message(PutSegmentReply, give_up_s).transfer
            if transfer == SEGMENT_TRANSFER_DESCRIPTOR and self.is_local:
                head = bulk.header(FrameKind.DESCRIPTOR)
                socket.send_fds(self._socket, [head], [segment.descriptor])
            elif transfer == SEGMENT_TRANSFER_CHUNKS:
                self._send_chunks(segment, give_up_s)
            elif transfer != SEGMENT_TRANSFER_NONE:
                raise self._malformed(f"transfer {transfer}", "NONE, DESCRIPTOR or CHUNKS")
            self._send(bulk.header(FrameKind.END))
            reply = self._message(PutSegmentReply, give_up_s)
            self._end(give_up_s)
            return reply
        except OSError as error:
            raise self._error_of_failed_send(error) from error

    def fetch(
        self, request: FetchSegmentRequest, staged: StagedSegment, timeout_s: float
    ) -> Segment:
        """Fetch a segment: as a descriptor from a server on this host, else as verified chunks.
        `timeout_s`: longest time until the next chunk.

        Raises what the server raises, ChecksumMismatch, MalformedMessage, Overloaded (no memory),
        Unavailable or DeadlineExceeded. After an error, `staged` may continue over another
        connection.
        """
        if staged.is_complete:
            return staged.seal()
        give_up_s = time.monotonic() + timeout_s
        sent = FetchSegmentRequest()
        sent.CopyFrom(request)
        sent.takes_descriptor = self.is_local
        missing = staged.missing
        self._on_beat = staged.progressed
        wanted = _ranges(missing) if missing else staged.wanted
        sent.chunks.extend(ChunkRange(start=each.start, stop=each.stop) for each in wanted)
        try:
            opening = bulk.message(FrameKind.SEGMENT_FETCH, sent.SerializeToString())
            self._send(opening + bulk.header(FrameKind.END))
            reply = self._message(FetchSegmentReply, give_up_s)
            if reply.transfer == SEGMENT_TRANSFER_DESCRIPTOR:
                check_root(reply.chunk_digests, reply.num_bytes, staged.digest)
                segment: Segment | None = self._adopt(reply, give_up_s, staged.digest)
            elif reply.transfer == SEGMENT_TRANSFER_CHUNKS:
                staged.open(reply.chunk_digests, reply.num_bytes)
                self._receive(staged, timeout_s)
                give_up_s = time.monotonic() + timeout_s
                segment = None
            else:
                raise self._malformed(f"transfer {reply.transfer}", "DESCRIPTOR or CHUNKS")
            self._end(give_up_s)
            # Sealed last: if this connection fails before, another can still complete the segment.
            return segment if segment is not None else staged.seal()
        except OSError as error:
            raise self._broken(repr(error)) from error
        finally:
            self._on_beat = _nothing

    # --- receiving ---

    def _adopt(self, reply: FetchSegmentReply, give_up_s: float, digest: bytes) -> Segment:
        frame = self._frame(give_up_s)
        if frame.kind is not FrameKind.DESCRIPTOR or not self._descriptors:
            seen = f"{frame.kind.name} with {len(self._descriptors)} descriptors"
            raise self._malformed(seen, "DESCRIPTOR with one descriptor")
        descriptor = self._descriptors.pop(0)
        self._drop_descriptors()
        if self._chunk_within_s is None:
            # The publisher digested write-protected memory, and the server checked the seals.
            return Segment.adopt(descriptor, reply.num_bytes, of_chunks=reply.chunk_digests)
        segment = Segment.adopt(descriptor, reply.num_bytes)
        try:
            check_root(segment.chunk_digests, segment.num_bytes, digest)
        except ShoalError:
            segment.close()
            raise
        return segment

    def _receive(self, staged: StagedSegment, timeout_s: float) -> None:
        checks: deque[Future[None]] = deque()
        missing = staged.missing
        try:
            with (
                ThreadPoolExecutor(1, thread_name_prefix="shoal-digests") as pool,
                ThreadPoolExecutor(1, thread_name_prefix="shoal-memory") as memory,
            ):
                for number, index in enumerate(missing):
                    first = number + AHEAD if number else 1
                    for later in missing[first : number + AHEAD + 1]:
                        checks.append(memory.submit(staged.populate, later))
                    buffer = staged.chunk_buffer(index)
                    self._next_buffer = partial(self._checked_buffer, buffer)
                    frame = self._frame(time.monotonic() + timeout_s)
                    if (
                        frame.kind is not FrameKind.CHUNK
                        or frame.offset_bytes != index * CHUNK_BYTES
                    ):
                        seen = f"{frame.kind.name} at {frame.offset_bytes}"
                        raise self._malformed(seen, f"CHUNK at {index * CHUNK_BYTES}")
                    checks.append(pool.submit(staged.verify, index, buffer))
                    while checks and checks[0].done():
                        checks.popleft().result()
            for check in checks:
                check.result()
        finally:
            self._next_buffer = None

    def _checked_buffer(self, buffer: memoryview, num_bytes: int) -> memoryview:
        if num_bytes != len(buffer):
            raise self._malformed(
                f"a chunk of {num_bytes} bytes", f"a chunk of {len(buffer)} bytes"
            )
        return buffer

    def _buffer_for(self, num_bytes: int) -> memoryview:
        if self._next_buffer is None:
            raise self._malformed("a chunk that was not requested", "no chunk at this point")
        return self._next_buffer(num_bytes)

    # --- frames ---

    def _message(self, kind: type[M], give_up_s: float) -> M:
        frame = self._frame(give_up_s)
        if frame.kind is not FrameKind.MESSAGE:
            raise self._malformed(frame.kind.name, kind.__name__)
        return self._parsed(frame, kind)

    def _parsed(self, frame: Frame, kind: type[M]) -> M:
        try:
            return kind.FromString(bytes(frame.body))
        except DecodeError as error:
            raise self._malformed(repr(error), kind.__name__) from error

    def _end(self, give_up_s: float) -> None:
        if (frame := self._frame(give_up_s)).kind is not FrameKind.END:
            raise self._malformed(frame.kind.name, "END")

    def _frame(self, give_up_s: float) -> Frame:
        """Return the next frame other than BEAT. Raises the error in an ERROR frame,
        DeadlineExceeded, Unavailable, MalformedMessage, and OSError after SILENCE_S."""
        while True:
            until_s = give_up_s
            if self._chunk_within_s is not None:
                until_s = min(give_up_s, time.monotonic() + self._chunk_within_s)
            while (frame := self._reader.next()) is None:
                self._check_time(until_s)
                self._fill()
            if frame.kind is FrameKind.ERROR:
                raise from_detail(self._parsed(frame, ErrorDetail))
            if frame.kind is not FrameKind.BEAT:
                return frame
            self._on_beat()
            self._check_time(give_up_s)

    def _fill(self) -> None:
        with self._reader.space() as space:
            if self.is_local:
                # Without space for a descriptor, the kernel drops it.
                count, descriptors = receive_into(self._socket, space)
                self._descriptors += descriptors
            else:
                count = self._socket.recv_into(space)
        if not count:
            raise self._broken("the server closed it")
        self._reader.received(count)

    def _send(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            view = view[self._socket.send(view) :]

    def _send_chunks(self, segment: Segment, give_up_s: float) -> None:
        with open(segment.descriptor, "rb", buffering=0, closefd=False) as file:
            for index, chunk in enumerate(chunks_of(segment.view())):
                self._check_time(give_up_s)
                start = index * CHUNK_BYTES
                self._send(bulk.header(FrameKind.CHUNK, offset_bytes=start, num_bytes=len(chunk)))
                if isinstance(self._socket, ssl.SSLSocket):
                    self._send(chunk)
                else:
                    self._socket.sendfile(file, start, len(chunk))

    def _error_of_failed_send(self, error: OSError) -> ShoalError:
        try:
            self._frame(time.monotonic() + SILENCE_S)
        except ShoalError as reason:
            return reason
        except OSError:
            return self._broken(repr(error))
        return self._broken(repr(error))

    def _check_time(self, give_up_s: float) -> None:
        if time.monotonic() >= give_up_s:
            raise DeadlineExceeded(
                f"the server at {self._address} did not answer in time",
                expected="the next part of the segment within the time limit",
            )

    def _drop_descriptors(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()

    def _malformed(self, seen: str, expected: str) -> MalformedMessage:
        return MalformedMessage(
            f"the server at {self._address} sent an unexpected frame in the transfer of a segment",
            seen=seen,
            expected=expected,
        )

    def _broken(self, seen: str) -> ShoalError:
        return Unavailable(
            f"the bulk connection to {self._address} broke",
            seen=seen,
            expected="the rest of the transfer",
            fix="Try again. If it breaks again, look at the log of that server.",
        )


def _ranges(indices: Sequence[int]) -> list[range]:
    found: list[range] = []
    for index in indices:
        if found and found[-1].stop == index:
            found[-1] = range(found[-1].start, index + 1)
        else:
            found.append(range(index, index + 1))
    return found


def requested_chunks(request: FetchSegmentRequest, num_bytes: int) -> Sequence[range]:
    """Return the requested chunks of a segment; all if none are named. Raises InvalidSpec for
    chunks that are not in the segment or not in rising order."""
    last = num_chunks(num_bytes)
    requested = [range(each.start, each.stop) for each in request.chunks] or [range(last)]
    rising = [0, *(bound for each in requested for bound in (each.start, each.stop)), last]
    if rising != sorted(rising):
        raise InvalidSpec(
            "the requested chunks are not in the segment, or not in rising order",
            seen=", ".join(f"{each.start} to {each.stop}" for each in requested[:10]),
            expected=f"rising numbers, at most {last}",
        )
    return requested
