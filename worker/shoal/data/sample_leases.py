"""Batches for members that train at their own pace: the coordinator leases who trains on what."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeout

import structlog

from shoal_client.progress.samples import Lease, SampleRange, Samples
from shoal_proto.errors import JobFinished, RejoinError, RetryError

log = structlog.get_logger(__name__)

REPORT_WITHIN_S = 3.0
LOOK_UP_EACH_S = 1.0


class Leases:
    """Yields ranges to train on until every sample of every epoch is done, by whomever.

    Where there is none now, since others are still at work or no coordinator is there, it yields
    None now and then.
    """

    def __init__(self, samples: Samples, batch_size: int) -> None:
        self._samples = samples
        self._batch_size = batch_size
        self._changed = threading.Condition()
        self._done: list[SampleRange] = []
        self._closed = False
        self._ahead: Future[Lease] | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shoal-lease")

    def __iter__(self) -> Iterator[SampleRange | None]:
        ahead: Future[Lease] = self._ask()
        while True:
            try:
                lease = ahead.result(timeout=LOOK_UP_EACH_S)
            except FutureTimeout:
                # No coordinator is there, maybe for long: the trainer looks after itself meanwhile.
                yield None
                continue
            if lease.exhausted:
                return
            if lease.range is None:
                # Others are still at work, or this member's own last step is not acknowledged.
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._done or self._closed, timeout=lease.retry_after_s
                    )
                    if self._closed:
                        return
                yield None
                ahead = self._ask()
                continue
            ahead = self._ask()
            yield lease.range

    def done(self, trained: SampleRange) -> None:
        """The range counts: its step cannot be lost any more. Any thread."""
        with self._changed:
            self._done.append(trained)
            self._changed.notify_all()

    def close(self) -> None:
        """Report what is done and let go of the rest. A coordinator that is away is logged."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)
        # One that was cancelled before it began is never done, and took no report along.
        under_way = [a for a in (self._ahead,) if a is not None and not a.cancelled()]
        if wait(under_way, timeout=REPORT_WITHIN_S).not_done:
            log.warning("samples_not_reported", reason="the coordinator does not answer")
            return
        completed = self._take()
        if not completed:
            return
        try:
            self._samples.report(completed, timeout_s=REPORT_WITHIN_S)
        except (RetryError, RejoinError, JobFinished) as error:
            log.warning("samples_not_reported", reason=str(error))

    def _ask(self) -> Future[Lease]:
        self._ahead = self._pool.submit(self._lease)
        return self._ahead

    def _lease(self) -> Lease:
        """What was done goes along with the first attempt, and is kept for the next ones."""
        return self._samples.coordinators.persist(
            lambda: self._samples.lease(self._batch_size, self._take()),
            waits_for="samples",
            gives_up=lambda: self._closed,
        )

    def _take(self) -> list[SampleRange]:
        with self._changed:
            done, self._done = self._done, []
        return done
