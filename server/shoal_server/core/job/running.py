"""Bring-ups that fail, breaks that members report, and pauses."""

from dataclasses import replace

from shoal_server.core.generations.agreement import Agreement
from shoal_server.core.generations.roster import NO_GENERATION, Generation, GenerationRoster
from shoal_server.core.job.endings import Endings, Removal
from shoal_server.core.job.job_state import JobState
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import (
    BreakReported,
    MemberPaused,
    MemberResumed,
    PausesNotice,
    Refusal,
    StepReported,
)
from shoal_server.core.membership.member import MAX_NAMES, MemberState
from shoal_server.core.membership.pauses import Pause, pause_in_words
from shoal_server.core.membership.phases import Phase
from shoal_server.core.membership.setbacks import MAX_TRIES


class BringUps:
    """Decides which members a failed bring-up is blamed on, and when they are tried again."""

    def __init__(self, state: JobState, endings: Endings, removal: Removal) -> None:
        self._state = state
        self._endings = endings
        self._removal = removal

    def failed_under(self, member: MemberState, event: BreakReported, now_s: float) -> bool:
        """Handle the report if a bring-up failed. True if nothing else is to be done for the event:
        the attempt has ended, or the member was removed."""
        is_own = event.own and self._shares_failure(member, event.generation)
        error = f"{member.member_id} could not bring it up: {event.error}"
        is_attempt = self._state.agreement_of(member, event.generation, Phase.COMMITTED) is not None
        newcomers = self._newcomers()
        # A member that keeps the job may fail because of newcomers, for example while it sends them
        # its state. Then the newcomers are put off, and the member is not blamed.
        is_spared = is_own and member.keeps_job and bool(newcomers)
        puts_off = is_spared or (is_attempt and not is_own and self._state.running is not None)
        if is_attempt:
            self._endings.abort(error, now_s)
        if puts_off:
            self._put_off(newcomers, error, now_s)
        # A member's own failure counts even if another report has ended the attempt already.
        if is_spared:
            member.failed_in = event.generation
            self._state.log("bring_up_failed", error, member)
        elif is_own:
            self.blame(member, event.generation, event.error, now_s)
        return is_attempt or self._state.members.get(member.member_id) is not member

    def _shares_failure(self, member: MemberState, generation: Generation) -> bool:
        """True if this is the member's first report of its failure in the newest bring-up."""
        if member.failed_in >= generation:
            return False
        brought_up = self._brought_up
        known = brought_up is not None and brought_up.generation == generation
        return (
            known and brought_up is not None and brought_up.synchronous and member.is_in(brought_up)
        )

    @property
    def _brought_up(self) -> GenerationRoster | None:
        """The roster that is being brought up, or the last one whose bring-up failed."""
        if self._state.stage.phase is Phase.COMMITTED:
            return self._state.attempt
        return self._state.tries.failed_roster

    def _newcomers(self) -> list[MemberState]:
        """Newcomers in the newest bring-up; none if all its members are newcomers."""
        roster = self._brought_up
        members = self._state.members_of(roster) if roster is not None else []
        newcomers = [m for m in members if not self._state.stays(m)]
        return newcomers if len(newcomers) < len(members) else []

    def _put_off(self, newcomers: list[MemberState], error: str, now_s: float) -> None:
        """Delay the newcomers' next try: the other members stopped training for nothing."""
        for newcomer in newcomers:
            self._state.setbacks.shared(newcomer.member_id, now_s)
            newcomer.waits(f"another try: in the last one, {error}", now_s)

    def blame(self, member: MemberState, generation: Generation, error: str, now_s: float) -> None:
        """Count the member's own failure: it is tried again, or removed after its last try."""
        member.failed_in = generation
        num_tries = self._state.setbacks.failed(member.member_id, error, now_s)
        reason = (
            f"{member.member_id} could not bring up generation {generation}"
            f" (try {num_tries} of {MAX_TRIES}): {error}"
        )
        self._state.log("bring_up_failed", reason, member)
        member.waits(f"another try: {reason}", now_s)
        if num_tries >= MAX_TRIES:
            self._state.tries.num_excluded += 1
            self._removal.refuse(member, self.left_out(member.member_id, error), now_s)

    def left_out(self, member_id: str, error: str) -> Refusal:
        return refusals.cannot_bring_up(self._state.spec.job, member_id, MAX_TRIES, error)

    def has_no_intact_generation(self, member: MemberState, generation: Generation) -> bool:
        """True if the member's attempt has no intact running generation to return to."""
        agreement = self._state.agreement_of(member, generation, Phase.COMMITTED)
        intact = (
            self._state.running is not None and agreement is not None and agreement.stop_at is None
        )
        return agreement is not None and agreement.roster.synchronous and not intact

    def has_lost_old_generation(self, agreement: Agreement, member: MemberState) -> bool:
        """True if the member is still to enter a planned generation and no old one runs."""
        waits = self._state.stage.phase is Phase.COMMITTED and agreement.has_boundary
        return waits and self._state.running is None and member.member_id in agreement.unready


