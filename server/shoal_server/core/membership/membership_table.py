"""Who is there: a job's members, and those among them who are in some way not as they should be.

Every question that is asked at each event is answered without going through all members, so that
an event costs the same in a job of ten thousand as in one of ten.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from shoal_server.core.generations.roster import Proposal, Roster, Step
from shoal_server.core.limits import Limits
from shoal_server.core.membership.events import Refusal
from shoal_server.core.membership.member import Member
from shoal_server.core.membership.pauses import Pauses

MAX_EXPELLED = 10_000


@dataclass(kw_only=True)
class MembershipTable:
    """The members by id. Whoever changes what is kept count of here does it by a method of here."""

    limits: Limits
    members: dict[str, Member] = field(default_factory=dict)
    candidates: dict[str, Member] = field(default_factory=dict)
    """Those who have proposed and are to stay, in the order in which they proposed."""
    draining: dict[str, Member] = field(default_factory=dict)
    """Those who are to leave, in the order in which they were asked to."""
    expelled: dict[str, Refusal | None] = field(default_factory=dict)
    """Incarnations that were members and are not to come back, the oldest first, and what they
    were refused with: a call that was under way is answered with the same."""
    unheard: set[str] = field(default_factory=set)
    """Those who were there under another leader, and have not said again what they train."""
    pauses: Pauses = field(default_factory=Pauses)
    in_call: dict[str, int] = field(default_factory=dict)
    """Those who stand still in a call between two steps, and how many of them are enough for it."""
    finished: set[str] = field(default_factory=set)
    """Members that have done their work, present or gone: nobody waits for one, and each counts
    for the minimum that the others need."""
    told_waiting: int = 0
    """Members without a rank that would be in the next roster, as torchrun's nodes know it."""
    _unsettled: set[str] = field(default_factory=set)
    # By id, the earliest first: what is entered later counts from a later time.
    _disconnected: dict[str, Member] = field(default_factory=dict)
    _halted: dict[str, Member] = field(default_factory=dict)

    def admit(self, member: Member) -> None:
        """Take in a member that nobody of its name is here of."""
        self.members[member.member_id] = member
        self.finished.discard(member.member_id)
        if not member.settled:
            self._unsettled.add(member.member_id)

    def remove(self, member: Member, refusal: Refusal | None = None) -> None:
        """Let the member go; its incarnation never comes back."""
        name = member.member_id
        for table in (self.members, self.candidates, self.draining, self._disconnected):
            table.pop(name, None)
        self._halted.pop(name, None)
        self._unsettled.discard(name)
        self.unheard.discard(name)
        self.in_call.pop(name, None)
        self.pauses.gone(member)
        self.expelled[member.incarnation] = refusal
        if len(self.expelled) > MAX_EXPELLED:
            del self.expelled[next(iter(self.expelled))]

    def propose(self, member: Member, proposal: Proposal) -> None:
        member.proposal = proposal
        self.unheard.discard(member.member_id)
        if member.drain.since_s is None and member.member_id not in self.finished:
            self.candidates[member.member_id] = member

    def drain(self, member: Member, reason: str, now_s: float) -> None:
        """From now on the member is wanted in no further roster."""
        member.drain.since_s, member.drain.reason = now_s, reason
        self.draining[member.member_id] = member
        self.candidates.pop(member.member_id, None)

    def finish(self, member: Member) -> None:
        """From now on the member is wanted in no roster, and stands still."""
        self.settle((member,), settled=True)
        self.finished.add(member.member_id)
        for table in (self.candidates, self.draining):
            table.pop(member.member_id, None)

    def hold_state(self, members: Iterable[Member], step: Step) -> None:
        """The members hold the state after so many steps, whatever they proposed with."""
        for member in members:
            if member.proposal is not None:
                member.proposal = replace(member.proposal, step=step, has_state=True)

    def settle(self, members: Iterable[Member], *, settled: bool) -> None:
        """Note that the members stand still, or that they do not."""
        for member in members:
            if member.member_id in self.finished:
                continue
            member.settled = settled
            self.in_call.pop(member.member_id, None)
            if settled:
                self._unsettled.discard(member.member_id)
            else:
                self._unsettled.add(member.member_id)

    def disconnect(self, member: Member, now_s: float) -> None:
        self._disconnected.pop(member.member_id, None)
        member.disconnected_s = now_s
        self._disconnected[member.member_id] = member

    def halt(self, member: Member, now_s: float) -> None:
        if member.halted_s is None:
            member.halted_s = now_s
            self._halted[member.member_id] = member

    def go_on(self, member: Member) -> None:
        """The halted process goes on."""
        member.halted_s = None
        self._halted.pop(member.member_id, None)

    def show_life(self, member: Member) -> None:
        """The member's stream is back."""
        member.disconnected_s = None
        self._disconnected.pop(member.member_id, None)
        self.go_on(member)

    def postpone(self, by_s: float) -> None:
        """Give everybody so much more time: see `JobState.postpone`."""
        for member in self._disconnected.values():
            assert member.disconnected_s is not None
            member.disconnected_s += by_s
        self.postpone_drains(by_s)

    def postpone_drains(self, by_s: float) -> None:
        """Give those who are to leave so much more time."""
        for member in self.draining.values():
            assert member.drain.since_s is not None
            member.drain.since_s += by_s

    # --- questions ---

    @property
    def all_settled(self) -> bool:
        return not self._unsettled

    def unsettled(self) -> list[Member]:
        return [self.members[name] for name in sorted(self._unsettled)]

    def of(self, roster: Roster) -> list[Member]:
        """Those of the roster that are still here, by rank."""
        present = (self.members.get(e.member_id) for e in roster.entries)
        return [m for m in present if m is not None and m.is_in(roster)]

    def has_finished(self, member: Member) -> bool:
        return member.member_id in self.finished

    def trainers(self, roster: Roster) -> list[Member]:
        """Members of the roster that are still here and have work left, by rank."""
        return [m for m in self.of(roster) if m.member_id not in self.finished]

    @property
    def num_on_the_way(self) -> int:
        """Members that have not proposed yet."""
        known = len(self.candidates) + len(self.draining)
        return len(self.members) - known - sum(name in self.members for name in self.finished)

    def has_finished_in(self, roster: Roster) -> bool:
        """True if a member of the roster has done its work."""
        return any(name in self.finished for name in roster.ranks) if self.finished else False

    def overdue(self, now_s: float) -> Iterator[tuple[Member, str, str]]:
        """Those who were silent or halted for too long, the reason that makes them lost, and that
        in short."""
        for member in list(self._halted.values()):
            if now_s >= self._halt_ends_s(member):
                halted = f"{self.limits.halt_s:g} s"
                yield member, f"a signal halted it (SIGSTOP) for {halted}", f"SIGSTOP for {halted}"
        for member in list(self._disconnected.values()):
            if now_s >= self._reconnect_ends_s(member):
                yield member, "its stream broke and did not come back", "connection lost"

    def deadlines(self) -> Iterator[float]:
        """When `overdue` has something to say at the earliest."""
        for member in self._first(self._disconnected):
            yield self._reconnect_ends_s(member)
        for member in self._first(self._halted):
            yield self._halt_ends_s(member)

    @staticmethod
    def _first(table: dict[str, Member]) -> Iterator[Member]:
        if table:
            yield next(iter(table.values()))

    def _reconnect_ends_s(self, member: Member) -> float:
        assert member.disconnected_s is not None
        return member.disconnected_s + self.limits.reconnect_s

    def _halt_ends_s(self, member: Member) -> float:
        assert member.halted_s is not None
        return member.halted_s + self.limits.halt_s
