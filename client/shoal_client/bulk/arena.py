"""Memory shared with a server: slots of one size, each for one shard during its transfer."""

import mmap
from collections.abc import Iterator, Sequence

from shoal_client.shards.parts import GradientPart
from shoal_proto import bulk
from shoal_proto.bulk import MAX_ARENA_BYTES, FrameKind

NUM_SLOTS = 12
SMALL_ARENA_BYTES = 32 * 1024 * 1024
"""An arena of at most this size has a slot for each part of a call, so that no part waits."""
MIN_SLOTS = 3
"""A server reads one shard ahead; with fewer slots, client and server would wait for each other."""
PAGE_BYTES = 4096


def arena_bytes(largest_bytes: int, num_parts: int) -> int:
    """Bytes of shared memory for about `num_parts` parts of at most `largest_bytes` each; 0 if the
    parts are too large."""
    slot_bytes_each = _slot_bytes(largest_bytes)
    num_slots = max(NUM_SLOTS, min(num_parts, SMALL_ARENA_BYTES // slot_bytes_each))
    num_slots = min(num_slots, MAX_ARENA_BYTES // slot_bytes_each)
    return slot_bytes_each * num_slots if num_slots >= MIN_SLOTS else 0


def _slot_bytes(largest_bytes: int) -> int:
    return max(-(-largest_bytes // PAGE_BYTES), 1) * PAGE_BYTES


class Arena:
    """Slots in the shared memory of one connection. Their data needs no checksum."""

    def __init__(self, mapped: mmap.mmap, largest_bytes: int) -> None:
        self._memory = memoryview(mapped)
        self.slot_bytes = _slot_bytes(largest_bytes)
        self._all = [i * self.slot_bytes for i in range(len(mapped) // self.slot_bytes)]
        self._free: list[int] = []
        self._taken: dict[int, int] = {}
        self.copied_bytes = 0
        """Bytes that the current call has copied."""
        self.clear()

    def clear(self) -> None:
        """Free all slots for the next call."""
        self._free = self._all[::-1]
        self._taken.clear()
        self.copied_bytes = 0

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free)

    def fits(self, part: GradientPart) -> bool:
        return part.num_bytes <= self.slot_bytes

    def write_part(self, part: GradientPart) -> Iterator[bytes]:
        """Copy a part into a free slot; yield the frames that announce the part."""
        at = self._free.pop()
        self._taken[part.shard_id] = at
        yield bulk.header(
            FrameKind.FREE_SLOT, shard_id=part.shard_id, at=at, num_bytes=self.slot_bytes
        )
        for offset_bytes, buffers in part.pieces(self.slot_bytes):
            size = self._fill(at, buffers)
            yield bulk.header(
                FrameKind.PLACED,
                shard_id=part.shard_id,
                offset_bytes=offset_bytes,
                num_bytes=size,
                at=at,
            )
            at += size

    def _fill(self, at: int, buffers: Sequence[memoryview]) -> int:
        start = at
        for buffer in buffers:
            self._memory[at : at + len(buffer)] = buffer
            at += len(buffer)
        self.copied_bytes += at - start
        return at - start

    def release(self, shard_id: int) -> None:
        """Free the shard's slot, if any. Server and caller must have read the slot."""
        at = self._taken.pop(shard_id, None)
        if at is not None:
            self._free.append(at)

    def view(self, at: int, num_bytes: int) -> memoryview:
        return self._memory[at : at + num_bytes]
