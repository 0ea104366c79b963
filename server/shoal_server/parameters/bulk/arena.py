"""Memory shared with one client."""

import fcntl
import mmap
import os
from collections.abc import Sequence

import torch

from shoal_proto import bulk
from shoal_proto.bulk import FrameKind
from shoal_proto.checksum import crc32
from shoal_proto.errors import MalformedMessage
from shoal_server.parameters.shard.reply_writer import CopyOut, cut

LARGE_BYTES = 64 * 1024


class SharedArena:
    """Shared memory of a sealed size. A client that could shrink it could crash the server."""

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError if the system refuses the memory."""
        self.num_bytes = num_bytes
        self.descriptor = os.memfd_create("shoal-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, num_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
            self._memory = memoryview(mmap.mmap(self.descriptor, num_bytes))
        except OSError:
            os.close(self.descriptor)
            raise

    def close_descriptor(self) -> None:
        """Close the descriptor; the client has its own. The memory lives as long as its views."""
        os.close(self.descriptor)

    def view(self, at: int, num_bytes: int) -> memoryview:
        """Part of the memory. Raises MalformedMessage for a range outside of it."""
        if at + num_bytes > self.num_bytes:
            raise MalformedMessage(
                "a frame reaches beyond the shared memory",
                seen=f"bytes {at} to {at + num_bytes}",
                expected=f"at most {self.num_bytes}",
            )
        return self._memory[at : at + num_bytes]


def writer_into(slot: memoryview, at: int) -> CopyOut:
    """Return a function that copies a shard's values, one after the other, to the start of `slot`,
    and returns the PLACED frame. `at`: the slot's first byte in the shared memory."""

    def write(shard_id: int, *values: memoryview) -> Sequence[bytes]:
        size = 0
        for buffer in values:
            if len(buffer):
                _copy(slot[size : size + len(buffer)], buffer)
            size += len(buffer)
        if not size:
            return []
        return [bulk.header(FrameKind.PLACED, shard_id=shard_id, num_bytes=size, at=at)]

    return write


def _copy(into: memoryview, data: memoryview) -> None:
    if len(data) < LARGE_BYTES:
        into[:] = data
        return
    # torch releases the GIL while it copies.
    torch.frombuffer(into, dtype=torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))


def in_frames(shard_id: int, *values: memoryview) -> Sequence[bytes]:
    """Copies of the values as PIECE frames: a header and the bytes of each piece in turn."""
    frames: list[bytes] = []
    for start, piece in cut(values):
        data = bytes(piece)
        head = bulk.header(
            FrameKind.PIECE,
            shard_id=shard_id,
            offset_bytes=start,
            num_bytes=len(data),
            checksum=crc32(data),
        )
        frames += (head, data)
    return frames
