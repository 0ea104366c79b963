"""Ends of an attempt, a generation, a membership and the job."""

from shoal_proto.back_off import doubled_s
from shoal_server.core.generations.conflicts import shorten_conflicts
from shoal_server.core.generations.progress import JobProgress, JobResult
from shoal_server.core.generations.roster import Conflict, Generation, GenerationRoster, Verdict
from shoal_server.core.job.job_state import JobEnd, JobState, limit_passed
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import (
    BreakNotice,
    ClosingNotice,
    DrainNotice,
    DrainRequested,
    EventRefused,
    ExpelMember,
    FinishJob,
    OutcomeNotice,
    Refusal,
    RefusalKind,
    RefusedNotice,
    SaveJobRecord,
    WriteGeneration,
)
from shoal_server.core.membership.member import MemberState
from shoal_server.core.membership.phases import OVER, Phase, Trigger

FIRST_BACK_OFF_S = 0.05
MAX_BACK_OFF_S = 5.0


class Endings:
    """Aborts attempts and ends running generations; their members then settle."""

    def __init__(self, state: JobState) -> None:
        self._state = state

    def abort(self, reason: str, now_s: float, conflicts: tuple[Conflict, ...] = ()) -> None:
        """End the attempt with one record for all its members.

        Once the boundary may have been agreed, members may have begun to leave the old generation:
        then that generation is over too. Before that, it goes on unchanged.
        """
        agreement = self._state.agreement
        assert agreement is not None
        roster, concerned = agreement.roster, self._state.members_to_notify(agreement.roster)
        brought_up = self._state.stage.phase is Phase.COMMITTED and roster.synchronous
        if brought_up:
            self._state.tries.failed_roster = roster
        old_is_over = self._state.running is None or agreement.may_have_stopped
        self._state.to(Trigger.FAILED, reason, now_s)
        record = self._state.record_of(Verdict.ABORTED, reason, now_s, conflicts)
        self._state.agreement, self._state.tries.failures = None, self._state.tries.failures + 1
        self._state.emit(WriteGeneration(record=record))
        if brought_up and old_is_over and self._state.running is not None:
            # Sent before the outcome: members at the boundary must not take the abort as permission
            # to train.
            old, self._state.running = self._state.running, None
            self._state.tries.changes.record_break(reason, now_s)
            self.notify_broken(old, (), reason, now_s)
        notice = OutcomeNotice(reason=reason, record=record)
        for member in concerned:
            self._state.notify_member(member, notice)
        if brought_up and old_is_over:
            self.notify_broken(roster, (), reason, now_s)
        elif brought_up:
            newcomers = [
                m for m in self._state.members_of(roster) if not m.is_in(self._state.running)
            ]
            # The newcomers had begun to bring the generation up. They may even have trained in it,
            # if a new leader wrongly assumed that the old generation still ran.
            self._state.table.settle(newcomers, settled=False)
        self._state.previous = self._state.running or self._state.previous
        failures = self._state.tries.failures
        back_off_s = doubled_s(FIRST_BACK_OFF_S, MAX_BACK_OFF_S, failures - 1)
        # No back-off after the first failure: survivors of one loss try again at once.
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
            return  # The abort ended it too and notified its members.
        if not self._state.end.stopping:
            self._state.tally.num_breaks += 1
        if running.synchronous:
            self._state.tries.changes.record_break("" if lost else reason, now_s)
        if self._state.stage.phase is not Phase.ABORTED:
            self._state.to(Trigger.BROKEN, reason, now_s)
        self.notify_broken(running, lost, reason, now_s)

    def notify_broken(
        self, roster: GenerationRoster, lost: tuple[str, ...], reason: str, now_s: float
    ) -> None:
        if not roster.synchronous:
            return
        self._state.deadlines.broken_since_s = now_s
        generation = roster.generation
        members = self._state.members_of(roster)
        self._state.table.settle(members, settled=False)
        notice = BreakNotice(reason=reason, generation=generation, lost_member_ids=lost)
        for member in members:
            member.waits(f"its trainer to stop after the break ({reason})", now_s)
            self._state.notify_member(member, notice)

    def end_left_generation(self, member: MemberState, left: Generation, now_s: float) -> None:
        """End the attempt or generation that the member has left: an earlier leader notified the
        member of a break, but did not make the break durable."""
        reason = f"{member.member_id} has left generation {left}"
        running, attempt = self._state.running, self._state.attempt
        # A new leader may attempt a generation older than the newest, which was aborted.
        if (
            attempt is not None
            and left >= attempt.generation
            and self._state.agreement_of(member, attempt.generation, Phase.COMMITTED) is not None
        ):
            self.abort(reason, now_s)
        if running is not None and member.is_in(running) and left >= running.generation:
            self.break_off((), reason, now_s)


