"""The sample ledger, by example and against a slow twin that keeps one entry per sample."""

import json
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_server.core.samples.ledger import MAX_CLOSED_COUNTS, MAX_HELD_RANGES, SampleLedger
from shoal_server.core.samples.requests import (
    LedgerRange,
    SampleAnswer,
    SampleRequest,
    StaleRequest,
    TooManyRanges,
)
from shoal_server.core.samples.spans import IntegerSpans


class Worker:
    """Client of the ledger that numbers its requests and keeps its incarnation."""

    def __init__(self, ledger: SampleLedger, member_id: str, incarnation: str = "1") -> None:
        self.ledger, self.member_id, self.incarnation = ledger, member_id, incarnation
        self.sequence = 0

    def ask(
        self,
        num_samples: int = 0,
        done: Sequence[LedgerRange] = (),
        held: Sequence[LedgerRange] = (),
    ) -> LedgerRange | None:
        self.sequence += 1
        return self.ledger.answer(self.request(num_samples, done, held)).range

    def reserve(
        self,
        num_samples: int,
        held: Sequence[LedgerRange] = (),
        *,
        back: Sequence[LedgerRange] = (),
        reserve: int = 100,
        step: int = 5,
    ) -> SampleAnswer:
        """Request samples with a reserve, and return the whole answer."""
        self.sequence += 1
        request = self.request(num_samples, (), held)
        return self.ledger.answer(
            replace(request, reserve=reserve, step_samples=step, given_back=tuple(back))
        )

    def request(
        self, num_samples: int, done: Sequence[LedgerRange], held: Sequence[LedgerRange]
    ) -> SampleRequest:
        return SampleRequest(
            member_id=self.member_id,
            incarnation=self.incarnation,
            sequence=self.sequence,
            completed=tuple(done),
            held=tuple(held),
            num_samples=num_samples,
        )

    def must(self, num_samples: int, done: Sequence[LedgerRange] = ()) -> LedgerRange:
        granted = self.ask(num_samples, done)
        assert granted is not None
        return granted


def test_one_worker_leases_every_epoch_in_order() -> None:
    """The ledger is exhausted once the last range is completed."""
    ledger = SampleLedger(dataset_size=5, num_epochs=2)
    worker = Worker(ledger, "a")
    seen: list[LedgerRange] = []
    done: Sequence[LedgerRange] = ()
    while (granted := worker.ask(2, done)) is not None:
        assert not ledger.exhausted
        seen.append(granted)
        done = [granted]
    assert seen == [LedgerRange(e, a, b) for e in (0, 1) for a, b in ((0, 2), (2, 4), (4, 5))]
    assert ledger.exhausted
    assert ledger.counts().completed == 10
    assert ledger.counts().repeated_max == 0


def test_a_lost_members_range_is_leased_before_others() -> None:
    """The range of the lost member counts as returned."""
    ledger = SampleLedger(dataset_size=100, num_epochs=1)
    lost, survivor = Worker(ledger, "lost"), Worker(ledger, "survivor")
    held, own = lost.must(10), survivor.must(10)
    assert ledger.give_back("lost", "1") == 10
    assert survivor.ask(10, [own]) == held
    assert ledger.counts().returned == 10


def test_a_completion_after_the_range_was_given_back_is_ignored_and_counted() -> None:
    """The samples of the range are completed by the member that leases it next."""
    ledger = SampleLedger(dataset_size=10, num_epochs=1)
    lost, heir = Worker(ledger, "lost"), Worker(ledger, "heir")
    held = lost.must(10)
    ledger.give_back("lost", "1")
    assert heir.must(10) == held
    ledger.ignore([held])
    assert ledger.counts().completed == 0
    assert ledger.counts().ignored == 10
    heir.ask(0, [held])
    assert ledger.exhausted
    assert ledger.counts().completed == 10


def test_a_new_incarnation_ends_the_earlier_one() -> None:
    """The ranges of the earlier incarnation are leased again, and its loss, which is reported
    later, changes nothing."""
    ledger = SampleLedger(dataset_size=10, num_epochs=1)
    before = Worker(ledger, "a", "1").must(10)
    assert Worker(ledger, "a", "2").must(10) == before
    assert ledger.give_back("a", "1") == 0, "the loss of the earlier incarnation changes nothing"
    assert ledger.counts().in_flight == 10


