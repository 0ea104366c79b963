"""Leases of ranges of samples from the coordinator."""

import threading
import time
from collections.abc import Iterator

import structlog

from shoal.strategies.asynchronous.sample_reserve import SampleReserve
from shoal_client.connection.coordinators import OUTLASTED
from shoal_client.progress.ranges import SampleRange, size_of
from shoal_client.progress.samples import Reserve, SampleClient, SampleLease
from shoal_proto.errors import JobFinished, RejoinError

log = structlog.get_logger(__name__)

ASK_AGAIN_S = 0.5
"""Interval of requests if the coordinator has no range, but the member still has samples."""
TALK_EACH_S = 2.0
"""Longest time without a request: an answer may ask this member to give back samples."""
MAX_HELD_RANGES = 96
"""Limit of held ranges. Coordinators refuse a member with 128 held ranges or more."""
REPORT_WITHIN_S = 3.0
LOOK_UP_EACH_S = 1.0


class Leases:
    """Iterator over ranges to train on, until all samples of all epochs are trained on.

    A thread leases ranges ahead and reports completed ones; iterating raises the thread's errors.
    Without a range the iterator yields None every `LOOK_UP_EACH_S` or sooner.
    """

    def __init__(self, samples: SampleClient, batch_size: int, *, round_batches: int = 1) -> None:
        """`round_batches`: number of batches that are acknowledged together."""
        self._samples = samples
        self._batch_size = batch_size
        self._reserve = SampleReserve(
            batch_size, samples.num_samples, round_samples=batch_size * round_batches
        )
        self._changed = threading.Condition()
        self._done: list[SampleRange] = []
        self._given_back: list[SampleRange] = []
        self._is_waiting = False
        self._has_none = False
        self._is_exhausted = False
        self._is_closed = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._lease, name="shoal-lease", daemon=True)

    def __iter__(self) -> Iterator[SampleRange | None]:
        self._thread.start()
        while True:
            span = self._next()
            if span is None and (self._is_exhausted or self._is_closed):
                return
            given_s = time.monotonic()
            yield span
            if span is not None:
                with self._changed:
                    took_s = time.monotonic() - given_s
                    self._reserve.pace.record_trained(span.stop - span.start, took_s)

    def _next(self) -> SampleRange | None:
        with self._changed:
            span = self._take()
            if span is None:
                # There may be no range for long. The trainer gets None meanwhile, so that it can
                # follow changes of members.
                self._has_none = False
                self._changed.wait_for(self._has_news, timeout=LOOK_UP_EACH_S)
                span = self._take()
            if self._error is not None:
                raise self._error
            return span

    def _take(self) -> SampleRange | None:
        span = self._reserve.take(self._batch_size)
        if self._is_waiting != (span is None):
            self._is_waiting = span is None
            self._changed.notify_all()
        return span

    def _has_news(self) -> bool:
        over = self._is_exhausted or self._is_closed or self._error is not None
        return over or self._has_none or self._reserve.num_ready > 0

    def done(self, trained: SampleRange) -> None:
        """Report the range as completed: its step can no longer be lost. Thread-safe."""
        with self._changed:
            self._done.append(trained)
            self._changed.notify_all()

    def close(self) -> None:
        """Report completed ranges and give back the others.

        Waits up to twice `REPORT_WITHIN_S`; logs a warning if no coordinator answers.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(REPORT_WITHIN_S)
            if self._thread.is_alive():
                log.warning("samples_not_reported", reason="the coordinator does not answer")
                return
        completed, reserve = (
            self._done,
            self._reserve_of(self._given_back + self._reserve.take_all()),
        )
        owes = completed or reserve.given_back or self._samples.has_unreported
        if self._is_exhausted or not owes:
            return
        try:
            self._samples.report(completed, reserve=reserve, timeout_s=REPORT_WITHIN_S)
        except (*OUTLASTED, RejoinError, JobFinished) as error:
            log.warning("samples_not_reported", reason=str(error))

    # --- on the leasing thread ---

    def _lease(self) -> None:
        try:
            while self._await_news():
                self._request()
        except Exception as error:  # noqa: BLE001 - raised where the trainer asks for samples
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _await_news(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._has_message, TALK_EACH_S)
            return not self._is_over

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._is_exhausted

    @property
    def _wants_more(self) -> bool:
        return self._reserve.lacking > 0

    @property
    def _has_message(self) -> bool:
        return bool(self._done or self._given_back) or self._wants_more

    def _request(self) -> None:
        lease = self._samples.coordinators.persist(
            self._attempt, waits_for="samples", gives_up=lambda: self._is_closed
        )
        with self._changed:
            self._apply(lease)
            if lease.range is None and self._wants_more:
                # Other members hold the remaining samples, or this member holds its share of them.
                self._changed.wait_for(
                    lambda: self._is_over or bool(self._done),
                    lease.retry_after_s if self._is_waiting else ASK_AGAIN_S,
                )

    def _attempt(self) -> SampleLease:
        with self._changed:
            done, self._done = self._done, []
            back, self._given_back = self._given_back, []
            wanted, reserve = self._reserve.lacking, self._reserve_of(back)
            if len(self._samples.held) >= MAX_HELD_RANGES:
                wanted = 0
        return self._samples.lease(wanted, done, reserve=reserve)

    def _reserve_of(self, given_back: list[SampleRange]) -> Reserve:
        not_begun = self._reserve.num_ready + size_of(given_back)
        return Reserve(
            num_samples=self._reserve.wanted,
            step_samples=self._reserve.step_samples,
            given_back=given_back,
            num_begun=size_of(self._samples.held) - not_begun,
            begins_per_s=self._reserve.begins_per_s,
        )

    def _apply(self, lease: SampleLease) -> None:
        self._is_exhausted, self._has_none = lease.exhausted, lease.range is None
        self._reserve.remove(lease.not_held)
        if lease.range is not None:
            self._reserve.add(lease.range)
        num_held = size_of(self._samples.held)
        self._given_back += self._reserve.beyond_share(lease.reserve_max, num_held)
        self._changed.notify_all()
