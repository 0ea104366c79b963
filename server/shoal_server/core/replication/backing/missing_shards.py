"""What a record says is here and is not: a copy that failed, and that nobody has heard of yet, or
one that was to take over. Whoever else has the shard is to have it, or it is lost by name: a record
that goes on naming this server keeps everybody waiting, a disk that has the shard too."""

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
        """It is on its way from the journal, or was told to be forgotten: in the record's epoch it
        is no loss that nothing is here."""
        if assignment is not None:
            self._excused[key] = assignment.epoch

    def revised(self, key: Key, a: ShardAssignment) -> ShardAssignment:
        """The record of a shard of which nothing is here, as this server wants it."""
        if a.content is not ShardContent.PRESENT or self._excused.get(key) == a.epoch:
            return a
        if a.primary == self._me:
            return not_held(a, self._me)
        return without_backup(a, a.primary, self._me) if self._me in a.backups else a
