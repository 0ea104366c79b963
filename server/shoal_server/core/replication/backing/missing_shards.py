"""Shards that a record places on this server, which lacks them: a copy failed, before or while it
took over. The record must then name a backup, or call the shard lost: as long as it names this
server, no other server leads the shard, not even from a disk that has it."""

from shoal_server.core.processes import Holder
from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.assignments import (
    ShardAssignment,
    ShardContent,
    replace_empty_primary,
    without_backup,
)


class MissingShards:
    def __init__(self, me: Holder) -> None:
        self._me = me
        self._excused: dict[Key, int] = {}

    def tolerate_absence(self, key: Key, assignment: ShardAssignment | None) -> None:
        """Tolerate the absence of a shard in the record's epoch: it is being loaded from the
        journal, or was retired (`ShardRetired`)."""
        if assignment is not None:
            self._excused[key] = assignment.epoch

    def revised(self, key: Key, a: ShardAssignment) -> ShardAssignment:
        """The record that this server wants for a shard that it lacks."""
        if a.content is not ShardContent.PRESENT or self._excused.get(key) == a.epoch:
            return a
        if a.primary == self._me:
            return replace_empty_primary(a, self._me)
        return without_backup(a, a.primary, self._me) if self._me in a.backups else a
