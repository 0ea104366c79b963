"""How members go, and with the last of them the job."""

from shoal_server.core.generations.conflicts import in_short
from shoal_server.core.generations.roster import Conflict
from shoal_server.core.job.endings import Endings
from shoal_server.core.job.job_state import JobState
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import (
    ClosingNotice,
    Expel,
    Finish,
    Refusal,
    RefusalKind,
    RefusedNotice,
    Save,
)
from shoal_server.core.membership.member import Member
from shoal_server.core.membership.phases import Phase, Trigger


class Removal:
    """Takes members out, and with each whatever it was needed for."""

    def __init__(self, state: JobState, endings: Endings) -> None:
        self._state = state
        self._endings = endings

    def remove(
        self,
        member: Member,
        reason: str,
        now_s: float,
        *,
        completed: bool = False,
        refusal: Refusal | None = None,
        cause: str = "",
        lost: bool = True,
    ) -> None:
        """Take a member out, and with it whatever it was needed for.

        `cause`: the reason in a word or two; `lost`: whether it went without leave.
        """
        self._state.tries.changes.gone(member.member_id, cause or reason, lost=lost)
        has_work = not self._state.table.has_finished(member)
        trained = member.is_in(self._state.running) and has_work
        attempted = member.is_in(self._state.attempt) and has_work
        reason = f"{member.member_id}: {reason}"
        self._state.table.remove(member, refusal)
        self._state.do(
            Expel(member_id=member.member_id, incarnation=member.incarnation, reason=reason)
        )
        self._state.log("member_completed" if completed else "member_removed", reason, member)
        if not self._state.table.candidates:
            self._state.deadlines.first_proposal_s = None
        if not self._state.members and self._state.table.finished:
            # Whoever comes now begins with nobody: it is the whole minimum that it needs.
            self._state.table.finished.clear()
            self._state.do(Save())
        if self._state.end.completing:
            roster = self._state.running or self._state.attempt
            if (trained or attempted) and not completed and roster is not None:
                self._endings.tell_broken(roster, (member.member_id,), reason, now_s)
            if self._state.agreement is not None:
                self._state.agreement.forget(member.member_id)
            if not self._state.members and self._state.end.lost is None:
                self.end(Trigger.COMPLETED, self._state.stage.reason, now_s)
            return
        if attempted:
            self._endings.abort(reason, now_s)
        if trained and self._state.running is not None:
            self._endings.break_off((member.member_id,), reason, now_s)
        if self._state.end.stopping and not self._state.members:
            self.end(Trigger.STOPPED, self._state.end.stopping, now_s)

    def refuse(self, member: Member, refusal: Refusal, now_s: float) -> None:
        self._state.tell(member, RefusedNotice(reason=refusal.what, refusal=refusal))
        told = f"{member.member_id} was refused: {refusal.what}"
        self._state.log("member_refused", told, member)
        # Who was too late may join again, and so is fenced like any that was lost.
        lasting = refusal if refusal.kind != RefusalKind.TIMEOUT else None
        reason = f"refused: {refusal.what}"
        self.remove(member, reason, now_s, refusal=lasting, cause=refusal.what)

    def abort_conflicting(self, conflicts: tuple[Conflict, ...], now_s: float) -> None:
        """Nobody in conflict trains; members that train, or keep the job, are not to blame."""
        roster, conflicts = self._state.attempt, in_short(conflicts)
        assert roster is not None
        at_fault = self._state.at_fault(self._state.members_of(roster))
        reason = "members differ in " + "; ".join(str(c) for c in conflicts)
        self._endings.abort(reason, now_s, conflicts)
        for member in at_fault:
            self.refuse(member, refusals.conflict(self._state.spec.job, conflicts), now_s)

    def lose_state(self, seen: str, now_s: float) -> None:
        """End the job: what it had come to is gone, and it must not begin anew unasked."""
        self._state.end.lost = refusals.state_lost(self._state.spec.job, self._state.progress, seen)
        self._endings.abort(self._state.end.lost.what, now_s)
        self._state.to(Trigger.STATE_LOST, self._state.end.lost.what, now_s)
        self._state.end.completing = True
        self._state.deadlines.stop()
        self._state.do(Finish(reason=self._state.stage.reason))
        for member in list(self._state.members.values()):
            self.refuse(member, self._state.end.lost, now_s)

    def finish(self, member: Member, why: str, now_s: float) -> None:
        """Wait for the member no more: it has done its work. With the last one the job completes.

        Others train on, and form further generations without it if they have to.
        """
        table, agreement = self._state.table, self._state.agreement
        trained = self._state.running or self._state.previous
        if trained is None:
            is_last = all(m is member for m in table.candidates.values())
        elif not member.is_in(trained):
            return
        elif table.has_finished(member):
            # It said so before. If all did, an earlier leader may not have come to complete the
            # job; a member that was lost since has not.
            is_last = table.finished.issuperset(trained.ranks)
        else:
            table.finish(member)
            is_last = not table.trainers(trained)
            self._state.do(Save())
            reason = f"{member.member_id} has done its work" + (f": {why}" if why else "")
            self._state.log("member_finished", reason, member)
            member.waits("nothing: its work is done", now_s)
            if agreement is not None and member.member_id in agreement.unready:
                self._endings.abort(reason, now_s)
            elif agreement is not None:
                agreement.forget(member.member_id)
        if is_last and not self._state.end.completing:
            self.complete(member, why, now_s)

    def complete(self, leaver: Member, why: str, now_s: float) -> None:
        """Nobody else needs to join. Who trains finishes; an attempt to change is called off."""
        self._state.end.completing = True
        reason = f"{leaver.member_id} completed its work" + (f": {why}" if why else "")
        self._state.log("job_completing", reason)
        if self._state.agreement is not None and (
            self._state.running or self._state.stage.phase is Phase.PREPARE
        ):
            self._state.agreement.stop_at = None  # who has steps left goes on with them
            self._endings.abort(reason, now_s)
            if self._state.running is not None:
                self._state.to(Trigger.INTACT, reason, now_s)
        self._state.deadlines.deadline_s, self._state.stage.reason = None, reason
        # Who trained before finishes by itself, in a generation or (asynchronous) between two.
        trained = self._state.running or self._state.previous
        newcomers = [m for m in self._state.members.values() if not m.is_in(trained)]
        for member in [m for m in newcomers if m is not leaver]:
            self.refuse(member, refusals.finished(self._state.spec.job, reason), now_s)
        for member in self._state.members.values():
            self._state.tell(member, ClosingNotice(reason=reason))

    def end(self, trigger: Trigger, reason: str, now_s: float) -> None:
        """Nobody is a member any more: the job is over."""
        self._state.to(trigger, reason, now_s)
        self._state.running = self._state.agreement = None
        self._state.deadlines.stop()
        self._state.do(Finish(reason=self._state.stage.reason))
