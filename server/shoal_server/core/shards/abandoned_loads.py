"""Shards that were to be loaded from a snapshot by a restore that ended early."""

from dataclasses import replace

from shoal_server.core.shards.assignments import JobAssignments, ShardAssignment, ShardContent

GIVEN_UP_AFTER_S = 10.0
"""Time after which an abandoned load is given up. Until then, a primary that has loaded its shard
may still record that."""


class AbandonedLoads:
    def __init__(self) -> None:
        self._loading: frozenset[tuple[int, int]] = frozenset()
        self._since_s = 0.0

    @property
    def is_due_soon(self) -> bool:
        """True if shards wait to be loaded, and may be given up soon."""
        return bool(self._loading)

    def mark_lost(
        self, assignments: JobAssignments, *, is_restoring: bool, now_s: float
    ) -> JobAssignments:
        """Mark the LOADING shards as LOST if none of them changed for GIVEN_UP_AFTER_S.
        `is_restoring`: True marks no shard, as this coordinator is restoring the job."""
        shards = [h for h in assignments.shards if h.content is ShardContent.LOADING]
        loading = frozenset((h.shard_id, h.epoch) for h in shards)
        if is_restoring:
            loading = frozenset()
        if loading != self._loading:
            self._loading, self._since_s = loading, now_s
        if not loading or now_s - self._since_s < GIVEN_UP_AFTER_S:
            return assignments
        return assignments.changed((h.shard_id for h in shards), _lost)


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
