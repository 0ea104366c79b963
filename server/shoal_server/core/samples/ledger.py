"""The sample ledger: the samples that each member trains on, if members go at their own pace.

An epoch of the data is a permutation of the dataset. The ledger leases ranges [start, stop) of its
positions, and records them as completed. Each sample of each epoch counts as completed exactly
once, whichever members join or are lost:

- A range is free, held by one member, or completed.
- Ranges of a lost member are free again. The lowest free positions are leased first, so
  returned ranges come before fresh ones.
- Only the holder completes a range. Reports of other members are ignored and counted.

Once an epoch is leased out, the next begins, so that no member waits for the slowest. At most two
epochs are open, or more if the members' reserves need them: members cannot run far ahead of one
that hangs.

A member holds a reserve of samples, to train on while no coordinator answers. If samples are too
few for all reserves, members share them in proportion to their requests. A member that holds more
is notified, and gives back samples that it has not begun.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import inf
from typing import Any

from shoal_server.core.samples.requests import (
    EpochCounts,
    LedgerCounts,
    LedgerRange,
    SampleAnswer,
    SampleRequest,
    StaleRequest,
    TooManyRanges,
)
from shoal_server.core.samples.spans import IntegerSpans

MAX_OPEN_EPOCHS = 2
MAX_RESERVED_EPOCHS = 64
"""Maximum number of open epochs if the reserves together exceed an epoch."""
MAX_HELD_RANGES = 128
MAX_LEASE_SAMPLES = 1 << 20
MAX_CLOSED_COUNTS = 64
MAX_NUMBER = 1 << 63
FORMAT = 1


class _Epoch:
    def __init__(
        self, number: int, free: IntegerSpans, completed: IntegerSpans, returned: int
    ) -> None:
        self.number = number
        self.free = free
        self.completed = completed
        self.returned = returned


class _Member:
    def __init__(self, incarnation: str) -> None:
        self.incarnation = incarnation
        self.sequence = 0
        self.answer: LedgerRange | None = None
        self.waits = False
        """True if the member holds no samples, and none could be leased to it."""
        self.held: dict[int, IntegerSpans] = {}
        self.reserve = 0
        self.not_held: tuple[LedgerRange, ...] = ()
        """Ranges that the member's latest request claimed without holding them."""
        self.begun: int | None = None
        """Held samples that the member had begun at its latest request. None: perhaps all."""
        self.begins_per_s = 0

    def may_have_begun(self, silent_s: float) -> float:
        """Upper bound on the held samples that the member has begun."""
        if self.begun is None or silent_s == inf:
            return inf
        # The request may have been made up to a second before it arrived.
        return self.begun + self.begins_per_s * (silent_s + 1.0)

    @property
    def num_held(self) -> int:
        return sum(spans.size for spans in self.held.values())


