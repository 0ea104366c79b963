"""Members under which a generation could not be brought up: tried again later, or left out."""

from shoal_server.core.generations.agreement import Agreement
from shoal_server.core.generations.roster import Generation, Roster
from shoal_server.core.job.endings import Endings
from shoal_server.core.job.job_state import JobState
from shoal_server.core.job.removal import Removal
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import Broke, Refusal
from shoal_server.core.membership.member import Member
from shoal_server.core.membership.phases import Phase
from shoal_server.core.membership.setbacks import MAX_TRIES


class BringUps:
    """Whose failure it was, and what follows for the next tries."""

    def __init__(self, state: JobState, endings: Endings, removal: Removal) -> None:
        self._state = state
        self._endings = endings
        self._removal = removal

    def failed_under(self, member: Member, event: Broke, now_s: float) -> bool:
        """True if that was all there is to it: an attempt failed, or a member was left out."""
        own = event.own and self._shares_failure(member, event.generation)
        error = f"{member.member_id} could not bring it up: {event.error}"
        is_attempt = self._state.agreement_of(member, event.generation, Phase.COMMITTED) is not None
        newcomers = self._newcomers()
        # A member that keeps the job fails for those that come to it, such as in handing them its
        # state: that costs them the attempt, and never the job the member.
        is_spared = own and member.keeps_job and bool(newcomers)
        puts_off = is_spared or (is_attempt and not own and self._state.running is not None)
        if is_attempt:
            self._endings.abort(error, now_s)
        if puts_off:
            self._put_off(newcomers, error, now_s)
        # Else another's word came first, which may have been a consequence of this.
        if is_spared:
            member.failed_in = event.generation
            self._state.log("bring_up_failed", error, member)
        elif own:
            self.blame(member, event.generation, event.error, now_s)
        return is_attempt or self._state.members.get(member.member_id) is not member

    def _shares_failure(self, member: Member, generation: Generation) -> bool:
        """Whether the member says for the first time what it failed with in the newest bring-up."""
        if member.failed_in >= generation:
            return False
        brought_up = self._brought_up
        known = brought_up is not None and brought_up.generation == generation
        return (
            known and brought_up is not None and brought_up.synchronous and member.is_in(brought_up)
        )

    @property
    def _brought_up(self) -> Roster | None:
        """The roster that is being brought up, or that was last."""
        if self._state.stage.phase is Phase.COMMITTED:
            return self._state.attempt
        return self._state.tries.failed_roster

    def _newcomers(self) -> list[Member]:
        """Members of the newest bring-up that come to others, which keep the job."""
        roster = self._brought_up
        members = self._state.members_of(roster) if roster is not None else []
        newcomers = [m for m in members if not self._state.stays(m)]
        return newcomers if len(newcomers) < len(members) else []

    def _put_off(self, newcomers: list[Member], error: str, now_s: float) -> None:
        """The others go on without them for now, whose coming they stopped for in vain."""
        for newcomer in newcomers:
            self._state.setbacks.shared(newcomer.member_id, now_s)
            newcomer.waits(f"another try: in the last one, {error}", now_s)

    def blame(self, member: Member, generation: Generation, error: str, now_s: float) -> None:
        """It failed by itself: it is tried again later, or left out for good."""
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

    def has_no_way_back(self, member: Member, generation: Generation) -> bool:
        """Whether an attempt that the member is in is all that there is."""
        agreement = self._state.agreement_of(member, generation, Phase.COMMITTED)
        intact = (
            self._state.running is not None and agreement is not None and agreement.stop_at is None
        )
        return agreement is not None and agreement.roster.synchronous and not intact

    def lost_its_old(self, agreement: Agreement, member: Member) -> bool:
        """Whether a member on its way to a planned generation comes from none that runs."""
        waits = self._state.stage.phase is Phase.COMMITTED and agreement.has_boundary
        return waits and self._state.running is None and member.member_id in agreement.unready
