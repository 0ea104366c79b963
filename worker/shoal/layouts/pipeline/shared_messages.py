"""Messages between the stages of a pipeline in a pass, through shared memory: quicker than Gloo. A
barrier follows each pass: no message is overwritten before it is read.

Memory: two semaphores for each rank, then for each pair of neighbours a lane forward and a lane
back. A message has a head of 64 bytes, which begins with the content's size (int64), then its
content, padded to 64 bytes.
"""

import ctypes
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shoal.backends.abortable.p2p import P2PMessage
from shoal.backends.shared_memory.memory import SharedMemory
from shoal.backends.shared_memory.semaphores import SEMAPHORE_BYTES, Semaphore
from shoal_proto.errors import InternalError

MAX_BYTES = 64 * 1024**2
"""Limit for all messages of a pass together; above it, messages go over Gloo."""
_ALIGNMENT_BYTES = 64
_HEAD_BYTES = _ALIGNMENT_BYTES
_WORD_BYTES = 8


def bytes_of(tensors: Iterable[Tensor], count: int) -> int:
    """Return the bytes needed for `count` micro-batches of these tensors."""
    return count * sum(_HEAD_BYTES + _aligned(tensor.nbytes) for tensor in tensors)


def lanes_bytes(sent_bytes: Sequence[int]) -> int:
    """Return the bytes needed for a pass in which each stage sends `sent_bytes` to the next, and as
    much back; 0 if more than `MAX_BYTES`."""
    lanes = 2 * sum(sent_bytes)
    return _head_bytes(len(sent_bytes)) + lanes if lanes <= MAX_BYTES else 0


class SharedLanes:
    """Shared memory as one rank sees it: one lane for each direction between two neighbours."""

    def __init__(self, memory: SharedMemory, buffer: memoryview) -> None:
        """Collective. `buffer`: the part of the memory to use."""
        self.memory = memory
        self._bytes = torch.frombuffer(buffer, dtype=torch.uint8)
        self._words = buffer.cast("q")
        start = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self._semaphores = [
            Semaphore(start + number * SEMAPHORE_BYTES) for number in range(2 * memory.world_size)
        ]
        if memory.rank == 0:
            for semaphore in self._semaphores:
                semaphore.initialise()
        memory.register_waiters(self._semaphores[2 * memory.rank : 2 * memory.rank + 2])
        # No rank posts before all semaphores are initialised.
        memory.gather_words()

    def lanes(self, sent_bytes: Sequence[int]) -> "StageLanes | None":
        """Make lanes for passes in which each stage sends `sent_bytes` forward; None, on all ranks,
        if the memory is too small."""
        needed = lanes_bytes(sent_bytes)
        if not 0 < needed <= len(self._bytes):
            return None
        memory, rank = self.memory, self.memory.rank
        starts = list(
            accumulate((2 * each for each in sent_bytes), initial=_head_bytes(len(sent_bytes)))
        )
        sends, receives = {}, {}
        for stage in (rank - 1, rank):
            if not 0 <= stage < memory.world_size - 1:
                continue
            middle = starts[stage] + sent_bytes[stage]
            forward = self._lane(starts[stage], middle, 2 * (stage + 1))
            back = self._lane(middle, starts[stage + 1], 2 * stage + 1)
            other = stage if stage < rank else stage + 1
            sends[other], receives[other] = (back, forward) if stage < rank else (forward, back)
        return StageLanes(sends, receives)

    def _lane(self, start: int, stop: int, semaphore: int) -> "_Lane":
        return _Lane(self, (start, stop), self._semaphores[semaphore])

    def tensor_at(self, start: int, like: Tensor) -> Tensor:
        """View the memory from `start` on as a tensor shaped as `like`."""
        whole = self._bytes[start : start + like.nbytes]
        return whole.view(like.dtype).view(like.shape)

    @property
    def words(self) -> memoryview:
        """View of the memory in words of 64 bits."""
        return self._words


class _Lane:
    def __init__(self, lanes: SharedLanes, span: tuple[int, int], semaphore: Semaphore) -> None:
        self._lanes, self._semaphore = lanes, semaphore
        self._start, self._stop = span
        self._views: dict[tuple[int, torch.dtype, torch.Size], Tensor] = {}
        self.begin()

    def begin(self) -> None:
        self._next = self._start
        self._num_awaited = self._num_arrived = 0

    def send(self, tensor: Tensor) -> None:
        at, view = self._advance(tensor)
        self._lanes.words[at // _WORD_BYTES] = tensor.nbytes
        view.copy_(tensor.detach())
        self._semaphore.post()

    def receive(self, tensor: Tensor) -> P2PMessage:
        at, view = self._advance(tensor)
        self._num_awaited += 1
        return _Awaited(self, (at, view), self._num_awaited, tensor)

    def fill(self, number: int, at: int, view: Tensor, tensor: Tensor) -> None:
        """Wait for the message of this number, and copy it into the tensor. Raises InternalError if
        their sizes differ."""
        while self._num_arrived < number:
            self._lanes.memory.wait_for(self._semaphore)
            self._num_arrived += 1
        num_bytes = self._lanes.words[at // _WORD_BYTES]
        if num_bytes != tensor.nbytes:
            raise InternalError(
                "a stage sent a message of another size than the next stage expects",
                seen=f"{num_bytes} bytes",
                expected=f"{tensor.nbytes} bytes",
            )
        tensor.detach().copy_(view)

    def _advance(self, like: Tensor) -> tuple[int, Tensor]:
        at = self._next
        self._next = at + _HEAD_BYTES + _aligned(like.nbytes)
        if self._next > self._stop:
            raise InternalError(
                "a stage of the pipeline sends more than its shared memory holds",
                seen=f"{self._next - self._start} bytes in a pass",
                expected=f"{self._stop - self._start} bytes",
            )
        key = (at, like.dtype, like.shape)
        view = self._views.get(key)
        if view is None:
            view = self._views[key] = self._lanes.tensor_at(at + _HEAD_BYTES, like)
        return at, view


class _Awaited:
    def __init__(self, lane: _Lane, slot: tuple[int, Tensor], number: int, tensor: Tensor) -> None:
        self._lane, self._slot, self._number, self._tensor = lane, slot, number, tensor

    def wait(self) -> None:
        self._lane.fill(self._number, *self._slot, self._tensor)


class _Sent:
    def wait(self) -> None:
        """Return at once: the message is in memory already."""


_SENT = _Sent()


class StageLanes:
    """Lanes of one rank for the passes of one schedule, in place of torch's process group."""

    group_name = "shared memory"
    """Identifies a destination in torch's pipelining (since 2.14)."""
    takes_batches = False
    """Batches are not needed: no message waits for another."""

    def __init__(self, sends: dict[int, _Lane], receives: dict[int, _Lane]) -> None:
        """`sends`, `receives`: lanes by the other rank."""
        self._sends, self._receives = sends, receives

    def begin(self) -> None:
        """Begin a pass, after a barrier of all ranks."""
        for lane in (*self._sends.values(), *self._receives.values()):
            lane.begin()

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> P2PMessage:
        """See `AbortableP2P.send`."""
        self._sends[to].send(tensors[0])
        return _SENT

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> P2PMessage:
        """See `AbortableP2P.recv`. Awaiting the message raises GenerationBroken if a rank is lost
        or late."""
        return self._receives[source].receive(tensors[0])


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _head_bytes(world_size: int) -> int:
    return 2 * world_size * SEMAPHORE_BYTES
