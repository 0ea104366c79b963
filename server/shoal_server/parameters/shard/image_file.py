"""A shard's image as one safetensors file: its tensors, and everything else as metadata."""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence

from google.protobuf.message import DecodeError
from safetensors import SafetensorError
from safetensors.torch import load

from shoal_proto.errors import SnapshotDamaged
from shoal_proto.pieces import Buffer
from shoal_proto.v1 import replication_pb2 as pb
from shoal_server.parameters.images.image import Image, LoadedImage, TensorStream
from shoal_server.parameters.images.tensor_bytes import DTYPES, as_bytes

METADATA_KEY = "shoal.image"
"""A ShardImage without its tensors, serialized, in base 64."""
PLACEMENT_KEY = "shoal.run"
MAX_METADATA_BYTES = 64 * 1024 * 1024
_LENGTH_BYTES = 8
_DTYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "uint8": "U8",
    "bool": "BOOL",
}


def pieces(image: Image, placement_id: str = "") -> Iterator[Buffer]:
    """Yield the file in pieces, each read when it is requested. Equal images give equal bytes."""
    header = pb.ShardImage(
        shard_id=image.shard_id,
        version=image.version,
        kind=image.kind,
        spec=image.spec,
        sessions=image.sessions,
    )
    return _pieces(header, image.streams(), placement_id)


def _pieces(
    header: pb.ShardImage, streams: Sequence[TensorStream], placement_id: str
) -> Iterator[Buffer]:
    """Tensors with the largest elements come first, so that every tensor is aligned."""
    text = base64.b64encode(header.SerializeToString(deterministic=True)).decode()
    metadata = {METADATA_KEY: text} | ({PLACEMENT_KEY: placement_id} if placement_id else {})
    entries: dict[str, object] = {"__metadata__": metadata}
    streams = sorted(streams, key=lambda s: (-DTYPES[s.described.dtype].itemsize, s.described.name))
    end = 0
    for each in (stream.described for stream in streams):
        start, end = end, end + each.num_bytes
        entries[each.name] = {
            "dtype": _DTYPE_NAMES[each.dtype],
            "shape": list(each.shape),
            "data_offsets": [start, end],
        }
    written = json.dumps(entries, separators=(",", ":")).encode()
    written += b" " * (-len(written) % _LENGTH_BYTES)
    yield len(written).to_bytes(_LENGTH_BYTES, "little")
    yield written
    for stream in streams:
        for piece in stream.pieces:
            data: Buffer = as_bytes(piece).numpy().data
            yield data


class DigestingReader:
    """Passes pieces of a file on, and computes their total size and digest."""

    def __init__(self, pieces: Iterator[Buffer]) -> None:
        self._pieces = pieces
        self._hash = hashlib.sha256()
        self.num_bytes = 0

    def __iter__(self) -> Iterator[Buffer]:
        for piece in self._pieces:
            self._hash.update(piece)
            self.num_bytes += len(piece)
            yield piece

    @property
    def sha256(self) -> str:
        """Digest of all pieces, as `digest` returns it."""
        return self._hash.hexdigest()


def digest(data: bytes) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def from_bytes(data: bytes, *, sha256: str, file: str, shard_id: int) -> LoadedImage:
    """Decode a file that `pieces` wrote. Raises SnapshotDamaged if the digest differs, or `data`
    are not the image of this shard."""
    seen = digest(data)
    if seen != sha256:
        raise _damaged(file, shard_id, f"SHA-256 {seen} of {len(data)} bytes", sha256)
    try:
        metadata = _metadata(data)
        header = pb.ShardImage.FromString(base64.b64decode(metadata[METADATA_KEY]))
        tensors = load(data)
    except (ValueError, KeyError, TypeError, DecodeError, SafetensorError) as error:
        raise _damaged(file, shard_id, repr(error)[:200], "the image of a shard") from error
    if header.shard_id != shard_id:
        raise _damaged(file, shard_id, f"shard {header.shard_id}", f"shard {shard_id}")
    return LoadedImage(
        kind=header.kind,
        shard_id=header.shard_id,
        version=header.version,
        spec=header.spec,
        tensors=tensors,
        sessions=tuple(header.sessions),
        placement_id=metadata.get(PLACEMENT_KEY, ""),
    )


def _metadata(data: bytes) -> dict[str, str]:
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > MAX_METADATA_BYTES:
        raise ValueError(f"a header of {length} bytes; expected at most {MAX_METADATA_BYTES}")
    header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + length])
    metadata: dict[str, str] = header["__metadata__"]
    return metadata


def _damaged(file: str, shard_id: int, seen: str, expected: str) -> SnapshotDamaged:
    return SnapshotDamaged(
        f"the file {file} of shard {shard_id} is not what was written",
        seen=seen,
        expected=expected,
        fix="Restore another snapshot.",
        details={"file": file, "shard": str(shard_id)},
    )
