"""Callers that wait until a version is safe at some level."""

import heapq
from collections.abc import Iterator
from itertools import count

from shoal_server.core.replication.protocol.events import Token


class Waiters:
    """Waiters of one shard and level. Abandoned waiters are skipped once their version is safe."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Token]] = []
        self._waiting: set[Token] = set()
        """Tokens in the heap whose callers have not abandoned their wait."""
        self._order = count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, version: int, token: Token) -> None:
        heapq.heappush(self._heap, (version, next(self._order), token))
        self._waiting.add(token)

    def abandon(self, token: Token) -> None:
        """Mark a waiter as abandoned, if it is waiting here."""
        self._waiting.discard(token)

    def release(self, safe: int) -> Iterator[Token]:
        """Remove and yield waiters whose version is safe, oldest version first."""
        while self._heap and self._heap[0][0] <= safe:
            yield from self._live(heapq.heappop(self._heap)[2])

    def clear(self) -> Iterator[Token]:
        """Remove and yield all waiters."""
        while self._heap:
            yield from self._live(heapq.heappop(self._heap)[2])

    def _live(self, token: Token) -> Iterator[Token]:
        if token in self._waiting:
            self._waiting.remove(token)
            yield token
