"""How far each member of a job is, and whether it may begin its next step.

Members that train at their own pace count rounds. A member's clock is the round that it is in: the
pushes of all its steps in earlier rounds are acknowledged. It may begin a step of round c only
while c minus the clock of the slowest member is at most the bound. So whatever a step is computed
on has all that any live member did up to round c - bound - 1, and until it is applied nobody is
beyond round c + bound ("stale synchronous parallel": Ho et al., NIPS 2013).

Rounds and not steps, because nobody has a share of its own to catch up with: samples are leased to
whoever asks. Who finishes a step late goes on in the newest round that the others are in. A member
that is five times slower thus takes part in every fifth round, and the bound says how far it may
be left behind, not how many steps it owes.

Only members that take steps have a clock. Who is lost, leaves or rests has none and is waited for
by nobody. Who comes, or comes back, begins where it need not wait.

With bound 0 a member also says when it has the values of its round, and pushes only once all have
theirs (`pulled`). Then a round has one set of values, and every member computes on the same.

Pure: an edge holds one `Clocks` a job, in memory only. After a change of leaders nobody is allowed
anything until each member that trained has spoken again.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

MAX_NAMES = 5


class MemberProcess(NamedTuple):
    """One process of a member."""

    member_id: str
    incarnation: str


class Position(NamedTuple):
    """Places within a job, in order."""

    clock: int
    pulled: bool = False
    """It has the values of this round, and asks to push."""


class NoClock(Exception):
    """The member has no clock (any more): it was lost, or rests."""


@dataclass(frozen=True, kw_only=True)
class ClockReport:
    """What a member says of itself."""

    position: Position
    bound: int
    """By how many rounds it may be ahead of the slowest."""
    enters: bool = False
    """It has no clock to go on from: it is to be told one."""
    begins: bool = False
    """It knows that it may begin this round's step, and does so whatever it is answered."""


@dataclass(frozen=True, kw_only=True)
class ClockStatus:
    """Where a member stands."""

    clock: int
    """The round of its next step; higher than the one it said where the others are further. Who
    begins without waiting for the answer is in the round that it said, until it says this one."""
    allowed: bool
    slowest: int
    """The lowest clock of all. It never falls, whoever comes or goes. 0: not known yet."""
    reason: str = ""
    """What it waits for, in words; empty when it is allowed."""


@dataclass(kw_only=True, slots=True)
class _Member:
    incarnation: str
    bound: int
    position: Position | None
    """None: it has entered, and is told where it begins once all others are known."""
    moved_s: float
    in_step: bool = False
    """It was allowed to begin, or began by itself, and has not asked for the next step since."""
    waits_since_s: float | None = None


