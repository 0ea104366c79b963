"""Shards that were to be loaded from a snapshot, by a coordinator that ended in the middle."""

from dataclasses import replace

from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent

GIVEN_UP_AFTER_S = 10.0
"""Who has loaded them may be about to write so."""


class AbandonedLoads:
    """Of one job, as one coordinator sees it."""

    def __init__(self) -> None:
        self._loading: frozenset[tuple[int, int]] = frozenset()
        self._since_s = 0.0

    @property
    def is_due_soon(self) -> bool:
        """Whether something may have been abandoned, and it is too early to say so."""
        return bool(self._loading)

    def given_up(
        self, assignments: JobAssignments, *, is_restoring: bool, now_s: float
    ) -> JobAssignments:
        """The record in which shards are lost that nobody loads any more. `is_restoring`: this
        coordinator has the job's shards loaded just now."""
        found = [h for h in assignments.shards if h.content is ShardContent.LOADING]
        loading = frozenset((h.shard_id, h.epoch) for h in found)
        if is_restoring:
            loading = frozenset()
        if loading != self._loading:
            self._loading, self._since_s = loading, now_s
        if not loading or now_s - self._since_s < GIVEN_UP_AFTER_S:
            return assignments
        return assignments.changed((h.shard_id for h in found), _lost)


def _lost(loading: ShardAssignment) -> ShardAssignment:
    return replace(
        loading,
        epoch=loading.epoch + 1,
        backups=(),
        joining=None,
        successor=None,
        content=ShardContent.LOST,
        loss=None,
    )
