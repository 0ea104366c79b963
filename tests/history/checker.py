"""Decides whether what survived is the serial replay of exactly the acknowledged pushes.

Each acknowledgement names the version that a shard had right after the push, so it says where in
the shard's order the push stands. Versions that nobody was told of must be those of pushes whose
outcome is unknown, each of which may stand there once or not at all. The search tries them; values
that anybody saw on the way (every push brings some) rule out wrong ones within a version or two.

All of it is exact: `check` finds nothing only if there is an order of exactly the acknowledged
pushes and some unknown ones that gives every value that was seen, to the last bit, and in which
no push stands before one that was answered before it was sent.
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import accumulate, pairwise

from history.events import Answered, Event, Seen, Sent, Verdict
from history.search import Misfit, Placed, Search, Undecided
from history.sightings import Push, Sightings
from history.twin import Twin

from shoal_proto.v1.optimizer_pb2 import OptimizerSpec
from shoal_proto.v1.shards_pb2 import Shard

MAX_EXPLAINED = 12
"""Pushes between two seen values of which one is looked for that explains the difference."""


class Kind(StrEnum):
    """What is wrong."""

    LOST = "an acknowledged push is lost"
    TWICE = "a push was applied twice"
    ORDER = "pushes stand in another order than they were acknowledged in"
    VANISHED = "a version that was seen is no more"
    BITS = "values that no order of the pushes gives"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that is wrong with one shard."""

    kind: Kind
    shard_id: int
    detail: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """What came of a check."""

    faults: Sequence[Fault]
    num_acknowledged: int
    num_unknown: int
    num_unknown_applied: int
    """Parts of unknown pushes that turned out to be applied, over all shards."""
    began_s: float
    """When the first thing happened, on the clock of the events: what is told of times counts from
    there."""

    def count(self, kind: Kind) -> int:
        return sum(fault.kind is kind for fault in self.faults)

    def __str__(self) -> str:
        listed = "".join(f"\n  shard {f.shard_id}: {f.kind}: {f.detail}" for f in self.faults)
        return (
            f"{self.num_acknowledged} pushes acknowledged, {self.num_unknown} unknown"
            f" ({self.num_unknown_applied} of their parts applied),"
            f" {len(self.faults)} faults{listed}"
        )


def check(shards: Iterable[Shard], optimizer: OptimizerSpec, events: Sequence[Event]) -> Report:
    """Compare everything that the workers were told and saw. The values that were seen last, by
    whoever it was, are taken for what survived."""
    pushes = collect(events)
    began_s = min(event.at_s for event in events)
    faults: list[Fault] = []
    num_applied = 0
    for shard in shards:
        own = _ShardCheck(Twin(shard, optimizer), pushes, events, began_s)
        faults += own.run()
        num_applied += own.num_unknown_applied
    verdicts = [push.verdict for push in pushes]
    return Report(
        faults=faults,
        num_acknowledged=verdicts.count(Verdict.ACKNOWLEDGED),
        num_unknown=verdicts.count(Verdict.UNKNOWN),
        num_unknown_applied=num_applied,
        began_s=began_s,
    )


def collect(events: Iterable[Event]) -> list[Push]:
    """Each push with its answer; without one its outcome is unknown."""
    pushes: dict[tuple[str, int], Push] = {}
    for event in events:
        if isinstance(event, Sent):
            pushes[event.session, event.sequence] = Push(
                session=event.session,
                sequence=event.sequence,
                gradients=event.gradients,
                sent_s=event.at_s,
            )
    for event in events:
        if isinstance(event, Answered) and event.verdict is not Verdict.UNKNOWN:
            key = event.session, event.sequence
            pushes[key] = replace(
                pushes[key],
                verdict=event.verdict,
                answered_s=event.at_s,
                versions=event.versions,
            )
    return list(pushes.values())


