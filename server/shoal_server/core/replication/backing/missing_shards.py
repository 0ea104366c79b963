"""Shards that records place in this server's memory or on its disk, but that are not there.

No other server leads such a shard while its record names this server as primary.
"""

from collections.abc import Collection

from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.limits import ReplicationLimits
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.absences import ServerAbsences
from shoal_server.core.shards.assignments import (
    ShardAssignment,
    ShardContent,
    remove_disk,
    replace_empty_primary,
    without_backup,
)


class MissingShards:
    """Shards that this server's memory lacks. A record that names this server as primary must name
    a backup instead, or call the shard lost. A record that names this server as backup must leave
    it out."""

    def __init__(self, me: Holder) -> None:
        self._me = me
        self._excused: dict[Key, int] = {}

    def tolerate_absence(self, key: Key, assignment: ShardAssignment | None) -> None:
        """Accept that a shard is absent in this epoch: it is being loaded, or was retired."""
        if assignment is not None:
            self._excused[key] = assignment.epoch

    def wanted_record(self, key: Key, a: ShardAssignment) -> ShardAssignment:
        if a.content is not ShardContent.PRESENT or self._excused.get(key) == a.epoch:
            return a
        if a.primary == self._me:
            return replace_empty_primary(a, self._me)
        return without_backup(a, a.primary, self._me) if self._me in a.backups else a


class DiskRemoval:
    """Removal of this server's disk from the records of shards that the disk lacks. A record stays
    while another process of this server leads the shard and may be alive: that process may write
    the shard to the disk."""

    def __init__(self, me: Holder, limits: ReplicationLimits) -> None:
        self._me = me
        self._dead_after_s = limits.dead_after_s
        self._absences = ServerAbsences[Holder](limits.longest_gap_s)
        self._dead: frozenset[Holder] = frozenset()

    def note_servers(
        self,
        missing: Collection[ShardAssignment],
        present: frozenset[Holder],
        ended: frozenset[Holder],
        *,
        asked_s: float,
        now_s: float,
    ) -> None:
        """`missing`: shards that records place on this disk."""
        others = {a.primary for a in missing if self._is_own(a)} - {self._me}
        away_s = self._absences.away_s(others - present, now_s, asked_s=asked_s)
        long_gone = (h for h, for_s in away_s.items() if for_s >= self._dead_after_s)
        self._dead = ended | frozenset(long_gone)

    def wanted_record(self, missing: ShardAssignment) -> ShardAssignment:
        if self._is_own(missing) and missing.primary not in self._dead:
            return missing
        return remove_disk(missing, self._me)

    def _is_own(self, a: ShardAssignment) -> bool:
        return a.primary.server_id == self._me.server_id
