"""The sample ledger: who trains on which samples, for members that go at their own pace.

An epoch is a permutation of the dataset; the ledger leases ranges [start, stop) of its positions
and books them when they are completed. In the books each sample of each epoch is completed exactly
once, whoever comes and goes:

- A range is in one place at a time: free, held by one member, or completed.
- What a lost member held is free again. Free positions are leased lowest first, so what came back
  goes out before anything fresh.
- Only the holder completes a range. What is reported by anybody else is ignored and counted.

Epochs overlap at the edge: once an epoch is leased out, the next one begins, so that nobody waits
for the slowest. It is at most one epoch ahead: with one still in flight, the next but one does not
begin. So nobody runs away from a member that hangs, and the books stay small: two epochs, and
as many spans as members hold (`MAX_HELD_RANGES` each) or held when they were lost.

What trained twice is bounded by `returned + ignored`: a lost member may have trained on what it
gave back, and who reports what it does not hold did train on it.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from shoal_server.core.samples.requests import (
    Answer,
    EpochCounts,
    LedgerCounts,
    Request,
    SampleRange,
    StaleRequest,
    TooManyRanges,
)
from shoal_server.core.samples.spans import Spans

MAX_OPEN_EPOCHS = 2
MAX_HELD_RANGES = 8
MAX_LEASE_SAMPLES = 1 << 20
MAX_CLOSED_COUNTS = 64
MAX_NUMBER = 1 << 63
FORMAT = 1


class _Epoch:
    def __init__(self, number: int, free: Spans, completed: Spans, returned: int) -> None:
        self.number = number
        self.free = free
        self.completed = completed
        self.returned = returned


class _Member:
    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.sequence = 0
        self.answer: SampleRange | None = None
        self.held: dict[int, Spans] = {}

    @property
    def num_ranges(self) -> int:
        return sum(len(spans) for spans in self.held.values())


class Ledger:
    """The books of one job. Every method leaves them untouched when it raises."""

    def __init__(self, *, dataset_size: int, num_epochs: int) -> None:
        if dataset_size < 1 or num_epochs < 1:
            raise ValueError(
                f"dataset_size is {dataset_size} and num_epochs {num_epochs}; expected at least 1"
            )
        self.dataset_size = dataset_size
        self.num_epochs = num_epochs
        self._num_closed = 0
        self._closed_returned = 0
        self._closed: dict[int, int] = {}
        self._open: list[_Epoch] = []
        self._members: dict[str, _Member] = {}
        self._ignored = 0

    @property
    def exhausted(self) -> bool:
        """Whether every sample of every epoch was completed."""
        return self._num_closed == self.num_epochs

    @property
    def holders(self) -> tuple[tuple[str, str], ...]:
        """(member_id, incarnation) of everybody who has asked and not gone."""
        return tuple((m, member.incarnation) for m, member in self._members.items())

    def answer(self, request: Request) -> Answer:
        """Book what the member completed, take back what it dropped, and lease it a range.

        A retry of its latest request gets the same answer and books nothing. An incarnation that
        was not seen before ends the member's earlier one. Raises StaleRequest, TooManyRanges.
        """
        member = self._members.get(request.member_id)
        if member is None or member.incarnation != request.incarnation:
            self.give_back(request.member_id)
            member = self._members[request.member_id] = _Member(request.incarnation)
        if request.sequence < member.sequence:
            raise StaleRequest(request.sequence, member.sequence)
        if request.sequence > member.sequence:
            self._book(member, request)
            member.sequence = request.sequence
            member.answer = self._lease(member, request.num_samples)
        return Answer(range=member.answer, exhausted=self.exhausted)

    def ignore(self, completed: Iterable[SampleRange]) -> None:
        """Count what a fenced member reported. Its ranges went back when it was lost."""
        self._ignored += sum(min(max(r.stop - r.start, 0), self.dataset_size) for r in completed)

    def give_back(self, member_id: str, incarnation: str | None = None) -> int:
        """Free what a lost member holds and forget it; returns how many samples that is.

        With an incarnation, only that one: a later one under the same id keeps its ranges.
        """
        member = self._members.get(member_id)
        if member is None or incarnation not in (None, member.incarnation):
            return 0
        del self._members[member_id]
        num_samples = 0
        for number, spans in member.held.items():
            for start, stop in spans:
                self._free(self._epoch(number), start, stop)
                num_samples += stop - start
        return num_samples

    def counts(self) -> LedgerCounts:
        """What the books say."""
        epochs = [self._epoch_counts(epoch) for epoch in self._open]
        closed = [
            EpochCounts(epoch=e, completed=self.dataset_size, in_flight=0, returned=returned)
            for e, returned in self._closed.items()
        ]
        return LedgerCounts(
            dataset_size=self.dataset_size,
            num_epochs=self.num_epochs,
            completed=self._num_closed * self.dataset_size + sum(e.completed for e in epochs),
            in_flight=sum(e.in_flight for e in epochs),
            returned=self._closed_returned + sum(e.returned for e in epochs),
            ignored=self._ignored,
            exhausted=self.exhausted,
            epochs=(*closed, *epochs),
        )

    def _epoch_counts(self, epoch: _Epoch) -> EpochCounts:
        completed = epoch.completed.size
        return EpochCounts(
            epoch=epoch.number,
            completed=completed,
            in_flight=self.dataset_size - epoch.free.size - completed,
            returned=epoch.returned,
        )

    def _book(self, member: _Member, request: Request) -> None:
        held = {number: Spans(spans) for number, spans in member.held.items()}
        booked: list[SampleRange] = []
        num_reported = num_booked = 0
        for report in request.completed:
            num_reported += min(max(report.stop - report.start, 0), self.dataset_size)
            for start, stop in held.get(report.epoch, Spans()).within(report.start, report.stop):
                held[report.epoch].remove(start, stop)
                booked.append(SampleRange(report.epoch, start, stop))
                num_booked += stop - start
        kept: dict[int, Spans] = {}
        for claim in request.held:
            for start, stop in held.get(claim.epoch, Spans()).within(claim.start, claim.stop):
                kept.setdefault(claim.epoch, Spans()).add(start, stop)
        dropped = [
            SampleRange(number, start, stop)
            for number, spans in _without(held, kept).items()
            for start, stop in spans
        ]
        if sum(map(len, kept.values())) >= MAX_HELD_RANGES and request.num_samples > 0:
            raise TooManyRanges
        self._ignored += num_reported - num_booked
        member.held = kept
        for r in dropped:
            self._free(self._epoch(r.epoch), r.start, r.stop)
        for r in booked:
            self._epoch(r.epoch).completed.add(r.start, r.stop)
        self._close_completed()

    def _lease(self, member: _Member, num_samples: int) -> SampleRange | None:
        if num_samples < 1:
            return None
        epoch = next((e for e in self._open if e.free), None) or self._begin_epoch()
        if epoch is None:
            return None
        start, stop = epoch.free.first()
        stop = min(stop, start + min(num_samples, MAX_LEASE_SAMPLES))
        epoch.free.remove(start, stop)
        member.held.setdefault(epoch.number, Spans()).add(start, stop)
        return SampleRange(epoch.number, start, stop)

    def _begin_epoch(self) -> _Epoch | None:
        number = self._num_closed + len(self._open)
        if number == self.num_epochs or len(self._open) == MAX_OPEN_EPOCHS:
            return None
        self._open.append(_Epoch(number, Spans([(0, self.dataset_size)]), Spans(), 0))
        return self._open[-1]

    def _close_completed(self) -> None:
        # In order: an epoch that is done before its predecessor waits for it.
        while self._open and self._open[0].completed.size == self.dataset_size:
            epoch = self._open.pop(0)
            self._num_closed += 1
            self._closed_returned += epoch.returned
            self._closed[epoch.number] = epoch.returned
            self._closed.pop(epoch.number - MAX_CLOSED_COUNTS, None)

    def _epoch(self, number: int) -> _Epoch:
        return self._open[number - self._num_closed]

    @staticmethod
    def _free(epoch: _Epoch, start: int, stop: int) -> None:
        epoch.free.add(start, stop)
        epoch.returned += stop - start

    def to_json(self) -> dict[str, Any]:
        """The books as JSON types; `from_json` makes the same books of it."""
        return {
            "format": FORMAT,
            "dataset_size": self.dataset_size,
            "num_epochs": self.num_epochs,
            "num_closed": self._num_closed,
            "closed_returned": self._closed_returned,
            "closed": list(map(list, self._closed.items())),
            "ignored": self._ignored,
            "open": [
                {
                    "epoch": e.number,
                    "free": list(map(list, e.free)),
                    "returned": e.returned,
                }
                for e in self._open
            ],
            "members": {name: _member_to_json(member) for name, member in self._members.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Ledger":
        """The books that `to_json` wrote. Raises ValueError if they do not add up, and KeyError,
        TypeError or AttributeError for what has another shape."""
        _check_numbers(data)
        if data.get("format") != FORMAT:
            raise ValueError(f"sample ledger of format {data.get('format')!r}; expected {FORMAT}")
        ledger = cls(dataset_size=data["dataset_size"], num_epochs=data["num_epochs"])
        ledger._num_closed = data["num_closed"]
        ledger._closed_returned = data["closed_returned"]
        ledger._closed = dict(data["closed"])
        ledger._ignored = data["ignored"]
        ledger._members = {name: _member_from_json(m) for name, m in data["members"].items()}
        ledger._open = [ledger._epoch_from_json(entry) for entry in data["open"]]
        expected = [ledger._num_closed + i for i in range(len(ledger._open))]
        held = {number for m in ledger._members.values() for number in m.held}
        counts = (ledger._num_closed, ledger._closed_returned, ledger._ignored)
        if not all(isinstance(n, int) for pair in [counts, *ledger._closed.items()] for n in pair):
            raise ValueError("sample ledger with counts that are no integers")
        if [e.number for e in ledger._open] != expected or not held <= set(expected):
            raise ValueError(f"sample ledger with epochs out of order; expected {expected}")
        return ledger

    def _epoch_from_json(self, entry: Mapping[str, Any]) -> _Epoch:
        # Completed is what is neither free nor held: stored thrice, the three could disagree.
        free, completed = Spans(map(tuple, entry["free"])), Spans([(0, self.dataset_size)])
        held = [s for m in self._members.values() for s in m.held.get(entry["epoch"], ())]
        for start, stop in [*free, *held]:
            if completed.within(start, stop) != [(start, stop)]:
                raise ValueError(
                    f"sample ledger holds [{start}, {stop}) of epoch {entry['epoch']} twice,"
                    f" or it lies beyond the {self.dataset_size} samples"
                )
            completed.remove(start, stop)
        return _Epoch(entry["epoch"], free, completed, entry["returned"])


def _check_numbers(data: object) -> None:
    """Every number in the books counts something. Raises ValueError."""
    if isinstance(data, Mapping):
        for value in data.values():
            _check_numbers(value)
    elif isinstance(data, list):
        for value in data:
            _check_numbers(value)
    elif isinstance(data, bool | float) or (isinstance(data, int) and not 0 <= data < MAX_NUMBER):
        raise ValueError(f"sample ledger with {data!r} in it; expected integers from 0 to 2^63")


def _without(held: Mapping[int, Spans], kept: Mapping[int, Spans]) -> dict[int, Spans]:
    rest = {number: Spans(spans) for number, spans in held.items()}
    for number, spans in kept.items():
        for start, stop in spans:
            rest[number].remove(start, stop)
    return rest


def _member_to_json(member: _Member) -> dict[str, Any]:
    answer = member.answer
    return {
        "incarnation": member.incarnation,
        "sequence": member.sequence,
        "answer": [answer.epoch, answer.start, answer.stop] if answer else None,
        "held": [[number, a, b] for number, spans in member.held.items() for a, b in spans],
    }


def _member_from_json(data: Mapping[str, Any]) -> _Member:
    member = _Member(data["incarnation"])
    member.sequence = data["sequence"]
    member.answer = SampleRange(*data["answer"]) if data["answer"] else None
    for number, start, stop in data["held"]:
        member.held.setdefault(number, Spans()).add(start, stop)
    return member