def test_a_repeated_request_gets_the_first_answer_and_changes_nothing() -> None:
    """The first answer may have been lost."""
    ledger = SampleLedger(dataset_size=10, num_epochs=1)
    worker = Worker(ledger, "a")
    first = worker.must(4)
    second = worker.must(4, [first])
    before = ledger.to_json()
    again = ledger.answer(worker.request(4, [first], []))
    assert again.range == second
    assert ledger.to_json() == before


def test_a_late_request_is_refused_and_changes_nothing() -> None:
    """A late request must not return ranges that the member has leased since."""
    ledger = SampleLedger(dataset_size=10, num_epochs=1)
    worker = Worker(ledger, "a")
    worker.must(4)
    late = worker.request(4, [], [])
    worker.must(4, [LedgerRange(0, 0, 4)])
    before = ledger.to_json()
    with pytest.raises(StaleRequest, match="request 1 arrived after request 2"):
        ledger.answer(late)
    assert ledger.to_json() == before


def test_a_range_that_its_member_no_longer_names_is_returned() -> None:
    """A report may have been lost with a coordinator: the ledger does not wait for it."""
    ledger = SampleLedger(dataset_size=8, num_epochs=1)
    worker = Worker(ledger, "a")
    dropped = worker.must(4)
    assert worker.ask(4) == dropped
    assert ledger.counts().returned == 4


def test_at_most_two_epochs_are_open() -> None:
    """Epoch 1 is leased while a sample of epoch 0 is leased, but epoch 2 is not."""
    ledger = SampleLedger(dataset_size=4, num_epochs=3)
    slow, quick = Worker(ledger, "slow"), Worker(ledger, "quick")
    hanging = slow.must(1)
    quick_0 = quick.must(4)
    quick_1 = quick.must(4, [quick_0])
    assert (quick_0.epoch, quick_1.epoch) == (0, 1)
    assert quick.ask(4, [quick_1]) is None
    assert not ledger.exhausted
    slow.ask(0, [hanging])
    assert quick.must(4).epoch == 2


def test_each_open_epoch_has_its_counts() -> None:
    """The counts of an epoch are its numbers of samples completed, leased and returned."""
    ledger = SampleLedger(dataset_size=6, num_epochs=2)
    a, b = Worker(ledger, "a"), Worker(ledger, "b")
    first = a.must(4)
    b.must(2)
    a.must(3, [first])
    ledger.give_back("b")
    zero, one = ledger.counts().epochs
    assert (zero.completed, zero.in_flight, zero.returned) == (4, 0, 2)
    assert (one.completed, one.in_flight, one.returned) == (0, 3, 0)


def test_a_member_with_too_many_ranges_gets_no_more() -> None:
    """The refusal changes nothing."""
    ledger = SampleLedger(dataset_size=1000, num_epochs=1)
    a, b = Worker(ledger, "a"), Worker(ledger, "b")
    held: list[LedgerRange] = []
    apart: list[LedgerRange] = []
    while len(held) < MAX_HELD_RANGES:
        granted = a.ask(1, held=held)
        assert granted is not None
        held.append(granted)
        apart = [b.must(1, apart)]
    before = ledger.counts()
    with pytest.raises(TooManyRanges):
        a.ask(1, held=held)
    assert ledger.counts() == before


def test_the_first_member_leaves_the_others_their_share() -> None:
    """Members hold whole steps, in proportion to the reserves that they request."""
    ledger = SampleLedger(dataset_size=90, num_epochs=1)
    quick, slow = Worker(ledger, "quick"), Worker(ledger, "slow")
    assert slow.reserve(0, reserve=50).range is None
    first = quick.reserve(100, reserve=100)
    assert first.range == LedgerRange(0, 0, 60)
    assert slow.reserve(100, reserve=50).range == LedgerRange(0, 60, 90)


def test_a_member_returns_samples_beyond_its_share_once_others_lack_some() -> None:
    """The answer to the member has its share as `reserve_max`. Returned samples do not count as
    repeated."""
    ledger = SampleLedger(dataset_size=90, num_epochs=1)
    first, later = Worker(ledger, "first"), Worker(ledger, "later")
    held = first.reserve(100).range
    assert held == LedgerRange(0, 0, 90)
    assert first.reserve(0, [held]).reserve_max >= 90
    assert later.reserve(10).range is None
    assert first.reserve(0, [held]).reserve_max == 45
    back, kept = LedgerRange(0, 45, 90), LedgerRange(0, 0, 45)
    first.reserve(0, [kept], back=[back])
    assert later.reserve(100).range == back
    assert ledger.counts().repeated_max == 0


