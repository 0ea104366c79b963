"""One piece of memory for all ranks of a group, all on one machine, and their meetings.

What a rank wrote before a meeting, all of them can read after it. A meeting is a dissemination
barrier (Hensgen, Finkel and Manber 1988): in round r a rank posts to the rank 2^r after it and
waits for the rank 2^r before it, so n ranks need log2(n) rounds.
"""

import ctypes
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence

from shoal.backends.shared_memory.links import PeerSockets
from shoal.backends.shared_memory.processors import NOTE_BYTES, Processors
from shoal.backends.shared_memory.semaphores import SEMAPHORE_BYTES, Semaphore
from shoal_proto.errors import GenerationBroken

_WORD_BYTES = 8
_STORES_IN_ORDER = platform.machine() == "x86_64"
"""True if a processor sees the stores of another one in the order in which they were made."""


def head_bytes(world_size: int) -> int:
    """Memory that the meetings take, rounded up to a whole page."""
    semaphores = _num_rounds(world_size) * world_size * SEMAPHORE_BYTES
    return whole_pages(semaphores + world_size * (2 * _WORD_BYTES + NOTE_BYTES))


def whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def initialise(head: mmap.mmap, world_size: int) -> None:
    """Once, by one rank, before any other has the memory of the meetings."""
    for semaphore in _semaphores(head, _num_rounds(world_size) * world_size):
        semaphore.initialise()


class SharedMemory:
    """The shared memory as one rank sees it. For one thread at a time, but for `cut`."""

    def __init__(
        self, head: mmap.mmap, room: memoryview, rank: int, world_size: int, limit_s: float
    ) -> None:
        """`head`, which holds the meetings, is initialised and not shared with another use. A rank
        waits for the others at most `limit_s`."""
        self.rank, self.world_size = rank, world_size
        rounds = _num_rounds(world_size)
        self.room = room
        """The caller's part; its contents are not interpreted here."""
        words = memoryview(head)[rounds * world_size * SEMAPHORE_BYTES :].cast("Q")
        # Two sets: a rank may be at the next meeting already while another still reads this one.
        self._words = words[:world_size], words[world_size : 2 * world_size]
        self._processors = Processors(words[2 * world_size : 3 * world_size], rank)
        all_of_them = _semaphores(head, rounds * world_size)
        self._rounds = [all_of_them[r * world_size : (r + 1) * world_size] for r in range(rounds)]
        self._limit_s = limit_s
        self._have_one_each = world_size <= len(os.sched_getaffinity(0))
        """True if there is a processor for each rank."""
        self._num_met = self._num_awaited = 0
        self._lock = threading.Lock()
        self._reason = ""
        self._links: PeerSockets | None = None
        self._left: Callable[[], None] | None = None
        self._further: tuple[Semaphore, ...] = ()

    @property
    def num_met(self) -> int:
        """Meetings that this rank has come to. Any thread."""
        return self._num_met

    @property
    def num_moved(self) -> int:
        """The same, and what else it has waited for. Any thread."""
        return self._num_met + self._num_awaited

    def watch(self, links: PeerSockets, left: Callable[[], None]) -> None:
        """`left` is called once this rank has left: it has written its last."""
        self._links, self._left = links, left

    def meet(self, word: int = 0) -> Sequence[int]:
        """Return when all ranks are here: their words, by rank, each of 64 bits at most.

        Raises GenerationBroken if a rank is lost or late, or after `cut`.
        """
        self.arrive(word)
        return self.await_others()

    def arrive(self, word: int = 0) -> None:
        """The first part of `meet`, which waits for nobody."""
        self._raise_if_over()
        self._words[self._num_met % 2][self.rank] = word
        if self._rounds:
            if self._have_one_each:
                self._processors.part()
            self._post(0)

    def await_others(self, *, sign: int = 0) -> Sequence[int]:
        """Complete the meeting that `arrive` began.

        `sign`: the word that all ranks bring, different from that of the meeting before the last.
        Once all have arrived, a rank may go on and leave, which cuts the meeting for ranks that
        have not woken up yet. So a rank that finds the signs of all goes on as well, if the
        processor keeps stores in order.
        """
        words = self._words[self._num_met % 2]
        self._num_met += 1
        deadline_s = time.monotonic() + self._limit_s
        try:
            for number, semaphores in enumerate(self._rounds):
                if number:
                    self._post(number)
                self._wait(semaphores[self.rank], deadline_s)
        except GenerationBroken:
            # With stores in order, a rank's earlier writes are visible once its sign is.
            if not (sign and _STORES_IN_ORDER) or any(word != sign for word in words):
                raise
        return list(words)

    def wake_from(self, semaphores: Sequence[Semaphore]) -> None:
        """Register the caller's semaphores that `wait_for` awaits: `cut` ends those waits too."""
        with self._lock:
            self._further = tuple(semaphores)

    def wait_for(self, semaphore: Semaphore) -> None:
        """Return when another rank has posted it. Raises as `meet`."""
        self._wait(semaphore, time.monotonic() + self._limit_s)
        # Counted as a meeting is, for the watch that checks if this rank advances.
        self._num_awaited += 1

    def _wait(self, semaphore: Semaphore, deadline_s: float) -> None:
        self._raise_if_over()
        came = self._comes(semaphore, deadline_s)
        self._raise_if_over()
        if not came:
            self.cut(f"not all of them came within {self._limit_s:g} s")
            raise GenerationBroken(
                "ranks no longer share memory",
                seen=f"not all {self.world_size} came",
                expected=f"within {self._limit_s:g} s",
            )

    def _comes(self, semaphore: Semaphore, deadline_s: float) -> bool:
        if not self._have_one_each:
            return semaphore.wait(deadline_s)
        self._processors.part()
        if semaphore.comes_soon(deadline_s):
            return True
        came = semaphore.wait(deadline_s)
        self._processors.part()
        return came

    def _post(self, number: int) -> None:
        """Post, in this round, to the rank that waits for this one."""
        self._rounds[number][(self.rank + (1 << number)) % self.world_size].post()

    def cut(self, reason: str) -> None:
        """End the meetings of this rank and all others: every wait raises. Any thread, quick."""
        with self._lock:
            if self._reason:
                return
            self._reason = reason
        for semaphores in self._rounds:
            semaphores[self.rank].post()
        for semaphore in self._further:
            semaphore.post()
        if self._links is not None:
            self._links.cut()

    def _raise_if_over(self) -> None:
        if self._reason:
            raise GenerationBroken("ranks no longer share memory", seen=self._reason)

    def close(self) -> None:
        """Leave in good order: this rank has met the others for the last time. May be called
        twice."""
        with self._lock:
            self._reason = self._reason or "this rank has left"
        if self._links is not None:
            self._links.close()
        left, self._left = self._left, None
        if left is not None:
            left()


def _num_rounds(world_size: int) -> int:
    return (world_size - 1).bit_length()


def _semaphores(head: mmap.mmap, number: int) -> list[Semaphore]:
    start = ctypes.addressof(ctypes.c_char.from_buffer(head))
    return [Semaphore(start + i * SEMAPHORE_BYTES) for i in range(number)]
