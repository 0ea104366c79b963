"""The error for a shard of which its primary has no copy."""

from shoal_proto.errors import ShardNotReady, ShoalError, StateLost
from shoal_server.core.shards import losses
from shoal_server.core.shards.assignments import ShardAssignment, ShardContent


def absence_error(job: str, assignment: ShardAssignment, *, is_kept: bool) -> ShoalError:
    """Return the error for a shard of which its primary has no copy: StateLost if the shard had
    values and no backup or journal is known to have its newest version, else ShardNotReady.

    `is_kept`: True if the primary's journal has the shard, in whatever version.
    """
    if assignment.content is ShardContent.NONE:
        return not_ready(job, assignment.shard_id, "a worker that creates it")
    if assignment.content is ShardContent.LOADING:
        return not_ready(job, assignment.shard_id, "a snapshot that is being restored")
    if is_kept and not assignment.found_version:
        server_id = assignment.primary.server_id
        expected = f"server {server_id}, which reads it from its journal once it is known that no"
        return not_ready(job, assignment.shard_id, f"{expected} other process has a later version")
    if assignment.backups:
        backups = ", ".join(backup.server_id for backup in assignment.backups)
        return not_ready(job, assignment.shard_id, f"one of its backups, {backups}, as primary")
    return _lost(job, assignment)


def not_ready(job: str, shard_id: int, expected: str) -> ShardNotReady:
    return ShardNotReady(f"shard {shard_id} of job {job} has no values yet", expected=expected)


def _lost(job: str, assignment: ShardAssignment) -> StateLost:
    why = losses.explained(job, assignment)
    return StateLost(
        why.what, seen=why.seen, expected=why.expected, fix=why.fix, details=why.details
    )
