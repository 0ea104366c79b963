"""Encoding and decoding of the messages between servers.

Pieces of large data have checksums unless they are in shared memory.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from shoal_proto import pieces
from shoal_proto.checksum import crc32, verify
from shoal_proto.errors import MalformedMessage, Overloaded
from shoal_proto.v1 import parameters_pb2
from shoal_proto.v1 import replication_pb2 as pb
from shoal_server.core.replication.protocol.messages import (
    CopyUpToDate,
    ImageChunk,
    ImageStart,
    Key,
    Offer,
    Request,
    UpdateMessage,
)
from shoal_server.parameters.comparison import digest as comparison
from shoal_server.parameters.shard.memory import Memory
from shoal_server.parameters.shard.record import UpdateRecord

PIECE_BYTES = 2 * 1024 * 1024
INLINE_BYTES = 128 * 1024
"""Largest gradient within the message that announces it."""
MAX_RECORD_BYTES = 8 * 1024**3
PART_BYTES = 128
MAX_CHUNK_BYTES = 64 * 1024 * 1024
Arriving = pb.FollowRequest | pieces.OnlyPiece


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of the record or chunk that was announced last, at an offset."""

    offset_bytes: int
    data: memoryview

    @property
    def checksum(self) -> int:
        """CRC-32 of the data, computed on access."""
        return crc32(self.data)


Frame = pb.FollowRequest | Piece


def of_offer(offer: Offer) -> pb.FollowRequest:
    job, shard_id = offer.key
    message = pb.Offer(
        job=job, shard_id=shard_id, epoch=offer.epoch, born=offer.born, run=offer.placement_id
    )
    return pb.FollowRequest(offer=message)


def of_continue(request: CopyUpToDate) -> pb.FollowRequest:
    job, shard_id = request.key
    message = pb.Continue(
        job=job,
        shard_id=shard_id,
        epoch=request.epoch,
        version=request.version,
        run=request.placement_id,
    )
    return pb.FollowRequest(continuation=message)


def of_record(
    job: str,
    shard_id: int,
    epoch: int,
    record: UpdateRecord,
    inline_bytes: int = INLINE_BYTES,
    *,
    answer_may_wait: bool = False,
) -> Iterator[Frame]:
    """Yield the messages that carry a push to a backup."""
    data = memoryview(record.data)
    message = pb.FollowRequest()
    start = message.record
    start.job, start.shard_id, start.epoch, start.num_bytes = job, shard_id, epoch, len(data)
    start.answer_may_wait = answer_may_wait
    start.record.CopyFrom(record.push)
    if len(data) <= min(inline_bytes, INLINE_BYTES):
        start.first.data = bytes(data)
        start.first.checksum = crc32(data)
        data = data[:0]
    yield message
    yield from _pieces(data)


def of_image_start(start: ImageStart, header: pb.CutHeader) -> pb.FollowRequest:
    message = pb.ImageStart(
        job=start.key[0],
        epoch=start.epoch,
        born=start.born,
        image=start.image,
        next_chunk=start.next_chunk,
        num_chunks=start.num_chunks,
        cut=header,
        run=start.placement_id,
    )
    return pb.FollowRequest(image=message)


def of_chunk(chunk: ImageChunk, data: pieces.Buffer) -> Iterator[Frame]:
    job, shard_id = chunk.key
    start = pb.ChunkStart(
        job=job, shard_id=shard_id, image=chunk.image, index=chunk.index, num_bytes=len(data)
    )
    yield pb.FollowRequest(chunk=start)
    yield from _pieces(memoryview(data))


def of_digest(key: Key, epoch: int, digest: comparison.PieceDigest) -> pb.FollowRequest:
    """Encode the digest of a piece of a shard."""
    job, shard_id = key
    piece = digest.piece
    message = pb.Digest(
        job=job,
        shard_id=shard_id,
        epoch=epoch,
        version=digest.version,
        part=piece.part,
        start=piece.start,
        stop=piece.stop,
        row_ids=piece.row_ids,
        checksum=digest.checksum,
    )
    return pb.FollowRequest(digest=message)