def test_short_epochs_are_open_as_far_as_a_reserve_needs() -> None:
    """A reserve of 60 samples holds six epochs of 10 samples."""
    ledger = SampleLedger(dataset_size=10, num_epochs=50)
    held: list[LedgerRange] = []
    worker = Worker(ledger, "a")
    while (granted := worker.reserve(10, held, reserve=60).range) is not None:
        held.append(granted)
    assert [r.epoch for r in held] == list(range(6))


def test_the_answer_names_ranges_that_a_member_does_not_hold() -> None:
    """The member must not begin these samples, which another member may hold."""
    ledger = SampleLedger(dataset_size=20, num_epochs=1)
    a, b = Worker(ledger, "a"), Worker(ledger, "b")
    held, other = a.reserve(5).range, b.reserve(5).range
    assert (held, other) == (LedgerRange(0, 0, 5), LedgerRange(0, 5, 10))
    answer = a.reserve(0, [LedgerRange(0, 0, 8)])
    assert answer.not_held == (LedgerRange(0, 5, 8),)
    assert a.reserve(0, [LedgerRange(0, 0, 5)]).not_held == ()


def test_only_samples_that_a_lost_member_may_have_begun_count_as_returned() -> None:
    """All samples of the lost member are leased again, but it had not begun most of its reserve."""
    for silent_s, counted in ((0.0, 20), (3.0, 35), (100.0, 50), (inf, 50)):
        ledger = SampleLedger(dataset_size=100, num_epochs=1)
        worker = Worker(ledger, "a")
        held = worker.reserve(50, reserve=50).range
        assert held is not None
        request = replace(worker.request(0, [], [held]), reserve=50, begun=15, begins_per_s=5)
        ledger.answer(replace(request, sequence=worker.sequence + 1))
        assert ledger.give_back("a", "1", silent_s=silent_s) == 50
        assert ledger.counts().returned == counted
        assert Worker(ledger, "b").must(100) == LedgerRange(0, 0, 100)


def test_a_range_reported_again_is_completed_once() -> None:
    """The ledger that a dead coordinator left may have the report or not."""
    ledger = SampleLedger(dataset_size=10, num_epochs=1)
    worker = Worker(ledger, "a")
    first = worker.must(5)
    stored = ledger.to_json()
    second = worker.must(5, [first])
    for each in (ledger, SampleLedger.from_json(stored)):
        request = replace(
            worker.request(0, [], [second]), sequence=9, completed_before=[first], reserve=10
        )
        each.answer(request)
        assert each.counts().completed == 5
        assert each.counts().repeated_max == 0


def test_a_request_that_changes_nothing_is_no_news() -> None:
    ledger = SampleLedger(dataset_size=5, num_epochs=1)
    a, b = Worker(ledger, "a"), Worker(ledger, "b")
    assert a.reserve(5).is_news
    assert b.reserve(5).is_news, "the member is new"
    assert not b.reserve(5).is_news


def test_only_the_newest_closed_epochs_have_counts_of_their_own() -> None:
    """The record does not grow with the number of epochs."""
    ledger = SampleLedger(dataset_size=1, num_epochs=500)
    worker, done = Worker(ledger, "a"), list[LedgerRange]()
    while (granted := worker.ask(1, done)) is not None:
        done = [granted]
    assert ledger.counts().completed == 500
    assert len(ledger.counts().epochs) == MAX_CLOSED_COUNTS
    assert len(json.dumps(ledger.to_json())) < 2000


@pytest.mark.parametrize(("size", "epochs"), [(0, 1), (1, 0), (-1, 1)])
def test_a_ledger_without_samples_is_refused(size: int, epochs: int) -> None:
    """The message names both numbers."""
    with pytest.raises(ValueError, match=f"dataset_size is {size} and num_epochs {epochs}"):
        SampleLedger(dataset_size=size, num_epochs=epochs)


def test_an_inconsistent_record_is_refused() -> None:
    """The record has a sample twice, or an unknown format."""
    ledger = SampleLedger(dataset_size=4, num_epochs=1)
    Worker(ledger, "a").must(2)
    data = ledger.to_json()
    data["open"][0]["free"] = [[1, 4]]
    with pytest.raises(ValueError, match="twice"):
        SampleLedger.from_json(data)
    with pytest.raises(ValueError, match="format 9"):
        SampleLedger.from_json({**ledger.to_json(), "format": 9})


# The slow twin: one entry for each sample, with its holder.

FREE, DONE = "free", "done"


