"""Shards that a record places on this server but are not there: a copy failed, before or while it
took over. A backup must then lead the shard, or it is lost. As long as the record names this
server, all wait for it, even a disk that has the shard."""

from shoal_server.core.replication.protocol.messages import Key
from shoal_server.core.shards.assignments import (
    Holder,
    ShardAssignment,
    ShardContent,
    not_held,
    without_backup,
)


class MissingShards:
    def __init__(self, me: Holder) -> None:
        self._me = me
        self._excused: dict[Key, int] = {}

    def excuse(self, key: Key, assignment: ShardAssignment | None) -> None:
        """Tolerate the absence of a shard in the record's epoch: it is being loaded from the
        journal, or was to be forgotten."""
        if assignment is not None:
            self._excused[key] = assignment.epoch

    def revised(self, key: Key, a: ShardAssignment) -> ShardAssignment:
        """The record that this server wants for a shard of which it has nothing."""
        if a.content is not ShardContent.PRESENT or self._excused.get(key) == a.epoch:
            return a
        if a.primary == self._me:
            return not_held(a, self._me)
        return without_backup(a, a.primary, self._me) if self._me in a.backups else a