class Removal:
    """Removes members, and ends the attempt or generation that a removed member was part of."""

    def __init__(self, state: JobState, endings: Endings) -> None:
        self._state = state
        self._endings = endings

    def remove(
        self,
        member: MemberState,
        reason: str,
        now_s: float,
        *,
        completed: bool = False,
        refusal: Refusal | None = None,
        cause: str = "",
        lost: bool = True,
    ) -> None:
        """Remove a member, and end the attempt or generation that it was part of, unless it has
        done its work. If the job is completing, no generation follows: the other members are
        notified of the break, and the job is over once the last member is removed.

        `completed`: True if the member left with its work done. `refusal`: the answer to later
        calls of its process. `cause`: the reason in a word or two. `lost`: True if the member did
        not leave in order.
        """
        self._state.tries.changes.record_departure(member.member_id, cause or reason, lost=lost)
        has_work = not self._state.table.has_finished(member)
        trained = member.is_in(self._state.running) and has_work
        attempted = member.is_in(self._state.attempt) and has_work
        reason = f"{member.member_id}: {reason}"
        self._state.table.remove(member, refusal)
        self._state.emit(
            ExpelMember(member_id=member.member_id, incarnation=member.incarnation, reason=reason)
        )
        self._state.log("member_completed" if completed else "member_removed", reason, member)
        if not self._state.table.candidates:
            self._state.deadlines.first_proposal_s = None
        if not self._state.members and self._state.table.finished:
            # No member is left, so the next ones need the whole minimum again.
            self._state.table.finished.clear()
            self._state.emit(SaveJobRecord())
        if self._state.end.completing:
            roster = self._state.running or self._state.attempt
            if (trained or attempted) and not completed and roster is not None:
                self._endings.notify_broken(roster, (member.member_id,), reason, now_s)
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

    def refuse(self, member: MemberState, refusal: Refusal, now_s: float) -> None:
        self._state.notify_member(member, RefusedNotice(reason=refusal.what, refusal=refusal))
        text = f"{member.member_id} was refused: {refusal.what}"
        self._state.log("member_refused", text, member)
        # A member that was too late may join again as a new process. So the old process is fenced
        # like that of a lost member, without this refusal.
        lasting = refusal if refusal.kind != RefusalKind.TIMEOUT else None
        reason = f"refused: {refusal.what}"
        self.remove(member, reason, now_s, refusal=lasting, cause=refusal.what)

    def abort_conflicting(self, conflicts: tuple[Conflict, ...], now_s: float) -> None:
        """Abort, and refuse the roster's members that are `suspects_of` it, even if others differ
        as well."""
        roster, conflicts = self._state.attempt, shorten_conflicts(conflicts)
        assert roster is not None
        at_fault = self._state.suspects_of(self._state.members_of(roster))
        reason = "members differ in " + "; ".join(str(c) for c in conflicts)
        self._endings.abort(reason, now_s, conflicts)
        for member in at_fault:
            self.refuse(member, refusals.conflict(self._state.spec.job, conflicts), now_s)

    def lose_state(self, seen: str, now_s: float) -> None:
        """End the job, whose state is gone: it must not start over unless an operator asks."""
        self._state.end.lost = refusals.state_lost(self._state.spec.job, self._state.progress, seen)
        self._endings.abort(self._state.end.lost.what, now_s)
        self._state.to(Trigger.STATE_LOST, self._state.end.lost.what, now_s)
        self._state.end.completing = True
        self._state.deadlines.stop()
        self._state.emit(FinishJob(reason=self._state.stage.reason))
        for member in list(self._state.members.values()):
            self.refuse(member, self._state.end.lost, now_s)

    def finish(self, member: MemberState, why: str, now_s: float) -> None:
        """Stop waiting for a member that has done its work; after the last one the job completes.
        Ignored for a member that was not in the newest generation, if there was one.

        The other members train on, and form further generations without it if they have to.
        """
        table, agreement = self._state.table, self._state.agreement
        trained = self._state.running or self._state.previous
        if trained is None:
            is_last = all(m is member for m in table.candidates.values())
        elif not member.is_in(trained):
            return
        elif table.has_finished(member):
            # A repeated report: an earlier leader may have died before it completed the job, which
            # is due once all members have finished. A lost member has not finished.
            is_last = table.finished.issuperset(trained.ranks)
        else:
            table.finish(member)
            is_last = not table.trainers(trained)
            self._state.emit(SaveJobRecord())
            reason = f"{member.member_id} has done its work" + (f": {why}" if why else "")
            self._state.log("member_finished", reason, member)
            member.waits("nothing: its work is done", now_s)
            if agreement is not None and member.member_id in agreement.unready:
                self._endings.abort(reason, now_s)
            elif agreement is not None:
                agreement.forget(member.member_id)
        if is_last and not self._state.end.completing:
            self.complete(member, why, now_s)

    def complete(self, leaver: MemberState, why: str, now_s: float) -> None:
        """Close the job to new members, and refuse those that have not trained. Its trainers
        finish; an attempt at a planned change, or one in PREPARE, is aborted."""
        self._state.end.completing = True
        reason = f"{leaver.member_id} completed its work" + (f": {why}" if why else "")
        self._state.log("job_completing", reason)
        if self._state.agreement is not None and (
            self._state.running or self._state.stage.phase is Phase.PREPARE
        ):
            self._state.agreement.stop_at = None  # Members with steps left go on.
            self._endings.abort(reason, now_s)
            if self._state.running is not None:
                self._state.to(Trigger.INTACT, reason, now_s)
        self._state.deadlines.deadline_s, self._state.stage.reason = None, reason
        # Members that have trained finish by themselves, asynchronous ones even between two
        # generations.
        trained = self._state.running or self._state.previous
        newcomers = [m for m in self._state.members.values() if not m.is_in(trained)]
        for member in [m for m in newcomers if m is not leaver]:
            self.refuse(member, refusals.finished(self._state.spec.job, reason), now_s)
        for member in self._state.members.values():
            self._state.notify_member(member, ClosingNotice(reason=reason))

    def end(self, trigger: Trigger, reason: str, now_s: float) -> None:
        """End the job: it has no members any more."""
        self._state.to(trigger, reason, now_s)
        self._state.running = self._state.agreement = None
        self._state.deadlines.stop()
        self._state.emit(FinishJob(reason=self._state.stage.reason))


