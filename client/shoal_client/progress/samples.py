"""A worker's client of the sample ledger."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from shoal_client.connection.coordinators import OUTLASTED, Coordinators
from shoal_client.progress.ranges import SampleRange, joined, subtract_ranges
from shoal_proto.errors import Overloaded, ShoalError
from shoal_proto.v1 import samples_pb2
from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.samples_pb2_grpc import SamplesStub

DEFAULT_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class SampleLease:
    """The coordinator's answer to a lease request."""

    range: SampleRange | None
    """May be shorter than requested. None: nothing now."""
    exhausted: bool
    retry_after_s: float
    """Wait before the next request, if `range` is None and not `exhausted`."""
    reserve_max: int = 0
    """Samples to hold at most; 0: any number."""
    not_held: tuple[SampleRange, ...] = ()
    """Ranges that no longer belong to this member: do not begin them."""


@dataclass(frozen=True, kw_only=True)
class Reserve:
    """Samples that a member wants to hold for times without a coordinator."""

    num_samples: int
    """Samples to hold in all, at least 1."""
    step_samples: int
    """Samples of a step: ranges are multiples of it, unless an epoch ends."""
    given_back: Sequence[SampleRange] = ()
    """Ranges that were never begun: other members may train on them."""
    num_begun: int = 0
    """Samples begun, among those held or completed in this call."""
    begins_per_s: int = 0
    """Maximum rate of further begun samples."""


class SampleClient:
    """Leases samples of one job for one member. Thread-safe.

    Ranges are held until they are completed or given back. The first call gives back what another
    client of this process held."""

    def __init__(
        self,
        coordinators: Coordinators,
        token: Callable[[], Token],
        *,
        dataset_size: int,
        num_epochs: int,
    ) -> None:
        """`dataset_size` and `num_epochs`: the same for all members."""
        self.coordinators = coordinators
        self._token = token
        self._dataset_size = dataset_size
        self._num_epochs = num_epochs
        self._lock = threading.Lock()
        self._held: list[SampleRange] = []
        self._unreported: list[SampleRange] = []
        self._given_back: list[SampleRange] = []
        self._not_durable: dict[int, list[SampleRange]] = {}
        """Reported ranges that may not be durable yet, by the request's number."""
        self._unanswered: samples_pb2.LeaseRequest | None = None
        self._not_held: list[SampleRange] = []
        """Ranges that this member no longer holds, until `lease` has returned them."""
        self._sequence = 0

    @property
    def num_samples(self) -> int:
        """Number of samples of the job, over all epochs."""
        return self._dataset_size * self._num_epochs

    @property
    def held(self) -> tuple[SampleRange, ...]:
        """Ranges neither reported as completed nor given back, in order."""
        with self._lock:
            return tuple(self._held)

    @property
    def has_unreported(self) -> bool:
        """True if the last request had no answer, or ranges are to be reported."""
        with self._lock:
            return bool(self._unanswered is not None or self._unreported or self._given_back)

    def lease(
        self,
        num_samples: int,
        completed: Iterable[SampleRange] = (),
        *,
        reserve: Reserve | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> SampleLease:
        """Report `completed` ranges (leased ranges, or parts of them) and lease at most
        `num_samples` further samples. With a reserve, a report is repeated until it is durable.
        Raises Fenced if this member was declared lost, ProposalConflict if the job has other
        samples, JobQuarantined, CertificateRefused, and the last RetryError after `timeout_s`.

        The request may have been carried out in the last three cases, except for Overloaded. So the
        next call repeats it first. If a range is granted then, that call returns the range, and
        reports its own `completed` ranges later; with `num_samples` 0 it gives the range back."""
        with self._lock:
            done = list(completed)
            back = list(reserve.given_back) if reserve is not None else []
            self._unreported = joined([*self._unreported, *done])
            self._given_back = joined([*self._given_back, *back])
            self._held = subtract_ranges(self._held, [*done, *back])
            answer = None
            if self._unanswered is not None:
                # A retry gets the first answer.
                answer = self._call(self._unanswered, timeout_s)
                if answer.range is not None and not num_samples:
                    # The caller would not know of the range, and nobody would train on it.
                    self._held = subtract_ranges(self._held, [answer.range])
                    self._given_back = joined([*self._given_back, answer.range])
            if answer is None or not (answer.exhausted or (answer.range and num_samples)):
                answer = self._call(self._request(num_samples, reserve), timeout_s)
            self._not_held = []
            return answer

    def _call(self, request: samples_pb2.LeaseRequest, timeout_s: float) -> SampleLease:
        self._unanswered = request
        try:
            reply = self.coordinators.call(
                lambda channel: SamplesStub(channel).Lease, request, timeout_s=timeout_s
            )
        except Overloaded:
            # The request had no effect, and would be refused again.
            self._unanswered = None
            self._unreported = joined([*map(_range, request.completed), *self._unreported])
            self._given_back = joined([*map(_range, request.given_back), *self._given_back])
            raise
        except OUTLASTED:
            raise
        except ShoalError:
            self._unanswered = None
            raise
        self._unanswered = None
        if request.completed:
            self._not_durable[request.sequence] = list(map(_range, request.completed))
        for sequence in [s for s in self._not_durable if s <= reply.durable_sequence]:
            del self._not_durable[sequence]
        not_held = list(map(_range, reply.not_held))
        self._not_held = joined([*self._not_held, *not_held])
        leased = _range(reply.range) if reply.HasField("range") else None
        now_leased = [leased] if leased is not None else []
        self._held = joined([*subtract_ranges(self._held, not_held), *now_leased])
        return SampleLease(
            range=leased,
            exhausted=reply.exhausted,
            retry_after_s=reply.retry_after_s,
            reserve_max=reply.reserve_max_samples,
            not_held=tuple(self._not_held),
        )

    def _request(self, num_samples: int, reserve: Reserve | None) -> samples_pb2.LeaseRequest:
        # Rising across several `SampleClient`s of one process. In microseconds since boot: released
        # coordinators refuse numbers above 2**53 - 1, which nanoseconds reach after 104 days.
        self._sequence = max(self._sequence + 1, time.monotonic_ns() // 1000)
        request = samples_pb2.LeaseRequest(
            token=self._token(),
            completed=map(_message, self._unreported),
            held=map(_message, self._held),
            given_back=map(_message, self._given_back),
            num_samples=num_samples,
            dataset_size=self._dataset_size,
            num_epochs=self._num_epochs,
            sequence=self._sequence,
        )
        if reserve is not None:
            before = joined(r for ranges in self._not_durable.values() for r in ranges)
            request.completed_before.extend(map(_message, before))
            request.reserve_samples = min(reserve.num_samples, self.num_samples)
            request.step_samples = reserve.step_samples
            request.begun_samples = reserve.num_begun
            request.begins_samples_per_s = reserve.begins_per_s
        else:
            self._not_durable.clear()
        self._unreported, self._given_back = [], []
        return request

    def report(
        self,
        completed: Iterable[SampleRange] = (),
        *,
        reserve: Reserve | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """Report completed ranges only. Raises what `lease` raises."""
        self.lease(0, completed, reserve=reserve, timeout_s=timeout_s)


def _message(r: SampleRange) -> samples_pb2.SampleRange:
    return samples_pb2.SampleRange(epoch=r.epoch, start=r.start, stop=r.stop)


def _range(message: samples_pb2.SampleRange) -> SampleRange:
    return SampleRange(message.epoch, message.start, message.stop)