class Clocks:
    """The clocks of one job. `unheard`: members that may have one which only they know."""

    def __init__(self, unheard: Iterable[MemberProcess] = (), now_s: float = 0.0) -> None:
        self._members: dict[str, _Member] = {}
        self._unheard = {who.member_id: who.incarnation for who in unheard}
        self._since_s = now_s
        self._floor = 0

    # --- what members say ---

    def advance(self, who: MemberProcess, said: ClockReport, now_s: float) -> ClockStatus:
        """Note where the member is; says whether it may go on. Saying it again changes nothing."""
        self._unheard.pop(who.member_id, None)
        member = self._members.get(who.member_id)
        if member is None or member.incarnation != who.incarnation:
            member = _Member(
                incarnation=who.incarnation,
                bound=said.bound,
                position=None if said.enters else said.position,
                moved_s=now_s,
            )
            self._members[who.member_id] = member
        elif not said.enters and (member.position is None or said.position > member.position):
            member.position, member.moved_s, member.waits_since_s = said.position, now_s, None
        member.in_step = said.begins or said.position.pulled
        member.bound = said.bound
        return self.standing(who, now_s)

    def standing(self, who: MemberProcess, now_s: float) -> ClockStatus:
        """Where the member stands now. Raises NoClock."""
        member = self._members.get(who.member_id)
        if member is None or member.incarnation != who.incarnation:
            raise NoClock(who.member_id)
        start = self._start(member.bound, but=who.member_id) if not self._unheard else 0
        if not self._unheard and not member.in_step:
            # Nothing keeps it in an earlier round than it could be in.
            member.position = max(member.position or Position(start), Position(start))
        own = member.position or Position(0)
        reason = self._why_not(who.member_id, member)
        if not reason:
            member.in_step = True
            if member.waits_since_s is not None:
                member.moved_s, member.waits_since_s = now_s, None
        elif member.waits_since_s is None and (own.pulled or not member.in_step):
            member.waits_since_s = now_s
        return ClockStatus(
            clock=own.clock if own.pulled else max(own.clock, start),
            allowed=not reason,
            slowest=0 if self._unheard else self.slowest,
            reason=reason,
        )

    def rest(self, who: MemberProcess, clock: int) -> None:
        """The member takes no steps for now; `clock`: of the round that it would be in."""
        self._unheard.pop(who.member_id, None)
        self._floor = max(self._floor, clock)
        self.remove(who)

    def remove(self, who: MemberProcess) -> None:
        """The member is lost, or left. A later process of the same name keeps its clock."""
        if self._unheard.get(who.member_id) == who.incarnation:
            del self._unheard[who.member_id]
        member = self._members.get(who.member_id)
        if member is not None and member.incarnation == who.incarnation:
            del self._members[who.member_id]
            if member.position is not None:
                self._floor = max(self._floor, member.position.clock)

    # --- what follows ---

    def _start(self, bound: int, but: str) -> int:
        """Where a member begins that has finished all it had: in the newest round that is open to
        it at once, in which nobody has begun to push for it to miss."""
        others = [
            (member.position, member.in_step)
            for name, member in self._members.items()
            if name != but and member.position is not None
        ]
        if not others:
            return self._floor
        start = max(position.clock for position, _ in others)
        # Who is in no step will be moved on before it begins one.
        stepping = [position for position, in_step in others if in_step]
        if stepping:
            start = min(start, min(stepping).clock + bound)
        return start + 1 if Position(start, pulled=True) in stepping else start

    def _why_not(self, name: str, member: _Member) -> str:
        if self._unheard:
            names = _names(sorted(self._unheard))
            return f"{names} to say how far they are: another coordinator leads since"
        if member.position is None:
            return "the other members' clocks"
        held_up = self._ahead_of(name, member)
        if not held_up:
            return ""
        clock, bound = member.position.clock, member.bound
        slowest = min(held_up.values())
        names = _names(sorted(who for who, at in held_up.items() if at == slowest))
        own = f"its own next is {clock}, the bound {bound}"
        if member.position.pulled:
            own = f"it pushes in round {clock} once all have their values"
        return f"{names} in round {slowest}: {own}"

    def _ahead_of(self, name: str, member: _Member) -> dict[str, int]:
        """Who is further behind the member than its bound allows, and in which round."""
        if member.position is None:
            return {}
        return {
            other: position.clock
            for other, position in self._positions()
            if other != name
            and position._replace(clock=position.clock + member.bound) < member.position
        }

    def _positions(self) -> Iterator[tuple[str, Position]]:
        for name, member in self._members.items():
            if member.position is not None:
                yield name, member.position

    @property
    def slowest(self) -> int:
        """The lowest clock; where nobody has one, that of the next to come."""
        return min((p.clock for _, p in self._positions()), default=self._floor)

    @property
    def horizon(self) -> tuple[Position, int]:
        """While it stays the same, and nobody goes, no member's wait is over."""
        lowest = min((p for _, p in self._positions()), default=Position(self._floor))
        return lowest, len(self._unheard)

    # --- what is shown, and who is in the way ---

    @property
    def clocks(self) -> Mapping[str, int]:
        """The round of each member that has one."""
        return {name: position.clock for name, position in self._positions()}

    def waiting(self) -> Iterator[tuple[str, str, float]]:
        """(member, what it waits for, since when) of each that was refused its next step."""
        for name, member in self._members.items():
            if member.waits_since_s is not None and (reason := self._why_not(name, member)):
                yield name, reason, member.waits_since_s

    def overdue(self, limit_s: float, now_s: float) -> list[tuple[MemberProcess, str]]:
        """Who has held up others for longer than the limit without a step, and the reason that
        makes it lost."""
        waits = [m for m in self._members.values() if m.waits_since_s is not None]
        if not any(now_s - (m.waits_since_s or now_s) > limit_s for m in waits):
            return []
        if self._unheard:
            late = now_s - self._since_s > limit_s
            text = f"it did not say how far it is, {limit_s:g} s after another coordinator leads"
            return [(MemberProcess(*who), text) for who in self._unheard.items()] if late else []
        blamed = {name for who, m in self._members.items() for name in self._ahead_of(who, m)}
        text = f"the others waited for its step for more than {limit_s:g} s"
        return [
            (MemberProcess(name, self._members[name].incarnation), text)
            for name in sorted(blamed)
            if self._is_stuck(name, limit_s, now_s)
        ]

    def _is_stuck(self, name: str, limit_s: float, now_s: float) -> bool:
        member = self._members[name]
        # Who waits itself is not at fault, whoever waits for it.
        return member.waits_since_s is None and now_s - member.moved_s > limit_s


def _names(names: list[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
