"""Claims after a restart to shards that are in this server's journal and in no server's memory.

The record of a shard names the server whose disk holds the shard (`ShardAssignment.on_disk`).
"""

from math import inf

from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.limits import ReplicationLimits
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.absences import ServerAbsences
from shoal_server.core.shards.assignments import (
    ShardAssignment,
    is_older,
    may_be_put_on_disk,
    not_on_disk,
    promote_from_disk,
    record_older_copy,
)


class JournalClaims:
    def __init__(self, me: Holder, limits: ReplicationLimits) -> None:
        self._me = me
        self._dead_after_s = limits.dead_after_s
        self._found: dict[Key, tuple[int, int] | None] = {}
        """Epoch and version of each journaled shard; None: this process led the shard itself."""
        self._missing: dict[Key, int] = {}
        """Shards that turned out not to be in the journal, with their epochs."""
        self._absences = ServerAbsences[Holder](limits.longest_gap_s)
        self._dead: frozenset[Holder] = frozenset()
        self._listed_s = -inf
        self._longest_gap_s = limits.longest_gap_s

    def note_journaled(self, key: Key, epoch: int, version: int) -> None:
        """Note a shard from an earlier process."""
        self._found[key] = epoch, version

    def note_given_up(self, key: Key) -> None:
        self._found[key] = None

    @property
    def open(self) -> list[Key]:
        """Journaled shards that are not led yet."""
        return sorted(self._found)

    def __contains__(self, key: Key) -> bool:
        return key in self._found

    def note_record(self, key: Key, assignment: ShardAssignment) -> None:
        """Note a shard's newest record, which may end the claim."""
        if self._missing.get(key, assignment.epoch) != assignment.epoch:
            del self._missing[key]
        if not may_be_put_on_disk(assignment, self._me):
            self.remove(key)

    def remove(self, key: Key) -> None:
        self._found.pop(key, None)

    def note_missing(self, key: Key, epoch: int) -> None:
        """Note that the journal lacks a shard that was to be led from it in this epoch."""
        self._missing[key] = epoch

    def note_servers(
        self,
        present: frozenset[Holder],
        ended: frozenset[Holder],
        holders: frozenset[Holder],
        *,
        asked_s: float,
        now_s: float,
    ) -> None:
        """`holders`: those of the shards in the journal."""
        away_s = self._absences.away_s(holders - present, now_s, asked_s=asked_s)
        long_gone = (h for h, for_s in away_s.items() if for_s >= self._dead_after_s)
        self._dead = ended | frozenset(long_gone)
        self._listed_s = asked_s

    def wanted_record(self, key: Key, a: ShardAssignment, now_s: float) -> ShardAssignment:
        """The record that this server wants. Unchanged if the list of servers is old: a process
        that counted as dead may be back."""
        if key in self._missing:
            return not_on_disk(a, self._me, self._missing[key])
        if key not in self._found or now_s - self._listed_s > self._longest_gap_s:
            return a
        found = self._found[key]
        if found is not None and is_older(a, *found):
            return record_older_copy(a, self._me, found[1], self._dead)
        return promote_from_disk(a, self._me, self._dead)
