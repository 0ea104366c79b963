"""Members that are to leave: by a planned change where one can spare the others, else at once."""

from shoal_server.core.generations.roster import Roster
from shoal_server.core.job.deadlines import passed
from shoal_server.core.job.job_state import JobState
from shoal_server.core.job.removal import Removal
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import DrainAsked, DrainNotice
from shoal_server.core.membership.member import Member


class Drains:
    """Who is to leave, and when it is told to go."""

    def __init__(self, state: JobState, removal: Removal) -> None:
        self._state = state
        self._removal = removal

    def ask(self, member: Member, event: DrainAsked, now_s: float) -> None:
        if self._state.table.has_finished(member):
            self._state.tell(member, DrainNotice(reason=event.reason, now=True))
            return
        if member.drain.since_s is None:
            self._state.table.drain(member, event.reason, now_s)
            self._state.log(
                "drain_asked", f"{member.member_id} is to leave: {event.reason}", member
            )
        self._tell(member, event.reason, now=member.drain.let_go, now_s=now_s)

    def let_go(self, now_s: float) -> None:
        """Tell those to leave now whom no planned change can spare the others."""
        for member in list(self._state.table.draining.values()):
            if member.drain.let_go or self._is_worth_waiting(member, now_s):
                continue
            member.drain.let_go = True
            member.waits("nothing: it leaves at its next step boundary", now_s)
            self._tell(member, member.drain.reason, now=True, now_s=now_s)

    def tell_stopping(self, member: Member, reason: str, now_s: float) -> None:
        """Tell a member of a job that an operator has stopped to leave now."""
        self._tell(member, reason, now=True, now_s=now_s)

    def _tell(self, member: Member, reason: str, *, now: bool, now_s: float) -> None:
        unreplaced = now and self._is_unreplaced(member, now_s)
        self._state.tell(member, DrainNotice(reason=reason, now=now, unreplaced=unreplaced))

    def _is_unreplaced(self, member: Member, now_s: float) -> bool:
        """True if no generation follows without this member. Not if others, which did not come to
        an agreed boundary in time, would keep it from taking a further step."""
        running = self._state.running
        if running is None:
            return member.holds_state and len(self._state.table.draining) == len(
                self._state.members
            )
        overdue = passed(member.drain.since_s, self._state.limits.drain_s, now_s)
        return running.synchronous and member.is_in(running) and not overdue

    def _is_worth_waiting(self, member: Member, now_s: float) -> bool:
        """True if a generation without the member may soon follow the one it trains in."""
        # A change that members are agreeing on is carried out first, though all of them are to
        # leave by now: one that left amid it would take the state of the others with it.
        if self._may_hand_over(member) or self._is_changing(member):
            return not passed(member.drain.since_s, self._state.limits.drain_s, now_s)
        roster = self._state.attempt if member.is_in(self._state.attempt) else self._state.running
        if roster is None or not roster.synchronous or not member.is_in(roster):
            return False
        if self._state.end.completing or passed(
            member.drain.since_s, self._state.limits.drain_s, now_s
        ):
            return False
        candidates = self._state.table.candidates
        if len(candidates) >= self._state.least_members and any(
            m.is_in(roster) for m in candidates.values()
        ):
            return True
        # Else its state has to be handed to somebody who is only on the way.
        return any(
            m.drain.since_s is None and not m.is_in(roster) for m in self._state.members.values()
        )

    def _is_changing(self, member: Member) -> bool:
        """True if the synchronous generation of this member is being changed by plan."""
        running, attempt = self._state.running, self._state.attempt
        changes = running is not None and running.synchronous and attempt is not None
        return changes and (member.is_in(running) or member.is_in(attempt))

    def _may_hand_over(self, member: Member) -> bool:
        """True if nobody but members that are to leave holds the job's state, and others are there
        that can take it: with fewer than the minimum no generation forms."""
        others = len(self._state.members) - len(self._state.table.draining)
        return (
            others >= self._state.spec.min_members
            and member.holds_state
            and self._state.lacks_state(self._state.table.candidates.values())
        )

    def leavers(self, chosen: list[Member]) -> list[Member]:
        """Who trains and would not be in a roster of the chosen."""
        if self._state.running is None or not self._state.table.draining:
            return []
        staying = {m.member_id for m in chosen}
        draining = self._state.table.draining.values()
        return [m for m in draining if m.is_in(self._state.running) and m.member_id not in staying]

    def part_leavers(self, old: Roster, roster: Roster, now_s: float) -> None:
        """Let those go who trained in the old generation and are not in the one that runs now."""
        for leaver in [m for m in self._state.members_of(old) if not m.is_in(roster)]:
            if leaver.drain.since_s is not None:
                self._state.tell(leaver, DrainNotice(reason=leaver.drain.reason, now=True))
                reason, job = leaver.drain.reason, self._state.spec.job
                refusal = refusals.drained(job, leaver.member_id, reason)
                # A call of its own may come before the notice: it is to hear the same.
                told = f"drained: {reason}"
                self._removal.remove(leaver, told, now_s, refusal=refusal, cause=told, lost=False)
            elif self._state.table.has_finished(leaver):
                self._state.tell(leaver, self._state.break_notice(old.generation))
            else:
                # It asked a leader before this one, and will ask again: it waits at the boundary.
                self._state.table.settle((leaver,), settled=False)
                self._state.tell(leaver, self._state.break_notice(old.generation))
