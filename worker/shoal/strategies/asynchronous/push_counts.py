"""Counts of a member's pushes, and a log line if updates were undone."""

import threading
from collections.abc import Mapping

import structlog

from shoal_client.parameters.dense import PushResult
from shoal_proto.short_lists import short_list

log = structlog.get_logger(__name__)

MAX_LISTED = 8


class RollbackWatch:
    """Detector of shards that were rolled back to an earlier version."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def compare_versions(self, versions: Mapping[int, int]) -> None:
        """Log one line for all shards with a lower version than last time."""
        seen, self._seen = self._seen, dict(versions)
        back = {shard: now for shard, now in versions.items() if now < seen.get(shard, 0)}
        if not back:
            return
        shards = sorted(back)
        listed = [f"shard {shard} from {seen[shard]} to {back[shard]}" for shard in shards]
        log.warning(
            "values_rolled_back",
            reason=short_list(listed, MAX_LISTED),
            num_shards=len(back),
            num_updates_undone=max(seen[shard] - back[shard] for shard in shards),
            fix="Every server of these shards was lost: a snapshot was restored, or their loss was"
            " accepted (see `shoal status`). Training continues from these versions.",
        )


class PushCounts:
    """Counts of pushes. All methods may be called by any thread."""

    def __init__(self) -> None:
        self.rollbacks = RollbackWatch()
        self._lock = threading.Lock()
        self._last: PushResult | None = None
        self._num_pushed = 0
        self._num_rejected = 0

    def pushed(self, result: PushResult) -> None:
        """Note that a step's push was applied."""
        with self._lock:
            self._last = result
            self._num_pushed += 1

    def rejected(self) -> None:
        """Note that a push was too stale for some shard."""
        with self._lock:
            self._num_rejected += 1

    def metrics(self) -> Mapping[str, float]:
        """Figures for the health report; empty before the first push."""
        with self._lock:
            if self._last is None:
                return {}
            return {
                "staleness": self._last.staleness_mean,
                "staleness_max": float(self._last.staleness_max),
                "pushes": float(self._num_pushed),
                "rejected": float(self._num_rejected),
            }
