"""Memory that one client and this server share."""

import fcntl
import mmap
import os
from collections.abc import Sequence

import torch

from shoal_proto import bulk
from shoal_proto.bulk import Kind
from shoal_proto.checksum import crc32
from shoal_proto.errors import MalformedMessage
from shoal_server.parameters.shard.reply_writer import CopyOut, cut

LARGE_BYTES = 64 * 1024
"""From so many on, other threads may run while they are copied."""


class SharedArena:
    """Its size is sealed: a client that could shrink it would crash the server that reads it."""

    def __init__(self, num_bytes: int) -> None:
        """Raises OSError if the system gives no such memory."""
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
        """The client has its own. The memory stays as long as anything lies in it."""
        os.close(self.descriptor)

    def view(self, at: int, num_bytes: int) -> memoryview:
        """Raises MalformedMessage for what is not in it."""
        if at + num_bytes > self.num_bytes:
            raise MalformedMessage(
                "a frame reaches beyond the shared memory",
                seen=f"bytes {at} to {at + num_bytes}",
                expected=f"at most {self.num_bytes}",
            )
        return self._memory[at : at + num_bytes]


def in_place(room: memoryview, at: int) -> CopyOut:
    """Copies the values into `room`, which begins at `at` of the shared memory."""

    def write(shard_id: int, *values: memoryview) -> Sequence[bytes]:
        size = 0
        for buffer in values:
            if len(buffer):
                _copy(room[size : size + len(buffer)], buffer)
            size += len(buffer)
        if not size:
            return []
        return [bulk.header(Kind.PLACED, shard_id=shard_id, num_bytes=size, at=at)]

    return write


def _copy(into: memoryview, data: memoryview) -> None:
    if len(data) < LARGE_BYTES:
        into[:] = data
        return
    # torch copies without holding the interpreter up.
    torch.frombuffer(into, dtype=torch.uint8).copy_(torch.frombuffer(data, dtype=torch.uint8))


def in_frames(shard_id: int, *values: memoryview) -> Sequence[bytes]:
    """Pieces to be sent as they are."""
    frames: list[bytes] = []
    for start, piece in cut(values):
        data = bytes(piece)
        head = bulk.header(
            Kind.PIECE,
            shard_id=shard_id,
            offset_bytes=start,
            num_bytes=len(data),
            checksum=crc32(data),
        )
        frames += (head, data)
    return frames
