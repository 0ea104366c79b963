"""Decides whether the surviving values are the serial replay of exactly the acknowledged pushes.

Each acknowledgement names the version that a shard had right after the push: the push's position
in the shard's order. A version that no acknowledgement names must be that of a push whose outcome
is unknown; each such push may be in the order once or not at all. The search tries them. Values
that workers saw on the way (every push returns some) rule out a wrong choice within a version or
two.

The check is exact. It finds nothing only if one order of all acknowledged pushes and some unknown
ones gives every value that was seen, to the last bit. In that order no push may precede one that
was answered before it was sent.
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
"""Largest number of pushes between two seen values among which one is sought that explains the
difference."""


class Kind(StrEnum):
    """The kinds of fault that a check finds."""

    LOST = "an acknowledged push is lost"
    TWICE = "a push was applied twice"
    ORDER = "pushes stand in another order than they were acknowledged in"
    VANISHED = "a version that was seen is no more"
    BITS = "values that no order of the pushes gives"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of one shard."""

    kind: Kind
    shard_id: int
    detail: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a check."""

    faults: Sequence[Fault]
    num_acknowledged: int
    num_unknown: int
    num_unknown_applied: int
    """Parts of unknown pushes that were found to be applied, summed over all shards."""
    began_s: float
    """Time of the first event, on the clock of the events; times in messages count from it."""

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
    """Compare all answers and values that the workers received.

    The values that were seen last, by any worker, count as those that survived.
    """
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
    """Pair each push with its answer; the outcome of a push without an answer is unknown."""
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
        """Acknowledged pushes by the version that each made."""
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
        """Report each sighting of a version beyond the last, or older than the session's previous
        one."""
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
        """Report each push that was sent after the answer to a push with a later version."""
        earliest: tuple[float, str] = (math.inf, "")
        for version in sorted(order, reverse=True):
            push = order[version]
            if earliest[0] < push.sent_s:
                self._fault(
                    Kind.ORDER, f"{push} made {version}, before {earliest[1]}, answered earlier"
                )
            earliest = min(earliest, (push.answered_s, str(push)))

    def _which(self, order: Mapping[int, Push], version: int) -> str:
        """Describe, for each set of values seen of a version, if the pushes give it, and if later
        values follow from it."""
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
            return f"is what the pushes give, and not what was seen of {found.bad} after it"
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
        """Run the `Search` over the unknown pushes. Raises Undecided."""
        answers = sorted((push.answered_s, version) for version, push in order.items())
        answered_s = [at_s for at_s, _ in answers]
        # newest[i]: the newest version that certainly existed after i answers.
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
        """Report the single fault that would give the seen values, or BITS if there is none."""
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
    """Orders with a single fault: the fault's kind, the pushes it concerns, and the order."""
    for i, push in enumerate(pushes):
        yield Kind.LOST, push.name, [*pushes[:i], *pushes[i + 1 :]]
    for push in (*pushes, *before):
        for i in range(len(pushes) + 1):
            yield Kind.TWICE, push.name, [*pushes[:i], push, *pushes[i:]]
    for i, (one, other) in enumerate(pairwise(pushes)):
        swapped = [*pushes[:i], other, one, *pushes[i + 2 :]]
        yield Kind.ORDER, f"{one.name} and {other.name}", swapped


__all__ = ["Fault", "Kind", "Push", "Report", "check", "collect"]
