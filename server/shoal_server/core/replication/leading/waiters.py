"""Who waits until a version is as safe as was asked for."""

import heapq
from collections.abc import Iterator
from itertools import count

from shoal_server.core.replication.protocol.events import Token


class Waiters:
    """Of one shard and level. Who abandons the wait is skipped when its turn comes."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Token]] = []
        self._abandoned: set[Token] = set()
        self._order = count()

    def __bool__(self) -> bool:
        return bool(self._heap)

    def add(self, version: int, token: Token) -> None:
        heapq.heappush(self._heap, (version, next(self._order), token))

    def abandon(self, token: Token) -> None:
        """Of one that waits here."""
        self._abandoned.add(token)

    def release(self, safe: int) -> Iterator[Token]:
        """Those whose version is safe by now, oldest version first."""
        while self._heap and self._heap[0][0] <= safe:
            yield from self._live(heapq.heappop(self._heap)[2])

    def clear(self) -> Iterator[Token]:
        """All of them."""
        while self._heap:
            yield from self._live(heapq.heappop(self._heap)[2])

    def _live(self, token: Token) -> Iterator[Token]:
        if token in self._abandoned:
            self._abandoned.discard(token)
        else:
            yield token