def to_digest(message: pb.Digest) -> comparison.PieceDigest:
    """Decode a digest that `of_digest` encoded."""
    piece = comparison.DigestRange(
        part=message.part, start=message.start, stop=message.stop, row_ids=message.row_ids
    )
    return comparison.PieceDigest(version=message.version, piece=piece, checksum=message.checksum)


def _pieces(data: memoryview) -> Iterator[Piece]:
    for at in range(0, len(data), PIECE_BYTES):
        part = data[at : at + PIECE_BYTES]
        yield Piece(at, part)


def as_message(frame: Frame) -> pb.FollowRequest:
    """Return a frame for the gRPC stream."""
    if not isinstance(frame, Piece):
        return frame
    data = bytes(frame.data)
    piece = parameters_pb2.Piece(
        offset_bytes=frame.offset_bytes, data=data, checksum=frame.checksum
    )
    return pb.FollowRequest(bytes=piece)


def checked(message: pieces.AnyPiece) -> pieces.Buffer:
    """Return the bytes of a message. Raises ChecksumMismatch."""
    # Each access to the data of a message copies them.
    data = message.data
    verify("a piece of a shard for its backup", message.checksum, data)
    return data


@dataclass(frozen=True, slots=True)
class ArrivedRequest:
    """A complete request, with its data."""

    request: Request
    push: pb.PushRecord | None = None
    """Record of an update, without its gradient; None for other requests or dropped data."""
    header: pb.CutHeader | None = None
    parts: Sequence[pieces.Buffer] = ()
    why_dropped: str = ""
    is_borrowed: bool = False
    """True if the sender soon reuses the memory of a record's data; see `owned`."""

    def owned(self) -> "ArrivedRequest":
        """Return the same request with copies of its data."""
        return replace(self, parts=[bytes(part) for part in self.parts], is_borrowed=False)

    def record(self) -> UpdateRecord:
        """Return the push with its gradient in one buffer."""
        assert self.push is not None
        data = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
        return UpdateRecord(self.push, data)


@dataclass(slots=True)
class _Unfinished:
    arrived: ArrivedRequest
    left_bytes: int
    memory: Memory | None
    """Memory of the server; None for a chunk, whose memory was reserved before."""
    parts: list[pieces.Buffer] = field(default_factory=list)
    held_bytes: int = 0
    uncounted_bytes: int = 0
    """Bytes not reserved yet. Data within the announcing message are never dropped: the primary
    relies on that."""
    why_dropped: str = ""
    is_borrowed: bool = False

    def add(self, data: pieces.Buffer, *, is_lent: bool = False) -> None:
        """Memory is reserved only as data arrive, since announced data may never be sent."""
        self.left_bytes -= len(data)
        if not data or self.why_dropped:
            return
        is_borrowed = is_lent and self.arrived.push is not None
        is_borrowed = is_borrowed and not (self.left_bytes or self.parts)
        # A record in shared memory must not be dropped: its sender counts it as received.
        if not is_borrowed and not self._count(len(data) + PART_BYTES):
            return
        if is_borrowed:
            self.is_borrowed = True
        elif is_lent:
            data = bytes(data)
        self.parts.append(data)

    def announce(self) -> None:
        """Count the memory of an incomplete record's first message: it may have many row ids."""
        if self.arrived.push is not None:
            self._count(self.arrived.push.ByteSize())

    def _count(self, num_bytes: int) -> bool:
        if self.memory is None:
            return True
        self.uncounted_bytes += num_bytes
        if self.uncounted_bytes <= INLINE_BYTES + PART_BYTES:
            return True
        try:
            self.memory.reserve(self.uncounted_bytes, "an update from a shard's primary")
        except Overloaded as error:
            self.drop(str(error))
            return False
        self.held_bytes += self.uncounted_bytes
        self.uncounted_bytes = 0
        return True

    def drop(self, why: str) -> None:
        self.parts.clear()
        self.arrived = replace(self.arrived, push=None)
        self.why_dropped = why
        self.give_back()

    def give_back(self) -> None:
        if self.memory is not None:
            self.memory.settle(self.held_bytes, is_held=False)
        self.held_bytes = 0

    def whole(self) -> ArrivedRequest:
        self.give_back()
        return ArrivedRequest(
            self.arrived.request,
            push=self.arrived.push,
            header=self.arrived.header,
            parts=self.parts or [b""],
            why_dropped=self.why_dropped,
            is_borrowed=self.is_borrowed,
        )


