"""Memory that all ranks of a group on one machine share, and barriers in it.

A value that a rank wrote before a barrier can be read by all ranks after it. Barriers are
dissemination barriers (Hensgen, Finkel and Manber 1988): in round r a rank posts to the rank 2^r
after it, and waits for the rank 2^r before it.
"""

import ctypes
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence

from shoal.backends.abortable.waiter import waiting
from shoal.backends.shared_memory.links import PeerSockets
from shoal.backends.shared_memory.processors import NOTE_BYTES, Processors
from shoal.backends.shared_memory.semaphores import SEMAPHORE_BYTES, Semaphore
from shoal_proto.errors import GenerationBroken

_WORD_BYTES = 8
_STORES_IN_ORDER = platform.machine() == "x86_64"
"""True if a processor sees another one's stores in the order in which they were made."""


def head_bytes(world_size: int) -> int:
    """Return the number of bytes that barriers need, in whole pages: for semaphores by round and
    rank, two sets of a word for each rank, and a note of `Processors` for each rank."""
    semaphores = _num_rounds(world_size) * world_size * SEMAPHORE_BYTES
    return whole_pages(semaphores + world_size * (2 * _WORD_BYTES + NOTE_BYTES))


def whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def initialise(head: mmap.mmap, world_size: int) -> None:
    """Initialise the barriers' memory, on one rank, before any other has it."""
    for semaphore in _semaphores(head, _num_rounds(world_size) * world_size):
        semaphore.initialise()


class SharedMemory:
    """View of the shared memory for one rank. Not thread-safe, except `cut`."""

    def __init__(
        self, head: mmap.mmap, data: memoryview, rank: int, world_size: int, limit_s: float
    ) -> None:
        """`head`: initialised memory for the barriers. `data`: memory for the caller. `limit_s`:
        time limit of each wait for other ranks."""
        self.rank, self.world_size = rank, world_size
        rounds = _num_rounds(world_size)
        self.data = data
        words = memoryview(head)[rounds * world_size * SEMAPHORE_BYTES :].cast("Q")
        # Two sets: a rank may write at the next barrier while another still reads the words of this
        # one.
        self._words = words[:world_size], words[world_size : 2 * world_size]
        self._processors = Processors(words[2 * world_size : 3 * world_size], rank)
        semaphores = _semaphores(head, rounds * world_size)
        self._rounds = [semaphores[r * world_size : (r + 1) * world_size] for r in range(rounds)]
        self._limit_s = limit_s
        self._has_processor_each = world_size <= len(os.sched_getaffinity(0))
        self._num_barriers = self._num_awaited = 0
        self._lock = threading.Lock()
        self.reason = ""
        """Reason for which barriers raise; empty while they work."""
        self._links: PeerSockets | None = None
        self._on_left: Callable[[], None] | None = None
        self._other_semaphores: tuple[Semaphore, ...] = ()

    @property
    def num_barriers(self) -> int:
        """Number of this rank's barriers so far. Thread-safe."""
        return self._num_barriers

    @property
    def num_moved(self) -> int:
        """Number of this rank's barriers and other waits so far. Thread-safe."""
        return self._num_barriers + self._num_awaited

    def watch(self, links: PeerSockets, on_left: Callable[[], None]) -> None:
        """Set the connections to peers. `close` calls `on_left`, once this rank writes no more."""
        self._links, self._on_left = links, on_left

    def gather_words(self, word: int = 0) -> Sequence[int]:
        """Wait for all ranks; return their words, by rank. `word`: an unsigned integer of 64 bits.
        Raises GenerationBroken if a rank is lost or late, or after `cut`."""
        self.arrive(word)
        return self.await_others()

    def arrive(self, word: int = 0) -> None:
        """Begin a barrier, without waiting."""
        self._raise_if_over()
        self._words[self._num_barriers % 2][self.rank] = word
        if self._rounds:
            if self._has_processor_each:
                self._processors.avoid_shared_processor()
            self._post(0)

    def await_others(self, *, sign: int = 0) -> Sequence[int]:
        """Complete the barrier that `arrive` began.

        `sign`: the word that every rank writes in this barrier; it differs from the sign two
        barriers earlier. A rank that leaves cuts the barrier for ranks that still sleep in it. A
        rank that was woken by the cut completes the barrier if it reads the sign from every rank
        and the processor keeps stores in order.
        """
        words = self._words[self._num_barriers % 2]
        self._num_barriers += 1
        deadline_s = time.monotonic() + self._limit_s
        try:
            for number, semaphores in enumerate(self._rounds):
                if number:
                    self._post(number)
                self._wait(semaphores[self.rank], deadline_s)
        except GenerationBroken:
            if not (sign and _STORES_IN_ORDER) or any(word != sign for word in words):
                raise
        return list(words)

    def register_waiters(self, semaphores: Sequence[Semaphore]) -> None:
        """Register semaphores for `wait_for`: `cut` ends waits for them too."""
        with self._lock:
            self._other_semaphores = tuple(semaphores)

    def wait_for(self, semaphore: Semaphore) -> None:
        """Wait until another rank has posted the semaphore. Raises what `gather_words` raises."""
        self._wait(semaphore, time.monotonic() + self._limit_s)
        # Counted for the hang detection.
        self._num_awaited += 1

    def _wait(self, semaphore: Semaphore, deadline_s: float) -> None:
        self._raise_if_over()
        with waiting:
            is_posted = self._await_post(semaphore, deadline_s)
        self._raise_if_over()
        if not is_posted:
            self.cut(f"not all ranks arrived within {self._limit_s:g} s")
            raise GenerationBroken(
                "ranks no longer share memory",
                seen=f"not all {self.world_size} ranks arrived",
                expected=f"within {self._limit_s:g} s",
            )

    def _await_post(self, semaphore: Semaphore, deadline_s: float) -> bool:
        if not self._has_processor_each:
            return semaphore.wait(deadline_s)
        self._processors.avoid_shared_processor()
        if semaphore.spin_wait(deadline_s):
            return True
        is_posted = semaphore.wait(deadline_s)
        self._processors.avoid_shared_processor()
        return is_posted

    def _post(self, number: int) -> None:
        self._rounds[number][(self.rank + (1 << number)) % self.world_size].post()

    def cut(self, reason: str) -> None:
        """Make every wait of all ranks raise. Thread-safe, quick."""
        with self._lock:
            if self.reason:
                return
            self.reason = reason
        for semaphores in self._rounds:
            semaphores[self.rank].post()
        for semaphore in self._other_semaphores:
            semaphore.post()
        if self._links is not None:
            self._links.cut()

    def _raise_if_over(self) -> None:
        if self.reason:
            raise GenerationBroken("ranks no longer share memory", seen=self.reason)

    def close(self) -> None:
        """Leave in order, after this rank's last barrier. May be called twice."""
        with self._lock:
            self.reason = self.reason or "this rank has left"
        if self._links is not None:
            self._links.close()
        on_left, self._on_left = self._on_left, None
        if on_left is not None:
            on_left()


def _num_rounds(world_size: int) -> int:
    return (world_size - 1).bit_length()


def _semaphores(head: mmap.mmap, number: int) -> list[Semaphore]:
    start = ctypes.addressof(ctypes.c_char.from_buffer(head))
    return [Semaphore(start + i * SEMAPHORE_BYTES) for i in range(number)]
