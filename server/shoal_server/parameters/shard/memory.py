"""A server's memory use, and its limit."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal_proto.errors import Overloaded
from shoal_server.parameters.shard.catalog import Catalog
from shoal_server.parameters.shard.chunk_assembler import Budget

SUM_EACH_S = 0.25
"""Interval between sums over all shards, which take milliseconds."""
FIX = "Add a server (`shoal ps`) or raise --memory-limit-bytes."


class Memory:
    """Counts the memory of replicas, of data not applied yet, and of other reservations. Lives on
    the event loop; `growth` may be used on any thread."""

    def __init__(
        self,
        limit_bytes: int,
        catalog: Catalog,
        budget: Budget,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._catalog = catalog
        self._budget = budget
        self._now_s = now_s
        self._lock = threading.Lock()
        self._summed_bytes = 0
        self._summed_at_s = float("-inf")
        self._taken_bytes = 0
        self._reserved_bytes = 0

    def refresh(self) -> None:
        if self._now_s() - self._summed_at_s >= SUM_EACH_S:
            self._sum()

    def _sum(self) -> None:
        before_bytes = self._taken_bytes
        summed_bytes = sum(replica.state.held_bytes for replica in self._catalog.shards())
        with self._lock:
            self._summed_at_s = self._now_s()
            self._summed_bytes = summed_bytes
            self._taken_bytes -= before_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that count against the limit."""
        grown_bytes = self._summed_bytes + self._taken_bytes
        return grown_bytes + self._reserved_bytes + self._budget.held_bytes

    def check(self, what: str) -> None:
        """Raise Overloaded while the limit is exceeded."""
        self.refresh()
        if self.held_bytes > self.limit_bytes:
            raise self._full(what, 0)

    @contextmanager
    def growth(self, what: str) -> Iterator[Callable[[int], None]]:
        """Yield a function to call with the bytes by which a shard is about to grow within the
        block. It raises Overloaded if they do not fit."""
        reserved_bytes = 0

        def reserve(num_bytes: int) -> None:
            nonlocal reserved_bytes
            if num_bytes <= 0:
                return
            with self._lock:
                self._check_fits(num_bytes, what)
                self._reserved_bytes += num_bytes
            reserved_bytes += num_bytes

        try:
            yield reserve
        finally:
            self.settle(reserved_bytes, is_held=True)

    def reserve(self, num_bytes: int, what: str) -> "MemoryClaim":
        """Reserve memory that is about to be used. Raises Overloaded."""
        self.refresh()
        if self.held_bytes + num_bytes > self.limit_bytes:
            # Shards may have been dropped since the last sum.
            self._sum()
        with self._lock:
            if num_bytes > 0:
                self._check_fits(num_bytes, what)
            self._reserved_bytes += num_bytes
        return MemoryClaim(self, num_bytes)

    def settle(self, num_bytes: int, *, is_held: bool) -> None:
        """End a reservation, or part of it. `is_held`: its memory is part of a shard now."""
        with self._lock:
            self._reserved_bytes -= num_bytes
            self._taken_bytes += num_bytes if is_held else 0

    def _check_fits(self, num_bytes: int, what: str) -> None:
        if self.held_bytes + num_bytes > self.limit_bytes:
            raise self._full(what, num_bytes)

    def _full(self, what: str, num_bytes: int) -> Overloaded:
        held_bytes = self.held_bytes
        return Overloaded(
            f"the server has no memory left for {what}",
            seen=f"{held_bytes} bytes held, {num_bytes} more asked for",
            expected=f"at most {self.limit_bytes} bytes",
            fix=FIX,
            details={
                "held_bytes": str(held_bytes),
                "asked_bytes": str(num_bytes),
                "limit_bytes": str(self.limit_bytes),
            },
        )


class MemoryClaim:
    """Reserved memory; the unused rest is released on exit."""

    def __init__(self, memory: Memory, num_bytes: int) -> None:
        self._memory = memory
        self._left_bytes = num_bytes

    def __enter__(self) -> "MemoryClaim":
        return self

    def __exit__(self, *exc: object) -> None:
        self._memory.settle(self._left_bytes, is_held=False)

    def move_to_shard(self, num_bytes: int) -> None:
        """Note that this part of the claim now belongs to a shard."""
        self._left_bytes -= num_bytes
        self._memory.settle(num_bytes, is_held=True)
