"""COLLECT: the choice of the next roster's members, and of the time to draw it up."""

from dataclasses import replace

from shoal_server.core.generations.conflicts import find_conflicts
from shoal_server.core.generations.roster import Conflict, Proposal
from shoal_server.core.job.endings import Drains
from shoal_server.core.job.job_state import JobState, limit_passed
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import EventRefused, StandbyNotice, WaitingNotice
from shoal_server.core.membership.member import MemberState, names_of


class Collecting:
    """Chooses the members of the next roster."""

    def __init__(self, state: JobState, drains: Drains) -> None:
        self._state = state
        self._drains = drains

    def proposed(self, member: MemberState, proposal: Proposal, now_s: float) -> None:
        self._state.refuse_if_over()
        if not proposal.fields:
            raise EventRefused(refusals.empty_proposal(member.member_id))
        if conflicts := self._conflicts_with_trainers(member, proposal):
            raise EventRefused(refusals.conflict(self._state.spec.job, conflicts))
        known = member.proposal
        if known is not None and known.fields == proposal.fields:
            # The call is late, or a repetition after a reconnection: keep the later step, and the
            # state if the member ever had it.
            step, has_state = max(known.step, proposal.step), known.has_state or proposal.has_state
            proposal = replace(proposal, step=step, has_state=has_state)
        self._state.table.propose(member, self._sharing_listings(proposal))
        if self._state.deadlines.first_proposal_s is None:
            self._state.deadlines.first_proposal_s = now_s
        if self._state.deadlines.overdue_check_s is None:
            self._state.deadlines.overdue_check_s = now_s + self._state.limits.join_s
        if known is None:
            member.waits("other members", now_s)
            self._state.log("member_proposed", f"{member.member_id} is ready to train", member)

    def _conflicts_with_trainers(
        self, member: MemberState, proposal: Proposal
    ) -> tuple[Conflict, ...]:
        """Conflicts of a newcomer with the members that train, or trained before a break.

        Such a newcomer is refused at once, so that it does not disturb them.
        """
        roster = self._state.running or self._state.previous
        if roster is None or member.is_in(roster):
            return ()
        trainers = [m for m in self._state.members_of(roster) if m.proposal]
        if proposal.fields == roster.fields and all(
            m.proposal.optional_fields == proposal.optional_fields for m in trainers if m.proposal
        ):
            return ()
        newcomer = replace(member, proposal=proposal).as_candidate()
        return find_conflicts([*(m.as_candidate() for m in trainers), newcomer])

    def _sharing_listings(self, proposal: Proposal) -> Proposal:
        """The proposal with another member's listings if those are equal, to save memory."""
        others = (m.proposal.listings for m in self._state.members.values() if m.proposal)
        same = next((each for each in others if each == proposal.listings), proposal.listings)
        return replace(proposal, listings=same)

    def change_wanted(self, now_s: float) -> tuple[str, list[MemberState]]:
        """The reason for a planned change of the running generation ("" for none), and the members
        of the next roster."""
        assert self._state.running is not None
        if self._state.table.has_finished_in(self._state.running):
            # The other members are near their end; a change could interrupt their last work.
            self._hold_newcomers(now_s)
            if not self._state.table.draining:
                return "", []
        newcomer = any(m.settled and not m.is_in(self._state.running) for m in self._state.eligible)
        if not newcomer and not self._state.table.draining:
            return "", []
        if any(m.proposal is None for m in self._state.members_of(self._state.running)):
            # After a leader failover: a roster drawn up now would leave out members that train.
            return "", []
        chosen = self.chosen(now_s)
        joiners = [m for m in chosen if not m.is_in(self._state.running)]
        leavers = self._drains.leavers(chosen)
        if len(chosen) < self._state.min_roster_size or not (joiners or leavers):
            return "", []
        texts = [f"{names_of(joiners)} joins"] if joiners else []
        texts += [f"{names_of(leavers)} leaves"] if leavers else []
        return ", ".join(texts), chosen

    def _hold_newcomers(self, now_s: float) -> None:
        running = self._state.running
        newcomers = [m for m in self._state.eligible if not m.is_in(running)]
        reason = "standing by: members of the generation that trains have done their work"
        for position, member in enumerate(newcomers, start=1):
            self._stand_by(member, reason, position, now_s)

    def _stand_by(self, member: MemberState, reason: str, position: int, now_s: float) -> None:
        if member.waiting_for != reason or not member.is_standby:
            member.waits(reason, now_s, is_standby=True)
            self._state.notify_member(member, StandbyNotice(reason=reason, position=position))

    def notify_waiting(self) -> None:
        """Send members that torchrun started the number of members that wait to join, if that
        number changed. Call after each event."""
        running = self._state.running
        first = next(iter(self._state.table.candidates.values()), None)
        if running is None or first is None or first.proposal is None:
            return
        if not first.proposal.stateless or self._state.end.completing:
            return
        trainers = self._state.table.trainers(running)
        num = sum(not m.is_in(running) for m in self._state.eligible)
        num = min(num, self._state.spec.max_members - len(trainers))
        if self._state.table.has_finished_in(running):
            num = 0
        if num != self._state.table.num_announced_waiting:
            self._state.table.num_announced_waiting = num
            for member in trainers:
                self._state.notify_member(member, self.waiting_notice())

    def waiting_notice(self) -> WaitingNotice:
        num = self._state.table.num_announced_waiting
        return WaitingNotice(reason=f"{num} more members wait", num_members=num)

    def chosen(self, now_s: float) -> list[MemberState]:
        """Members of a roster drawn up now, at most `max_members`: members that hold the state
        first (unless a generation runs), then former trainers by rank, then by arrival. Puts the
        others on standby."""
        # A member that has not settled may have missed its notice and still be training.
        candidates = [m for m in self._state.eligible if m.settled or m.is_in(self._state.running)]
        if amid := self.amid_call():
            names = {m.member_id for m in amid}
            self._keep_out([m for m in candidates if m.member_id not in names], now_s)
            candidates = amid
        if self._state.running is not None and not any(
            m.is_in(self._state.running) for m in candidates
        ):
            # All trainers are to leave: they hand their state over to the newcomers first.
            candidates += [
                m for m in self._state.members_of(self._state.running) if m.proposal is not None
            ]
        if self._state.lacks_state(candidates):
            # Draining members that hold the state hand it over first.
            candidates += [m for m in self._state.table.draining.values() if m.holds_state]
        ranks = (
            {e.member_id: e.rank for e in self._state.previous.entries}
            if self._state.previous
            else {}
        )
        candidates.sort(
            key=lambda m: (
                self._state.running is None and not m.holds_state,
                ranks.get(m.member_id, len(ranks)),
                m.joined_s,
            )
        )
        for position, member in enumerate(candidates[self._state.spec.max_members :], start=1):
            reason = (
                f"standing by: the job has its maximum of {self._state.spec.max_members} members"
            )
            self._stand_by(member, reason, position, now_s)
        return candidates[: self._state.spec.max_members]

    def hold_for_members(self, now_s: float) -> None:
        """Put the ready members on standby if the job lacks only further members
        (`waits_for_members`); otherwise end their standby. Do nothing before the first generation,
        while members have not settled yet, and if there are enough members.

        Called only while no generation runs.
        """
        if self._state.previous is None or not self._state.table.all_settled or self.are_enough:
            return
        waiting = [m for m in self._state.eligible if m.settled]
        if not self.waits_for_members:
            for member in [m for m in waiting if m.is_standby]:
                member.waits("other members", now_s)
            return
        missing = self._state.min_roster_size - len(waiting)
        limit_s = self._state.limits.wait_for_members_s
        until = "no limit" if limit_s is None else f"until it has waited for {limit_s:g} s"
        reason = f"{missing} more member{'' if missing == 1 else 's'}, {until}"
        for member in waiting:
            self._stand_by(member, reason, 0, now_s)

    @property
    def waits_for_members(self) -> bool:
        """True if a member that is ready has `keeps_job`, so that the job lacks only further
        members. False if a call between two steps has to be repeated."""
        # A member that joins cannot take part in a call between two steps.
        return not self.amid_call() and any(
            m.keeps_job for m in self._state.table.candidates.values()
        )

    def may_form(self, now_s: float) -> bool:
        """True if a roster can be drawn up now. Called only while no generation runs."""
        num_ready = len(self._state.eligible) + len(self._state.table.finished)
        # Wait for survivors that have not settled yet.
        if not self._state.table.all_settled or not self.are_enough:
            return False
        if self.awaits_state:
            return False
        if (
            num_ready + self._state.tries.num_excluded >= self._state.spec.desired_members
            or self._has_survivors
        ):
            return True
        return limit_passed(self._state.deadlines.first_proposal_s, self.last_call_s, now_s)

    @property
    def are_enough(self) -> bool:
        """True if enough members are present for a roster, while no generation runs."""
        amid = self.amid_call()
        return len(amid or self._state.eligible) >= self.num_needed(amid)

    def num_needed(self, amid: list[MemberState]) -> int:
        """The number of members that a roster needs. `amid`: members in a call; empty: all
        count."""
        # A call between two steps takes no step, so the job's minimum does not apply.
        enough = max((self._state.table.in_call[m.member_id] for m in amid), default=None)
        least = self._state.min_roster_size
        return least if enough is None else min(least, enough)

    def amid_call(self) -> list[MemberState]:
        """Members that have to repeat a call between two steps before others join.

        Other members, which join or have the call's result already, are elsewhere in their script
        and cannot take part.
        """
        table = self._state.table
        if self._state.running is not None or not table.in_call:
            return []
        newest = max((m.state_and_step for m in self._state.eligible), default=None)
        return [
            m
            for m in self._state.eligible
            if m.member_id in table.in_call and m.state_and_step == newest
        ]

    def _keep_out(self, members: list[MemberState], now_s: float) -> None:
        for member in members:
            member.waits("the end of a call between two steps that the others are in", now_s)

    @property
    def awaits_state(self) -> bool:
        """True if the missing state may be held by a member that has not proposed yet under this
        leader, or whose next try is put off."""
        if not self._state.lacks_state(self._state.eligible):
            return False
        candidates = self._state.table.candidates.values()
        return bool(self._state.table.unproposed) or not self._state.lacks_state(candidates)

    @property
    def last_call_s(self) -> float:
        return self._state.spec.last_call_s or self._state.limits.last_call_s

    @property
    def _has_survivors(self) -> bool:
        """True if a member that trained before is present: then a roster waits for no others."""
        if self._state.previous is None:
            return False
        staying = self._state.eligible
        leaving = self._state.table.draining.values()
        return any(m.is_in(self._state.previous) for m in staying) or any(
            m.holds_state for m in leaving
        )
