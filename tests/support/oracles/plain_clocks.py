"""Plain second implementation of the clocks, which looks at all members for each answer."""

from dataclasses import dataclass

from shoal_server.core.clocks import ClockReport, ClockStatus
from shoal_server.core.positions import ClockPosition
from shoal_server.core.processes import MemberProcess


@dataclass
class PlainMember:
    incarnation: str
    bound: int
    position: ClockPosition | None
    in_step: bool = False


class PlainClocks:
    """Clocks that answer the same questions as `Clocks`, without times and reasons."""

    def __init__(self) -> None:
        self.members: dict[str, PlainMember] = {}
        self.floor = 0

    def advance(self, who: MemberProcess, said: ClockReport) -> ClockStatus:
        member = self.members.get(who.member_id)
        if member is None or member.incarnation != who.incarnation:
            position = None if said.enters else said.position
            member = PlainMember(who.incarnation, said.bound, position)
            self.members[who.member_id] = member
        elif not said.enters and (member.position is None or said.position > member.position):
            member.position = said.position
        member.in_step, member.bound = said.begins or said.position.pulled, said.bound
        return self.standing(who)

    def standing(self, who: MemberProcess) -> ClockStatus:
        member = self.members[who.member_id]
        others = [m for name, m in self.members.items() if name != who.member_id and m.position]
        start = self._start(member.bound, others)
        if not member.in_step:
            member.position = max(member.position or ClockPosition(start), ClockPosition(start))
        own = member.position or ClockPosition(0)
        behind = self.behind(who.member_id)
        member.in_step = member.in_step or not behind
        return ClockStatus(
            clock=own.clock if own.pulled else max(own.clock, start),
            allowed=not behind,
            slowest=self.slowest,
        )

    def behind(self, name: str) -> set[str]:
        """Return the members that this member waits for."""
        own = self.members[name]
        return {
            other
            for other, m in self.members.items()
            if other != name
            and m.position
            and own.position
            and ClockPosition(m.position.clock + own.bound, m.position.pulled) < own.position
        }

    def remove(self, who: MemberProcess) -> None:
        member = self.members.get(who.member_id)
        if member is not None and member.incarnation == who.incarnation:
            del self.members[who.member_id]
            self.floor = max(self.floor, member.position.clock if member.position else 0)

    @property
    def slowest(self) -> int:
        return min(
            (m.position.clock for m in self.members.values() if m.position), default=self.floor
        )

    def _start(self, bound: int, others: list[PlainMember]) -> int:
        at = [m.position for m in others if m.position]
        if not at:
            return self.floor
        stepping = [m.position for m in others if m.in_step and m.position]
        start = max(position.clock for position in at)
        if stepping:
            start = min(start, min(stepping).clock + bound)
        return start + 1 if ClockPosition(start, pulled=True) in stepping else start
