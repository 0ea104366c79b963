"""A few integers that each rank sends to all others, again and again.

Over Gloo that is a collective, which takes 0.2 ms with two ranks that have a core each. Ranks of
one machine write them into memory that they share, and meet there, which takes a tenth of that.
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
"""Two sets: a rank may write the next words while another still reads these."""


class SharedMessages:
    """Words of one rank. All ranks call the same methods in order. For one thread, but for
    `cut`."""

    def __init__(self, group: dist.ProcessGroup, num_words: int) -> None:
        self._group: dist.ProcessGroup | None = group
        self._num_words = num_words
        self._rank, self._world_size = group.rank(), group.size()
        self._message: torch.Tensor | None = None
        self._alone: list[int] = []
        """The words sent if there is no other rank."""
        self._work: dist.Work | None = None
        self._memory: SharedMemory | None = None
        self._room = memoryview(b"").cast("q")
        self.beside = memoryview(b"")
        """The part of the memory that `share` was asked for beside the words."""
        self._reason = ""
        self.may_share = self._world_size > 1 and can_be_cut(group)
        """True if `share` has not been called yet but can be; the same on all ranks."""
        self.is_told = False
        """True if words were sent and not received yet."""

    @property
    def is_shared(self) -> bool:
        """True if the words go through memory; the same on all ranks."""
        return self._memory is not None

    @property
    def memory(self) -> SharedMemory | None:
        """The memory that carries the words, or None."""
        return self._memory

    def share(self, beside_bytes: int = 0) -> None:
        """Collective: send words through memory from now on if all ranks can share some, with
        `beside_bytes` for the caller.

        Raises as a collective of the group.
        """
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
        self._room = memory.room[:num_bytes].cast("q")
        self.beside = memory.room[first : first + beside_bytes]

    def send_values(self, words: Sequence[int]) -> None:
        """Send these words, `num_words` or fewer, to the other ranks, each of 63 bits and a sign.
        Waits for no rank."""
        self.is_told = True
        memory = self._memory
        if memory is not None:
            start = self._start_of(self._rank, memory)
            for place, word in enumerate(words, start):
                self._room[place] = word
            memory.arrive(_sign_of(memory))
            return
        if self._world_size == 1:
            self._alone = list(words)
            return
        message = torch.zeros(self._world_size, len(words), dtype=torch.int64)
        message[self._rank] = torch.tensor(words, dtype=torch.int64)
        self._message = message
        self._work = dist.all_reduce(message, group=self._group, async_op=True)

    def receive_values(self) -> list[list[int]]:
        """Return the words of each rank, by rank, once all have sent theirs. Raises
        GenerationBroken or RuntimeError if a rank dies before that. If it dies after writing, every
        rank still reads its words in memory; over Gloo only some may have received them."""
        self.is_told = False
        memory, count = self._memory, self._num_words
        if memory is not None:
            start = self._start_of(0, memory)
            memory.await_others(sign=_sign_of(memory))
            told = self._room[start : start + self._world_size * count].tolist()
            return [told[place : place + count] for place in range(0, len(told), count)]
        if self._world_size == 1:
            return [self._alone]
        message, self._message = self._message, None
        assert message is not None, "told before"
        work, self._work = self._work, None
        if work is not None and self._group is not None:
            wait_abortable(work, self._group)
        heard: list[list[int]] = message.tolist()
        return heard

    def forget(self) -> None:
        """Drop what was sent and not received, on all ranks alike."""
        if self.is_told and self._memory is not None:
            # No rank could tell the next words from these.
            self._memory.cut("words were told and not heard")
        self.is_told = False
        self._message = self._work = None

    def cut(self, reason: str) -> None:
        """Let nobody wait in memory any more: see `SharedMemory.cut`. Any thread."""
        self._reason = reason
        memory = self._memory
        if memory is not None:
            memory.cut(reason)

    def close(self) -> None:
        """End the use of the memory: this rank sends no more. May be called twice."""
        self._group = self._message = self._work = None
        self._room, self.beside = memoryview(b"").cast("q"), memoryview(b"")
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()

    def _start_of(self, rank: int, memory: SharedMemory) -> int:
        """Index of the first word of this rank at the next meeting."""
        return (memory.num_met % _NUM_SETS * self._world_size + rank) * self._num_words


def _sign_of(memory: SharedMemory) -> int:
    """The sign that all ranks bring to the next meeting, and to no other."""
    return memory.num_met + 1


def bits_of(number: float) -> int:
    """A number as a word."""
    word: int = struct.unpack("<q", struct.pack("<d", number))[0]
    return word


def number_of(word: int) -> float:
    """The number that `bits_of` made a word of."""
    number: float = struct.unpack("<d", struct.pack("<q", word))[0]
    return number