class Breaks:
    """Handles members' reports of a break, until all survivors have settled."""

    def __init__(
        self, state: JobState, endings: Endings, removal: Removal, bring_ups: BringUps
    ) -> None:
        self._state = state
        self._endings = endings
        self._removal = removal
        self._bring_ups = bring_ups

    def handle_break(self, member: MemberState, event: BreakReported, now_s: float) -> None:
        """Handle a failed collective. Disconnected members are removed as lost; if no member is
        disconnected, a loss may still be noticed later."""
        if self._state.table.has_finished(member):
            return  # Late: the member has no work left that could have failed.
        agreement = self._state.agreement
        if event.state_lost and self._bring_ups.has_no_intact_generation(member, event.generation):
            self._removal.lose_state(event.error, now_s)
            return
        if self._bring_ups.failed_under(member, event, now_s):
            return
        if agreement is not None and self._bring_ups.has_lost_old_generation(agreement, member):
            # A new leader could not know that members still had to train in the old generation.
            self._endings.abort(f"the old generation broke under {member.member_id}", now_s)
            return
        running = self._state.running
        if running is None or event.generation != running.generation:
            if NO_GENERATION < event.generation <= self._state.last_generation:
                # An earlier leader announced that end, or this member was disconnected then.
                self._state.notify_member(member, self._state.break_notice(event.generation))
            return
        if not running.synchronous:
            return
        self._state.stage.reason = f"a collective failed under {member.member_id}: {event.error}"
        if self._state.deadlines.suspect_since_s is None:
            self._state.deadlines.suspect_since_s = now_s
        trainers = self._state.table.trainers(running)
        if away := self._away_in_words([m for m in trainers if m is not member], now_s):
            self._state.stage.reason = f"{away}; {refusals.AWAY_FIX}"
        self._state.log("collective_failed", self._state.stage.reason, member)
        member.reported_broken = running.generation
        for other in self._state.members_of(running):
            # A new leader sets this time in the future: members get time to attend.
            if other.disconnected_s is not None and other.disconnected_s <= now_s:
                reason = "its stream broke, and so did a collective"
                self._removal.remove(other, reason, now_s, cause="connection lost")
        if all(m.reported_broken == running.generation for m in trainers):
            # All members are connected and have reported the break: no loss explains it.
            self._endings.break_off((), f"{self._state.stage.reason}; all members answer", now_s)

    def step_reported(self, member: MemberState, event: StepReported, now_s: float) -> None:
        self._state.refuse_if_over()
        if event.left < member.entered or self._state.table.has_finished(member):
            return  # Late: the member has trained since.
        member.entered = event.left
        self._endings.end_left_generation(member, event.left, now_s)
        committed = self._state.attempt if self._state.stage.phase is Phase.COMMITTED else None
        if member.is_in(self._state.running) or member.is_in(committed):
            return
        if member.proposal is not None:
            step, has_state = event.step, event.has_state
            member.proposal = replace(member.proposal, step=step, has_state=has_state)
            if has_state and not member.proposal.stateless:
                self._state.progress.note_reached(step)
        self._state.table.settle((member,), settled=True)
        if event.enough_for_call:
            self._state.table.in_call[member.member_id] = event.enough_for_call
        if not self._state.setbacks.waits(member.member_id):
            member.waits("the other members to report their step", now_s)
        if self._state.table.all_settled:
            self._state.deadlines.broken_since_s = None

    def drop_unsettled(self, now_s: float) -> None:
        self._state.deadlines.broken_since_s = None
        limit = f"{self._state.limits.collective_s:g} s"
        for member in self._state.table.unsettled():
            if self._state.members.get(member.member_id) is member:
                reason = f"{member.member_id} did not stop within {limit} of the break"
                if away := self._away_in_words([member], now_s):
                    self._removal.refuse(member, refusals.away(f"{away}: {reason}"), now_s)
                else:
                    self._removal.refuse(member, refusals.timeout(reason), now_s)

    def _away_in_words(self, members: list[MemberState], now_s: float) -> str:
        """Name the members that have been in the script's own code for at least half of
        `collective_s`, or return "".

        For example "rank 0 (vm-0) has been in your code for 54 s", or "... waiting for a batch to
        be loaded ...", according to their heartbeats.
        """
        texts = []
        for member in members:
            since_s = member.trainer.own_code_since_s
            if since_s is None or now_s < since_s + self._state.limits.collective_s / 2:
                continue
            rank = self._state.rank_of(member)
            name = member.member_id if rank is None else f"rank {rank} ({member.member_id})"
            does = "waiting for a batch to be loaded" if member.trainer.loads else "in your code"
            texts.append(f"{name} has been {does} for {now_s - since_s:.0f} s")
        return ", ".join(texts[:MAX_NAMES])