class Drains:
    """Members that are to leave, and the time at which each is notified."""

    def __init__(self, state: JobState, removal: Removal) -> None:
        self._state = state
        self._removal = removal

    def request_drain(self, member: MemberState, event: DrainRequested, now_s: float) -> None:
        if self._state.table.has_finished(member):
            self._state.notify_member(member, DrainNotice(reason=event.reason, now=True))
            return
        if member.drain.since_s is None:
            self._state.table.drain(member, event.reason, now_s)
            self._state.log(
                "drain_requested", f"{member.member_id} is to leave: {event.reason}", member
            )
        self._notify_drain(member, event.reason, now=member.drain.is_released, now_s=now_s)

    def release_overdue(self, now_s: float) -> None:
        """Notify members to leave now if a planned change cannot replace them first."""
        for member in list(self._state.table.draining.values()):
            if member.drain.is_released or self._is_worth_waiting(member, now_s):
                continue
            member.drain.is_released = True
            member.waits("nothing: it leaves at its next step boundary", now_s)
            self._notify_drain(member, member.drain.reason, now=True, now_s=now_s)

    def notify_stopping(self, member: MemberState, reason: str, now_s: float) -> None:
        """Notify a member to leave now, because an operator has stopped the job."""
        self._notify_drain(member, reason, now=True, now_s=now_s)

    def _notify_drain(self, member: MemberState, reason: str, *, now: bool, now_s: float) -> None:
        unreplaced = now and self._is_unreplaced(member, now_s)
        self._state.notify_member(
            member, DrainNotice(reason=reason, now=now, unreplaced=unreplaced)
        )

    def _is_unreplaced(self, member: MemberState, now_s: float) -> bool:
        """True if no further generation follows once the member has left. It is to leave now.
        False once its drain is overdue: the other members did not agree on a boundary in time, and
        might keep it from taking a step."""
        running = self._state.running
        if running is None:
            return member.holds_state and len(self._state.table.draining) == len(
                self._state.members
            )
        overdue = limit_passed(member.drain.since_s, self._state.limits.drain_s, now_s)
        return running.synchronous and member.is_in(running) and not overdue

    def _is_worth_waiting(self, member: MemberState, now_s: float) -> bool:
        """True if a generation without the member may soon follow the member's generation."""
        # A planned change in progress is finished first, even if all its members are to leave by
        # now: a member that left in the middle of it would take the job's state along.
        if self._may_hand_over(member) or self._is_changing(member):
            return not limit_passed(member.drain.since_s, self._state.limits.drain_s, now_s)
        roster = self._state.attempt if member.is_in(self._state.attempt) else self._state.running
        if roster is None or not roster.synchronous or not member.is_in(roster):
            return False
        if self._state.end.completing or limit_passed(
            member.drain.since_s, self._state.limits.drain_s, now_s
        ):
            return False
        candidates = self._state.table.candidates
        if len(candidates) >= self._state.min_roster_size and any(
            m.is_in(roster) for m in candidates.values()
        ):
            return True
        # In all other cases the state has to be handed to a member that is still joining.
        return any(
            m.drain.since_s is None and not m.is_in(roster) for m in self._state.members.values()
        )

    def _is_changing(self, member: MemberState) -> bool:
        """True if a planned change of this member's synchronous generation is in progress."""
        running, attempt = self._state.running, self._state.attempt
        changes = running is not None and running.synchronous and attempt is not None
        return changes and (member.is_in(running) or member.is_in(attempt))

    def _may_hand_over(self, member: MemberState) -> bool:
        """True if only draining members hold the job's state, and enough other members for a
        generation are present to take it."""
        others = len(self._state.members) - len(self._state.table.draining)
        return (
            others >= self._state.spec.min_members
            and member.holds_state
            and self._state.lacks_state(self._state.table.candidates.values())
        )

    def leavers(self, chosen: list[MemberState]) -> list[MemberState]:
        """Draining members that train now and would not be in a roster of the `chosen` members."""
        if self._state.running is None or not self._state.table.draining:
            return []
        staying = {m.member_id for m in chosen}
        draining = self._state.table.draining.values()
        return [m for m in draining if m.is_in(self._state.running) and m.member_id not in staying]

    def part_leavers(self, old: GenerationRoster, roster: GenerationRoster, now_s: float) -> None:
        """Remove draining members of the old generation that are not in the new `roster`. Other
        members that are not in it are notified that the old generation is over."""
        for leaver in [m for m in self._state.members_of(old) if not m.is_in(roster)]:
            if leaver.drain.since_s is not None:
                self._state.notify_member(leaver, DrainNotice(reason=leaver.drain.reason, now=True))
                reason, job = leaver.drain.reason, self._state.spec.job
                refusal = refusals.drained(job, leaver.member_id, reason)
                # The member's own call may arrive before the notice: it gets the same reason.
                why = f"drained: {reason}"
                self._removal.remove(leaver, why, now_s, refusal=refusal, cause=why, lost=False)
            elif self._state.table.has_finished(leaver):
                self._state.notify_member(leaver, self._state.break_notice(old.generation))
            else:
                # The member asked an earlier leader to leave and will ask again; it waits at the
                # boundary.
                self._state.table.settle((leaver,), settled=False)
                self._state.notify_member(leaver, self._state.break_notice(old.generation))


