"""Records and images as messages of a stream, and back; what is large goes in checked pieces."""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal_proto import pieces
from shoal_proto.checksum import crc32
from shoal_proto.errors import ChecksumMismatch, MalformedMessage
from shoal_proto.v1 import replication_pb2 as pb
from shoal_server.parameters.shard.image import Image, UpdateRecord

PIECE_BYTES = 1024 * 1024
INLINE_BYTES = 64 * 1024
"""A gradient of so many goes with the message that announces it."""
BYTES = 4
"""Number of the field `bytes` in FollowRequest."""
DECODER = pieces.Decoder(BYTES, pb.FollowRequest.FromString)
MAX_IMAGE_BYTES = 8 * 1024**3
Arriving = pb.FollowRequest | pieces.OnlyPiece
"""What comes in of a stream."""
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.uint8,
        torch.bool,
    )
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some bytes of the record or image that was announced last."""

    offset_bytes: int
    data: memoryview
    checksum: int


Frame = pb.FollowRequest | Chunk
"""What goes out in a stream."""


def of_record(job: str, shard_id: int, epoch: int, record: UpdateRecord) -> Iterator[Frame]:
    """The messages that tell a backup of a push."""
    data = memoryview(record.data)
    start = pb.RecordStart(
        job=job, shard_id=shard_id, epoch=epoch, record=record.push, num_bytes=len(data)
    )
    if len(data) <= INLINE_BYTES:
        start.first.data = bytes(data)
        start.first.checksum = crc32(data)
        data = data[:0]
    yield pb.FollowRequest(record=start)
    yield from _pieces(data)


def of_image(job: str, epoch: int, image: Image) -> Iterator[Frame]:
    """The messages that give a backup the whole shard."""
    header = pb.ShardImage(
        shard_id=image.shard_id,
        version=image.version,
        kind=image.kind,
        spec=image.spec,
        tensors=[
            pb.TensorImage(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tensor.shape,
                num_bytes=tensor.nbytes,
            )
            for name, tensor in image.tensors.items()
        ],
        sessions=image.sessions,
    )
    start = pb.ImageStart(job=job, epoch=epoch, image=header, num_bytes=image.num_bytes)
    yield pb.FollowRequest(image=start)
    for tensor in image.tensors.values():
        yield from _pieces(bytes_of(tensor))


def bytes_of(tensor: Tensor) -> memoryview:
    """The tensor's own memory."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _pieces(data: memoryview) -> Iterator[Chunk]:
    for at in range(0, len(data), PIECE_BYTES):
        part = data[at : at + PIECE_BYTES]
        yield Chunk(at, part, crc32(part))


def serialize(frame: Frame) -> bytes:
    """The message for gRPC; each byte of a chunk is copied once."""
    if isinstance(frame, Chunk):
        return pieces.encode(BYTES, 0, frame.offset_bytes, (frame.data,), frame.checksum)
    return frame.SerializeToString()


def checked(message: pb.Bytes | pieces.AnyPiece) -> pieces.Buffer:
    """The bytes. Raises ChecksumMismatch if they are not those that were sent."""
    data = message.data
    seen = crc32(data)
    if seen != message.checksum:
        raise ChecksumMismatch(
            "a piece of a shard changed on its way to the backup",
            seen=f"CRC-32 {seen:#010x} of {len(data)} bytes",
            expected=f"{message.checksum:#010x}",
        )
    return data


@dataclass(frozen=True, slots=True)
class Arrived:
    """A whole record or image."""

    job: str
    shard_id: int
    epoch: int
    content: UpdateRecord | Image


class _Unfinished(Protocol):
    """A record or an image of which more bytes are to come."""

    left_bytes: int

    def add(self, data: pieces.Buffer) -> None:
        """Take the next bytes, at most as many as are left."""
        ...

    def whole(self) -> Arrived:
        """What has come, once nothing is left."""
        ...


class _UnfinishedRecord:
    def __init__(self, start: pb.RecordStart) -> None:
        self.left_bytes = start.num_bytes
        self._start = start
        self._parts: list[pieces.Buffer] = []

    def add(self, data: pieces.Buffer) -> None:
        self._parts.append(data)
        self.left_bytes -= len(data)

    def whole(self) -> Arrived:
        start, parts = self._start, self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        return Arrived(start.job, start.shard_id, start.epoch, UpdateRecord(start.record, data))


