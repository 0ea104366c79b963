"""What became of a member's pushes, for the health report."""

import threading
from collections.abc import Mapping

from shoal_client.parameters.dense import PushResult


class PushCounts:
    """All methods may be called by any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: PushResult | None = None
        self._num_pushed = 0
        self._num_rejected = 0

    def pushed(self, result: PushResult) -> None:
        """A step's push was applied."""
        with self._lock:
            self._last = result
            self._num_pushed += 1

    def rejected(self) -> None:
        """A push was too stale for some shard."""
        with self._lock:
            self._num_rejected += 1

    def metrics(self) -> Mapping[str, float]:
        """Nothing before the first push."""
        with self._lock:
            if self._last is None:
                return {}
            return {
                "staleness": self._last.staleness_mean,
                "staleness_max": float(self._last.staleness_max),
                "pushes": float(self._num_pushed),
                "rejected": float(self._num_rejected),
            }
