"""Aborts of a generation's groups on a device, made concurrently.

`ProcessGroupNCCL::abort` waits for its communicators up to the group's limit, and then raises. The
abort of one group may wait, in cudaFree, for a kernel of another group that waits for a lost peer
(pytorch issue 119797). So each abort has a thread, and the kernels of all groups end together.
"""

import threading
import time
from collections.abc import Iterable
from typing import Any

import structlog

log = structlog.get_logger(__name__)


class Aborts:
    """The aborts of one generation. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._begun: list[tuple[Any, threading.Thread]] = []
        """Aborted backends with their threads. Kept, so that no later backend has the same `id`."""

    def begin(self, backends: Iterable[Any]) -> None:
        """Begin to abort each backend for which no abort has begun. Does not wait."""
        with self._lock:
            known = {id(backend) for backend, _ in self._begun}
            for backend in backends:
                if id(backend) in known:
                    continue
                known.add(id(backend))
                thread = threading.Thread(
                    target=_abort, args=(backend,), name="shoal-abort", daemon=True
                )
                self._begun.append((backend, thread))
                thread.start()

    def wait(self, limit_s: float) -> bool:
        """Wait for all aborts, at most `limit_s`; return True if they have ended."""
        deadline_s = time.monotonic() + limit_s
        with self._lock:
            threads = [thread for _, thread in self._begun]
        for thread in threads:
            thread.join(max(deadline_s - time.monotonic(), 0))
        return not any(thread.is_alive() for thread in threads)


def _abort(backend: Any) -> None:
    try:
        backend.abort()
    except RuntimeError as error:
        log.warning(
            "abort_failed",
            reason=str(error)[:300],
            consequence="operations of this group may hold their GPU until the process ends",
        )