class _ShardCheck:
    def __init__(
        self, first: Twin, pushes: Sequence[Push], events: Sequence[Event], began_s: float
    ) -> None:
        self._first = first
        self._shard_id = first.shard.shard_id
        self._acknowledged = [p for p in pushes if p.verdict is Verdict.ACKNOWLEDGED]
        self._unknown = [p for p in pushes if p.verdict is Verdict.UNKNOWN]
        self._seen = [e for e in events if isinstance(e, Seen) and self._shard_id in e.values]
        self._end = max(self._seen, key=lambda e: e.at_s).values[self._shard_id][0]
        self._sightings = Sightings(self._shard_id, self._seen, began_s)
        self._faults: list[Fault] = []
        self.num_unknown_applied = 0

    def run(self) -> Sequence[Fault]:
        order = self._place()
        self._check_sightings()
        self._check_order(order)
        disputed = self._sightings.disputed
        is_all = not self._faults
        for version in disputed:
            problem = self._sightings.dispute(version, order, self._unknown)
            if is_all and version == disputed[0]:
                problem = f"{problem}; {self._which(order, version)}"
            self._fault(Kind.VANISHED, problem)
        if not self._faults:
            self._replay(order)
        return self._faults

    def _fault(self, kind: Kind, detail: str) -> None:
        self._faults.append(Fault(kind=kind, shard_id=self._shard_id, detail=detail))

    def _place(self) -> dict[int, Push]:
        """The acknowledged pushes by the version that each made."""
        order: dict[int, Push] = {}
        for push in self._acknowledged:
            version = push.versions.get(self._shard_id, 0)
            if version > self._end:
                self._fault(Kind.LOST, f"{push} made version {version}, the last is {self._end}")
            elif version < 2:
                self._fault(Kind.LOST, f"{push} was acknowledged with version {version}")
            elif version in order:
                self._fault(Kind.LOST, f"{push} and {order[version]} both made version {version}")
            else:
                order[version] = push
        return order

    def _check_sightings(self) -> None:
        """Fault each version that went back, but for those that are disputed."""
        newest: dict[str, int] = defaultdict(int)
        for event in sorted(self._seen, key=lambda e: e.at_s):
            version, _ = event.values[self._shard_id]
            who = self._sightings.at(event)
            if version > self._end:
                problem = f"{version} was seen by {who}, the last is {self._end}"
                self._fault(Kind.VANISHED, problem)
            if version < newest[event.session]:
                self._fault(Kind.VANISHED, f"{who} saw {version} after {newest[event.session]}")
            newest[event.session] = max(newest[event.session], version)

    def _check_order(self, order: Mapping[int, Push]) -> None:
        """Fault each push that stands behind one that was sent after it was answered."""
        earliest: tuple[float, str] = (math.inf, "")
        for version in sorted(order, reverse=True):
            push = order[version]
            if earliest[0] < push.sent_s:
                self._fault(
                    Kind.ORDER, f"{push} made {version}, before {earliest[1]}, answered earlier"
                )
            earliest = min(earliest, (push.answered_s, str(push)))

    def _which(self, order: Mapping[int, Push], version: int) -> str:
        """Which of the values that were seen of a version the pushes give, and what of later ones
        follows on these."""
        known = self._sightings.checksums
        for other in self._sightings.disputed:
            del known[other]
        return ", ".join(
            f"{checksum:#010x} {self._how_far(order, known, version, checksum)}"
            for checksum in self._sightings.values_of(version)
        )

    def _how_far(
        self, order: Mapping[int, Push], known: Mapping[int, int], version: int, checksum: int
    ) -> str:
        try:
            found = self._search(order, {**known, version: checksum})
        except Undecided:
            return "may or may not be what the pushes give"
        if not isinstance(found, Misfit):
            return "is what the pushes give, and so is all that was seen later"
        if found.bad > version:
            return f"is what the pushes give, and not what was seen of {found.bad} behind it"
        if found.bad < version:
            return f"was not reached: what was seen of {found.bad} is not what the pushes give"
        return "is not what the pushes give"

    def _replay(self, order: Mapping[int, Push]) -> None:
        found = self._search(order, self._sightings.checksums)
        if isinstance(found, Misfit):
            self._explain(found)
        else:
            self.num_unknown_applied = len(found)

    def _search(
        self, order: Mapping[int, Push], checksums: Mapping[int, int]
    ) -> Mapping[int, Placed] | Misfit:
        """See `Search.run`. Raises Undecided."""
        answers = sorted((push.answered_s, version) for version, push in order.items())
        answered_s = [at_s for at_s, _ in answers]
        # newest[i]: the newest version that was there for sure after i answers.
        newest = list(accumulate((version for _, version in answers), max, initial=1))
        unknown = [
            self._placed(push, newest[bisect_left(answered_s, push.sent_s)])
            for push in self._unknown
        ]
        return Search(
            self._first,
            end=self._end,
            acknowledged={version: self._placed(push) for version, push in order.items()},
            unknown=unknown,
            checksums=checksums,
        ).run()

    def _placed(self, push: Push, floor: int = 0) -> Placed:
        return Placed(name=str(push), gradients=push.gradients, floor=floor)

    def _explain(self, misfit: Misfit) -> None:
        """Name the one wrong thing that would give the values, if there is one."""
        where = f"between versions {misfit.good} and {misfit.bad}"
        for pushes in (misfit.between, misfit.acknowledged):
            if len(pushes) > MAX_EXPLAINED:
                continue
            for kind, names, order in _variations(pushes, misfit.before):
                if misfit.gives(order):
                    return self._fault(kind, f"{names}, {where}")
        names = ", ".join(push.name for push in misfit.between[-MAX_EXPLAINED:])
        return self._fault(Kind.BITS, f"{where}: {names or 'nothing'}; {misfit.gap}")


def _variations(
    pushes: Sequence[Placed], before: Sequence[Placed]
) -> Iterator[tuple[Kind, str, Sequence[Placed]]]:
    """Orders in which one thing is wrong, what, and with which pushes."""
    for i, push in enumerate(pushes):
        yield Kind.LOST, push.name, [*pushes[:i], *pushes[i + 1 :]]
    for push in (*pushes, *before):
        for i in range(len(pushes) + 1):
            yield Kind.TWICE, push.name, [*pushes[:i], push, *pushes[i:]]
    for i, (one, other) in enumerate(pairwise(pushes)):
        swapped = [*pushes[:i], other, one, *pushes[i + 2 :]]
        yield Kind.ORDER, f"{one.name} and {other.name}", swapped


__all__ = ["Fault", "Kind", "Push", "Report", "check", "collect"]
