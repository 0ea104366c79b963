"""Table of a job's members, with indexes, so that most events need not scan all members."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from shoal_server.core.generations.roster import GenerationRoster, Proposal, Step
from shoal_server.core.limits import Limits
from shoal_server.core.membership.events import Refusal
from shoal_server.core.membership.member import MemberState
from shoal_server.core.membership.pauses import Pauses

MAX_EXPELLED = 10_000


@dataclass(kw_only=True)
class MembershipTable:
    """Members by id. Only the table's methods change indexed state."""

    limits: Limits
    members: dict[str, MemberState] = field(default_factory=dict)
    candidates: dict[str, MemberState] = field(default_factory=dict)
    """Members that have proposed and are to stay, by order of proposal."""
    draining: dict[str, MemberState] = field(default_factory=dict)
    """Members that are to leave, by order of request."""
    expelled: dict[str, Refusal | None] = field(default_factory=dict)
    """Newest incarnations that must not return, with the refusal for their later calls. None: the
    refusal of any process that is not a member."""
    unproposed: set[str] = field(default_factory=set)
    """Members of an earlier leader that have yet to propose."""
    pauses: Pauses = field(default_factory=Pauses)
    in_call: dict[str, int] = field(default_factory=dict)
    """Members in a shared call, with the number that suffices to repeat it."""
    finished: set[str] = field(default_factory=set)
    """Members, present or gone, that have done their work."""
    num_announced_waiting: int = 0
    """Number of waiting members, as last sent to members under torchrun."""
    _unsettled: set[str] = field(default_factory=set)
    # Both tables are by member id, the earliest time first.
    _disconnected: dict[str, MemberState] = field(default_factory=dict)
    _halted: dict[str, MemberState] = field(default_factory=dict)

    def admit(self, member: MemberState) -> None:
        """Add a member; no other member may have its name."""
        self.members[member.member_id] = member
        self.finished.discard(member.member_id)
        if not member.settled:
            self._unsettled.add(member.member_id)

    def remove(self, member: MemberState, refusal: Refusal | None = None) -> None:
        """Remove the member; its incarnation must not return."""
        name = member.member_id
        for table in (self.members, self.candidates, self.draining, self._disconnected):
            table.pop(name, None)
        self._halted.pop(name, None)
        self._unsettled.discard(name)
        self.unproposed.discard(name)
        self.in_call.pop(name, None)
        self.pauses.forget_process(member)
        self.expelled[member.incarnation] = refusal
        if len(self.expelled) > MAX_EXPELLED:
            del self.expelled[next(iter(self.expelled))]

    def propose(self, member: MemberState, proposal: Proposal) -> None:
        member.proposal = proposal
        self.unproposed.discard(member.member_id)
        if member.drain.since_s is None and member.member_id not in self.finished:
            self.candidates[member.member_id] = member

    def drain(self, member: MemberState, reason: str, now_s: float) -> None:
        """Note that the member is to leave: it is in no further roster, except to hand over the
        state."""
        member.drain.since_s, member.drain.reason = now_s, reason
        self.draining[member.member_id] = member
        self.candidates.pop(member.member_id, None)

    def finish(self, member: MemberState) -> None:
        """Note that the member has done its work: it is in no further roster."""
        self.settle((member,), settled=True)
        self.finished.add(member.member_id)
        for table in (self.candidates, self.draining):
            table.pop(member.member_id, None)

    def hold_state(self, members: Iterable[MemberState], step: Step) -> None:
        """Note that the members hold the state after this step."""
        for member in members:
            if member.proposal is not None:
                member.proposal = replace(member.proposal, step=step, has_state=True)

    def settle(self, members: Iterable[MemberState], *, settled: bool) -> None:
        """Note that the members have stopped, or train again. Members without work left stay
        settled."""
        for member in members:
            if member.member_id in self.finished:
                continue
            member.settled = settled
            self.in_call.pop(member.member_id, None)
            if settled:
                self._unsettled.discard(member.member_id)
            else:
                self._unsettled.add(member.member_id)

    def disconnect(self, member: MemberState, now_s: float) -> None:
        self._disconnected.pop(member.member_id, None)
        last = next(reversed(self._disconnected.values()), None)
        member.disconnected_s = now_s
        self._disconnected[member.member_id] = member
        # A new leader and `postpone` set future times.
        if last is not None and _disconnected_s(last) > now_s:
            members = sorted(self._disconnected.values(), key=_disconnected_s)
            self._disconnected = {each.member_id: each for each in members}

    def halt(self, member: MemberState, now_s: float) -> None:
        if member.halted_s is None:
            member.halted_s = now_s
            self._halted[member.member_id] = member

    def note_continued(self, member: MemberState) -> None:
        member.halted_s = None
        self._halted.pop(member.member_id, None)

    def note_stream_back(self, member: MemberState) -> None:
        member.disconnected_s = None
        self._disconnected.pop(member.member_id, None)
        self.note_continued(member)

    def postpone(self, by_s: float) -> None:
        """Extend the limits of disconnected and draining members, for `JobState.postpone`."""
        for member in self._disconnected.values():
            member.disconnected_s = _disconnected_s(member) + by_s
        self.postpone_drains(by_s)

    def postpone_drains(self, by_s: float) -> None:
        """Extend the limits of draining members."""
        for member in self.draining.values():
            assert member.drain.since_s is not None
            member.drain.since_s += by_s

    # --- questions ---

    @property
    def all_settled(self) -> bool:
        return not self._unsettled

    def unsettled(self) -> list[MemberState]:
        return [self.members[name] for name in sorted(self._unsettled)]

    def members_of(self, roster: GenerationRoster) -> list[MemberState]:
        """Present members of the roster, by rank."""
        present = (self.members.get(e.member_id) for e in roster.entries)
        return [m for m in present if m is not None and m.is_in(roster)]

    def has_finished(self, member: MemberState) -> bool:
        return member.member_id in self.finished

    def trainers(self, roster: GenerationRoster) -> list[MemberState]:
        """Present members of the roster with work left, by rank."""
        return [m for m in self.members_of(roster) if m.member_id not in self.finished]

    @property
    def num_not_proposed(self) -> int:
        """Number of members that have not proposed, and are not to leave."""
        known = len(self.candidates) + len(self.draining)
        return len(self.members) - known - sum(name in self.members for name in self.finished)

    def has_finished_in(self, roster: GenerationRoster) -> bool:
        """True if a member of the roster has done its work."""
        return any(name in self.finished for name in roster.ranks) if self.finished else False

    def overdue(
        self, now_s: float, *, suspects: GenerationRoster | None
    ) -> Iterator[tuple[MemberState, str, str]]:
        """Yield members that were disconnected or halted for too long: (member, reason, cause in a
        word or two). `suspects`: the roster in which a collective has failed, if one has."""
        for member in list(self._halted.values()):
            if now_s >= self._halt_ends_s(member):
                halted = f"{self.limits.halt_s:g} s"
                yield member, f"a signal halted it (SIGSTOP) for {halted}", f"SIGSTOP for {halted}"
        for member in list(self._disconnected.values()):
            if now_s >= self._reconnect_ends_s(member, suspects):
                also = ", and a collective failed" if member.is_in(suspects) else ""
                yield member, f"its stream broke and did not come back{also}", "connection lost"

    def deadlines(self, *, suspects: GenerationRoster | None = None) -> Iterator[float]:
        """Yield the earliest times at which `overdue` may yield a member."""
        # The limit of a suspect is shorter than that of one that was disconnected before.
        first = self._first(self._disconnected)
        for member in first if suspects is None else self._disconnected.values():
            yield self._reconnect_ends_s(member, suspects)
        for member in self._first(self._halted):
            yield self._halt_ends_s(member)

    @staticmethod
    def _first(table: dict[str, MemberState]) -> Iterator[MemberState]:
        if table:
            yield next(iter(table.values()))

    def _reconnect_ends_s(self, member: MemberState, suspects: GenerationRoster | None) -> float:
        is_suspect = member.is_in(suspects)
        limit_s = self.limits.halt_s if is_suspect else self.limits.reconnect_s
        return _disconnected_s(member) + limit_s

    def _halt_ends_s(self, member: MemberState) -> float:
        assert member.halted_s is not None
        return member.halted_s + self.limits.halt_s


def _disconnected_s(member: MemberState) -> float:
    assert member.disconnected_s is not None
    return member.disconnected_s
