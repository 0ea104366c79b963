"""The coordinator's view of a series, kept up to date."""

import math
import threading
import time

import grpc
import structlog

from shoal_client.connection.coordinators import OUTLASTED, Coordinators, chance
from shoal_client.connection.held_stream import HeldStream, Stream
from shoal_proto.back_off import BackOff
from shoal_proto.errors import DeadlineExceeded, ShoalError, Unavailable
from shoal_proto.v1.weights_pb2 import SeriesView, WatchSeriesRequest
from shoal_proto.v1.weights_pb2_grpc import WeightSeriesStub

log = structlog.get_logger(__name__)

FIRST_ANSWER_S = 2.0
"""See `HeldStream`."""


class SeriesWatch:
    """The newest view of a series. Its version never falls, even if an outdated coordinator sends
    an older view. Thread-safe."""

    def __init__(self, coordinators: Coordinators, series: str) -> None:
        self._coordinators = coordinators
        self._series = series
        self._changed = threading.Condition()
        self._view: SeriesView | None = None
        self._failure: ShoalError | None = None
        self._is_closed = False
        self._stream = HeldStream(FIRST_ANSWER_S)
        self._thread = threading.Thread(target=self._follow, name="shoal-series", daemon=True)
        self._thread.start()

    def newest(self, newer_than: int, timeout_s: float | None) -> SeriesView:
        """Wait for a view with a newest version above `newer_than`; -1: any view. Raises
        DeadlineExceeded, the coordinator's refusal, or Unavailable after `close`."""
        give_up_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self._changed:
            while True:
                if self._failure is not None:
                    raise self._failure
                if self._view is not None and self._view.head > newer_than:
                    return self._view
                if self._is_closed:
                    raise Unavailable("the reader was closed")
                left_s = give_up_s - time.monotonic()
                if left_s <= 0.0:
                    raise self._late(newer_than, timeout_s or 0.0)
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))

    def wait_change(self, seen: SeriesView, timeout_s: float) -> SeriesView:
        """Wait for another view than `seen`; return `seen` if none arrives in time."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._view is not seen or self._is_closed, timeout=timeout_s
            )
            return self._view or seen

    def close(self) -> None:
        """Stop watching; waiting calls fail."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._stream.close()
        self._thread.join()

    def _late(self, newer_than: int, timeout_s: float) -> DeadlineExceeded:
        head = self._view.head if self._view is not None else None
        return DeadlineExceeded(
            f"no newer version of series {self._series} within {timeout_s:g} s",
            seen="no answer from a coordinator" if head is None else f"version {head}",
            expected=f"one newer than {newer_than}",
        )

    def _follow(self) -> None:
        back_off, request = BackOff(), WatchSeriesRequest(series=self._series)
        logged: tuple[str, SeriesView | None] | None = None

        def start(channel: grpc.Channel) -> Stream[SeriesView]:
            return WeightSeriesStub(channel).Watch(request)

        def handle(view: SeriesView) -> None:
            back_off.reset()
            self._update(view)

        while not self._is_closed:
            error = self._stream.hold(self._coordinators, start, handle)
            address = self._stream.address
            error = error or Unavailable(f"{address} ended the stream of series {self._series}")
            if self._is_closed:
                return
            if not isinstance(error, OUTLASTED):
                with self._changed:
                    self._failure = error
                    self._changed.notify_all()
                return
            self._coordinators.choose_next_replica(address, error)
            found = str(error), self._view
            if found != logged:  # else the same outage goes on
                log.info("series_watch_interrupted", series=self._series, reason=found[0])
                logged = found
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, back_off.pause_s(chance()))

    def _update(self, view: SeriesView) -> None:
        with self._changed:
            if self._view is None or view.head >= self._view.head:
                self._view = view
                self._changed.notify_all()