class _UnfinishedImage:
    """Every byte goes to its place in its tensor as it comes: nothing is left to do at the end,
    when a gigabyte would hold up all that the process does."""

    def __init__(self, start: pb.ImageStart) -> None:
        """Raises MalformedMessage for tensors that cannot be, or do not make up the image."""
        header = start.image
        num_bytes = sum(description.num_bytes for description in header.tensors)
        if start.num_bytes > MAX_IMAGE_BYTES or num_bytes != start.num_bytes:
            raise MalformedMessage(
                "an image is too large, or not as large as its tensors",
                seen=f"{start.num_bytes} bytes, {num_bytes} in tensors",
                expected=f"at most {MAX_IMAGE_BYTES}, all in tensors",
            )
        self.left_bytes = start.num_bytes
        self._start = start
        self._tensors = {each.name: _unset(each, num_bytes) for each in header.tensors}
        self._rooms = deque(bytes_of(t) for t in self._tensors.values() if t.nbytes)

    def add(self, data: pieces.Buffer) -> None:
        self.left_bytes -= len(data)
        rest = memoryview(data)
        while rest:
            room = self._rooms.popleft()
            size = min(len(room), len(rest))
            room[:size] = rest[:size]
            rest = rest[size:]
            if size < len(room):
                self._rooms.appendleft(room[size:])

    def whole(self) -> Arrived:
        header = self._start.image
        image = Image(
            kind=header.kind,
            shard_id=header.shard_id,
            version=header.version,
            spec=header.spec,
            tensors=self._tensors,
            sessions=list(header.sessions),
        )
        return Arrived(self._start.job, header.shard_id, self._start.epoch, image)


class Assembly:
    """Puts the messages of one stream together again, never holding more than one record or image
    of the size that its start gave."""

    def __init__(self) -> None:
        self._open: _Unfinished | None = None

    def take(self, request: Arriving) -> Arrived | None:
        """What has become whole with this message. Raises MalformedMessage, ChecksumMismatch."""
        if isinstance(request, pieces.OnlyPiece):
            return self._add(checked(request.piece))
        kind = request.WhichOneof("part")
        if kind == "bytes":
            return self._add(checked(request.bytes))
        if self._open is not None:
            raise MalformedMessage(
                "another record begins within one",
                seen=f"{self._open.left_bytes} bytes short",
                expected="all of its bytes first",
            )
        if kind == "record":
            self._open = _UnfinishedRecord(request.record)
            return self._add(checked(request.record.first))
        if kind == "image":
            self._open = _UnfinishedImage(request.image)
            return self._add(b"")
        raise MalformedMessage(
            "a message that does not belong here",
            seen=str(kind),
            expected="a record, an image, or bytes of one",
        )

    def _add(self, data: pieces.Buffer) -> Arrived | None:
        unfinished = self._open
        if unfinished is None or len(data) > unfinished.left_bytes:
            raise MalformedMessage(
                "bytes that nobody announced",
                seen=f"{len(data)} bytes",
                expected=f"at most {unfinished.left_bytes if unfinished else 0}",
            )
        if data:
            unfinished.add(data)
        if unfinished.left_bytes:
            return None
        self._open = None
        return unfinished.whole()


def _unset(description: pb.TensorImage, image_bytes: int) -> Tensor:
    """Memory for a tensor of an image. Nobody sees it before it is filled."""
    dtype = _DTYPES.get(description.dtype)
    shape = tuple(description.shape)
    if dtype is None or math.prod(shape) * dtype.itemsize != description.num_bytes:
        raise _wrong(description, image_bytes)
    try:
        return torch.empty(shape, dtype=dtype)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise _wrong(description, image_bytes) from error


def _wrong(description: pb.TensorImage, num_bytes: int) -> MalformedMessage:
    return MalformedMessage(
        f"tensor {description.name} of an image does not fit its description",
        seen=f"{description.dtype} {list(description.shape)} in {description.num_bytes} bytes",
        expected=f"a tensor within the image's {num_bytes} bytes",
    )