class Lifetime:
    """Stops a job, ends it as failed, or allows joins again."""

    def __init__(self, state: JobState, removal: Removal, drains: Drains) -> None:
        self._state = state
        self._removal = removal
        self._drains = drains

    def stop(self, reason: str, now_s: float) -> None:
        """Make all members leave at their next step boundary; the job is over once they have left.

        May be repeated, by a new leader too. Does nothing to a job that is over.
        """
        if self._state.stage.phase in OVER:
            return
        if self._state.end.stopping != reason:
            self._state.end.stopping = reason
            self._state.log("job_stopping", reason)
            self._state.emit(SaveJobRecord())
        for member in list(self._state.members.values()):
            process = {"member_id": member.member_id, "incarnation": member.incarnation}
            self._drains.request_drain(member, DrainRequested(**process, reason=reason), now_s)
        if not self._state.members:
            self._removal.end(Trigger.STOPPED, reason, now_s)

    def abandon(self, reason: str, now_s: float) -> None:
        """End the job as failed: all its members are gone for good. Does nothing if the job has
        members or is over."""
        if self._state.members or self._state.stage.phase not in (Phase.COLLECT, Phase.ABORTED):
            return
        self._removal.end(Trigger.ABANDONED, reason, now_s)

    def keep_result(self, result: JobResult) -> None:
        """Keep the result of a job that is over; ignored if it was joined again meanwhile."""
        if self._state.stage.phase in OVER:
            self._state.tally.result = result
            self._state.emit(SaveJobRecord())

    def retry(self, reason: str, now_s: float, *, from_scratch: bool) -> None:
        """Allow joins again. Raises EventRefused if the job has members or is finished, or if its
        records were removed and `from_scratch` is false.

        Succeeds if the job is not over but has no members: it can be joined already, and the call
        may be a repetition, perhaps with another `from_scratch`.
        """
        phase = self._state.stage.phase
        if phase is Phase.FINISHED:
            raise EventRefused(refusals.finished(self._state.spec.job, self._state.stage.reason))
        if phase not in OVER and (self._state.members or self._state.end.completing):
            raise EventRefused(refusals.not_over(self._state.spec.job, self._state.stage.reason))
        tally = self._state.tally
        if tally.is_cleared and not from_scratch:
            raise EventRefused(refusals.cleared(self._state.spec.job))
        if from_scratch:
            self._state.progress = JobProgress(tally=tally)
        if phase in OVER:
            tally.result, tally.is_cleared = None, False
            self._state.end = JobEnd()
            self._state.to(Trigger.RETRIED, reason, now_s)
        self._state.emit(SaveJobRecord())