class SampleLedger:
    """The sample ledger of one job. A method that raises has changed nothing."""

    def __init__(self, *, dataset_size: int, num_epochs: int) -> None:
        """Raises ValueError unless both numbers are at least 1."""
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
        self._reserves = 0
        self._num_waiting = 0
        self._touched: set[str] = set()

    def pop_touched(self) -> frozenset[str]:
        """Members that changed, or were removed, since the last call."""
        touched, self._touched = frozenset(self._touched), set()
        return touched

    def touch(self, member_ids: Iterable[str]) -> None:
        """Mark members as changed again: the write after `pop_touched` failed."""
        self._touched.update(member_ids)

    @property
    def exhausted(self) -> bool:
        return self._num_closed == self.num_epochs

    @property
    def holders(self) -> tuple[tuple[str, str], ...]:
        """(member_id, incarnation) of each member that sent a request and was not removed."""
        return tuple((m, member.incarnation) for m, member in self._members.items())

    def waits(self, member_id: str) -> bool:
        """True if the member has no samples, and must ask again."""
        member = self._members.get(member_id)
        return member is not None and member.waits

    @property
    def held_samples(self) -> Mapping[str, int]:
        return {
            name: sum(spans.size for spans in member.held.values())
            for name, member in self._members.items()
        }

    def answer(self, request: SampleRequest, num_members: int = 1) -> SampleAnswer:
        """Record completed ranges, free dropped ones, and lease the member a new range.

        `num_members`: all members of the job, also those that have not asked yet.

        A retry of the latest request gets the same range and changes nothing. A new incarnation
        ends the earlier one. Raises StaleRequest or TooManyRanges.
        """
        member = self._members.get(request.member_id)
        is_news = member is None or member.incarnation != request.incarnation
        if member is None or member.incarnation != request.incarnation:
            self.give_back(request.member_id)
            member = self._members[request.member_id] = _Member(request.incarnation)
            self._touched.add(request.member_id)
        if request.sequence < member.sequence:
            raise StaleRequest(request.sequence, member.sequence)
        if request.sequence > member.sequence:
            is_news = self._apply_reports(member, request) or is_news
            self._touched.add(request.member_id)
            member.sequence = request.sequence
            member.answer = self._lease(member, request, num_members)
            is_idle = request.num_samples > 0 and not member.num_held
            self._note_wait(member, is_idle and not self.exhausted)
            is_news = is_news or member.answer is not None
        return SampleAnswer(
            range=member.answer,
            exhausted=self.exhausted,
            reserve_max=self._reserve_limit(self._share(member, request, num_members)),
            not_held=member.not_held,
            is_news=is_news,
        )

    def sequences(self) -> Mapping[str, int]:
        return {name: member.sequence for name, member in self._members.items()}

    def ignore(self, completed: Iterable[LedgerRange]) -> None:
        """Count samples reported by a fenced member, whose ranges were freed when it was lost."""
        self._ignored += sum(min(max(r.stop - r.start, 0), self.dataset_size) for r in completed)

    def give_back(
        self, member_id: str, incarnation: str | None = None, *, silent_s: float = inf
    ) -> int:
        """Free the ranges of a member and remove it; return the number of samples freed.

        Returns 0 if the member's incarnation is another than `incarnation`. `silent_s`: time since
        the member's latest request; infinite if unknown. Samples that the member cannot have begun
        in that time do not count as returned.
        """
        member = self._members.get(member_id)
        if member is None or incarnation not in (None, member.incarnation):
            return 0
        del self._members[member_id]
        self._touched.add(member_id)
        self._reserves -= member.reserve
        self._note_wait(member, False)
        num_samples, may_begun = 0, member.may_have_begun(silent_s)
        for number, spans in sorted(member.held.items()):
            for start, stop in spans:
                epoch, size = self._epoch(number), stop - start
                epoch.free.add(start, stop)
                # Lowest first, the order of training.
                epoch.returned += int(min(size, max(0.0, may_begun - num_samples)))
                num_samples += size
        return num_samples

    def counts(self) -> LedgerCounts:
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

    def _apply_reports(self, member: _Member, request: SampleRequest) -> bool:
        held = {number: IntegerSpans(spans) for number, spans in member.held.items()}
        unused = list(_taken(held, request.given_back))
        recorded = list(_taken(held, request.completed))
        recorded_late = list(_taken(held, request.completed_before))
        num_reported = sum(self._size_of(report) for report in request.completed)
        num_recorded = sum(r.stop - r.start for r in recorded)
        kept: dict[int, IntegerSpans] = {}
        not_held: list[LedgerRange] = []
        for claim in request.held:
            still_held = held.get(claim.epoch, IntegerSpans()).intersection(claim.start, claim.stop)
            rest = IntegerSpans([(claim.start, claim.stop)])
            for start, stop in still_held:
                kept.setdefault(claim.epoch, IntegerSpans()).add(start, stop)
                rest.remove(start, stop)
            not_held += [LedgerRange(claim.epoch, start, stop) for start, stop in rest]
        dropped = [
            LedgerRange(number, start, stop)
            for number, spans in _without(held, kept).items()
            for start, stop in spans
        ]
        if sum(map(len, kept.values())) >= MAX_HELD_RANGES and request.num_samples > 0:
            raise TooManyRanges
        self._ignored += num_reported - num_recorded
        self._reserves += request.reserve - member.reserve
        member.held, member.reserve, member.not_held = kept, request.reserve, tuple(not_held)
        for r in unused:
            self._epoch(r.epoch).free.add(r.start, r.stop)
        for r in dropped:
            self._free(self._epoch(r.epoch), r.start, r.stop)
        for r in recorded + recorded_late:
            self._epoch(r.epoch).completed.add(r.start, r.stop)
        member.begun = max(request.begun - num_recorded, 0) if request.reserve else None
        member.begins_per_s = request.begins_per_s
        self._close_completed()
        return bool(unused or recorded or recorded_late or dropped or num_reported)

    def _size_of(self, report: LedgerRange) -> int:
        return min(max(report.stop - report.start, 0), self.dataset_size)

    def _lease(
        self, member: _Member, request: SampleRequest, num_members: int
    ) -> LedgerRange | None:
        num_samples = request.num_samples
        if num_samples > 0 and member.reserve:
            num_allowed = self._share(member, request, num_members) - member.num_held
            num_samples = min(num_samples, max(num_allowed - num_allowed % request.step_samples, 0))
        if num_samples < 1:
            return None
        epoch = next((e for e in self._open if e.free), None) or self._begin_epoch()
        if epoch is None:
            return None
        start, stop = epoch.free.first()
        stop = min(stop, start + min(num_samples, MAX_LEASE_SAMPLES))
        epoch.free.remove(start, stop)
        member.held.setdefault(epoch.number, IntegerSpans()).add(start, stop)
        return LedgerRange(epoch.number, start, stop)

    def _note_wait(self, member: _Member, waits: bool) -> None:
        self._num_waiting += waits - member.waits
        member.waits = waits

    def _reserve_limit(self, share: int) -> int:
        return share if self._num_waiting else share + share // 3

    def _share(self, member: _Member, request: SampleRequest, num_members: int) -> int:
        """Samples that the member may hold; 0 if it wants no reserve.

        Members that have not asked yet count as wanting the same reserve.
        """
        share, step = member.reserve, request.step_samples
        if not share:
            return 0
        num_epochs = min(self._num_openable, self.num_epochs - self._num_closed)
        in_reach = num_epochs * self.dataset_size - sum(e.completed.size for e in self._open)
        num_unknown = max(num_members - len(self._members), 0)
        wanted = self._reserves + num_unknown * member.reserve
        if wanted > in_reach:
            share = member.reserve * in_reach // wanted
        return max(share - share % step, step)

    @property
    def _num_openable(self) -> int:
        wanted = -(-2 * self._reserves // self.dataset_size)
        return min(max(wanted, MAX_OPEN_EPOCHS), MAX_RESERVED_EPOCHS)

    def _begin_epoch(self) -> _Epoch | None:
        number = self._num_closed + len(self._open)
        if number == self.num_epochs or len(self._open) >= self._num_openable:
            return None
        self._open.append(_Epoch(number, IntegerSpans([(0, self.dataset_size)]), IntegerSpans(), 0))
        return self._open[-1]

    def _close_completed(self) -> None:
        # Close epochs in order: one that is completed early is closed after its predecessors.
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

    def to_json(self, only: Iterable[str] | None = None) -> dict[str, Any]:
        """The ledger for `from_json`. `only`: the members to include."""
        names = self._members.keys() if only is None else only
        members = {name: self._members[name] for name in names if name in self._members}
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
            "members": {name: _member_to_json(member) for name, member in members.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "SampleLedger":
        """Read what `to_json` wrote. Raises ValueError for contradictions; KeyError, TypeError or
        AttributeError for another shape."""
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
            raise ValueError("sample ledger with counts that are not integers")
        if [e.number for e in ledger._open] != expected or not held <= set(expected):
            raise ValueError(f"sample ledger with epochs out of order; expected {expected}")
        return ledger

    def _epoch_from_json(self, entry: Mapping[str, Any]) -> _Epoch:
        # Completed positions are those that are neither free nor held.
        free, completed = (
            IntegerSpans(map(tuple, entry["free"])),
            IntegerSpans([(0, self.dataset_size)]),
        )
        held = [s for m in self._members.values() for s in m.held.get(entry["epoch"], ())]
        for start, stop in [*free, *held]:
            if completed.intersection(start, stop) != [(start, stop)]:
                raise ValueError(
                    f"sample ledger holds [{start}, {stop}) of epoch {entry['epoch']} twice,"
                    f" or it lies beyond the {self.dataset_size} samples"
                )
            completed.remove(start, stop)
        return _Epoch(entry["epoch"], free, completed, entry["returned"])


def _check_numbers(data: object) -> None:
    if isinstance(data, Mapping):
        for value in data.values():
            _check_numbers(value)
    elif isinstance(data, list):
        for value in data:
            _check_numbers(value)
    elif isinstance(data, bool | float) or (isinstance(data, int) and not 0 <= data < MAX_NUMBER):
        raise ValueError(f"sample ledger with the number {data!r}; expected integers below 2^63")


def _taken(
    held: Mapping[int, IntegerSpans], ranges: Iterable[LedgerRange]
) -> Iterator[LedgerRange]:
    for r in ranges:
        for start, stop in held.get(r.epoch, IntegerSpans()).intersection(r.start, r.stop):
            held[r.epoch].remove(start, stop)
            yield LedgerRange(r.epoch, start, stop)


def _without(
    held: Mapping[int, IntegerSpans], kept: Mapping[int, IntegerSpans]
) -> dict[int, IntegerSpans]:
    rest = {number: IntegerSpans(spans) for number, spans in held.items()}
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
    member.answer = LedgerRange(*data["answer"]) if data["answer"] else None
    for number, start, stop in data["held"]:
        member.held.setdefault(number, IntegerSpans()).add(start, stop)
    return member
