"""Records and images as messages of a stream, and back; what is large goes in checked pieces."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal_proto import pieces
from shoal_proto.checksum import crc32
from shoal_proto.errors import ChecksumMismatch, MalformedMessage
from shoal_proto.v1 import replication_pb2 as pb
from shoal_server.parameters.image import Image, Record

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


def of_record(job: str, shard_id: int, epoch: int, record: Record) -> Iterator[Frame]:
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
    content: Record | Image


@dataclass(slots=True)
class _Unfinished:
    start: pb.RecordStart | pb.ImageStart
    left_bytes: int
    parts: list[pieces.Buffer] = field(default_factory=list)


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
            self._open = _Unfinished(request.record, request.record.num_bytes)
            return self._add(checked(request.record.first))
        if kind == "image":
            if request.image.num_bytes > MAX_IMAGE_BYTES:
                raise MalformedMessage(
                    "an image is too large",
                    seen=f"{request.image.num_bytes} bytes",
                    expected=f"at most {MAX_IMAGE_BYTES}",
                )
            self._open = _Unfinished(request.image, request.image.num_bytes)
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
        unfinished.left_bytes -= len(data)
        if data:
            unfinished.parts.append(data)
        if unfinished.left_bytes:
            return None
        self._open = None
        start, parts = unfinished.start, unfinished.parts
        if isinstance(start, pb.RecordStart):
            joined = parts[0] if len(parts) == 1 else b"".join(parts)
            return Arrived(start.job, start.shard_id, start.epoch, Record(start.record, joined))
        return Arrived(start.job, start.image.shard_id, start.epoch, _image(start.image, parts))


def _image(header: pb.ShardImage, parts: Sequence[pieces.Buffer]) -> Image:
    whole = memoryview(bytearray().join(parts))
    tensors, at = {}, 0
    for description in header.tensors:
        dtype = _DTYPES.get(description.dtype)
        shape = tuple(description.shape)
        stop = at + description.num_bytes
        if dtype is None or stop > len(whole):
            raise _wrong(description, len(whole))
        flat = torch.frombuffer(whole[at:stop], dtype=torch.uint8) if stop > at else torch.empty(0)
        try:
            tensors[description.name] = _aligned(flat, dtype).reshape(shape)
        except RuntimeError as error:
            raise _wrong(description, len(whole)) from error
        at = stop
    return Image(
        kind=header.kind,
        shard_id=header.shard_id,
        version=header.version,
        spec=header.spec,
        tensors=tensors,
        sessions=list(header.sessions),
    )


def _aligned(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes as numbers, in memory of their own."""
    if flat.numel() == 0:
        return torch.empty(0, dtype=dtype)
    return flat.clone().view(dtype)


def _wrong(description: pb.TensorImage, num_bytes: int) -> MalformedMessage:
    return MalformedMessage(
        f"tensor {description.name} of an image does not fit its description",
        seen=f"{description.dtype} {list(description.shape)} in {description.num_bytes} bytes",
        expected=f"a tensor within the image's {num_bytes} bytes",
    )
