"""Shards that records place on this server's disk, which lacks them: the disk was lost, or the
server no longer keeps a journal. Until the records are corrected, other servers wait for the
shards."""

from collections.abc import Collection

from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.limits import ReplicationLimits
from shoal_server.core.shards.absences import ServerAbsences
from shoal_server.core.shards.assignments import ShardAssignment, remove_disk


class DiskRemoval:
    """Removal of this server's disk from records. If another process of this server leads a shard
    and may be alive, the shard's record stays: that process may have the shard on its disk, or be
    about to write it there."""

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

    def revised(self, missing: ShardAssignment) -> ShardAssignment:
        """The record that this server wants for a shard that its disk lacks."""
        if self._is_own(missing) and missing.primary not in self._dead:
            return missing
        return remove_disk(missing, self._me)

    def _is_own(self, a: ShardAssignment) -> bool:
        return a.primary.server_id == self._me.server_id
