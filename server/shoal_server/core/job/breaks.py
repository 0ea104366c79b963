"""A collective failed: who is lost, who settles, who does not."""

from dataclasses import replace

from shoal_server.core.generations.roster import NO_GENERATION
from shoal_server.core.job.bring_ups import BringUps
from shoal_server.core.job.endings import Endings
from shoal_server.core.job.job_state import JobState
from shoal_server.core.job.removal import Removal
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import Broke, StepReported
from shoal_server.core.membership.member import MAX_NAMES, Member
from shoal_server.core.membership.phases import Phase


class Breaks:
    """What members say of a break, until all who are left have settled."""

    def __init__(
        self, state: JobState, endings: Endings, removal: Removal, bring_ups: BringUps
    ) -> None:
        self._state = state
        self._endings = endings
        self._removal = removal
        self._bring_ups = bring_ups

    def broke(self, member: Member, event: Broke, now_s: float) -> None:
        """A collective failed. Who is also disconnected is lost; else word of a loss may follow."""
        if self._state.table.has_finished(member):
            return  # Late: it has no work left that could have failed.
        agreement = self._state.agreement
        if event.state_lost and self._bring_ups.has_no_way_back(member, event.generation):
            self._removal.lose_state(event.error, now_s)
            return
        if self._bring_ups.failed_under(member, event, now_s):
            return
        if agreement is not None and self._bring_ups.lost_its_old(agreement, member):
            # A new leader could not know that the old generation still had to be trained in.
            self._endings.abort(f"the old generation broke under {member.member_id}", now_s)
            return
        running = self._state.running
        if running is None or event.generation != running.generation:
            if NO_GENERATION < event.generation <= self._state.last_generation:
                # Its end was told by a leader that is gone, or while this member was away.
                self._state.tell(member, self._state.break_notice(event.generation))
            return
        if not running.synchronous:
            return
        self._state.stage.reason = f"a collective failed under {member.member_id}: {event.error}"
        if self._state.deadlines.suspect_since_s is None:
            self._state.deadlines.suspect_since_s = now_s
        trainers = self._state.table.trainers(running)
        if away := self._who_is_away([m for m in trainers if m is not member], now_s):
            self._state.stage.reason = f"{away}; {refusals.AWAY_FIX}"
        self._state.log("collective_failed", self._state.stage.reason, member)
        member.reported_broken = running.generation
        for other in self._state.members_of(running):
            # A leader that has just taken over gives everybody time to come.
            if other.disconnected_s is not None and other.disconnected_s <= now_s:
                reason = "its stream broke, and so did a collective"
                self._removal.remove(other, reason, now_s, cause="connection lost")
        if all(m.reported_broken == running.generation for m in trainers):
            # Every one of them is here and says so: there is nobody's loss to wait for.
            self._endings.break_off((), f"{self._state.stage.reason}; all members answer", now_s)

    def step_reported(self, member: Member, event: StepReported, now_s: float) -> None:
        self._state.refuse_if_over()
        if event.left < member.entered or self._state.table.has_finished(member):
            return  # Late: it has trained since.
        member.entered = event.left
        self._endings.believe_left(member, event.left, now_s)
        committed = self._state.attempt if self._state.stage.phase is Phase.COMMITTED else None
        if member.is_in(self._state.running) or member.is_in(committed):
            return
        if member.proposal is not None:
            step, has_state = event.step, event.has_state
            member.proposal = replace(member.proposal, step=step, has_state=has_state)
            if has_state and not member.proposal.stateless:
                self._state.progress.heard_of(step)
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
                if away := self._who_is_away([member], now_s):
                    self._removal.refuse(member, refusals.away(f"{away}: {reason}"), now_s)
                else:
                    self._removal.refuse(member, refusals.timeout(reason), now_s)

    def _who_is_away(self, members: list[Member], now_s: float) -> str:
        """Who among them has been in the script's own code for longer than others wait, or "".

        "rank 0 (vm-0) has been in your code for 54 s", or "waiting for a batch to be loaded", as
        far as heartbeats tell.
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
