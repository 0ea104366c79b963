"""CRC-32, as zlib computes it, at memory speed."""

from isal.isal_zlib import crc32

from shoal_proto.errors import ChecksumMismatch
from shoal_proto.pieces import Buffer

__all__ = ["crc32", "verify"]


def verify(what: str, checksum: int | None, *buffers: Buffer) -> None:
    """Raise ChecksumMismatch, naming `what`, unless the concatenated buffers have this checksum.
    `checksum` None: data in shared memory, without a checksum."""
    if checksum is None:
        return
    seen = num_bytes = 0
    for buffer in buffers:
        seen = crc32(buffer, seen)
        num_bytes += memoryview(buffer).nbytes
    if seen != checksum:
        raise ChecksumMismatch(
            f"{what} changed in transit",
            seen=f"CRC-32 {seen:#010x} of {num_bytes} bytes",
            expected=f"{checksum:#010x}",
        )
