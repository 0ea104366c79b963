"""The checker accepts every run of a faultless server, and finds every planted fault."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from history.checker import Kind, Report, check
from history.events import Answered, Event, Gradients, Journal, Seen, Verdict, read_journals
from history.simulation import Server, history
from history.twin import Twin

from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import Block, Shard

SHARDS = [
    Shard(
        shard_id=0,
        dtype="float32",
        blocks=[
            Block(parameter="a", num_elements=192),
            Block(parameter="b", num_elements=70),
            Block(parameter="a", offset=192, num_elements=9),
        ],
    ),
    Shard(shard_id=1, dtype="float64", group=1, blocks=[Block(parameter="c", num_elements=33)]),
]
OPTIMIZERS = {
    "sgd": OptimizerSpec(
        kind="sgd",
        groups=[
            HyperParameters(lr=0.1, momentum=0.9),
            HyperParameters(lr=0.1, momentum=0.5, nesterov=True, weight_decay=0.01),
        ],
    ),
    "adam": OptimizerSpec(
        kind="adam", groups=[HyperParameters(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8)] * 2
    ),
}
KINDS = list(OPTIMIZERS)
SEEDS = range(4)
STRIKE_AT = 17
"""Number of the application at which, or right after which, the fault strikes."""


@dataclass
class Forgets(Server):
    """Acknowledges one push that it does not apply."""

    def apply(self, gradients: Gradients) -> dict[int, int]:
        if self.num_applied == STRIKE_AT:
            self.num_applied += 1
            return self.advance()
        return super().apply(gradients)


@dataclass
class AppliesTwice(Server):
    """Applies one push again, under a version of its own, as if it were new."""

    def apply(self, gradients: Gradients) -> dict[int, int]:
        versions = super().apply(gradients)
        if self.num_applied == STRIKE_AT:
            super().apply(gradients)
        return versions


@dataclass
class AppliesTwiceAsOne(Server):
    """Applies one push twice under one version, like a copy that replays too much."""

    def apply(self, gradients: Gradients) -> dict[int, int]:
        if self.num_applied == STRIKE_AT:
            for twin in self.twins.values():
                twin.apply(gradients)
        return super().apply(gradients)


@dataclass
class Swaps(Server):
    """Applies two pushes in another order than it acknowledges."""

    held: Gradients | None = None

    def apply(self, gradients: Gradients) -> dict[int, int]:
        if self.num_applied == STRIKE_AT and self.held is None:
            self.held = gradients
            return self.advance()
        versions = super().apply(gradients)
        if self.held is not None:
            for twin in self.twins.values():
                twin.apply(self.held)
            self.held = None
        return versions


@dataclass
class FallsBack(Server):
    """Fails over to a backup that lacks the last three pushes."""

    older: list[tuple[dict[int, Twin], dict[int, int]]] = field(default_factory=list)

    def apply(self, gradients: Gradients) -> dict[int, int]:
        self.older.append(({i: twin.copy() for i, twin in self.twins.items()}, dict(self.versions)))
        if self.num_applied == STRIKE_AT:
            self.twins, self.versions = self.older[-4]
        return super().apply(gradients)


@dataclass
class FlipsBit(Server):
    def apply(self, gradients: Gradients) -> dict[int, int]:
        versions = super().apply(gradients)
        if self.num_applied == STRIKE_AT:
            self.twins[0].damage()
        return versions


@dataclass
class ForgetsMomentum(Server):
    """Has one wrong value in the optimizer's state."""

    def apply(self, gradients: Gradients) -> dict[int, int]:
        versions = super().apply(gradients)
        if self.num_applied == STRIKE_AT:
            self.twins[1].damage_state()
        return versions


FAULTS: list[tuple[Callable[..., Server], Kind, set[Kind]]] = [
    (Forgets, Kind.LOST, {Kind.BITS}),
    (AppliesTwice, Kind.TWICE, {Kind.BITS}),
    (AppliesTwiceAsOne, Kind.TWICE, {Kind.BITS}),
    # A sighting between the two shows one of them as lost.
    (Swaps, Kind.ORDER, {Kind.LOST, Kind.BITS}),
    (FallsBack, Kind.LOST, {Kind.VANISHED}),
    (FlipsBit, Kind.BITS, set()),
    (ForgetsMomentum, Kind.BITS, set()),
]
"""Server, kind of its fault, and kinds reported instead if too little was seen to tell."""


def judged(kind: str, events: list[Event]) -> Report:
    return check(SHARDS, OPTIMIZERS[kind], events)


@pytest.mark.sampled()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_faultless_server_passes(kind: str, seed: int) -> None:
    """Unknown pushes may have been applied or not, in any combination."""
    report = judged(kind, history(SHARDS, OPTIMIZERS[kind], seed))
    assert not report.faults, report
    assert report.num_acknowledged > 20


def test_unknown_pushes_are_found_where_they_were_applied() -> None:
    """The seeds' histories contain unknown pushes that were applied, and others that were not."""
    reports = [judged("sgd", history(SHARDS, OPTIMIZERS["sgd"], seed)) for seed in SEEDS]
    applied = sum(report.num_unknown_applied for report in reports)
    assert 0 < applied < len(SHARDS) * sum(report.num_unknown for report in reports)


