"""A worker's side of the sample ledger: lease a range, train on it, report it with the next."""

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shoal_client.connection.coordinators import Coordinators
from shoal_proto.v1 import samples_pb2
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.samples_pb2_grpc import SamplesStub

DEFAULT_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, order=True)
class SampleRange:
    """Positions [start, stop) of one epoch's permutation."""

    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Lease:
    """What the coordinator answered."""

    range: SampleRange | None
    """What to train on next; it may be shorter than was asked for. None: nothing now."""
    exhausted: bool
    """Every sample of every epoch was completed: stop."""
    retry_after_s: float
    """With neither range nor `exhausted`: others are still at work, ask again after so long."""


class Samples:
    """Leases samples of one job for one member. Thread-safe; calls go one after the other.

    It remembers what it leased: a range counts as worked at until it is reported as completed.
    What another `Samples` of the same process had leased goes back with the first call.
    """

    def __init__(
        self,
        coordinators: Coordinators,
        token: Callable[[], Token],
        *,
        dataset_size: int,
        num_epochs: int,
    ) -> None:
        """`token` gives the member's current token; it is asked on each call.

        Both numbers must be the same for every member of the job.
        """
        self.coordinators = coordinators
        self._token = token
        self._dataset_size = dataset_size
        self._num_epochs = num_epochs
        self._lock = threading.Lock()
        self._held: set[SampleRange] = set()
        self._unreported: list[SampleRange] = []
        self._sequence = 0

    @property
    def held(self) -> tuple[SampleRange, ...]:
        """What was leased and not reported as completed, in order."""
        with self._lock:
            return tuple(sorted(self._held))

    def lease(
        self,
        num_samples: int,
        completed: Iterable[SampleRange] = (),
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Lease:
        """Report `completed` ranges (as they were leased) and get at most `num_samples` more.

        Retries over a coordinator's restart or fail-over for `timeout_s`. Raises Fenced when this
        member was declared lost, ProposalConflict when the job goes over other samples, and the
        last RetryError when the time is over: the report is kept and goes along with the next call.
        """
        with self._lock:
            done = set(completed)
            self._unreported += sorted(done)
            self._held -= done
            # The clock keeps it rising over several `Samples` of one process.
            self._sequence = max(self._sequence + 1, time.monotonic_ns())
            request = samples_pb2.LeaseRequest(
                token=self._token(),
                completed=map(_message, self._unreported),
                held=map(_message, sorted(self._held)),
                num_samples=num_samples,
                dataset_size=self._dataset_size,
                num_epochs=self._num_epochs,
                sequence=self._sequence,
            )
            reply = self.coordinators.call(
                lambda channel: SamplesStub(channel).Lease, request, timeout_s=timeout_s
            )
            self._unreported.clear()
            leased = None
            if reply.HasField("range"):
                leased = SampleRange(reply.range.epoch, reply.range.start, reply.range.stop)
                self._held.add(leased)
            return Lease(range=leased, exhausted=reply.exhausted, retry_after_s=reply.retry_after_s)

    def report(
        self, completed: Iterable[SampleRange] = (), *, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """Report completed ranges without a wish for more, as before leaving. Raises as `lease`."""
        self.lease(0, completed, timeout_s=timeout_s)


def _message(r: SampleRange) -> samples_pb2.SampleRange:
    return samples_pb2.SampleRange(epoch=r.epoch, start=r.start, stop=r.stop)
