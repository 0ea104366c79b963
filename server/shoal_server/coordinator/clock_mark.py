"""The last leader's clock, stored in etcd. A new leader whose clock is far ahead of it suspends
removals for a while.

With a clock that is days ahead, the first sweep would remove every ended job. So each leader writes
the time to etcd once a minute, and the next leader compares its own. A large gap may come from an
outage or from a wrong clock.
"""

import json
from collections.abc import Callable

import structlog

from shoal_proto.errors import RetryError
from shoal_server.core.retention import held_s
from shoal_server.etcd import keys
from shoal_server.etcd.api import Put
from shoal_server.etcd.json_fields import Fields, UnreadableRecord
from shoal_server.etcd.leader_store import LeaderStore

log = structlog.get_logger(__name__)

NOTE_EACH_S = 60.0


class ClockMark:
    """The time mark, as one coordinator writes it."""

    def __init__(self, store: LeaderStore, clock: Callable[[], float]) -> None:
        """`clock`: Unix seconds that never jump."""
        self._store = store
        self._clock = clock
        self._is_read = False
        self._note_at_s = self._held_until_s = 0.0

    def begin(self) -> None:
        """Start a term: read the mark again."""
        self._is_read = False

    async def update_mark(self) -> bool:
        """Write the mark if it is due. True if data that is old by this clock may be removed.

        False while the last mark is unread or a clock is doubted; no mark is then written.
        """
        try:
            if not self._is_read:
                await self._read()
            now_s = self._clock()
            if now_s < self._held_until_s:
                return False
            if now_s >= self._note_at_s:
                mark = json.dumps({"unix_s": now_s}).encode()
                await self._store.transact((), [Put(keys.CLOCK, mark)])
                self._note_at_s = now_s + NOTE_EACH_S
        except RetryError as error:
            log.warning("clock_mark_not_written", reason=str(error))
        return self._is_read

    async def _read(self) -> None:
        mark = await self._store.get(keys.CLOCK)
        noted_s = None if mark is None else _noted(mark.value)
        now_s = self._clock()
        self._is_read = True
        self._note_at_s = now_s + NOTE_EACH_S
        wait_s = held_s(now_s, noted_s)
        self._held_until_s = now_s + wait_s
        if wait_s and noted_s is not None:
            log.error(
                "clock_implausible",
                ahead_s=round(now_s - noted_s),
                removes_nothing_for_s=round(wait_s),
                reason="no coordinator led for that long, or the clock of this coordinator or of"
                " the last leader is wrong: check both clocks",
            )


def _noted(value: bytes) -> float | None:
    try:
        return Fields.parsed(value).seconds("unix_s")
    except UnreadableRecord as error:
        log.warning("clock_unreadable", key=keys.CLOCK, reason=str(error))
        return None
