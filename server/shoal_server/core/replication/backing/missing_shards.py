"""Shards that their records place in this server's memory or on its disk, although they are not
there.

Until such a record is corrected, other servers wait for the shard: as long as it names this server
as primary, no other server leads the shard, not even from a disk that has it.
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
    """Shards that this server's memory lacks: a copy failed, before or while this server took over
    as primary. The record must then name a backup as primary, or call the shard lost."""

    def __init__(self, me: Holder) -> None:
        self._me = me
        self._excused: dict[Key, int] = {}

    def tolerate_absence(self, key: Key, assignment: ShardAssignment | None) -> None:
        """Tolerate the absence of a shard in the record's epoch: it is being loaded from the
        journal, or was retired (`ShardRetired`)."""
        if assignment is not None:
            self._excused[key] = assignment.epoch

    def wanted_record(self, key: Key, a: ShardAssignment) -> ShardAssignment:
        """The record that this server wants for a shard that it lacks."""
        if a.content is not ShardContent.PRESENT or self._excused.get(key) == a.epoch:
            return a
        if a.primary == self._me:
            return replace_empty_primary(a, self._me)
        return without_backup(a, a.primary, self._me) if self._me in a.backups else a


class DiskRemoval:
    """Removal of this server's disk from records of shards that the disk lacks: the disk's content
    was lost, or the server no longer keeps a journal. If another process of this server leads a
    shard and may be alive, the shard's record stays: that process may have the shard on its disk,
    or be about to write it there."""

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
        """Note the servers that etcd listed at `asked_s`, and processes known to have ended.
        `missing`: shards that records place on this disk, which lacks them."""
        others = {a.primary for a in missing if self._is_own(a)} - {self._me}
        away_s = self._absences.away_s(others - present, now_s, asked_s=asked_s)
        long_gone = (h for h, for_s in away_s.items() if for_s >= self._dead_after_s)
        self._dead = ended | frozenset(long_gone)

    def wanted_record(self, missing: ShardAssignment) -> ShardAssignment:
        """The record that this server wants for a shard that its disk lacks."""
        if self._is_own(missing) and missing.primary not in self._dead:
            return missing
        return remove_disk(missing, self._me)

    def _is_own(self, a: ShardAssignment) -> bool:
        return a.primary.server_id == self._me.server_id