class PauseKeeper:
    """Keeps pauses that other members wait for, and extends the limits by their duration."""

    def __init__(self, state: JobState) -> None:
        self._state = state
        self.announced_paused: tuple[str, ...] = ()
        """Paused members that all members were last notified of."""

    def pausing(self) -> list[tuple[MemberState, Pause]]:
        """Paused members that other members wait for."""
        return [each for each in self._state.table.pauses if self._is_waited_for(each[0])]

    def _is_waited_for(self, member: MemberState) -> bool:
        if not self._state.attempt_is_synchronous:
            return False
        if self._state.running is None:
            return (
                member.is_in(self._state.attempt or self._state.previous)
                or self._state.previous is None
            )
        return member.is_in(self._state.running) or member.is_in(self._state.attempt)

    def why_paused(self, now_s: float | None = None) -> str:
        """Text that names up to three paused members that others wait for, with their limits if
        `now_s` is given; empty if there are none."""
        pausing = self.pausing()
        texts = [
            pause_in_words(member, self._state.rank_of(member), pause, now_s)
            for member, pause in pausing[:3]
        ]
        more = [f"and {len(pausing) - 3} more"] if len(pausing) > 3 else []
        return "; ".join(texts + more)

    def keep_limits(self, now_s: float) -> None:
        """Move the limits by the time for which a member was paused. Call before any other check.

        Limits that detect a loss are not moved: broken streams, halts, a failed collective.
        """
        by_s = self._state.table.pauses.hold(now_s, held=bool(self.pausing()))
        if not by_s:
            return
        self._state.deadlines.extend(by_s)
        self._state.table.postpone_drains(by_s)

    def announce_pauses(self, now_s: float) -> None:
        """Notify all members if the set of paused members has changed. Call after each event."""
        paused = tuple(sorted(member.member_id for member, _ in self.pausing()))
        self._state.table.pauses.hold(now_s, held=bool(paused))
        if paused == self.announced_paused:
            return
        self.announced_paused = paused
        self.send_pauses()

    def send_pauses(self) -> None:
        """Send all members the pauses. On this notice members restart or stop their own limits."""
        notice = self.notice()
        for member in self._state.members.values():
            self._state.notify_member(member, notice)

    def notice(self) -> PausesNotice:
        reason = self.why_paused() or self._state.stage.reason
        return PausesNotice(reason=reason, member_ids=self.announced_paused)

    def begin(self, member: MemberState, event: MemberPaused, now_s: float) -> None:
        known = self._state.table.pauses.of(member)
        pause = self._state.table.pauses.begin(member, event, now_s)
        if known is None and pause is not None:
            text = pause_in_words(member, self._state.rank_of(member), pause)
            text += f", {pause.limit_s:g} s at the most"
            self._state.log("member_paused", text, member)

    def end(self, member: MemberState, event: MemberResumed, now_s: float) -> None:
        pause = self._state.table.pauses.end(member, event.number)
        # The time in the script's own code until now belonged to the pause.
        member.trainer.own_code_since_s = None
        if pause is not None:
            text = f"{member.member_id} goes on after {now_s - pause.since_s:.1f} s: {pause.reason}"
            self._state.log("member_resumed", text, member)
