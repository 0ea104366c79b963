"""A member's generation and the next one, and the reports that a new leader needs again.

(no generation) --record--> bring-up --ready--> training --break--> stopped --record--> bring-up
                                   training --planned record--> offer made --StopAt--> bring-up
"""

from dataclasses import dataclass, replace

from shoal_client.membership.identity import Identity
from shoal_client.membership.member_events import BEGUN, BringUpGeneration, StepBegun
from shoal_proto.short_lists import sendable
from shoal_proto.v1 import membership_pb2 as pb


@dataclass(frozen=True, kw_only=True)
class PlannedChange:
    """A planned successor of the generation that trains."""

    record: pb.GenerationRecord
    offer: int
    """First step not begun yet. It does not begin before `stop_at` is known."""
    stop_at: int | None = None

    @property
    def generation(self) -> int:
        return self.record.roster.generation

    @property
    def boundary(self) -> int:
        """First step that is not begun in the old generation."""
        return self.offer if self.stop_at is None else self.stop_at


class GenerationTrack:
    """The generations that one member knows. Methods return requests for the coordinator, which may
    be sent more than once.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self.generation = 0
        """Newest generation that the trainer was sent into; 0: none."""
        self.step = 0
        self.change: PlannedChange | None = None
        self.is_closing = False
        """True if the job admits no further members."""
        self.num_waiting = 0
        """Members without a rank that would be in the next generation, as last notified."""
        self._proposal: pb.Proposal | None = None
        self._record: pb.GenerationRecord | None = None
        """Newest record that the trainer may enter."""
        self._ready_generation = 0
        self._begun = -1
        self._crossed_at: int | None = None
        """Step at which the previous generation stopped, if this one was planned."""
        self._step_report: pb.SettleRequest | None = None
        """Step report after the last break, until a generation follows."""
        self._reported: pb.ReportBrokenRequest | None = None
        """Report of a failed collective, until the break is notified."""
        self._broken: dict[int, str] = {}
        self.lost: frozenset[str] = frozenset()
        """Members lost in this member's generations, as far as notified."""

    def is_broken(self, generation: int) -> bool:
        """True if the generation ended by a break (a lost member, a failed collective, an aborted
        bring-up), or was replaced."""
        return generation in self._broken

    @property
    def successor(self) -> pb.GenerationRecord | None:
        """Record of the planned generation, once members agreed where the present one stops."""
        change = self.change
        return change.record if change is not None and change.stop_at is not None else None

    # --- the trainer ---

    def propose(self, proposal: pb.Proposal) -> pb.ProposeRequest:
        self._proposal = pb.Proposal()
        self._proposal.CopyFrom(proposal)
        self.step, self._begun = proposal.step, proposal.step - 1
        return self._propose_request(proposal)

    def begin_step(self, step: int) -> StepBegun | BringUpGeneration | PlannedChange:
        """Begin the step, or return the generation to bring up instead, or the change to wait
        for."""
        change = self.change
        if change is None or step < change.boundary or self.generation in self._broken:
            self._begun = step
            return BEGUN
        if change.stop_at is None or not self._identity.is_in(change.record.roster):
            return change
        self.change, self._record, self._reported = None, change.record, None
        self.generation, self._crossed_at = change.generation, change.stop_at
        return BringUpGeneration(record=change.record)

    def enter(self, above: int) -> pb.GenerationRecord | None:
        """Enter the generation of the newest record, if its number is above `above`."""
        record = self._record
        if record is None or not self._is_new(record.roster.generation, above):
            return None
        self.generation = record.roster.generation
        self._crossed_at = self._step_report = self._reported = None
        return record

    def _is_new(self, generation: int, above: int) -> bool:
        return generation > above and generation not in self._broken

    def become_ready(self, roster: pb.Roster) -> pb.ReadyRequest:
        self._ready_generation = roster.generation
        if self._proposal is not None and roster.synchronous:
            # A later leader gets this proposal again, and must see that this member holds the
            # state.
            self._proposal.has_state = True
            self._proposal.step = max(self._proposal.step, self.step)
        return self._ready_request(roster.generation)

    def report_broken(self, error: str, *, own: bool, state_lost: bool) -> pb.ReportBrokenRequest:
        token = self._identity.token(self.generation)
        self._reported = pb.ReportBrokenRequest(
            token=token, error=sendable(error, 1000), own=own, state_lost=state_lost
        )
        return self._reported

    def record_stop(
        self, step: int, *, has_state: bool, enough_for_call: int = 0
    ) -> pb.SettleRequest:
        self.change, self.step, self._begun = None, step, step - 1
        self._reported = None
        if self._proposal is not None:
            self._proposal.step, self._proposal.has_state = step, has_state
        self._step_report = self._settle_request(step, has_state=has_state)
        self._step_report.enough_for_call = enough_for_call
        return self._step_report

    # --- the coordinator ---

    def is_superseded_by(self, record: pb.GenerationRecord) -> bool:
        """True if survivors formed a generation that replaces this member's: the old one is over,
        even if no break was notified.
        """
        roster = record.roster
        formed = roster.synchronous and not roster.planned
        in_one = self.generation > 0 and self.generation not in self._broken
        newer = formed and in_one and roster.generation > self.generation
        return newer and self._identity.is_in(roster)

    def take_committed(
        self, record: pb.GenerationRecord
    ) -> pb.OfferRequest | pb.ReadyRequest | None:
        number, is_in = record.roster.generation, self._identity.is_in(record.roster)
        if not record.roster.synchronous:
            if not is_in:
                return None
            self._record, self.generation = record, number
            return self.become_ready(record.roster)
        if number <= self.generation:
            return self._offer_again(number)
        trains = self.generation > 0 and self.generation not in self._broken
        if not trains or not record.roster.planned:
            if is_in:
                self._record = record
            return None
        if self.change is None or self.change.generation != number:
            self.change = PlannedChange(record=record, offer=self._begun + 1)
        # A repeated record gets the same offer: this member has begun only steps below it.
        return self._offer_request(self.generation, number, self.change.offer)

    def _offer_again(self, number: int) -> pb.OfferRequest | None:
        if number == self.generation and self._crossed_at is not None:
            return self._offer_request(number, number, self._crossed_at)
        return None

    def set_stop_at(self, stop: pb.StopAt) -> None:
        if self.change is not None and self.change.generation == stop.generation:
            self.change = replace(self.change, stop_at=stop.step)

    def take_aborted(self, generation: int) -> bool:
        """Record an aborted generation; True if it had been committed."""
        if self.change is not None and self.change.generation == generation:
            self.change = None
        return self._record is not None and self._record.roster.generation == generation

    def record_break(self, generation: int, reason: str) -> bool:
        """Record a break. True if it was not known yet."""
        if generation in self._broken:
            return False
        self._broken[generation] = reason
        # If a later generation breaks, the one that the trainer is in is over too.
        self._broken.setdefault(min(generation, self.generation), reason)
        return True

    def idle_step_report(self) -> pb.SettleRequest | None:
        """Step report of a trainer that is in no generation, if any. A trainer that entered none is
        at the step that it proposed.
        """
        if self._step_report is not None or self.generation or self._proposal is None:
            return self._step_report
        return self._settle_request(self._proposal.step, has_state=self._proposal.has_state)

    def proposed(self) -> pb.ProposeRequest | None:
        """Proposal to repeat for a new leader, which does not have the members' proposals."""
        return self._propose_request(self._proposal) if self._proposal is not None else None

    def report_to_repeat(
        self,
    ) -> pb.SettleRequest | pb.ReportBrokenRequest | pb.ReadyRequest | None:
        """Report to repeat for a new leader: of the trainer's step, a failed collective, or
        readiness."""
        if self._step_report is not None:
            return self._step_report
        if self._reported is not None and self.generation not in self._broken:
            return self._reported
        ready = self._ready_generation
        return self._ready_request(ready) if ready and ready == self.generation else None

    # --- requests ---

    def _propose_request(self, proposal: pb.Proposal) -> pb.ProposeRequest:
        token = self._identity.token(self.generation)
        return pb.ProposeRequest(token=token, proposal=proposal)

    def _ready_request(self, generation: int) -> pb.ReadyRequest:
        return pb.ReadyRequest(token=self._identity.token(generation), step=self.step)

    def _settle_request(self, step: int, *, has_state: bool) -> pb.SettleRequest:
        token = self._identity.token(self.generation)
        return pb.SettleRequest(token=token, step=step, has_state=has_state)

    def _offer_request(self, own: int, generation: int, step: int) -> pb.OfferRequest:
        token = self._identity.token(own)
        return pb.OfferRequest(token=token, generation=generation, next_step=step)
