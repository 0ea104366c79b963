"""Detection of a GPU that makes no progress."""

import threading
from collections.abc import Callable
from typing import Any, Protocol

import structlog
import torch

from shoal.torch_private.watching import after_calls, before_calls

log = structlog.get_logger(__name__)


class DeviceEvent(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """True if the device has reached this point. Raises RuntimeError if it has failed."""


class DeviceProgress:
    """Detector of a device that does not advance in the trainer's work. Not thread-safe.

    After a lost peer, the trainer may hang in any call that waits for the device, such as
    `loss.item()`.
    """

    def __init__(self, record: Callable[[], DeviceEvent | None]) -> None:
        """`record` returns an event after all queued work, or None if no event can be recorded
        now."""
        self._record = record
        self._event: DeviceEvent | None = None
        self._since_s = 0.0
        self._is_failed = False

    def stalled_since_s(self, now_s: float) -> float | None:
        """Return the time since which the device has not reached the last recorded event. None if
        the device has reached it, while a CUDA graph is captured, and after the device has
        failed."""
        if self._is_failed:
            return None
        try:
            # A query from another thread must not disturb a thread that captures a graph.
            with _capture_lock.excluded() as is_free:
                if not is_free:
                    self._event = None
                    return None
                if self._event is None or self._event.query():
                    self._event, self._since_s = self._record(), now_s
                    return None
        except RuntimeError as error:
            # The trainer's next call on the device raises the failure.
            self._is_failed, self._event = True, None
            log.warning("device_not_watched", reason=str(error)[:300])
            return None
        return self._since_s


class _CaptureLock:
    """Mutual exclusion of captures of CUDA graphs, and of calls that invalidate a capture."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_captures = 0

    def watch(self) -> None:
        """Track captures from now on. May be called again."""
        graph, ended = torch.cuda.CUDAGraph, lambda: self._count(-1)
        # A capture that could not begin has no `capture_end`.
        before_calls(graph, "capture_begin", lambda *_, **__: self._count(1), failed=ended)
        after_calls(graph, "capture_end", ended)

    def _count(self, change: int) -> None:
        with self._lock:
            self._num_captures = max(self._num_captures + change, 0)

    def excluded(self) -> "_Excluded":
        """Return a context in which no capture begins. Its value is False during a capture."""
        return _Excluded(self)


class _Excluded:
    def __init__(self, owner: _CaptureLock) -> None:
        self._owner = owner

    def __enter__(self) -> bool:
        self._owner._lock.acquire()
        return not self._owner._num_captures

    def __exit__(self, *_: Any) -> None:
        self._owner._lock.release()


_capture_lock = _CaptureLock()


def cuda_progress(device: torch.device) -> DeviceProgress:
    """Return the progress of the default stream of the trainer's GPU."""
    _capture_lock.watch()

    def record() -> DeviceEvent:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.default_stream(device))
        return event

    return DeviceProgress(record)
