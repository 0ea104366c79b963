"""A shard's image as one safetensors file: its tensors, and the rest of it in the metadata."""

import base64
import hashlib
import json

from google.protobuf.message import DecodeError
from safetensors import SafetensorError
from safetensors.torch import load, save

from shoal_proto.errors import SnapshotDamaged
from shoal_proto.v1.replication_pb2 import ShardImage
from shoal_server.parameters.shard.image import Image

METADATA_KEY = "shoal.image"
"""A ShardImage without its tensors, serialized, in base 64."""
MAX_METADATA_BYTES = 64 * 1024 * 1024
_LENGTH_BYTES = 8


def to_bytes(image: Image) -> bytes:
    """The file. The same image gives the same bytes."""
    header = ShardImage(
        shard_id=image.shard_id,
        version=image.version,
        kind=image.kind,
        spec=image.spec,
        sessions=image.sessions,
    )
    text = base64.b64encode(header.SerializeToString(deterministic=True)).decode()
    return save(dict(image.tensors), metadata={METADATA_KEY: text})


def digest(data: bytes) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def from_bytes(data: bytes, *, sha256: str, file: str, shard_id: int) -> Image:
    """The image that `to_bytes` wrote into a file of that checksum.

    Raises SnapshotDamaged, naming file and shard, for any other bytes.
    """
    seen = digest(data)
    if seen != sha256:
        raise _damaged(file, shard_id, f"SHA-256 {seen} of {len(data)} bytes", sha256)
    try:
        header = ShardImage.FromString(base64.b64decode(_metadata(data)[METADATA_KEY]))
        tensors = load(data)
    except (ValueError, KeyError, TypeError, DecodeError, SafetensorError) as error:
        raise _damaged(file, shard_id, repr(error)[:200], "the image of a shard") from error
    if header.shard_id != shard_id:
        raise _damaged(file, shard_id, f"shard {header.shard_id}", f"shard {shard_id}")
    return Image(
        kind=header.kind,
        shard_id=header.shard_id,
        version=header.version,
        spec=header.spec,
        tensors=tensors,
        sessions=tuple(header.sessions),
    )


def _metadata(data: bytes) -> dict[str, str]:
    """The format: eight bytes with the length of a JSON header, the header, the tensors."""
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
