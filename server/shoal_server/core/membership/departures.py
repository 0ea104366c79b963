"""How members go, wanted or not: drains, losses, breaks, aborts, and the end of the job."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from shoal_server.core.generations.agreement import Agreement
from shoal_server.core.generations.roster import (
    NO_GENERATION,
    Conflict,
    Generation,
    Roster,
    Verdict,
)
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import (
    BreakNotice,
    Broke,
    DrainAsked,
    DrainNotice,
    Expel,
    Finish,
    OutcomeNotice,
    Paused,
    Refusal,
    RefusalKind,
    Refused,
    RefusedNotice,
    Resumed,
    Settled,
    Write,
)
from shoal_server.core.membership.job_state import JobState
from shoal_server.core.membership.member import Member
from shoal_server.core.membership.pauses import told
from shoal_server.core.membership.phases import Phase, Trigger
from shoal_server.core.membership.setbacks import MAX_TRIES

FIRST_BACK_OFF_S = 0.05
MAX_BACK_OFF_S = 5.0
MAX_NAMES = 10


@dataclass(kw_only=True)
class Departures(JobState):
    """What of a job's state machine takes members or generations away."""

    def _remove(
        self,
        member: Member,
        reason: str,
        now_s: float,
        *,
        completed: bool = False,
        refusal: Refusal | None = None,
    ) -> None:
        """Take a member out, and with it whatever it was needed for."""
        trained, attempted = member.is_in(self.running), member.is_in(self.attempt)
        reason = f"{member.member_id}: {reason}"
        self.attendance.remove(member, refusal)
        self._do(Expel(member_id=member.member_id, incarnation=member.incarnation, reason=reason))
        self._log("member_completed" if completed else "member_removed", reason, member)
        if not self.attendance.candidates:
            self.first_proposal_s = None
        if self.completing:
            roster = self.running or self.attempt
            if (trained or attempted) and not completed and roster is not None:
                self._tell_broken(roster, (member.member_id,), reason, now_s)
            if self.agreement is not None:
                self.agreement.forget(member.member_id)
            if not self.members and self.lost is None:
                self._finish(now_s)
            return
        if attempted:
            self._abort(reason, now_s)
        if trained and self.running is not None:
            self._break((member.member_id,), reason, now_s)

    def _refuse_if_over(self) -> None:
        """Raise for a job that takes nobody in any more."""
        if self.lost is not None:
            raise Refused(self.lost)
        if self.phase is Phase.FINISHED or self.completing:
            raise Refused(refusals.finished(self.spec.job, self.reason))

    def _refuse(self, member: Member, refusal: Refusal, now_s: float) -> None:
        self._tell(member, RefusedNotice(reason=refusal.what, refusal=refusal))
        # Who was too late may join again, and so is fenced like any that was lost.
        lasting = refusal if refusal.kind != RefusalKind.TIMEOUT else None
        self._remove(member, f"refused: {refusal.what}", now_s, refusal=lasting)

    # --- who is to leave ---

    def _drain_asked(self, member: Member, event: DrainAsked, now_s: float) -> None:
        if member.draining_s is None:
            self.attendance.drain(member, event.reason, now_s)
            self._log("drain_asked", f"{member.member_id} is to leave: {event.reason}", member)
        self._tell(member, DrainNotice(reason=event.reason, now=member.let_go))

    def _let_go(self, now_s: float) -> None:
        """Tell those to leave now whom no planned change can spare the others."""
        for member in list(self.attendance.draining.values()):
            if member.let_go or self._is_worth_waiting(member, now_s):
                continue
            member.let_go = True
            member.waits("nothing: it leaves at its next step boundary", now_s)
            self._tell(member, DrainNotice(reason=member.drain_reason, now=True))

    def _is_worth_waiting(self, member: Member, now_s: float) -> bool:
        """Whether a generation without the member may soon follow the one it trains in."""
        if self._may_hand_over(member):
            return not passed(member.draining_s, self.limits.drain_s, now_s)
        roster = self.attempt if member.is_in(self.attempt) else self.running
        if roster is None or not roster.synchronous or not member.is_in(roster):
            return False
        if self.completing or passed(member.draining_s, self.limits.drain_s, now_s):
            return False
        candidates = self.attendance.candidates
        if len(candidates) >= self.spec.min_members and any(
            m.is_in(roster) for m in candidates.values()
        ):
            return True
        # Else its state has to be handed to somebody who is only on the way.
        return any(m.draining_s is None and not m.is_in(roster) for m in self.members.values())

    def _may_hand_over(self, member: Member) -> bool:
        """Whether nobody but who is to leave holds the job's state, and somebody can take it."""
        others = len(self.members) > len(self.attendance.draining)
        return (
            others and member.holds_state and self._lacks_state(self.attendance.candidates.values())
        )

    def _lacks_state(self, members: Iterable[Member]) -> bool:
        """Whether a generation of these could not go on from where the job had come to."""
        if self.running is not None or self.completing or not self.progress.has_trained:
            return False
        return not any(m.holds_state or (m.proposal and m.proposal.stateless) for m in members)

    def _leavers(self, chosen: list[Member]) -> list[Member]:
        """Who trains and would not be in a roster of the chosen."""
        if self.running is None or not self.attendance.draining:
            return []
        staying = {m.member_id for m in chosen}
        draining = self.attendance.draining.values()
        return [m for m in draining if m.is_in(self.running) and m.member_id not in staying]

    def _part_leavers(self, old: Roster, roster: Roster, now_s: float) -> None:
        """Let those go who trained in the old generation and are not in the one that runs now."""
        for leaver in [m for m in self.members_of(old) if not m.is_in(roster)]:
            if leaver.draining_s is not None:
                self._tell(leaver, DrainNotice(reason=leaver.drain_reason, now=True))
                self._remove(leaver, f"drained: {leaver.drain_reason}", now_s)
            else:
                # It asked a leader before this one, and will ask again: it waits at the boundary.
                self.attendance.settle((leaver,), settled=False)
                self._tell(leaver, self._break_notice(old.generation))

    # --- who is paused ---

    def _asked(self, member: Member, event: DrainAsked | Paused | Resumed, now_s: float) -> None:
        """What a member, or an operator for it, asks of the others."""
        match event:
            case DrainAsked():
                self._drain_asked(member, event, now_s)
            case Paused():
                self._paused(member, event, now_s)
            case Resumed():
                self._resumed(member, now_s)

    def _paused(self, member: Member, event: Paused, now_s: float) -> None:
        known = self.attendance.pauses.of(member)
        pause = self.attendance.pauses.begin(member, event, now_s)
        if known is None:
            text = f"{told(member, self.rank_of(member), pause)}, {pause.limit_s:g} s at the most"
            self._log("member_paused", text, member)

    def _resumed(self, member: Member, now_s: float) -> None:
        pause = self.attendance.pauses.end(member)
        # What it did meanwhile was announced.
        member.own_code_since_s = None
        if pause is not None:
            text = f"{member.member_id} goes on after {now_s - pause.since_s:.1f} s: {pause.reason}"
            self._log("member_resumed", text, member)

    def _drop_paused(self, now_s: float) -> None:
        """Who is paused for longer than it said is taken for hung."""
        for member, pause in self.attendance.pauses:
            if now_s >= pause.ends_s and self.members.get(member.member_id) is member:
                text = told(member, self.rank_of(member), pause, now_s)
                self._refuse(member, refusals.pause_over(text, pause.limit_s), now_s)

    # --- what goes wrong ---

    def _broke(self, member: Member, event: Broke, now_s: float) -> None:
        """A collective failed. Who is also disconnected is lost; else word of a loss may follow."""
        agreement = self.agreement
        if event.state_lost and self._has_no_way_back(member, event.generation):
            self._lose_state(event.error, now_s)
            return
        if self._bring_up_broke(member, event, now_s):
            return
        if agreement is not None and self._lost_its_old(agreement, member):
            # A new leader could not know that the old generation still had to be trained in.
            self._abort(f"the old generation broke under {member.member_id}", now_s)
            return
        running = self.running
        if running is None or event.generation != running.generation:
            if NO_GENERATION < event.generation <= self.last_generation:
                # Its end was told by a leader that is gone, or while this member was away.
                self._tell(member, self._break_notice(event.generation))
            return
        if not running.synchronous:
            return
        self.reason = f"a collective failed under {member.member_id}: {event.error}"
        if self.suspect_since_s is None:
            self.suspect_since_s = now_s
        trainers = self.members_of(running)
        if away := self._who_is_away([m for m in trainers if m is not member], now_s):
            self.reason = f"{away}; {refusals.AWAY_FIX}"
        self._log("collective_failed", self.reason, member)
        member.reported_broken = running.generation
        for other in self.members_of(running):
            if other.disconnected_s is not None:
                self._remove(other, "its stream broke, and so did a collective", now_s)
        if all(m.reported_broken == running.generation for m in trainers):
            # Every one of them is here and says so: there is nobody's loss to wait for.
            self._break((), f"{self.reason}; all members answer", now_s)

    # --- who cannot bring a generation up ---

    @property
    def _able(self) -> Collection[Member]:
        """The candidates but for those whose next try is put off.

        Who trains is never among them; and who holds state is tried again at once, once.
        """
        candidates, setbacks = self.attendance.candidates, self.setbacks
        if not any(setbacks.waits(name) for name in setbacks):
            return candidates.values()
        return [
            m
            for m in candidates.values()
            if not setbacks.waits(m.member_id)
            or m.is_in(self.running)
            or (m.holds_state and setbacks.is_first(m.member_id))
        ]

    def _bring_up_broke(self, member: Member, event: Broke, now_s: float) -> bool:
        """Whether that was all there is to it: an attempt failed, or a member was left out."""
        own = event.own and self._shares_failure(member, event.generation)
        if self.agreement_of(member, event.generation, Phase.COMMITTED) is not None:
            self._put_off_newcomers(member, now_s, own=own)
            self._abort(f"{member.member_id} could not bring it up: {event.error}", now_s)
            if own:
                self._blame(member, event.generation, event.error, now_s)
            return True
        if own:
            # Another's word came first, which may have been a consequence of this.
            self._blame(member, event.generation, event.error, now_s)
        return self.members.get(member.member_id) is not member

    def _shares_failure(self, member: Member, generation: Generation) -> bool:
        """Whether the member says for the first time what it failed with in the newest bring-up."""
        if member.failed_in >= generation:
            return False
        brought_up = self.attempt if self.phase is Phase.COMMITTED else self.failed_roster
        known = brought_up is not None and brought_up.generation == generation
        return (
            known and brought_up is not None and brought_up.synchronous and member.is_in(brought_up)
        )

    def _put_off_newcomers(self, member: Member, now_s: float, *, own: bool) -> None:
        """Those who train go on without them for now, whose coming they stopped for in vain."""
        roster, running = self.attempt, self.running
        if roster is None or running is None or (own and not member.is_in(running)):
            return
        for newcomer in self.members_of(roster):
            if not newcomer.is_in(running):
                self.setbacks.shared(newcomer.member_id, now_s)
                newcomer.waits("another try: the last one failed under others", now_s)

    def _blame(self, member: Member, generation: Generation, error: str, now_s: float) -> None:
        """It failed by itself: it is tried again later, or left out for good."""
        member.failed_in = generation
        num_tries = self.setbacks.failed(member.member_id, error, now_s)
        reason = (
            f"{member.member_id} could not bring up generation {generation}"
            f" (try {num_tries} of {MAX_TRIES}): {error}"
        )
        self._log("bring_up_failed", reason, member)
        member.waits(f"another try: {reason}", now_s)
        if num_tries >= MAX_TRIES:
            self.num_excluded += 1
            self._refuse(member, self._left_out(member.member_id, error), now_s)

    def _left_out(self, member_id: str, error: str) -> Refusal:
        return refusals.cannot_bring_up(self.spec.job, member_id, MAX_TRIES, error)

    def _has_no_way_back(self, member: Member, generation: Generation) -> bool:
        """Whether an attempt that the member is in is all that there is."""
        agreement = self.agreement_of(member, generation, Phase.COMMITTED)
        intact = self.running is not None and agreement is not None and agreement.stop_at is None
        return agreement is not None and agreement.roster.synchronous and not intact

    def _lost_its_old(self, agreement: Agreement, member: Member) -> bool:
        """Whether a member on its way to a planned generation comes from none that runs."""
        waits = self.phase is Phase.COMMITTED and agreement.has_boundary
        return waits and self.running is None and member.member_id in agreement.unready

    def _break(self, lost: tuple[str, ...], reason: str, now_s: float) -> None:
        """End the running generation now. Its survivors settle, then the next one forms."""
        if self.agreement is not None:
            self._abort(reason, now_s)
        running, self.running, self.suspect_since_s = self.running, None, None
        if running is None:
            return  # the abort took it along and told its members
        if self.phase is not Phase.ABORTED:
            self._to(Trigger.BROKEN, reason, now_s)
        self._tell_broken(running, lost, reason, now_s)

    def _tell_broken(
        self, roster: Roster, lost: tuple[str, ...], reason: str, now_s: float
    ) -> None:
        if not roster.synchronous:
            return
        self.broken_since_s = now_s
        generation = roster.generation
        members = self.members_of(roster)
        self.attendance.settle(members, settled=False)
        notice = BreakNotice(reason=reason, generation=generation, lost_member_ids=lost)
        for member in members:
            member.waits(f"its trainer to stop after the break ({reason})", now_s)
            self._tell(member, notice)

    def _settled(self, member: Member, event: Settled, now_s: float) -> None:
        self._refuse_if_over()
        if event.left < member.entered:
            return  # Late: it has trained since.
        member.entered = event.left
        self._believe_left(member, event.left, now_s)
        committed = self.attempt if self.phase is Phase.COMMITTED else None
        if member.is_in(self.running) or member.is_in(committed):
            return
        if member.proposal is not None:
            step, has_state = event.step, event.has_state
            member.proposal = replace(member.proposal, step=step, has_state=has_state)
            if has_state and not member.proposal.stateless:
                self.progress.heard_of(step)
        self.attendance.settle((member,), settled=True)
        if not self.setbacks.waits(member.member_id):
            member.waits("the other members to settle", now_s)
        if self.attendance.all_settled:
            self.broken_since_s = None

    def _believe_left(self, member: Member, left: Generation, now_s: float) -> None:
        """It was told of a break by a leader whose word is lost: what it left does not run."""
        reason = f"{member.member_id} has left generation {left}"
        running, newest = self.running, self.last_generation
        if left >= newest and self.agreement_of(member, newest, Phase.COMMITTED) is not None:
            self._abort(reason, now_s)
        if running is not None and member.is_in(running) and left >= running.generation:
            self._break((), reason, now_s)

    def _abort_conflicting(self, conflicts: tuple[Conflict, ...], now_s: float) -> None:
        """Nobody in conflict trains; members of a generation that still runs are not to blame."""
        roster = self.attempt
        assert roster is not None
        at_fault = [m for m in self.members_of(roster) if not m.is_in(self.running)]
        reason = "members differ in " + "; ".join(str(c) for c in conflicts)
        self._abort(reason, now_s, conflicts)
        for member in at_fault:
            self._refuse(member, refusals.conflict(self.spec.job, conflicts), now_s)

    def _abort(self, reason: str, now_s: float, conflicts: tuple[Conflict, ...] = ()) -> None:
        """End the attempt with one record for all.

        Once the boundary is agreed, members may have begun to leave the old generation: then that
        is over too. Before, it goes on as if nothing had been.
        """
        agreement = self.agreement
        assert agreement is not None
        roster, concerned = agreement.roster, self.concerned(agreement.roster)
        brought_up = self.phase is Phase.COMMITTED and roster.synchronous
        if brought_up:
            self.failed_roster = roster
        old_is_over = self.running is None or agreement.stop_at is not None
        self._to(Trigger.FAILED, reason, now_s)
        record = self._record(Verdict.ABORTED, reason, now_s, conflicts)
        self.agreement, self.failures = None, self.failures + 1
        self._do(Write(record=record))
        if brought_up and old_is_over and self.running is not None:
            # First of all: who waits at the boundary must not take the abort for leave to train on.
            old, self.running = self.running, None
            self._tell_broken(old, (), reason, now_s)
        notice = OutcomeNotice(reason=reason, record=record)
        for member in concerned:
            self._tell(member, notice)
        if brought_up and old_is_over:
            self._tell_broken(roster, (), reason, now_s)
        elif brought_up:
            newcomers = [m for m in self.members_of(roster) if not m.is_in(self.running)]
            # They had begun to bring it up. Or, where a new leader took the old generation for the
            # one that runs, they have trained in it since.
            self.attendance.settle(newcomers, settled=False)
        self.previous = self.running or self.previous
        back_off_s = min(FIRST_BACK_OFF_S * 2 ** (self.failures - 1), MAX_BACK_OFF_S)
        # One loss is news, not a failure to agree: the survivors need not wait to try again.
        again_s = now_s + (back_off_s if self.failures > 1 else 0.0)
        self.deadline_s = None if self.completing else again_s

    def _deadline_passed(self, now_s: float) -> None:
        self.deadline_s = None
        agreement = self.agreement
        if self.phase is Phase.ABORTED:
            intact = self.running is not None
            self._to(Trigger.INTACT if intact else Trigger.BACKED_OFF, self.reason, now_s)
        elif self.phase is Phase.PREPARE and agreement is not None:
            self._expel_late(agreement.unanswered, "accept or reject the roster", now_s)
        elif self.phase is Phase.COMMITTED and agreement is not None:
            self._bring_up_overdue(agreement, now_s)

    def _bring_up_overdue(self, agreement: Agreement, now_s: float) -> None:
        """A bring-up in which anything moves is never late, however long its state takes.

        Where it stands still, who waits for others is not to blame.
        """
        concerned = self.concerned(agreement.roster)
        moved_s = max((m.moved_s for m in concerned), default=float("-inf"))
        if now_s < moved_s + self.limits.bring_up_s:
            self.deadline_s = moved_s + self.limits.bring_up_s
            # Who waits for this one to end counts from now on.
            self._tell_all_pauses()
            return
        to_stop = self.running is not None and agreement.stop_at is None
        late = agreement.unoffered if to_stop and agreement.unoffered else agreement.unready
        waiting = {m.member_id for m in concerned if m.waits_for_others}
        if late <= waiting:
            names = names_of([m for m in concerned if m.member_id in late])
            limit = f"{self.limits.bring_up_s:g} s"
            self._abort(f"nothing moved for {limit}, and {names} wait for each other", now_s)
            return
        self._expel_late(late - waiting, "bring the generation up", now_s)

    def _expel_late(self, names: set[str], task: str, now_s: float) -> None:
        late = [self.members[name] for name in sorted(names) if name in self.members]
        attempt = self.attempt if self.phase is Phase.COMMITTED else None
        if attempt is not None and attempt.synchronous:
            # Who holds the state waits for those who come to it, and is not put out with them. If
            # it hangs too, it does not come to a stand.
            late = [m for m in late if not attempt.keeps(m.member_id)] or late
        reason = f"{names_of(late)} did not {task} in time"
        self._abort(reason, now_s)
        for member in late:
            if attempt is not None and attempt.synchronous:
                self._blame(member, attempt.generation, reason, now_s)
            if self.members.get(member.member_id) is member:
                self._refuse(member, refusals.timeout(reason), now_s)

    def _drop_unsettled(self, now_s: float) -> None:
        self.broken_since_s = None
        limit = f"{self.limits.collective_s:g} s"
        for member in self.attendance.unsettled():
            if self.members.get(member.member_id) is member:
                reason = f"{member.member_id} did not come to a stand within {limit} of the break"
                if away := self._who_is_away([member], now_s):
                    self._refuse(member, refusals.away(f"{away}: {reason}"), now_s)
                else:
                    self._refuse(member, refusals.timeout(reason), now_s)

    def _who_is_away(self, members: list[Member], now_s: float) -> str:
        """Who among them has been in the script's own code for longer than others wait, or "".

        "rank 0 (vm-0) has been in your code for 54 s", as far as heartbeats tell.
        """
        texts = []
        for member in members:
            since_s = member.own_code_since_s
            if since_s is None or now_s < since_s + self.limits.collective_s / 2:
                continue
            rank = self.rank_of(member)
            name = member.member_id if rank is None else f"rank {rank} ({member.member_id})"
            texts.append(f"{name} has been in your code for {now_s - since_s:.0f} s")
        return ", ".join(texts[:MAX_NAMES])

    def _drop_overdue(self, now_s: float) -> None:
        """Nobody waits for a generation for longer than the join limit."""
        self.overdue_check_s = None
        if self.running is not None or self.phase is not Phase.COLLECT:
            return
        ready = list(self.attendance.candidates.values())
        left_out = self.setbacks.all_left_out(now_s)
        without = "".join(f"; {name} was left out: {error}" for name, error in left_out)
        for member in [m for m in ready if now_s >= self._overdue_s(m)]:
            reason = (
                f"no generation formed within {self.limits.join_s:g} s:"
                f" {len(ready)} of at least {self.spec.min_members} members were ready{without}"
            )
            self._refuse(member, refusals.timeout(reason), now_s)
        left = self.attendance.candidates.values()
        self.overdue_check_s = min((self._overdue_s(m) for m in left), default=None)

    def _overdue_s(self, member: Member) -> float:
        since_s = max(member.waiting_since_s, self.phase_since_s, self.attendance.pauses.released_s)
        return since_s + self.limits.join_s

    # --- the end ---

    def _lose_state(self, seen: str, now_s: float) -> None:
        """End the job: what it had come to is gone, and it must not begin anew unasked."""
        self.lost = refusals.state_lost(self.spec.job, self.progress, seen)
        self._abort(self.lost.what, now_s)
        self._to(Trigger.STATE_LOST, self.lost.what, now_s)
        self.completing = True
        self._stop_clocks()
        self._do(Finish(reason=self.reason))
        for member in list(self.members.values()):
            self._refuse(member, self.lost, now_s)

    def _stop_clocks(self) -> None:
        self.deadline_s = self.broken_since_s = self.suspect_since_s = None
        self.overdue_check_s = None

    def _complete(self, leaver: Member, now_s: float) -> None:
        """Nobody else needs to join. Who trains finishes; an attempt to change is called off."""
        self.completing = True
        reason = f"{leaver.member_id} completed its work"
        self._log("job_completing", reason)
        if self.agreement is not None and (self.running or self.phase is Phase.PREPARE):
            self.agreement.stop_at = None  # who has steps left goes on with them
            self._abort(reason, now_s)
            if self.running is not None:
                self._to(Trigger.INTACT, reason, now_s)
        self.deadline_s, self.reason = None, reason
        # Who trained before finishes by itself, in a generation or (asynchronous) between two.
        trained = self.running or self.previous
        newcomers = [m for m in self.members.values() if not m.is_in(trained)]
        for member in [m for m in newcomers if m is not leaver]:
            self._refuse(member, refusals.finished(self.spec.job, reason), now_s)

    def _finish(self, now_s: float) -> None:
        self._to(Trigger.COMPLETED, self.reason, now_s)
        self.running = self.agreement = None
        self._stop_clocks()
        self._do(Finish(reason=self.reason))


def passed(since_s: float | None, limit_s: float, now_s: float) -> bool:
    return since_s is not None and now_s >= since_s + limit_s


def names_of(members: list[Member]) -> str:
    names = sorted(m.member_id for m in members)
    shown = ", ".join(names[:MAX_NAMES])
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return shown + more or "nobody"
