"""A relay: a reader that passes segments of a series on to other relays, even while they arrive.

It answers `WeightStore.OpenBulk`, and SEGMENT_FETCH on a bulk connection. Segments are requested by
digest, and the receiver verifies them, so that no reader has to trust a relay.
"""

import os
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf.message import DecodeError

from shoal_client.weights.stores import WeightStores
from shoal_proto import CHUNK_BYTES, MAX_MESSAGE_BYTES, bulk
from shoal_proto.bulk import BEAT_S, Frame, FrameKind, FrameReader
from shoal_proto.errors import (
    AccessDenied,
    CertificateRefused,
    MalformedMessage,
    ShoalError,
    Unavailable,
)
from shoal_proto.segments.descriptors import duplicate
from shoal_proto.segments.sealed import Segment
from shoal_proto.segments.transfer import StagedSegment, requested_chunks
from shoal_proto.status import to_detail, to_status
from shoal_proto.tls import identity
from shoal_proto.tls.bulk_offers import BulkOffers, PermittedUse, Purpose
from shoal_proto.tls.channels import add_port
from shoal_proto.tls.names import READER_NAME, Caller, CertificateRole, caller_among
from shoal_proto.tls.sockets import secure_accepted
from shoal_proto.v1.parameters_pb2 import OpenBulkReply
from shoal_proto.v1.weights_pb2 import (
    SEGMENT_TRANSFER_CHUNKS,
    SEGMENT_TRANSFER_DESCRIPTOR,
    CopySegmentsRequest,
    DifferenceRequest,
    FetchSegmentReply,
    FetchSegmentRequest,
    HoldsSegmentsRequest,
    OpenSegmentsRequest,
    StoreServer,
)
from shoal_proto.v1.weights_pb2_grpc import WeightStoreServicer, add_WeightStoreServicer_to_server

log = structlog.get_logger(__name__)

READING = frozenset({CertificateRole.READER, CertificateRole.WORKER, CertificateRole.OPERATOR})
MAX_CONNECTIONS = 32
"""The coordinator lets at most two relays fetch from this one at a time, each four segments at
once."""
HELLO_S = 3.0
IDLE_S = 10.0
"""A connection is closed after this time without a call."""
SEND_S = 10.0
SENT_BYTES = 1024 * 1024
UNKNOWN_S = 0.5
"""Wait for a segment that this relay has not begun to fetch."""
STALLED_S = 10.0
"""Readers get an error if no data arrives for this time."""


