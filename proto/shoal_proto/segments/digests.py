"""Digests of a segment: xxh3-128 of each chunk, and of these digests together."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from xxhash import xxh3_128_digest

from shoal_proto import CHUNK_BYTES
from shoal_proto.errors import ChecksumMismatch, MalformedMessage
from shoal_proto.pieces import Buffer

DIGEST_BYTES = 16
AT_ONCE = 4
"""A few cores use all of the memory's bandwidth."""


def num_chunks(num_bytes: int) -> int:
    """Return the number of chunks of a segment of `num_bytes`."""
    return -(-num_bytes // CHUNK_BYTES)


def chunks_of(data: Buffer) -> Iterator[memoryview]:
    """Yield the chunks of a segment's bytes, in order."""
    view = memoryview(data)
    for start in range(0, len(view), CHUNK_BYTES):
        yield view[start : start + CHUNK_BYTES]


def chunk_digest(chunk: Buffer) -> bytes:
    """Return the digest of one chunk."""
    return xxh3_128_digest(chunk)


def chunk_digests(data: Buffer) -> bytes:
    """Return the digests of all chunks, concatenated."""
    threads = min(AT_ONCE, os.cpu_count() or 1, num_chunks(len(memoryview(data))) // 2)
    if threads > 1:
        # Python starts no task of a pool once the script has ended, but a publication goes on.
        with (
            suppress(RuntimeError),
            ThreadPoolExecutor(threads, thread_name_prefix="shoal-digests") as pool,
        ):
            return b"".join(pool.map(chunk_digest, chunks_of(data)))
    return b"".join(map(chunk_digest, chunks_of(data)))


def root_digest(of_chunks: bytes) -> bytes:
    """Return the digest of a segment with these chunk digests."""
    return xxh3_128_digest(of_chunks)


def check_chunk(index: int, chunk: Buffer, of_chunks: bytes) -> None:
    """Raise ChecksumMismatch if the bytes do not have the digest of chunk `index`."""
    expected = of_chunks[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]
    seen = chunk_digest(chunk)
    if seen != expected:
        raise ChecksumMismatch(
            f"chunk {index} of a segment changed in transit",
            seen=f"digest {seen.hex()}",
            expected=expected.hex(),
        )


def check_root(of_chunks: bytes, num_bytes: int, expected: bytes) -> None:
    """Raise MalformedMessage or ChecksumMismatch unless `of_chunks` are the chunk digests of this
    segment. `expected`: the segment's digest."""
    if len(of_chunks) != num_chunks(num_bytes) * DIGEST_BYTES:
        raise MalformedMessage(
            "the digests of chunks do not match the segment's size",
            seen=f"{len(of_chunks)} bytes of digests for a segment of {num_bytes} bytes",
            expected=f"{DIGEST_BYTES} bytes for each {CHUNK_BYTES} bytes",
        )
    if (seen := root_digest(of_chunks)) != expected:
        raise ChecksumMismatch(
            "the digests of a segment's chunks do not belong to the segment's digest",
            seen=f"digest {seen.hex()}",
            expected=expected.hex(),
        )