class RequestAssembler:
    """Assembles the messages of one stream into requests. Holds at most one record or chunk."""

    def __init__(self, memory: Memory, is_coming: Callable[[Key, int], bool]) -> None:
        """`is_coming`: True if the image with that number is being received. Chunks of other images
        are dropped."""
        self._memory = memory
        self._is_coming = is_coming
        self._open: _Unfinished | None = None

    def close(self) -> None:
        """Drop an incomplete record or chunk at the stream's end."""
        if self._open is not None:
            self._open.drop("the stream is over")

    def take(self, request: Arriving) -> ArrivedRequest | None:
        """Add a message; return a completed request. Raises MalformedMessage, ChecksumMismatch."""
        if isinstance(request, pieces.OnlyPiece):
            return self._add(checked(request.piece), is_lent=request.piece.is_shared)
        kind = request.WhichOneof("part")
        if kind == "bytes":
            return self._add(checked(request.bytes))
        if self._open is not None:
            raise MalformedMessage(
                "a record or chunk begins before the previous one is complete",
                seen=f"{self._open.left_bytes} missing bytes",
                expected="all bytes of the previous one",
            )
        if kind == "record":
            return self._begin_record(request.record)
        if kind == "chunk":
            return self._begin_chunk(request.chunk)
        return _small(request, kind or "nothing")

    def _begin_record(self, start: pb.RecordStart) -> ArrivedRequest | None:
        _check_size(start.num_bytes, MAX_RECORD_BYTES)
        key = start.job, start.shard_id
        record = UpdateMessage(key, start.epoch, start.record.version, start.answer_may_wait)
        arrived = ArrivedRequest(record, push=start.record)
        self._open = _Unfinished(arrived, start.num_bytes, self._memory)
        whole = self._add(checked(start.first))
        if self._open is not None:
            self._open.announce()
        return whole

    def _begin_chunk(self, start: pb.ChunkStart) -> ArrivedRequest | None:
        _check_size(start.num_bytes, MAX_CHUNK_BYTES)
        chunk = ImageChunk((start.job, start.shard_id), start.image, start.index)
        self._open = _Unfinished(ArrivedRequest(chunk), start.num_bytes, memory=None)
        if not self._is_coming(chunk.key, chunk.image):
            self._open.drop("no such image is being received")
        return self._add(b"")

    def _add(self, data: pieces.Buffer, *, is_lent: bool = False) -> ArrivedRequest | None:
        unfinished = self._open
        if unfinished is None or len(data) > unfinished.left_bytes:
            raise MalformedMessage(
                "bytes that no message announced",
                seen=f"{len(data)} bytes",
                expected=f"at most {unfinished.left_bytes if unfinished else 0}",
            )
        unfinished.add(data, is_lent=is_lent)
        if unfinished.left_bytes:
            return None
        self._open = None
        return unfinished.whole()


def _small(request: pb.FollowRequest, kind: str) -> ArrivedRequest:
    if kind == "offer":
        offer = request.offer
        return ArrivedRequest(
            Offer((offer.job, offer.shard_id), offer.epoch, offer.born, offer.run)
        )
    if kind == "continuation":
        message = request.continuation
        key = message.job, message.shard_id
        return ArrivedRequest(CopyUpToDate(key, message.epoch, message.version, message.run))
    if kind == "image":
        image = request.image
        start = ImageStart(
            (image.job, image.cut.shard_id),
            image.epoch,
            image.born,
            image.image,
            image.cut.version,
            image.num_chunks,
            image.next_chunk,
            image.run,
        )
        return ArrivedRequest(start, header=image.cut)
    raise MalformedMessage(
        "a message that does not belong here",
        seen=kind,
        expected="an offer, a continuation, a record, an image, a chunk, or bytes of one",
    )


def _check_size(num_bytes: int, most_bytes: int) -> None:
    if num_bytes > most_bytes:
        raise MalformedMessage(
            "a record or chunk is too large",
            seen=f"{num_bytes} bytes",
            expected=f"at most {most_bytes}",
        )