class _Memory:
    """Descriptor of a memory file, open while this object is referenced."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = duplicate(descriptor)
        weakref.finalize(self, os.close, self.descriptor)


@dataclass(eq=False)
class _RelayedSegment:
    """A segment to pass on, filled as it arrives."""

    staged: StagedSegment | None = None
    """Set while the segment arrives."""
    memory: _Memory | None = None
    num_bytes: int = 0
    chunk_digests: bytes = b""
    is_whole: bool = False
    is_given_up: bool = False

    def show_arriving(self) -> None:
        staged = self.staged
        if self.memory is None and staged is not None and staged.descriptor is not None:
            self.memory = _Memory(staged.descriptor)
            self.num_bytes = os.fstat(staged.descriptor).st_size
            self.chunk_digests = staged.chunk_digests

    def has(self, index: int) -> bool:
        return self.is_whole or (self.staged is not None and self.staged.has(index))


class Relay(WeightStoreServicer):
    """Serves segments of the version fetched last, and of the one in progress. Thread-safe."""

    def __init__(self, series: str, host: str) -> None:
        """Serve at address `host`, on free ports, until `close`. Raises Unavailable, or
        CertificateRefused if other readers would refuse this certificate."""
        self._series = series
        self._changed = threading.Condition()
        self._segments: dict[bytes, _RelayedSegment] = {}
        self._fetched: set[bytes] = set()
        """Segments that were staged or added since `version` began."""
        self._progress_s = 0.0
        self._offers = BulkOffers()
        self._connections: set[socket.socket] = set()
        self._is_closed = False
        with ExitStack() as stack:
            try:
                self._listeners, name = _listeners(host, stack)
                self._offers.listening(name, self._listeners[0].getsockname()[1])
                options = (
                    ("grpc.so_reuseport", 0),
                    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                    # This package's channels ping every 2 s.
                    ("grpc.http2.min_ping_interval_without_data_ms", 900),
                    ("grpc.keepalive_permit_without_calls", 1),
                )
                pool = ThreadPoolExecutor(2, thread_name_prefix="shoal-relay-calls")
                self._server = grpc.server(
                    pool, options=options, maximum_concurrent_rpcs=2 * MAX_CONNECTIONS
                )
                add_WeightStoreServicer_to_server(self, self._server)
                bracketed = f"[{host}]" if ":" in host else host
                self.address = f"{bracketed}:{add_port(self._server, f'{bracketed}:0')}"
            except (OSError, RuntimeError) as error:
                raise Unavailable(
                    f"a reader of {series} cannot relay",
                    seen=repr(error),
                    expected=f"a free port at {host}",
                ) from error
            self._server.start()
            self._stack = stack.pop_all()
        self._accepting = threading.Thread(target=self._accept, name="shoal-relay", daemon=True)
        self._accepting.start()
        try:
            self._check_certificate()
        except BaseException:
            self.close()
            raise

    def _check_certificate(self) -> None:
        if identity.own() is None:
            return
        with closing(WeightStores(self._series, may_be_local=False, of_relays=True)) as stores:
            try:
                stores.check_reached(StoreServer(id="itself", address=self.address))
            except ShoalError as error:
                raise CertificateRefused(
                    "a relay needs a reader's certificate",
                    seen=str(error),
                    expected=f"one with the name {READER_NAME}, for series {self._series}",
                    fix=f"`shoal certs issue reader --series {self._series}`, or relay=False.",
                ) from error

    # --- from the reader ---

    @contextmanager
    def version(self, digests: Iterable[bytes]) -> Iterator[None]:
        """Replace the held segments by those staged or added within the block, or keep them if the
        block fails. `digests`: the segments that will arrive."""
        before = self._segments
        with self._changed:
            self._segments = {each: _RelayedSegment() for each in digests} | before
            self._fetched = set()
            self._progress_s = time.monotonic()
            self._changed.notify_all()
        try:
            yield
        except BaseException:
            with self._changed:
                for digest in self._segments.keys() - before.keys():
                    self._segments[digest].is_given_up = True
                self._segments = {} if self._is_closed else before
                self._changed.notify_all()
            raise
        with self._changed:
            kept = set[bytes]() if self._is_closed else self._fetched
            self._segments = {d: s for d, s in self._segments.items() if d in kept}

    def staged(self, digest: bytes) -> StagedSegment:
        """Memory for a segment to fetch, which other readers get while it arrives."""

        def progressed() -> None:
            with self._changed:
                if (arriving := announced()) is not None:
                    arriving.show_arriving()
                self._progress_s = time.monotonic()
                self._changed.notify_all()

        staged = StagedSegment(digest, on_progress=progressed)
        with self._changed:
            entry = self._announce(digest)
            entry.staged = staged
            # Weak: a cycle of references would keep the memory of a dropped segment in use until
            # the next garbage collection.
            announced = weakref.ref(entry)
        return staged

    def give_up(self, digest: bytes) -> None:
        """Record that a staged segment will not arrive; waiting readers get an error."""
        with self._changed:
            entry = self._segments.get(digest)
            if entry is not None and not entry.is_whole:
                del self._segments[digest]
                entry.is_given_up = True
                self._changed.notify_all()

    def add(self, segment: Segment) -> None:
        """Pass on a complete, sealed segment."""
        with self._changed:
            entry = self._announce(segment.digest)
            entry.memory = _Memory(segment.descriptor)
            entry.num_bytes, entry.chunk_digests = segment.num_bytes, segment.chunk_digests
            entry.is_whole, entry.staged = True, None
            self._progress_s = time.monotonic()

    def close(self) -> None:
        """Stop serving. Readers fetch the rest from a server. Segments of a fetch in progress are
        held until the end of its `version`."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            self._segments = {}
            for connected in self._connections:
                with suppress(OSError):
                    socket.socket.shutdown(connected, socket.SHUT_RDWR)
            self._changed.notify_all()
        self._server.stop(None)
        for listener in self._listeners:
            with suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._stack.close()

    def _announce(self, digest: bytes) -> _RelayedSegment:
        self._fetched.add(digest)
        self._changed.notify_all()
        return self._segments.setdefault(digest, _RelayedSegment())

    # --- to other readers: over gRPC ---

    def OpenBulk(  # noqa: N802 - the name of the call
        self, request: OpenSegmentsRequest, context: grpc.ServicerContext
    ) -> OpenBulkReply:
        try:
            if request.series != self._series:
                raise _denied(f"series {request.series!r}", f"series {self._series}")
            caller = None if identity.own() is None else self._caller(context)
            with self._changed:
                return self._offers.make(Purpose.SEGMENTS, caller, series=self._series)
        except ShoalError as error:
            code, text, metadata = to_status(error)
            context.set_trailing_metadata(metadata)
            context.abort(code, text)
            raise

    def Holds(  # noqa: N802 - the name of the call
        self, request: HoldsSegmentsRequest, context: grpc.ServicerContext
    ) -> NoReturn:
        _not_served(context)

    def Copy(  # noqa: N802 - the name of the call
        self, request: CopySegmentsRequest, context: grpc.ServicerContext
    ) -> NoReturn:
        _not_served(context)

    def Difference(  # noqa: N802 - the name of the call
        self, request: DifferenceRequest, context: grpc.ServicerContext
    ) -> NoReturn:
        _not_served(context)

    def _caller(self, context: grpc.ServicerContext) -> Caller:
        found: Any = context.auth_context()
        caller = caller_among(found.get("x509_subject_alternative_name", ()))
        job = self._series.partition("/")[0]
        if (
            caller is None
            or caller.role not in READING
            or caller.series not in ("", self._series)
            or caller.job not in ("", job)
            # The certificate of a resumed TLS session was not checked.
            or b"true" in found.get("ssl_session_reused", ())
        ):
            raise _denied(f"the certificate of {caller}", f"one that reads series {self._series}")
        return caller

    # --- to other readers: over bulk connections ---

    def _accept(self) -> None:
        poll = select.poll()
        for listener in self._listeners:
            poll.register(listener, select.POLLIN)
        by_number = {each.fileno(): each for each in self._listeners}
        while True:
            for number, _ in poll.poll():
                try:
                    connected, _ = by_number[number].accept()
                except BlockingIOError:
                    continue
                except OSError as error:
                    if self._is_closed:
                        return
                    log.warning("relay_connection_not_accepted", reason=repr(error))
                    time.sleep(BEAT_S)
                    continue
                with self._changed:
                    if self._is_closed or len(self._connections) >= MAX_CONNECTIONS:
                        connected.close()
                        continue
                    self._connections.add(connected)
                threading.Thread(
                    target=self._serve, args=(connected,), name="shoal-relayed", daemon=True
                ).start()

    def _serve(self, plain: socket.socket) -> None:
        connected = plain
        try:
            plain.settimeout(HELLO_S)
            if plain.family != socket.AF_UNIX:
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected = secure_accepted(plain)
            with self._changed:
                self._connections.discard(plain)
                self._connections.add(connected)
            wire = _Wire(connected)
            use = self._greet(wire)
            while not self._is_closed:
                opening = wire.frame(IDLE_S)
                try:
                    self._answer(wire, use, opening)
                except ShoalError as error:
                    detail = to_detail(error).SerializeToString()
                    wire.send(bulk.message(FrameKind.ERROR, detail))
                    raise
        except (OSError, ShoalError) as error:
            log.debug("relay_connection_ended", series=self._series, reason=repr(error))
        finally:
            with self._changed:
                self._connections -= {plain, connected}
            connected.close()

    def _greet(self, wire: "_Wire") -> PermittedUse:
        key = bytes(wire.frame(HELLO_S).body)
        with self._changed:
            use = self._offers.redeem(key)
        if use is None:
            raise MalformedMessage("a bulk connection with a key that this relay did not give")
        wire.send(bulk.header(FrameKind.HELLO))
        return use

    def _answer(self, wire: "_Wire", use: PermittedUse, opening: Frame) -> None:
        if (
            opening.kind is not FrameKind.SEGMENT_FETCH
            or wire.frame(HELLO_S).kind is not FrameKind.END
        ):
            raise MalformedMessage(
                "a call that a relay does not answer",
                seen=opening.kind.name,
                expected=FrameKind.SEGMENT_FETCH.name,
            )
        try:
            request = FetchSegmentRequest.FromString(bytes(opening.body))
        except DecodeError as error:
            raise MalformedMessage("a request that does not parse", seen=repr(error)) from error
        if request.series != use.series:
            raise _denied(f"series {request.series!r}", f"series {use.series}")
        entry = self._find(request.digest)
        self._wait(wire, entry, lambda: entry.memory is not None)
        assert entry.memory is not None
        as_descriptor = wire.is_local and request.takes_descriptor
        wanted = () if as_descriptor else requested_chunks(request, entry.num_bytes)
        reply = FetchSegmentReply(
            num_bytes=entry.num_bytes,
            chunk_digests=entry.chunk_digests,
            transfer=SEGMENT_TRANSFER_DESCRIPTOR if as_descriptor else SEGMENT_TRANSFER_CHUNKS,
        )
        wire.send(bulk.message(FrameKind.MESSAGE, reply.SerializeToString()))
        if as_descriptor:
            self._wait(wire, entry, lambda: entry.is_whole)
            socket.send_fds(
                wire.socket, [bulk.header(FrameKind.DESCRIPTOR)], [entry.memory.descriptor]
            )
        self._send_chunks(wire, entry, entry.memory, wanted)
        wire.send(bulk.header(FrameKind.END))

    def _send_chunks(
        self, wire: "_Wire", entry: _RelayedSegment, memory: _Memory, wanted: Sequence[range]
    ) -> None:
        for index in (index for each in wanted for index in each):
            self._wait(wire, entry, partial(entry.has, index))
            start = index * CHUNK_BYTES
            size = min(CHUNK_BYTES, entry.num_bytes - start)
            wire.send(bulk.header(FrameKind.CHUNK, offset_bytes=start, num_bytes=size))
            wire.send_part(memory.descriptor, start, size)

    def _find(self, digest: bytes) -> _RelayedSegment:
        with self._changed:
            self._changed.wait_for(lambda: digest in self._segments or self._is_closed, UNKNOWN_S)
            entry = self._segments.get(digest)
        if entry is None:
            raise Unavailable(
                f"this relay does not hold the segment of series {self._series}",
                seen=f"digest {digest.hex()}",
                expected="a segment of the version that it has, or fetches",
                details={"digest": digest.hex()},
            )
        return entry

    def _wait(self, wire: "_Wire", entry: _RelayedSegment, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` is true; send beats meanwhile. Raises Unavailable if no data
        arrives for STALLED_S, the fetch was given up, or the relay is closed."""
        while True:
            with self._changed:
                if self._changed.wait_for(condition, BEAT_S):
                    return
                is_late = time.monotonic() >= self._progress_s + STALLED_S
                if entry.is_given_up or is_late or self._is_closed:
                    raise Unavailable(
                        f"a segment of series {self._series} does not arrive at this relay",
                        expected=f"some of it within {STALLED_S:g} s",
                    )
            wire.send(bulk.header(FrameKind.BEAT))


class _Wire:
    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self.is_local = connected.family == socket.AF_UNIX
        self._reader = FrameReader(first=FrameKind.HELLO)
        self._part = bytearray(SENT_BYTES)

    def frame(self, within_s: float) -> Frame:
        """Raises OSError, also after `within_s` or a close by the other end."""
        self.socket.settimeout(within_s)
        while (frame := self._reader.next()) is None:
            count = self.socket.recv_into(self._reader.space())
            if not count:
                raise ConnectionResetError("the other end closed the connection")
            self._reader.received(count)
        return frame

    def send(self, data: bytes | memoryview) -> None:
        self.socket.settimeout(SEND_S)
        self.socket.sendall(data)

    def send_part(self, descriptor: int, start: int, num_bytes: int) -> None:
        """Send a part of a memory file through a buffer. (`sendfile` would leave pages of the file
        in the network's queues, and meanwhile the file could not be sealed.)"""
        for at in range(start, start + num_bytes, SENT_BYTES):
            buffer = memoryview(self._part)[: min(SENT_BYTES, start + num_bytes - at)]
            os.preadv(descriptor, [buffer], at)
            self.send(buffer)


def _listeners(host: str, stack: ExitStack) -> tuple[list[socket.socket], str]:
    """Open a TCP port and an abstract Unix socket; return both, and the Unix socket's name."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    remote = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
    remote.bind((host, 0))
    local = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    name = f"shoal-{token_hex(16)}"
    local.bind(f"\0{name}")
    for listener in (remote, local):
        listener.listen(MAX_CONNECTIONS)
        listener.setblocking(False)
    return [remote, local], name


def _not_served(context: grpc.ServicerContext) -> NoReturn:
    context.abort(grpc.StatusCode.UNIMPLEMENTED, "a relay serves segments only")


def _denied(seen: str, expected: str) -> AccessDenied:
    return AccessDenied(
        "a relay serves only its own series, to readers that may read it",
        seen=seen,
        expected=expected,
    )
