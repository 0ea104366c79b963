"""How an attempt or a running generation ends: one record or one word for all who are in it."""

from shoal_proto.back_off import doubled_s
from shoal_server.core.generations.roster import Conflict, Generation, Roster, Verdict
from shoal_server.core.job.job_state import JobState
from shoal_server.core.membership.events import BreakNotice, OutcomeNotice, Write
from shoal_server.core.membership.member import Member
from shoal_server.core.membership.phases import Phase, Trigger

FIRST_BACK_OFF_S = 0.05
MAX_BACK_OFF_S = 5.0


class Endings:
    """Aborts attempts and breaks generations off; who is in them settles."""

    def __init__(self, state: JobState) -> None:
        self._state = state

    def abort(self, reason: str, now_s: float, conflicts: tuple[Conflict, ...] = ()) -> None:
        """End the attempt with one record for all.

        Once the boundary may be agreed, members may have begun to leave the old generation: then
        that is over too. Before, it goes on as if nothing had been.
        """
        agreement = self._state.agreement
        assert agreement is not None
        roster, concerned = agreement.roster, self._state.concerned(agreement.roster)
        brought_up = self._state.stage.phase is Phase.COMMITTED and roster.synchronous
        if brought_up:
            self._state.tries.failed_roster = roster
        old_is_over = self._state.running is None or agreement.may_have_stopped
        self._state.to(Trigger.FAILED, reason, now_s)
        record = self._state.record_of(Verdict.ABORTED, reason, now_s, conflicts)
        self._state.agreement, self._state.tries.failures = None, self._state.tries.failures + 1
        self._state.do(Write(record=record))
        if brought_up and old_is_over and self._state.running is not None:
            # First of all: who waits at the boundary must not take the abort for leave to train on.
            old, self._state.running = self._state.running, None
            self._state.tries.changes.broke(reason, now_s)
            self.tell_broken(old, (), reason, now_s)
        notice = OutcomeNotice(reason=reason, record=record)
        for member in concerned:
            self._state.tell(member, notice)
        if brought_up and old_is_over:
            self.tell_broken(roster, (), reason, now_s)
        elif brought_up:
            newcomers = [
                m for m in self._state.members_of(roster) if not m.is_in(self._state.running)
            ]
            # They had begun to bring it up. Or, where a new leader took the old generation for the
            # one that runs, they have trained in it since.
            self._state.table.settle(newcomers, settled=False)
        self._state.previous = self._state.running or self._state.previous
        failures = self._state.tries.failures
        back_off_s = doubled_s(FIRST_BACK_OFF_S, MAX_BACK_OFF_S, failures - 1)
        # One loss is news, not a failure to agree: the survivors need not wait to try again.
        again_s = now_s + (back_off_s if failures > 1 else 0.0)
        self._state.deadlines.deadline_s = None if self._state.end.completing else again_s

    def break_off(self, lost: tuple[str, ...], reason: str, now_s: float) -> None:
        """End the running generation now. Its survivors settle, then the next one forms."""
        if self._state.agreement is not None:
            self.abort(reason, now_s)
        running, self._state.running, self._state.deadlines.suspect_since_s = (
            self._state.running,
            None,
            None,
        )
        if running is None:
            return  # the abort took it along and told its members
        if not self._state.end.stopping:
            self._state.tally.num_breaks += 1
        if running.synchronous:
            self._state.tries.changes.broke("" if lost else reason, now_s)
        if self._state.stage.phase is not Phase.ABORTED:
            self._state.to(Trigger.BROKEN, reason, now_s)
        self.tell_broken(running, lost, reason, now_s)

    def tell_broken(self, roster: Roster, lost: tuple[str, ...], reason: str, now_s: float) -> None:
        if not roster.synchronous:
            return
        self._state.deadlines.broken_since_s = now_s
        generation = roster.generation
        members = self._state.members_of(roster)
        self._state.table.settle(members, settled=False)
        notice = BreakNotice(reason=reason, generation=generation, lost_member_ids=lost)
        for member in members:
            member.waits(f"its trainer to stop after the break ({reason})", now_s)
            self._state.tell(member, notice)

    def believe_left(self, member: Member, left: Generation, now_s: float) -> None:
        """It was told of a break by a leader whose word is lost: what it left does not run."""
        reason = f"{member.member_id} has left generation {left}"
        running, attempt = self._state.running, self._state.attempt
        # A leader that took over may attempt an older one than the newest, which was aborted.
        if (
            attempt is not None
            and left >= attempt.generation
            and self._state.agreement_of(member, attempt.generation, Phase.COMMITTED) is not None
        ):
            self.abort(reason, now_s)
        if running is not None and member.is_in(running) and left >= running.generation:
            self.break_off((), reason, now_s)
