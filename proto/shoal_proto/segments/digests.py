"""Digests of a segment: xxh3-128 of each chunk, and of these digests together."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from xxhash import xxh3_128_digest

from shoal_proto import CHUNK_BYTES
from shoal_proto.errors import ChecksumMismatch, MalformedMessage
from shoal_proto.pieces import Buffer

DIGEST_BYTES = 16
AT_ONCE = 4
"""Maximum number of chunks digested at once: a few cores use all of the memory's bandwidth."""


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
    """Return the concatenated digests of all chunks of a segment's bytes."""
    threads = min(AT_ONCE, os.cpu_count() or 1, num_chunks(len(memoryview(data))) // 2)
    if threads < 2:
        return b"".join(map(chunk_digest, chunks_of(data)))
    with ThreadPoolExecutor(threads, thread_name_prefix="shoal-digests") as pool:
        return b"".join(pool.map(chunk_digest, chunks_of(data)))


class DigestsInOrder:
    """Digests of memory that is being written in order, computed on threads meanwhile. A chunk
    that was just written is still in a cache."""

    def __init__(self, data: memoryview, protect: Callable[[int, int], object]) -> None:
        """`protect(start, num_bytes)` write-protects a chunk, before it is digested."""
        self._protect = protect
        self._chunks = list(chunks_of(data))
        # Half of the processors are left to the writer.
        threads = max(min(AT_ONCE, (os.cpu_count() or 1) // 2), 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shoal-digests")
        self._digests: list[Future[bytes]] = []

    def advance(self, num_bytes: int) -> None:
        """Digest the chunks within the first `num_bytes`, which are written."""
        while (number := len(self._digests)) < len(self._chunks):
            chunk = self._chunks[number]
            start = number * CHUNK_BYTES
            if start + len(chunk) > num_bytes:
                return
            self._protect(start, len(chunk))
            self._digests.append(self._pool.submit(chunk_digest, chunk))

    def result(self) -> bytes:
        """Return the concatenated digests of all chunks, once all are written. Nothing refers to
        the memory afterwards."""
        try:
            return b"".join(each.result() for each in self._digests)
        finally:
            self.close()

    def close(self) -> None:
        """End the threads, and release the memory."""
        self._pool.shutdown(cancel_futures=True)
        for chunk in self._chunks:
            chunk.release()
        self._chunks = []


def root_digest(of_chunks: bytes) -> bytes:
    """Return the digest of a segment, from the digests of its chunks."""
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
    """Raise MalformedMessage or ChecksumMismatch unless `of_chunks` are the digests of the chunks
    of a segment of `num_bytes` with the digest `expected`."""
    if len(of_chunks) != num_chunks(num_bytes) * DIGEST_BYTES:
        raise MalformedMessage(
            "the digests of chunks do not match the segment's size",
            seen=f"{len(of_chunks)} bytes of digests for a segment of {num_bytes} bytes",
            expected=f"{DIGEST_BYTES} bytes for each {CHUNK_BYTES} bytes",
        )
    if (seen := root_digest(of_chunks)) != expected:
        raise ChecksumMismatch(
            "a segment has another digest than the requested one",
            seen=f"digest {seen.hex()}",
            expected=expected.hex(),
        )