@dataclass
class Twin:
    size: int
    epochs: int
    state: dict[tuple[int, int], str] = field(default_factory=dict)
    returned: int = 0
    ignored: int = 0

    def __post_init__(self) -> None:
        self.state = {(e, i): FREE for e in range(self.epochs) for i in range(self.size)}

    def oldest(self) -> int:
        done = [all(self.state[e, i] == DONE for i in range(self.size)) for e in range(self.epochs)]
        return done.index(False) if False in done else self.epochs

    def release(self, who: str, but: Set[tuple[int, int]] = frozenset()) -> None:
        for key, holder in self.state.items():
            if holder == who and key not in but:
                self.state[key] = FREE
                self.returned += 1

    def complete(self, who: str, r: LedgerRange) -> None:
        for i in range(r.start, r.stop):
            if self.state.get((r.epoch, i)) == who:
                self.state[r.epoch, i] = DONE
            else:
                self.ignored += 1

    def lease(self, who: str, num_samples: int) -> LedgerRange | None:
        oldest = self.oldest()
        for e in range(oldest, min(oldest + 2, self.epochs)):
            free = [i for i in range(self.size) if self.state[e, i] == FREE]
            if free and num_samples:
                stop = free[0]
                while stop - free[0] < num_samples and self.state.get((e, stop)) == FREE:
                    self.state[e, stop] = who
                    stop += 1
                return LedgerRange(e, free[0], stop)
        return None


NAMES = ("a", "b", "c")
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sampled_from(NAMES), st.integers(0, 5), st.integers(0, 3)),
        st.tuples(st.just("lose"), st.sampled_from(NAMES), st.just(0), st.just(0)),
        st.tuples(st.just("lie"), st.sampled_from(NAMES), st.integers(0, 9), st.integers(0, 2)),
    ),
    max_size=60,
)


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(size=st.integers(1, 9), epochs=st.integers(1, 3), operations=OPERATIONS)
def test_the_ledger_does_what_the_slow_twin_does(
    size: int, epochs: int, operations: list[tuple[str, str, int, int]]
) -> None:
    """Leases and counts are equal after each request; a round trip through JSON changes nothing."""
    ledger, twin = SampleLedger(dataset_size=size, num_epochs=epochs), Twin(size, epochs)
    hands: dict[str, list[LedgerRange]] = {name: [] for name in NAMES}
    incarnation = dict.fromkeys(NAMES, 0)
    for sequence, (what, name, argument, choice) in enumerate(operations, start=1):
        ledger = SampleLedger.from_json(json.loads(json.dumps(ledger.to_json())))
        who = f"{name}{incarnation[name]}"
        if what == "lose":
            ledger.give_back(name, str(incarnation[name]))
            twin.release(who)
            incarnation[name] += 1
            hands[name] = []
            continue
        held = hands[name]
        done = [held.pop()] if choice and held else []
        if choice == 3:
            held.clear()  # drops the ranges that it held
        if what == "lie":
            done = [LedgerRange(choice, argument, argument + 3)]
        number = 0 if what == "lie" else argument
        request = SampleRequest(
            member_id=name,
            incarnation=str(incarnation[name]),
            sequence=sequence,
            completed=done,
            held=tuple(held),
            num_samples=number,
        )
        for r in done:
            twin.complete(who, LedgerRange(r.epoch, r.start, min(r.stop, r.start + size)))
        twin.release(who, {(r.epoch, i) for r in held for i in range(r.start, r.stop)})
        if len({(e, a) for (e, a) in _starts(twin, who)}) >= MAX_HELD_RANGES and number:
            return
        expected = twin.lease(who, number)
        assert ledger.answer(request).range == expected
        if expected:
            held.append(expected)
        counts = ledger.counts()
        assert counts.completed == sum(s == DONE for s in twin.state.values())
        assert counts.in_flight == sum(s not in (FREE, DONE) for s in twin.state.values())
        assert (counts.returned, counts.ignored) == (twin.returned, twin.ignored)
        assert ledger.exhausted == (twin.oldest() == epochs)


def _starts(twin: Twin, who: str) -> list[tuple[int, int]]:
    mine = {key for key, holder in twin.state.items() if holder == who}
    return [(e, i) for e, i in mine if (e, i - 1) not in mine]


