"""Clocks of a job's members, which decide whether a member may begin its next step.

Members that train at their own pace count rounds. A member's clock is its round: the pushes of its
steps in earlier rounds are acknowledged. A member may begin a step of round c only while c minus
the slowest member's clock is at most the bound. So the step's values include every live member's
pushes up to round c - bound - 1, and no member passes round c + bound until the step is applied
("stale synchronous parallel": Ho et al., NIPS 2013).

Rounds are not steps: a slow member has no share to catch up with, since samples are leased on
request. After a late step it enters the newest round. With bound b it takes part at least in every
(b + 1)th round, and the others wait for it.

Only members that take steps have a clock: no member waits for one that is lost, has left or rests.
A member that joins or returns begins in the newest round in which it need not wait; with bound 0,
in the next one if another member already asks to push.

With bound 0 a member also reports that it has its round's values (`pulled`), and pushes once all
members have: so all steps of a round are computed on the same values. After a leader failover no
member may go on until each member that trained has reported again.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from shoal_proto.short_lists import short_list
from shoal_server.core.positions import ClockPosition, PositionIndex
from shoal_server.core.processes import MemberProcess

MAX_NAMES = 5


class NoClock(Exception):
    """Raised for a process without a clock, or if a later process of its member has reported."""


@dataclass(frozen=True, kw_only=True)
class ClockReport:
    position: ClockPosition
    bound: int
    """Number of rounds that the member may be ahead of the slowest."""
    enters: bool = False
    """True if the member asks for its first clock."""
    begins: bool = False
    """True if the member begins the step without waiting for the answer."""


@dataclass(frozen=True, kw_only=True)
class ClockStatus:
    clock: int
    """Round of the member's next step or push, possibly above the reported one. After a report with
    `begins`, the member stays in its reported round until it reports this clock."""
    allowed: bool
    slowest: int
    """Lowest clock of all members; 0 while reports to a new leader are missing."""
    reason: str = ""
    """Text that follows "waits for"; empty if the member may go on."""


@dataclass(kw_only=True, slots=True)
class _Member:
    incarnation: str
    bound: int
    position: ClockPosition | None
    """None while the member waits for its first clock."""
    moved_s: float
    in_step: bool = False
    """True if the member is in a step, or may begin one."""


class Clocks:
    """Clocks of one job. `unreported`: members that have not reported to this leader."""

    def __init__(self, unreported: Iterable[MemberProcess] = (), now_s: float = 0.0) -> None:
        self._members: dict[str, _Member] = {}
        self._standing = PositionIndex()
        """Members with a position."""
        self._stepping = PositionIndex()
        """Members in a step."""
        self._waits_since_s: dict[str, float] = {}
        """First refusal of each waiting member, the earliest first."""
        self._unreported = {who.member_id: who.incarnation for who in sorted(unreported)}
        self._since_s = now_s
        self._floor = 0

    # --- reports of members ---

    def advance(self, who: MemberProcess, report: ClockReport, now_s: float) -> ClockStatus:
        """Record the member's position, and return whether it may go on.

        A repeated report never moves the member back. A report with neither `begins` nor `pulled`
        requests the next step, and may move the member to a newer round.
        """
        name = who.member_id
        self._unreported.pop(name, None)
        member = self._members.get(name)
        if member is None or member.incarnation != who.incarnation:
            member = _Member(
                incarnation=who.incarnation,
                bound=report.bound,
                position=None if report.enters else report.position,
                moved_s=now_s,
            )
            self._members[name] = member
            self._waits_since_s.pop(name, None)
        elif not report.enters and (member.position is None or report.position > member.position):
            member.position, member.moved_s = report.position, now_s
            self._waits_since_s.pop(name, None)
        member.in_step = report.begins or report.position.pulled
        member.bound = report.bound
        self._index(name, member)
        return self.decide_clock(who, now_s)

    def decide_clock(self, who: MemberProcess, now_s: float) -> ClockStatus:
        """Decide whether the member may go on, and record that. Raises NoClock.

        A member outside of a step moves to the newest open round, or waits while reports to a new
        leader are missing.
        """
        name, member = who.member_id, self._member(who)
        start = self._start(member.bound, but=name) if not self._unreported else 0
        if not self._unreported and not member.in_step:
            member.position = max(member.position or ClockPosition(start), ClockPosition(start))
            self._standing.move(name, member.position)
        position = member.position or ClockPosition(0)
        reason = self._why_not(name, member)
        if not reason:
            member.in_step = True
            if self._waits_since_s.pop(name, None) is not None:
                member.moved_s = now_s
        elif position.pulled or not member.in_step:
            self._waits_since_s.setdefault(name, now_s)
        self._index(name, member)
        return ClockStatus(
            clock=position.clock if position.pulled else max(position.clock, start),
            allowed=not reason,
            slowest=0 if self._unreported else self.slowest,
            reason=reason,
        )

    def rest(self, who: MemberProcess, clock: int) -> None:
        """Note that the member rests; `clock` is its round."""
        self._unreported.pop(who.member_id, None)
        self._floor = max(self._floor, clock)
        self.remove(who)

    def remove(self, who: MemberProcess) -> None:
        """Remove a member that is lost or left. The clock of its later process stays."""
        name = who.member_id
        if self._unreported.get(name) == who.incarnation:
            del self._unreported[name]
        member = self._members.get(name)
        if member is not None and member.incarnation == who.incarnation:
            del self._members[name]
            self._waits_since_s.pop(name, None)
            self._standing.drop(name)
            self._stepping.drop(name)
            if member.position is not None:
                self._floor = max(self._floor, member.position.clock)

    def _member(self, who: MemberProcess) -> _Member:
        member = self._members.get(who.member_id)
        if member is None or member.incarnation != who.incarnation:
            raise NoClock(who.member_id)
        return member

    def _index(self, name: str, member: _Member) -> None:
        if member.position is None:
            self._standing.drop(name)
        else:
            self._standing.move(name, member.position)
        if member.position is None or not member.in_step:
            self._stepping.drop(name)
        else:
            self._stepping.move(name, member.position)

    # --- decisions ---

    def _start(self, bound: int, but: str) -> int:
        """Return the round that a member outside of a step enters: the newest that it may begin at
        once, or the next if another member asks to push."""
        newest = self._standing.last(but)
        if newest is None:
            return self._floor
        start = newest.clock
        # Members outside of a step enter the newest round as well.
        slowest = self._stepping.first(but)
        if slowest is not None:
            start = min(start, slowest.clock + bound)
        return (
            start + 1
            if self._stepping.is_occupied(ClockPosition(start, pulled=True), but)
            else start
        )

    def _why_not(self, name: str, member: _Member) -> str:
        if self._unreported:
            names = short_list(self._unreported, MAX_NAMES)
            return f"{names} to report their clocks to the new leader"
        if member.position is None:
            return "the other members' clocks"
        first, threshold = self._standing.first(name), _threshold(member.position, member.bound)
        if first is None or first >= threshold:
            return ""
        clock, bound = member.position.clock, member.bound
        at = (ClockPosition(first.clock), ClockPosition(first.clock, pulled=True))
        behind = [self._standing.names_at(each) for each in at if each < threshold]
        num = sum(len(each) for each in behind)
        names = short_list(chain.from_iterable(behind), MAX_NAMES, num)
        condition = f"the waiting member's next round is {clock}, the bound {bound}"
        if member.position.pulled:
            condition = (
                f"the waiting member pushes in round {clock}"
                " once all members have that round's values"
            )
        return f"{names} in round {first.clock}: {condition}"

    @property
    def slowest(self) -> int:
        """Lowest clock; if no member has one, the clock of the next member that enters."""
        lowest = self._standing.lowest
        return lowest.clock if lowest is not None else self._floor

    @property
    def horizon(self) -> ClockPosition | None:
        """Lowest position. A member may go on once the horizon has reached the member's
        `threshold`; None: no member may go on."""
        if self._unreported:
            return None
        lowest = self._standing.lowest
        return lowest if lowest is not None else ClockPosition(self._floor)

    def threshold(self, who: MemberProcess) -> ClockPosition:
        """Position that the horizon has to reach for the member to go on. Raises NoClock."""
        member = self._member(who)
        if member.position is None:
            return ClockPosition(0)
        return _threshold(member.position, member.bound)

    @property
    def is_idle(self) -> bool:
        """True if no member has a clock or has yet to report one to this leader."""
        return not self._members and not self._unreported

    # --- status, and members that hold up others ---

    @property
    def clocks(self) -> Mapping[str, int]:
        """Round of each member with a clock."""
        return {
            name: member.position.clock
            for name, member in self._members.items()
            if member.position is not None
        }

    def waiting(self) -> Iterator[tuple[str, str, float]]:
        """Waiting members: (member, reason, time of the first refusal)."""
        for name, since_s in self._waits_since_s.items():
            if reason := self._why_not(name, self._members[name]):
                yield name, reason, since_s

    def overdue(self, limit_s: float, now_s: float) -> list[tuple[MemberProcess, str]]:
        """Members to declare lost, with the reason; none until a member has waited for longer than
        the limit.

        These members hold up others, do not wait, and have not moved within the limit. While
        reports to a new leader are missing, the members to declare lost are those that have not
        reported within the limit.
        """
        longest_s = next(iter(self._waits_since_s.values()), now_s)
        if not now_s - longest_s > limit_s:
            return []
        if self._unreported:
            late = now_s - self._since_s > limit_s
            text = f"it did not report its clock to the new leader within {limit_s:g} s"
            return [(MemberProcess(*who), text) for who in self._unreported.items()] if late else []
        text = f"the others waited for its step for more than {limit_s:g} s"
        standing = [(name, m, m.position) for name, m in self._members.items() if m.position]
        # A member below this position holds up another.
        highest = max((_threshold(at, m.bound) for _, m, at in standing), default=ClockPosition(0))
        return [
            (MemberProcess(name, member.incarnation), text)
            for name, member, at in sorted(standing, key=lambda each: each[0])
            if at < highest and name not in self._waits_since_s and now_s - member.moved_s > limit_s
        ]


def _threshold(position: ClockPosition, bound: int) -> ClockPosition:
    return position._replace(clock=position.clock - bound)