@pytest.mark.sampled()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("faulty", "name", "others"), FAULTS, ids=[f.__name__ for f, *_ in FAULTS])
def test_a_faulty_server_is_caught(
    kind: str, faulty: Callable[..., Server], name: Kind, others: set[Kind]
) -> None:
    """A single fault in a run is enough; for at least one seed its kind is named exactly."""
    reports = [judged(kind, history(SHARDS, OPTIMIZERS[kind], seed, make=faulty)) for seed in SEEDS]
    for report in reports:
        assert report.faults
        assert {fault.kind for fault in report.faults} <= {name, *others}, report
    assert any(report.count(name) for report in reports)


def mutated(events: list[Event], seed: int, change: Callable[[Answered], Event]) -> list[Event]:
    """Change the answer to one acknowledged push of the history, drawn by seed."""
    answers = [
        i
        for i, event in enumerate(events)
        if isinstance(event, Answered) and event.verdict is Verdict.ACKNOWLEDGED
    ]
    chosen = random.Random(seed).choice(answers[:-1])
    event = events[chosen]
    assert isinstance(event, Answered)
    return [*events[:chosen], change(event), *events[chosen + 1 :]]


@pytest.mark.sampled()
@pytest.mark.parametrize("seed", SEEDS)
def test_an_applied_push_that_was_refused_is_caught(seed: int) -> None:
    events = history(SHARDS, OPTIMIZERS["sgd"], seed)
    wrong = mutated(
        events, seed, lambda answer: replace(answer, verdict=Verdict.REFUSED, versions={})
    )
    assert judged("sgd", wrong).faults


@pytest.mark.sampled()
@pytest.mark.parametrize("seed", SEEDS)
def test_a_push_without_answer_may_have_been_applied(seed: int) -> None:
    """The push counts as unknown, and is found to be applied."""
    events = history(SHARDS, OPTIMIZERS["adam"], seed)
    unanswered = mutated(
        events, seed, lambda answer: replace(answer, verdict=Verdict.UNKNOWN, versions={})
    )
    before, after = judged("adam", events), judged("adam", unanswered)
    assert not after.faults, after
    assert after.num_unknown_applied == before.num_unknown_applied + len(SHARDS)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_pushes_at_one_version_are_caught(seed: int) -> None:
    """The checker reports two pushes that claim the same version: only one of them can have made
    it."""
    events = history(SHARDS, OPTIMIZERS["sgd"], seed)
    wrong = mutated(
        events,
        seed,
        lambda answer: replace(answer, versions={**answer.versions, 0: answer.versions[0] + 1}),
    )
    assert judged("sgd", wrong).faults


def test_an_answered_push_precedes_those_sent_later() -> None:
    """The order of versions must not contradict the real-time order of the pushes."""
    events = history(SHARDS, OPTIMIZERS["sgd"], 0)
    late = max(event.at_s for event in events) + 1.0
    shifted = [
        replace(event, at_s=event.at_s + late) if event.session == "s0" else event
        for event in events[:-1]
    ]
    end = events[-1]
    assert isinstance(end, Seen)
    report = judged("sgd", [*shifted, replace(end, at_s=3 * late)])
    assert report.count(Kind.ORDER) >= 1


@pytest.mark.parametrize("goes_on_from_it", [False, True])
def test_the_report_of_a_version_with_two_sets_of_values(*, goes_on_from_it: bool) -> None:
    """The report lists the sightings with their times, the pushes around the version, and the set
    of values that these pushes give."""
    events = history(SHARDS, OPTIMIZERS["sgd"], 0)
    seen = [event for event in events if isinstance(event, Seen)]
    known = seen[len(seen) // 2]
    version, checksum = known.values[0]
    wrong = checksum ^ 1
    events.append(Seen(session="reader", at_s=known.at_s + 0.25, values={0: (version, wrong)}))
    if goes_on_from_it:
        events = [_other_values(e, version) if isinstance(e, Seen) else e for e in events]
    (fault,) = judged("sgd", events).faults
    assert (fault.kind, fault.shard_id) == (Kind.VANISHED, 0)
    later = min(event.values[0][0] for event in seen if event.values[0][0] > version)
    given = f"and not what was seen of {later} after it"
    pusher = f"{checksum:#010x} by {known.session} at {known.at_s - 1.0:.3f} s"
    for text in (
        f"{version} was seen with other values before; {pusher}",
        f"{wrong:#010x} by reader at {known.at_s - 0.75:.3f} s",
        f"{version}: made by {known.session}#",
        f"{checksum:#010x} is what the pushes give, "
        + (given if goes_on_from_it else "and so is all that was seen later"),
        f"{wrong:#010x} is not what the pushes give",
    ):
        assert text in fault.detail


def _other_values(event: Seen, version: int) -> Seen:
    """Change the checksum of the first shard if its version is newer than `version`."""
    seen, checksum = event.values[0]
    if seen <= version:
        return event
    return replace(event, values={**event.values, 0: (seen, checksum ^ 1)})


def test_a_journal_is_readable_after_a_kill_of_its_writer(tmp_path: Path) -> None:
    """Complete lines are read back equal; an incomplete last line is ignored."""
    events = history(SHARDS, OPTIMIZERS["sgd"], 3)
    with Journal(tmp_path / "a.jsonl") as journal:
        for event in events:
            journal.write(event)
    with (tmp_path / "a.jsonl").open("a") as file:
        file.write('["Sent", {"session": "s')
    assert read_journals([tmp_path / "a.jsonl"]) == events
