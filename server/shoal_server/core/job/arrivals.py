"""Members that join, reconnect or are disconnected; refusals of processes that are no members."""

from uuid import UUID

from shoal_server.core.generations.ranges import device_problem
from shoal_server.core.generations.roster import NO_GENERATION, Generation
from shoal_server.core.job.endings import Drains, Removal
from shoal_server.core.job.job_state import JobState
from shoal_server.core.job.running import PauseKeeper
from shoal_server.core.membership import refusals
from shoal_server.core.membership.events import (
    AdmitMember,
    ClosingNotice,
    EventRefused,
    MemberEvent,
    MemberJoined,
    OutcomeNotice,
    ProcessContinued,
    ProcessHalted,
    Refusal,
    RunningNotice,
    StandbyNotice,
    WaitingNotice,
)
from shoal_server.core.membership.member import MemberState, Wait
from shoal_server.core.membership.phases import Phase
from shoal_server.core.membership.setbacks import MAX_TRIES


class Arrivals:
    """Admits members, and refuses processes that are no longer members."""

    def __init__(
        self, state: JobState, pause_keeper: PauseKeeper, removal: Removal, drains: Drains
    ) -> None:
        self._state = state
        self._pause_keeper = pause_keeper
        self._removal = removal
        self._drains = drains

    def known(self, event: MemberEvent) -> MemberState:
        member = self._state.members.get(event.member_id)
        if refusal := self._state.table.expelled.get(event.incarnation):
            # The process was sent a notice with this refusal: its calls get the same reason.
            raise EventRefused(refusal)
        if member is None or member.incarnation != event.incarnation:
            raise EventRefused(self._fenced(member, event))
        return member

    def _fenced(self, holder: MemberState | None, event: MemberEvent) -> Refusal:
        """The refusal of a process that is no member. `holder`: the member with its name now."""
        if holder is None:
            return refusals.not_a_member(self._state.spec.job, event, self._state.last_generation)
        return refusals.replaced(event, holder.incarnation, self._state.last_generation)

    def joined(self, event: MemberJoined, now_s: float) -> None:
        self._state.refuse_if_over()
        if problem := event.spec.problem():
            raise EventRefused(refusals.bad_spec(self._state.spec.job, problem))
        if problem := device_problem(event.info):
            raise EventRefused(refusals.bad_devices(event.member_id, problem))
        known = self._state.members.get(event.member_id)
        if known is not None and known.incarnation == event.incarnation:
            self._state.table.note_stream_back(known)
            self._repeat_notices(known, event.generation, now_s)
            return
        if reason := self._state.end.stopping:
            raise EventRefused(refusals.stopped(self._state.spec.job, "is being stopped", reason))
        if event.incarnation in self._state.table.expelled:
            refusal = self._state.table.expelled[event.incarnation]
            raise EventRefused(refusal or self._fenced(known, event))
        if known is not None and is_older(event.incarnation, known.incarnation):
            raise EventRefused(self._fenced(known, event))
        if error := self._state.setbacks.left_out(event.member_id, now_s):
            raise EventRefused(
                refusals.cannot_bring_up(self._state.spec.job, event.member_id, MAX_TRIES, error)
            )
        if not self._state.members:
            self._state.spec = event.spec
        elif not self._state.spec.fits(event.spec):
            raise EventRefused(refusals.other_bounds(event.spec, self._state.spec))
        if known is not None:
            self._removal.remove(known, "a new process took its place", now_s)
        member = MemberState(
            member_id=event.member_id,
            incarnation=event.incarnation,
            info=event.info,
            joined_s=now_s,
            wait=Wait(since_s=now_s),
        )
        self._state.table.admit(member)
        self._state.emit(AdmitMember(member_id=member.member_id, incarnation=member.incarnation))
        self._state.log(
            "member_joined", f"{member.member_id} joined from {event.info.host}", member
        )
        if self._pause_keeper.announced_paused:
            self._state.notify_member(member, self._pause_keeper.notice())

    def disconnected(self, member: MemberState, now_s: float) -> None:
        self._state.table.disconnect(member, now_s)
        if self._state.deadlines.suspect_since_s is not None and member.is_in(self._state.running):
            self._removal.remove(
                member,
                "its stream broke, and so did a collective",
                now_s,
                cause="connection lost",
            )

    def halted(
        self, member: MemberState, event: ProcessHalted | ProcessContinued, now_s: float
    ) -> None:
        if isinstance(event, ProcessHalted):
            self._state.table.halt(member, now_s)
            self._state.log("member_halted", f"a signal halted {member.member_id}", member)
        else:
            self._state.table.note_continued(member)
            self._state.log("member_continued", f"{member.member_id} goes on", member)

    def _repeat_notices(self, member: MemberState, generation: Generation, now_s: float) -> None:
        """Repeat the notices that a reconnected member may have missed and has to act on.

        `generation`: the newest one that the member has entered, or began to bring up.
        """
        agreement, running = self._state.agreement, self._state.running
        missed_end = self._is_over(member, generation)
        if missed_end:
            self._state.notify_member(member, self._state.break_notice(generation))
        attempted = agreement is not None and member.is_in(agreement.roster)
        trains = running is not None and member.is_in(running)
        if agreement is not None and attempted and self._state.stage.phase is Phase.PREPARE:
            self._state.notify_member(member, self._state.prepare_notice(agreement))
        elif (
            agreement is not None
            and self._state.stage.phase is Phase.COMMITTED
            and (attempted or trains)
        ):
            assert self._state.record is not None
            self._state.notify_member(
                member, OutcomeNotice(reason=self._state.record.reason, record=self._state.record)
            )
            if agreement.stop_at is not None:
                self._state.notify_member(
                    member, self._state.stop_notice(agreement.generation, agreement.stop_at)
                )
        elif running is not None and trains:
            self._state.notify_member(
                member,
                RunningNotice(reason=self._state.stage.reason, generation=running.generation),
            )
        elif not member.settled and not missed_end:
            # The member missed the break of the last generation it was part of.
            self._state.notify_member(member, self._state.break_notice(self._state.last_generation))
        if self._pause_keeper.announced_paused:
            self._state.notify_member(member, self._pause_keeper.notice())
        if member.is_standby:
            self._state.notify_member(member, StandbyNotice(reason=member.waiting_for, position=0))
        if trains and (num := self._state.table.num_announced_waiting):
            notice = WaitingNotice(reason=f"{num} more members wait", num_members=num)
            self._state.notify_member(member, notice)
        if self._state.end.completing:
            self._state.notify_member(member, ClosingNotice(reason=self._state.stage.reason))
        if reason := self._state.end.stopping:
            self._drains.notify_stopping(member, reason, now_s)

    def _is_over(self, member: MemberState, generation: Generation) -> bool:
        """True if the synchronous generation that the member reports is over, or is now formed
        without the member.

        The member may not know: a leader may have died after it aborted the generation and before
        it notified members. Its successor then goes on with an older generation, or forms a new one
        of the members that connect first. A member that brought up the aborted generation and is
        not notified would wait for its peers until a time limit.
        """
        running, attempt = self._state.running, self._state.attempt
        if self._state.stage.phase is not Phase.COMMITTED:
            attempt = None
        newest = max((r.generation for r in (running, attempt) if r is not None), default=0)
        left_out = not member.is_in(running) and not member.is_in(attempt)
        over = NO_GENERATION < generation <= self._state.last_generation
        return over and (generation > newest or left_out) and self._state.attempt_is_synchronous


def is_older(incarnation: str, than: str) -> bool:
    """True if the process `incarnation` started before the process `than`, by their hosts' clocks.
    False if either is no UUID of version 7.

    UUIDs of version 7 (RFC 9562) begin with the time at which they were made. So a late call of the
    older process cannot replace the newer one.
    """
    first, second = _version_7(incarnation), _version_7(than)
    return first is not None and second is not None and first < second


def _version_7(text: str) -> UUID | None:
    try:
        value = UUID(text)
    except ValueError:
        return None
    return value if value.version == 7 else None
