"""Exchange of a few integers between all ranks.

Shared memory takes a tenth of the time of a collective of Gloo, 0.2 ms with two ranks.
"""

import ctypes
import struct
from collections.abc import Sequence

import torch
import torch.distributed as dist

from shoal.backends.abortable.waiter import wait_abortable
from shoal.backends.process_group.transports import can_be_cut
from shoal.backends.shared_memory.memory import SharedMemory, whole_pages
from shoal.backends.shared_memory.opening import share_memory
from shoal.torch_private.c10d import timeout_of

_WORD_BYTES = ctypes.sizeof(ctypes.c_int64)
_NUM_SETS = 2
"""Number of sets of words: a rank may write one while another rank still reads the previous one."""


class SharedMessages:
    """View of the exchange for one rank. All ranks must call the same methods in the same order.
    Not thread-safe, except `cut`."""

    def __init__(self, group: dist.ProcessGroup, num_words: int) -> None:
        self._group: dist.ProcessGroup | None = group
        self._num_words = num_words
        self._rank, self._world_size = group.rank(), group.size()
        self._message: torch.Tensor | None = None
        self._own_words: list[int] = []
        self._work: dist.Work | None = None
        self._memory: SharedMemory | None = None
        self._values = memoryview(b"").cast("q")
        self.beside = memoryview(b"")
        self._reason = ""
        self.may_share = self._world_size > 1 and can_be_cut(group)
        """True if `enable_shared_memory` may be called; the same on all ranks."""
        self.has_sent = False

    @property
    def is_shared(self) -> bool:
        """True if the words go through shared memory; the same on all ranks."""
        return self._memory is not None

    @property
    def memory(self) -> SharedMemory | None:
        """The memory that carries the words, if there is any."""
        return self._memory

    def enable_shared_memory(self, beside_bytes: int = 0) -> None:
        """Send all later words through shared memory, if all ranks can share memory. Collective;
        raises what `share_memory` raises. `beside_bytes`: additional memory for the caller."""
        assert self._group is not None, "not closed"
        self.may_share = False
        num_bytes = _NUM_SETS * self._world_size * self._num_words * _WORD_BYTES
        first = whole_pages(num_bytes)
        limit_s = timeout_of(self._group, torch.device("cpu"))
        self._memory = memory = share_memory(self._group, first + beside_bytes, limit_s)
        if memory is None:
            return
        if self._reason:
            memory.cut(self._reason)
        self._values = memory.data[:num_bytes].cast("q")
        self.beside = memory.data[first : first + beside_bytes]

    def send_values(self, words: Sequence[int]) -> None:
        """Send `num_words` signed integers of 64 bits to the other ranks. Does not wait."""
        self.has_sent = True
        memory = self._memory
        if memory is not None:
            start = self._start_of(self._rank, memory)
            for index, word in enumerate(words, start):
                self._values[index] = word
            memory.arrive(_sign_of(memory))
            return
        if self._world_size == 1:
            self._own_words = list(words)
            return
        message = torch.zeros(self._world_size, len(words), dtype=torch.int64)
        message[self._rank] = torch.tensor(words, dtype=torch.int64)
        self._message = message
        self._work = dist.all_reduce(message, group=self._group, async_op=True)

    def receive_values(self) -> list[list[int]]:
        """Wait for the words of all ranks; return them by rank.

        Raises GenerationBroken or RuntimeError if a rank dies before it has sent its words. If a
        rank dies later, every rank still reads its words in shared memory (on x86-64).
        """
        self.has_sent = False
        memory, count = self._memory, self._num_words
        if memory is not None:
            start = self._start_of(0, memory)
            memory.await_others(sign=_sign_of(memory))
            values = self._values[start : start + self._world_size * count].tolist()
            return [values[at : at + count] for at in range(0, len(values), count)]
        if self._world_size == 1:
            return [self._own_words]
        message, self._message = self._message, None
        assert message is not None, "sent before"
        work, self._work = self._work, None
        if work is not None and self._group is not None:
            wait_abortable(work, self._group)
        by_rank: list[list[int]] = message.tolist()
        return by_rank

    def forget(self) -> None:
        """Discard words that were sent and not received. All ranks must call this. If such words
        are in shared memory, the exchange fails: later waits raise on every rank."""
        if self.has_sent and self._memory is not None:
            # Other ranks cannot distinguish these words from the next ones.
            self._memory.cut("values were sent and not received")
        self.has_sent = False
        self._message = self._work = None

    def cut(self, reason: str) -> None:
        """Make waits in memory raise. Thread-safe."""
        self._reason = reason
        memory = self._memory
        if memory is not None:
            memory.cut(reason)

    def close(self) -> None:
        """Leave the memory, after this rank's last exchange. May be called twice."""
        self._group = self._message = self._work = None
        self._values, self.beside = memoryview(b"").cast("q"), memoryview(b"")
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _start_of(self, rank: int, memory: SharedMemory) -> int:
        return (memory.num_barriers % _NUM_SETS * self._world_size + rank) * self._num_words


def _sign_of(memory: SharedMemory) -> int:
    return memory.num_barriers + 1


def bits_of(number: float) -> int:
    """Return the bits of a float as an integer."""
    word: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return word


def number_of(word: int) -> float:
    """Return the float with these bits."""
    number: float = struct.unpack("<d", struct.pack("<q", word))[0]
    return number