@pytest.mark.long
@settings(max_examples=200, deadline=None)
@given(
    size=st.integers(1, 30),
    epochs=st.integers(1, 3),
    losses=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 7)), max_size=40),
)
def test_every_sample_is_completed_whichever_members_are_lost(
    size: int, epochs: int, losses: list[tuple[int, int]]
) -> None:
    """Each is completed once, and at most `repeated_max` samples were leased again."""
    ledger = SampleLedger(dataset_size=size, num_epochs=epochs)
    trained = 0
    for i, (victim, num_samples) in enumerate(losses):
        worker = Worker(ledger, f"w{victim}", str(i))
        granted = worker.ask(num_samples)
        trained += granted.stop - granted.start if granted else 0
        if i % 3 == 0 and granted:
            worker.ask(0, [granted])
    for name, incarnation in ledger.holders:
        ledger.give_back(name, incarnation)
    last, done = Worker(ledger, "last"), list[LedgerRange]()
    while (granted := last.ask(4, done)) is not None:
        trained += granted.stop - granted.start
        done = [granted]
    counts = ledger.counts()
    assert ledger.exhausted
    assert counts.completed == size * epochs
    assert trained - counts.completed <= counts.repeated_max


def test_the_repr_of_spans_evaluates_to_equal_spans() -> None:
    spans = IntegerSpans([(0, 3), (5, 9)])
    assert list(eval(repr(spans))) == list(spans)


RANGES = st.tuples(st.booleans(), st.integers(0, 20), st.integers(0, 20))


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(edits=st.lists(RANGES, max_size=30), probe=st.tuples(st.integers(0, 20), st.integers(0, 20)))
def test_spans_are_a_set_of_numbers(
    edits: list[tuple[bool, int, int]], probe: tuple[int, int]
) -> None:
    """Spans equal a set of numbers after any edits: sorted, apart and merged."""
    spans, numbers = IntegerSpans(), set[int]()
    for adds, start, stop in edits:
        if adds:
            spans.add(start, stop)
            numbers |= set(range(start, stop))
        else:
            spans.remove(start, stop)
            numbers -= set(range(start, stop))
    assert {i for a, b in spans for i in range(a, b)} == numbers
    assert spans.size == len(numbers)
    edges = [edge for span in spans for edge in span]
    assert edges == sorted(set(edges)), "adjacent spans are merged"
    found = {i for a, b in spans.intersection(*probe) for i in range(a, b)}
    assert found == numbers & set(range(*probe))


def shared_out(num_members: int, num_steps: int, asked_steps: int, step: int = 32) -> list[int]:
    """Return the number of steps of one epoch that each member gets, if they request in turn."""
    ledger = SampleLedger(dataset_size=num_steps * step, num_epochs=1)
    workers = [Worker(ledger, f"w{i}") for i in range(num_members)]
    done: dict[str, list[LedgerRange]] = {w.member_id: [] for w in workers}
    steps = Counter[str]({w.member_id: 0 for w in workers})
    while not ledger.exhausted:
        for worker in workers:
            worker.sequence += 1
            request = worker.request(asked_steps * step, done[worker.member_id], ())
            reserving = replace(request, step_samples=step, reserve=asked_steps * step)
            granted = ledger.answer(reserving, num_members).range
            done[worker.member_id] = [granted] if granted else []
            if granted is not None:
                assert granted.start % step == 0
                steps[worker.member_id] += -(-(granted.stop - granted.start) // step)
    return sorted(steps.values())


@pytest.mark.parametrize(
    ("num_members", "num_steps", "asked_steps", "expected"),
    [
        (1, 10, 100, [10]),
        (2, 10, 100, [5, 5]),
        (3, 10, 100, [3, 3, 4]),
        (3, 10, 2, [2, 4, 4]),
        (4, 10, 100, [2, 2, 2, 4]),
        (8, 5, 100, [0, 0, 0, 1, 1, 1, 1, 1]),
    ],
)
def test_too_few_samples_are_shared_between_the_members(
    num_members: int, num_steps: int, asked_steps: int, expected: list[int]
) -> None:
    """The first member to request more than its share gets the share in whole steps, even before
    other requests. A member gets none only if there are fewer steps than members."""
    assert shared_out(num_members, num_steps, asked_steps) == expected


def test_a_member_without_samples_waits_until_it_gets_some() -> None:
    """A member that holds samples does not count as waiting."""
    ledger = SampleLedger(dataset_size=20, num_epochs=1)
    works, waits = Worker(ledger, "works"), Worker(ledger, "waits")
    held = works.must(20)
    assert works.ask(20, held=[held]) is None
    assert not ledger.waits("works")
    assert waits.ask(20) is None
    assert ledger.waits("waits")
    assert ledger.held_samples == {"works": 20, "waits": 0}
    ledger.give_back("works")
    assert waits.ask(20) == held
    assert not ledger.waits("waits")
    waits.ask(20, [held])
    assert not ledger.waits("waits")
