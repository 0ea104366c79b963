"""Batches for members that train at their own pace: the coordinator leases who trains on what."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from shoal_client.samples import Lease, SampleRange, Samples


class Leases:
    """Yields ranges to train on until every sample of every epoch is done, by whomever."""

    def __init__(self, samples: Samples, batch_size: int) -> None:
        self._samples = samples
        self._batch_size = batch_size
        self._changed = threading.Condition()
        self._done: list[SampleRange] = []
        self._closed = False
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shoal-lease")

    def __iter__(self) -> Iterator[SampleRange]:
        ahead: Future[Lease] = self._ask()
        while True:
            lease = ahead.result()
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
        """Report what is done and let go of the rest."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pool.shutdown(cancel_futures=True)
        completed = self._take()
        if completed:
            self._samples.report(completed)

    def _ask(self) -> Future[Lease]:
        return self._pool.submit(lambda: self._samples.lease(self._batch_size, self._take()))

    def _take(self) -> list[SampleRange]:
        with self._changed:
            done, self._done = self._done, []
        return done


__all__ = ["Leases"]
