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
begin, unless epochs are so short that members hold more than that in reserve. So nobody runs away
from a member that hangs, and the books stay small: two epochs or what is held in reserve, and
as many spans as members hold (`MAX_HELD_RANGES` each) or held when they were lost.

A member holds what it needs for as long as a coordinator may be away: its reserve. Where there is
not enough left for everybody's, each has its share, in proportion to what it asked for; who holds
more is told so and gives back what it has not begun.

What trained twice is bounded by `returned + ignored`: a lost member may have trained on what it
held and had begun, and who reports what it does not hold did train on it.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import inf
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
MAX_RESERVED_EPOCHS = 64
"""Open at once, where members hold more than two epochs in reserve."""
MAX_HELD_RANGES = 128
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
        self.waits = False
        """It holds nothing, and there was nothing for it."""
        self.held: dict[int, Spans] = {}
        self.reserve = 0
        self.not_held: tuple[SampleRange, ...] = ()
        """Of its latest request."""
        self.begun: int | None = None
        """Of what it held at its latest request, so much was begun. None: all of it may be."""
        self.begins_per_s = 0

    def may_have_begun(self, silent_s: float) -> float:
        """How many of the samples that it holds, at most."""
        if self.begun is None or silent_s == inf:
            return inf
        # The answer to its latest request may have been on its way for a second.
        return self.begun + self.begins_per_s * (silent_s + 1.0)

    @property
    def num_held(self) -> int:
        return sum(spans.size for spans in self.held.values())


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
        self._reserves = 0
        """What all members would hold."""
        self._num_waiting = 0
        self._touched: set[str] = set()

    def take_touched(self) -> frozenset[str]:
        """Members that changed, or went, since this was asked last."""
        touched, self._touched = frozenset(self._touched), set()
        return touched

    def touch(self, member_ids: Iterable[str]) -> None:
        """Name these among the members that changed: what was made of it came to nothing."""
        self._touched.update(member_ids)

    @property
    def exhausted(self) -> bool:
        """Whether every sample of every epoch was completed."""
        return self._num_closed == self.num_epochs

    @property
    def holders(self) -> tuple[tuple[str, str], ...]:
        """(member_id, incarnation) of everybody who has asked and not gone."""
        return tuple((m, member.incarnation) for m, member in self._members.items())

    def waits(self, member_id: str) -> bool:
        """Whether the member has nothing to work at, and was told to ask again."""
        member = self._members.get(member_id)
        return member is not None and member.waits

    @property
    def held_samples(self) -> Mapping[str, int]:
        """How many samples each member holds."""
        return {
            name: sum(spans.size for spans in member.held.values())
            for name, member in self._members.items()
        }

    def answer(self, request: Request, num_members: int = 1) -> Answer:
        """Book what the member completed, take back what it dropped, and lease it a range.

        `num_members`: how many there are to share an epoch, those included that have not asked yet.

        A retry of its latest request gets the same answer and books nothing. An incarnation that
        was not seen before ends the member's earlier one. Raises StaleRequest, TooManyRanges.
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
            is_news = self._book(member, request) or is_news
            self._touched.add(request.member_id)
            member.sequence = request.sequence
            member.answer = self._lease(member, request, num_members)
            is_idle = request.num_samples > 0 and not member.num_held
            self._note_wait(member, is_idle and not self.exhausted)
            is_news = is_news or member.answer is not None
        return Answer(
            range=member.answer,
            exhausted=self.exhausted,
            reserve_max=self._told(self._share(member, request, num_members)),
            not_held=member.not_held,
            is_news=is_news,
        )

    def sequences(self) -> Mapping[str, int]:
        """Of each member's latest request."""
        return {name: member.sequence for name, member in self._members.items()}

    def ignore(self, completed: Iterable[SampleRange]) -> None:
        """Count what a fenced member reported. Its ranges went back when it was lost."""
        self._ignored += sum(min(max(r.stop - r.start, 0), self.dataset_size) for r in completed)

    def give_back(
        self, member_id: str, incarnation: str | None = None, *, silent_s: float = inf
    ) -> int:
        """Free what a lost member holds and forget it; returns how many samples that is.

        With an incarnation, only that one: a later one under the same id keeps its ranges.
        `silent_s`: since its latest request. What it cannot have begun is not counted as returned.
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
                # Lowest first, as it was trained on.
                epoch.returned += int(min(size, max(0.0, may_begun - num_samples)))
                num_samples += size
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

    def _book(self, member: _Member, request: Request) -> bool:
        """Whether anything changed hands."""
        held = {number: Spans(spans) for number, spans in member.held.items()}
        unused = list(_taken(held, request.given_back))
        booked = list(_taken(held, request.completed))
        booked_late = list(_taken(held, request.completed_before))
        num_reported = sum(self._size_of(report) for report in request.completed)
        num_booked = sum(r.stop - r.start for r in booked)
        kept: dict[int, Spans] = {}
        not_held: list[SampleRange] = []
        for claim in request.held:
            own = held.get(claim.epoch, Spans()).within(claim.start, claim.stop)
            rest = Spans([(claim.start, claim.stop)])
            for start, stop in own:
                kept.setdefault(claim.epoch, Spans()).add(start, stop)
                rest.remove(start, stop)
            not_held += [SampleRange(claim.epoch, start, stop) for start, stop in rest]
        dropped = [
            SampleRange(number, start, stop)
            for number, spans in _without(held, kept).items()
            for start, stop in spans
        ]
        if sum(map(len, kept.values())) >= MAX_HELD_RANGES and request.num_samples > 0:
            raise TooManyRanges
        self._ignored += num_reported - num_booked
        self._reserves += request.reserve - member.reserve
        member.held, member.reserve, member.not_held = kept, request.reserve, tuple(not_held)
        for r in unused:
            self._epoch(r.epoch).free.add(r.start, r.stop)
        for r in dropped:
            self._free(self._epoch(r.epoch), r.start, r.stop)
        for r in booked + booked_late:
            self._epoch(r.epoch).completed.add(r.start, r.stop)
        member.begun = max(request.begun - num_booked, 0) if request.reserve else None
        member.begins_per_s = request.begins_per_s
        self._close_completed()
        return bool(unused or booked or booked_late or dropped or num_reported)

    def _size_of(self, report: SampleRange) -> int:
        return min(max(report.stop - report.start, 0), self.dataset_size)

    def _lease(self, member: _Member, request: Request, num_members: int) -> SampleRange | None:
        num_samples = request.num_samples
        if num_samples > 0 and member.reserve:
            room = self._share(member, request, num_members) - member.num_held
            num_samples = min(num_samples, max(room - room % request.step_samples, 0))
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

    def _note_wait(self, member: _Member, waits: bool) -> None:
        self._num_waiting += waits - member.waits
        member.waits = waits

    def _told(self, share: int) -> int:
        """While nobody lacks samples, nobody gives a few of them back."""
        return share if self._num_waiting else share + share // 3

    def _share(self, member: _Member, request: Request, num_members: int) -> int:
        """How many samples the member may hold, of what can be held now; 0: that is not asked.

        Who has not asked yet is expected to want as much.
        """
        share, step = member.reserve, request.step_samples
        if not share:
            return 0
        num_epochs = min(self._num_openable, self.num_epochs - self._num_closed)
        in_reach = num_epochs * self.dataset_size - sum(e.completed.size for e in self._open)
        unheard = max(num_members - len(self._members), 0)
        wanted = self._reserves + unheard * member.reserve
        if wanted > in_reach:
            share = member.reserve * in_reach // wanted
        return max(share - share % step, step)

    @property
    def _num_openable(self) -> int:
        """Epochs that may be open at once: two, or as many as the reserves are twice over."""
        wanted = -(-2 * self._reserves // self.dataset_size)
        return min(max(wanted, MAX_OPEN_EPOCHS), MAX_RESERVED_EPOCHS)

    def _begin_epoch(self) -> _Epoch | None:
        number = self._num_closed + len(self._open)
        if number == self.num_epochs or len(self._open) >= self._num_openable:
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

    def to_json(self, only: Iterable[str] | None = None) -> dict[str, Any]:
        """The books as JSON types; `from_json` makes the same books of it. With `only`, of the
        members no others than those."""
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


def _taken(held: Mapping[int, Spans], ranges: Iterable[SampleRange]) -> Iterator[SampleRange]:
    """Take out of what is held what of the ranges is in it."""
    for r in ranges:
        for start, stop in held.get(r.epoch, Spans()).within(r.start, r.stop):
            held[r.epoch].remove(start, stop)
            yield SampleRange(r.epoch, start, stop)


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
