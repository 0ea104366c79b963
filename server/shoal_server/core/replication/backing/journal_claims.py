"""Claims after a restart: shards in this server's journal that no server has in memory.

A shard's assignment names the server on whose disk it is (`ShardAssignment.on_disk`). Its last
process may have led the shard to the end; or a backup took over from it and ended too, before all
was on a disk of its own.
"""

from math import inf

from shoal_server.core.replication.protocol.limits import ReplicationLimits
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.absences import ServerAbsences
from shoal_server.core.shards.assignments import (
    Holder,
    ShardAssignment,
    found_older,
    is_older,
    led_from_disk,
    may_be_put_on_disk,
    not_on_disk,
)


class JournalClaims:
    def __init__(self, me: Holder, limits: ReplicationLimits) -> None:
        self._me = me
        self._dead_after_s = limits.dead_after_s
        self._found: dict[Key, tuple[int, int] | None] = {}
        """What the journal has and others may have too: epoch and version. None: what this very
        process left there."""
        self._not_there: dict[Key, int] = {}
        """Claimed shards, with their epochs, that the journal turned out not to have."""
        self._absences = ServerAbsences[Holder](limits.longest_gap_s)
        self._dead: frozenset[Holder] = frozenset()
        self._judged_s = -inf
        self._longest_gap_s = limits.longest_gap_s

    def found(self, key: Key, epoch: int, version: int) -> None:
        """The last process left it in the journal."""
        self._found[key] = epoch, version

    def left(self, key: Key) -> None:
        """Note a shard in the journal that this process led and leads no longer."""
        self._found[key] = None

    @property
    def open(self) -> list[Key]:
        """Shards in the journal that are not led from it yet."""
        return sorted(self._found)

    def __contains__(self, key: Key) -> bool:
        return key in self._found

    def known(self, key: Key, assignment: ShardAssignment) -> None:
        """The record as it is now."""
        if self._not_there.get(key, assignment.epoch) != assignment.epoch:
            del self._not_there[key]
        if not may_be_put_on_disk(assignment, self._me):
            self.take(key)

    def take(self, key: Key) -> None:
        """Remove a shard that is led here now, or that another disk has."""
        self._found.pop(key, None)

    def not_there(self, key: Key, epoch: int) -> None:
        """The journal has nothing of what this server is to lead from it in that epoch."""
        self._not_there[key] = epoch

    def seen(
        self,
        present: frozenset[Holder],
        ended: frozenset[Holder],
        holders: frozenset[Holder],
        *,
        asked_s: float,
        now_s: float,
    ) -> None:
        """The servers that etcd lists now, and those known to have ended; `holders`: of the
        shards that the journal has."""
        away_s = self._absences.away_s(holders - present, now_s, asked_s=asked_s)
        long_gone = (h for h, for_s in away_s.items() if for_s >= self._dead_after_s)
        self._dead = ended | frozenset(long_gone)
        self._judged_s = asked_s

    def revised(self, key: Key, a: ShardAssignment, now_s: float) -> ShardAssignment:
        """The record as this server wants it. Who was dead a while ago may be back by now."""
        if key in self._not_there:
            return not_on_disk(a, self._me, self._not_there[key])
        if key not in self._found or now_s - self._judged_s > self._longest_gap_s:
            return a
        found = self._found[key]
        if found is not None and is_older(a, *found):
            return found_older(a, self._me, found[1], self._dead)
        return led_from_disk(a, self._me, self._dead)
