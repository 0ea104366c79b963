"""State and decisions of a member of a job, without I/O: an event and the time go in, effects come
out. `MemberSession` carries out an event's effects in order, on the thread that submitted it. The
trainer's decisions (`begin_step`, `next_generation`, `judge_break`) are methods: waiting threads
call them again after every event.
"""

import math
from dataclasses import dataclass, replace

from shoal_client.connection.admission import ADMISSION_S
from shoal_client.connection.certificate_wait import DEFAULT_WAIT_S, CertificateWait
from shoal_client.membership import member_events as ev
from shoal_client.membership.generation_track import GenerationTrack, PlannedChange
from shoal_client.membership.identity import Identity
from shoal_client.membership.leaving import LEAVE_NOT_NEEDED, LeaveState, drained
from shoal_client.membership.member_calls import MemberCalls
from shoal_client.membership.wait_clock import WaitClock
from shoal_proto.back_off import BackOff
from shoal_proto.errors import (
    CertificateRefused,
    DeadlineExceeded,
    Fenced,
    JobFinished,
    JobQuarantined,
    MemberDrained,
    RetryError,
    ShoalError,
)
from shoal_proto.rosters import roster_digest
from shoal_proto.short_lists import sendable
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.identity_pb2 import Token

UNCHANGING = frozenset({"admitted", "pauses", "drain", "closing", "waiting"})
"""Kinds of notice that leave a standby member on standby."""

Effects = list[ev.Effect]


@dataclass(frozen=True, kw_only=True)
class OwnPause:
    """A pause of this member, as reported to the coordinator."""

    reason: str
    limit_s: float
    since_s: float
    number: int
    """Counts the pauses of this process, from 1."""
    over: bool = False

    def ended(self) -> "OwnPause":
        """The pause, ended."""
        return replace(self, over=True)

    def request(self, token: Token, now_s: float) -> pb.PauseRequest:
        """Request that reports the pause, with the elapsed part of its limit."""
        return pb.PauseRequest(
            token=token,
            paused=not self.over,
            reason=sendable(self.reason, 1000),
            limit_s=self.limit_s,
            elapsed_s=now_s - self.since_s,
            pause_number=self.number,
        )


class MemberCore:
    """State and decisions of one member, from joining to leaving."""

    def __init__(self, identity: Identity, certificate_wait_s: float = DEFAULT_WAIT_S) -> None:
        self.identity = identity
        self.track = GenerationTrack(identity)
        self.clock = WaitClock()
        self.failure: ShoalError | None = None
        self.waiting_for = "the coordinator to admit this member"
        """Text for errors and logs: the reason in the coordinator's newest notice, or the error
        that ended the last stream."""
        self.is_standby = False
        self.leaving = LeaveState()
        self.closed = False
        self._admitted: pb.Admitted | None = None
        self._calls = MemberCalls(identity.member_id)
        self._back_off = BackOff()
        self._certificate = CertificateWait(certificate_wait_s)
        self._own_pause: OwnPause | None = None
        self._unreported: ev.CallLeader | None = None
        """Newest report of a pause, if it failed."""
        self._held_since_s: float | None = None
        """Time since which the trainer waits to begin a step."""

    # --- status ---

    @property
    def admitted(self) -> bool:
        return self._admitted is not None

    @property
    def limits(self) -> pb.Limits:
        return self._admitted.limits if self._admitted is not None else pb.Limits()

    @property
    def http_url(self) -> str:
        return self._admitted.http_url if self._admitted is not None else ""

    @property
    def token(self) -> Token:
        """The fencing token for the generation that the trainer was last sent into."""
        return self.identity.token(self.track.generation)

    def is_idle(self, call: ev.CallLeader) -> bool:
        """True if the call is of no use, or not to be repeated, since the membership has ended."""
        is_last = call.persistence is ev.Persistence.LAST and call.give_up_s > 0
        return (call.persistence in ev.FOR_MEMBERS or is_last) and self.failure is not None

    def is_over(self, generation: int) -> bool:
        """True if the generation broke or has a successor, or the membership ended."""
        return bool(
            self.track.is_broken(generation) or self.track.successor is not None or self.failure
        )

    # --- events ---

    def step(self, event: ev.Event, now_s: float) -> Effects:
        """Handle an event; return the effects, in order."""
        effects: Effects
        match event:
            case ev.HeartbeatDue() | ev.HeartbeatRefused():
                effects = self._heartbeat(event, now_s)
            case ev.NoticeReceived():
                effects = self._notice(event, now_s)
            case ev.RosterValidated():
                effects = [self._with_stream(self._answer(event), now_s)]
            case ev.CallEnded():
                effects = self._call_ended(event, now_s)
            case ev.JoinWanted():
                self._calls.joins(now_s, event.within_s)
                effects = [ev.OpenStream(request=self._attend_request())]
            case ev.StreamEnded():
                effects = self._stream_ended(event, now_s)
            case ev.PauseBegun() | ev.PauseEnded():
                effects = self._pause(event, now_s)
            case ev.DrainWanted():
                self.leaving.request_leave(event.reason)
                # The request is sent on admission.
                effects = [self._drain_call(event.reason, now_s)] if self.admitted else []
            case ev.LeaveWanted():
                effects = self._leave(event, now_s)
            case ev.ThreadFailed():
                effects = self._fail(event.error)
            case ev.SessionClosed():
                self.closed = True
                effects = [ev.CancelStream()]
            case _:
                effects = [self._until_answered(self._request_of(event), now_s)]
        return effects

    def _request_of(self, event: ev.TrainerEvent) -> ev.Request:
        match event:
            case ev.ProposalMade():
                return self.track.propose(event.proposal)
            case ev.GenerationBroughtUp():
                return self.track.become_ready(event.record.roster)
            case ev.TrainerStopped():
                return self.track.record_stop(**vars(event))
            case ev.CollectiveFailed():
                return self.track.report_broken(
                    event.error, own=event.own, state_lost=event.state_lost
                )
            case ev.WorkDone():
                return self.leaving.work_done(event, self.token)

    def progress(self, step: int) -> None:
        """Set the number of committed steps."""
        self.track.step = step

    # --- the stream ---

    def _notice(self, event: ev.NoticeReceived, now_s: float) -> Effects:
        if self.clock.away:
            self.clock.set_away(now_s, away=False)
        self._back_off.reset()
        self._end_certificate_wait()
        notice, kind = event.notice, event.notice.WhichOneof("kind")
        waited_for, self.waiting_for = self.waiting_for, notice.reason or self.waiting_for
        self.is_standby = kind == "standby" or (self.is_standby and kind in UNCHANGING)
        self.clock.set_standby(now_s, is_standby=self.is_standby)
        return self._follow(event, waited_for, now_s)

    def _follow(self, event: ev.NoticeReceived, waited_for: str, now_s: float) -> Effects:
        """`waited_for`: the reason in the notice before this one."""
        notice = event.notice
        effects: Effects = []
        match notice.WhichOneof("kind"):
            case "admitted":
                effects = self._take_admitted(notice.admitted, now_s)
            case "prepare":
                effects = self._take_prepare(notice.prepare)
            case "outcome":
                effects = self._take_outcome(notice.outcome, now_s)
            case "stop_at":
                self.track.set_stop_at(notice.stop_at)
            case "break":
                break_notice = getattr(notice, "break")
                self.track.lost |= frozenset(break_notice.lost_member_ids)
                effects = self._break(break_notice.generation, notice.reason, now_s)
            case "pauses":
                self.clock.pause(notice.pauses.member_ids, now_s)
            case "standby" if notice.reason != waited_for:
                effects = [self._log("member_waits", reason=notice.reason)]
            case "closing":
                self.track.is_closing = True
            case "waiting":
                self.track.num_waiting = notice.waiting.num_members
            case "drain":
                effects = self._take_drain(
                    notice.reason,
                    now=notice.drain.now,
                    no_generation_follows=notice.drain.unreplaced,
                )
            case "refused" if event.refusal is not None:
                effects = self._fail(event.refusal)
        return effects

    def _take_admitted(self, admitted: pb.Admitted, now_s: float) -> Effects:
        again, self._admitted = self.admitted, admitted
        # The next notice names the paused members.
        self.clock.pause((), now_s)
        self.track.num_waiting = 0
        limits = admitted.limits
        effects: Effects = []
        if not self.leaving.has_begun:
            beats = ev.ClaimBeats(
                token=self.identity.token(0),
                heartbeat_s=limits.heartbeat_s,
                patience_s=limits.watchdog_s,
            )
            effects.append(beats)
        if self.leaving.reason:
            effects.append(ev.AskForDrain(reason=self.leaving.reason))
        if not again:
            return effects + self._calls.handle_admission(now_s)
        # A new leader does not have what members have reported.
        pause = self._own_pause
        repeated = (
            self.track.proposed(),
            pause.request(self.token, now_s) if pause is not None else None,
            self.track.report_to_repeat(),
            self.leaving.work_done_request,
        )
        return effects + [self._with_stream(each, now_s) for each in repeated if each is not None]

    def _take_prepare(self, prepare: pb.Prepare) -> Effects:
        states = {entry.state for entry in prepare.roster.entries}
        return [
            ev.ValidateRoster(
                prepare=prepare,
                digest=roster_digest(prepare.roster),
                from_checkpoint=pb.STATE_ACTION_CHECKPOINT in states,
            )
        ]

    def _answer(self, judged: ev.RosterValidated) -> pb.AnswerRequest:
        return pb.AnswerRequest(
            token=self.token,
            generation=judged.generation,
            digest=judged.digest,
            rejections=judged.rejections,
            unreachable=[
                pb.Unreachable(member_id=peer, error=seen)
                for peer, seen in judged.unreachable.items()
            ],
            checkpoint_steps=judged.checkpoint_steps,
        )

    def _take_outcome(self, record: pb.GenerationRecord, now_s: float) -> Effects:
        if record.verdict != pb.VERDICT_COMMITTED:
            number = record.roster.generation
            had = self.track.take_aborted(number)
            return self._break(number, record.reason, now_s) if had else []
        effects: Effects = []
        if self.track.is_superseded_by(record):
            effects = self._break(self.track.generation, record.reason, now_s)
        ready = self.track.take_committed(record)
        return effects + ([self._with_stream(ready, now_s)] if ready is not None else [])

    def _break(self, generation: int, reason: str, now_s: float) -> Effects:
        effects: Effects = []
        if self.track.record_break(generation, reason):
            fields = {"generation": generation, "reason": reason}
            effects = [
                ev.LogMessage(event="generation_broken", fields=fields, is_detail=True),
                ev.BreakGeneration(generation=generation, reason=reason),
            ]
        # Report the step of a trainer that never entered the generation that is over.
        report = self.track.idle_step_report()
        return effects + ([self._with_stream(report, now_s)] if report is not None else [])

    def _stream_ended(self, event: ev.StreamEnded, now_s: float) -> Effects:
        self.clock.set_away(now_s, away=True)
        error = event.error
        if self.closed or self.failure is not None:
            return []
        is_news = not self._certificate.is_waiting
        if error is not None and not self._outlasts(error, now_s):
            return self._fail(error)
        found = [] if self.admitted else self._calls.not_admitted(error, now_s)
        if error is not None:
            self.waiting_for = str(error)
        if isinstance(error, CertificateRefused) and is_news:
            reason, waits_s = str(error), self._certificate.limit_s
            found = [
                self._log("certificate_refused", is_warning=True, reason=reason, waits_s=waits_s)
            ]
        if isinstance(error, RetryError | CertificateRefused):
            found.append(ev.FindLeader(error=error))
        after_s = self._back_off.pause_s(event.chance)
        return [*found, ev.OpenStream(request=self._attend_request(), after_s=after_s)]

    def _attend_request(self) -> pb.AttendRequest:
        return self.identity.attend_request(self.track.generation)

    def _end_certificate_wait(self) -> None:
        if self._certificate.record_acceptance():
            self.waiting_for = "the coordinator to admit this member again"

    # --- calls ---

    def _with_stream(self, request: ev.Request, now_s: float) -> ev.CallLeader:
        # The end of the stream is not noticed during the call. So the call is shorter than any wait
        # for others, whose clock stops only once the end is noticed.
        timeout_s = self.limits.collective_s / 2
        return self._calls.new(request, ev.Persistence.WITH_STREAM, timeout_s, now_s)

    def _until_answered(self, request: ev.Request, now_s: float) -> ev.CallLeader:
        return self._calls.persistent(request, self.limits.join_s, now_s, self.clock.give_up_at_s)

    def _call_ended(self, event: ev.CallEnded, now_s: float) -> Effects:  # noqa: PLR0911 - a table
        call, error = event.call, event.error
        rule = call.persistence
        if rule is ev.Persistence.LAST:
            return self._leave_ended(event, now_s)
        if error is None:
            self._end_certificate_wait()
            return self._calls.handle_answer(call, now_s)
        if rule is ev.Persistence.ONCE:
            if isinstance(call.request, pb.PauseRequest):
                self._unreported = call
            return self._calls.give_up_call(call, error)
        if rule is ev.Persistence.FOR_A_TIME:
            return self._drain_unanswered(call, error, now_s)
        if not self._outlasts(error, now_s):
            return [*self._fail(error), ev.RaiseError(error=self.failure or error)]
        ended = self.closed or self.failure is not None
        if rule is ev.Persistence.UNTIL_ANSWERED and not ended and now_s < call.give_up_s:
            return self._calls.repeat_call(call, error, event.chance, now_s)
        return [ev.RaiseError(error=self.failure or error)]

    def _heartbeat(self, event: ev.HeartbeatDue | ev.HeartbeatRefused, now_s: float) -> Effects:
        if isinstance(event, ev.HeartbeatRefused):
            if self._outlasts(event.error, now_s):
                return []
            return [*self._fail(event.error), ev.RaiseError(error=event.error)]
        effects: Effects = []
        if not event.has_recent_beat:
            request = ev.heartbeat_request(event, self.token, self.track.step)
            effects = [self._calls.new(request, ev.Persistence.ONCE, self.limits.lease_s, now_s)]
        return effects + self._pause_again(now_s)

    def _pause(self, event: ev.PauseBegun | ev.PauseEnded, now_s: float) -> Effects:
        if isinstance(event, ev.PauseBegun):
            number = self._own_pause.number + 1 if self._own_pause is not None else 1
            self._own_pause = OwnPause(
                reason=event.reason, limit_s=event.limit_s, since_s=now_s, number=number
            )
        elif self._own_pause is not None:
            self._own_pause = self._own_pause.ended()
        else:
            return []
        request = self._own_pause.request(self.token, now_s)
        return [self._calls.new(request, ev.Persistence.ONCE, self.limits.lease_s, now_s)]

    def _pause_again(self, now_s: float) -> Effects:
        """Report the newest pause again, if a report failed: the coordinator would not notice the
        end of a pause by itself."""
        failed, self._unreported = self._unreported, None
        if failed is None or self._own_pause is None or self.failure is not None:
            return []
        # The next heartbeat waits for this call.
        return [
            replace(
                failed,
                request=self._own_pause.request(self.token, now_s),
                timeout_s=self.limits.lease_s / 2,
                num_failures=failed.num_failures + 1,
            )
        ]

    # --- the end ---

    def _outlasts(self, error: ShoalError, now_s: float) -> bool:
        """True if the membership continues. An admitted member waits a limited time for a renewed
        certificate."""
        if isinstance(error, CertificateRefused) and self.admitted:
            return self._certificate.record_refusal(now_s)
        quarantined = isinstance(error, JobQuarantined) and self.track.generation > 0
        return quarantined or isinstance(error, RetryError)

    def _fail(self, error: ShoalError) -> Effects:
        if self.failure is not None:
            return []
        if isinstance(error, MemberDrained):
            # The others train without this member; that notice has not arrived yet.
            return self._take_drain(error.seen, now=True)
        if isinstance(error, CertificateRefused) and self._certificate.is_waiting:
            error = self._certificate.final_error(error)
        self.failure = error
        effects = self._report_ending(error)
        if self.track.generation:
            effects.append(ev.BreakGeneration(generation=self.track.generation, reason=str(error)))
        return effects

    def _report_ending(self, error: ShoalError) -> Effects:
        return [] if self.leaving.has_begun else [ev.ReportEnding(error=error)]

    def _take_drain(
        self, reason: str, *, now: bool, no_generation_follows: bool = False
    ) -> Effects:
        """`now`: no other member needs this member any longer."""
        fields = {"member": self.identity.member_id, "now": now, "reason": reason}
        # The notice is sent twice: when the coordinator accepts the drain, and when the others go
        # on.
        is_detail = self.leaving.is_noticed
        self.leaving.is_noticed = True
        effects: Effects = [
            ev.LogMessage(event="drain_noticed", fields=fields, is_detail=is_detail)
        ]
        self.leaving.request_leave(reason or "asked to")
        self.leaving.no_generation_follows |= no_generation_follows
        if now:
            # `_fail` would interrupt the step in progress, which is to be completed.
            end = drained(self.identity, self.leaving.reason)
            self.failure = self.failure or end
            effects += self._report_ending(end)
        return effects

    def _log(self, event: str, *, is_warning: bool = False, **fields: object) -> ev.LogMessage:
        named = {"member": self.identity.member_id, **fields}
        return ev.LogMessage(event=event, fields=named, is_warning=is_warning)

    def _drain_call(self, reason: str, now_s: float) -> ev.CallLeader:
        request = self.leaving.drain_request(self.identity, reason)
        within_s, give_up_s = self.limits.lease_s, now_s + self.limits.drain_s
        return self._calls.new(request, ev.Persistence.FOR_A_TIME, within_s, now_s, give_up_s)

    def _drain_unanswered(self, call: ev.CallLeader, error: ShoalError, now_s: float) -> Effects:
        if not isinstance(error, RetryError | JobQuarantined):
            # A leader that does not know this member yet gets the request on admission.
            return self._calls.give_up_call(call, error)
        assert isinstance(call.request, pb.DrainRequest)
        if self.closed:
            return []
        if now_s >= call.give_up_s:
            self.leaving.is_unanswered = True
            reason = f"{call.request.reason}; meanwhile {error}"
            # No coordinator forms a generation without this member.
            return self._take_drain(reason, now=True, no_generation_follows=True)
        return [self._calls.repeat_after_pause(call)]

    def _leave(self, event: ev.LeaveWanted, now_s: float) -> Effects:
        drained = isinstance(self.failure, MemberDrained)
        self.leaving.begin(drained=drained)
        # A heartbeat after the leave would be refused like a lost member's.
        effects: Effects = [ev.UnclaimBeats()]
        if self.admitted and (self.failure is None or drained):
            # Only this call reports that the work is done.
            is_needed = not drained or self.leaving.is_unanswered
            persists = event.completed and event.timeout_s is None and is_needed
            request = pb.LeaveRequest(
                token=self.token,
                completed=event.completed,
                reason=sendable(event.reason, 1000),
                failed=event.failed,
            )
            within_s = self.leaving.call_timeout_s(event.timeout_s)
            if persists and not drained:
                within_s = self.limits.join_s
            give_up_s = math.inf if persists else 0.0
            last = self._calls.new(request, ev.Persistence.LAST, within_s, now_s, give_up_s)
            effects.append(last)
        elif event.completed and self.failure and not isinstance(self.failure, JobFinished):
            # Lost after the last step, say: nobody may have finished the job.
            effects.append(ev.RaiseError(error=self.leaving.not_recorded(self.failure, None)))
        return effects

    def _leave_ended(self, event: ev.CallEnded, now_s: float) -> Effects:
        call, error = event.call, event.error
        if error is not None and isinstance(self.failure, JobFinished | Fenced):
            # An earlier leader may have recorded the leave, and died before it answered.
            error = self.failure
        if error is None or isinstance(error, LEAVE_NOT_NEEDED) or not call.give_up_s:
            return self.leaving.end_call(error, self.identity.member_id)
        if self._outlasts(error, now_s) and self.failure is None and not self.closed:
            return self._calls.repeat_call(call, error, event.chance, now_s)
        return [ev.RaiseError(error=self.leaving.not_recorded(error, self.failure))]

    # --- the trainer's decisions ---

    def begin_step(
        self,
        step: int,
        now_s: float,
        *,
        handed_over: bool = True,
        steps_before_leaving: bool = False,
    ) -> ev.StepBegun | ev.BringUpGeneration | ev.HandOver | ev.WaitUntil | ev.RaiseError:
        """Decide if step number `step` (0-based) may begin.

        `handed_over`: False if this member has yet to hand over data that the others need.
        `steps_before_leaving`: a drained member that no generation follows takes further steps,
        until the members write a checkpoint.
        """
        stays = steps_before_leaving and self.leaving.no_generation_follows
        stays = stays and isinstance(self.failure, MemberDrained)
        if self.failure is not None and not stays:
            return ev.RaiseError(error=self.failure)
        answer = self.track.begin_step(step)
        if not isinstance(answer, PlannedChange):
            self._held_since_s = None
            return answer
        if answer.stop_at is not None and not handed_over:
            return ev.HAND_OVER
        if self.failure is not None and answer.stop_at is not None:
            return ev.RaiseError(error=self.failure)
        if self._held_since_s is None:
            self._held_since_s = now_s
        since_s = self._held_since_s
        if answer.stop_at is None:
            give_up_s = self.clock.give_up_s(since_s, self._boundary_limit_s, now_s)
        else:
            give_up_s = max(since_s, self.clock.paused_until_s(now_s)) + self._boundary_limit_s
        if now_s < give_up_s:
            return ev.WaitUntil(until_s=give_up_s)
        self._held_since_s = None
        return ev.RaiseError(error=self._boundary_overdue(answer))

    @property
    def _boundary_limit_s(self) -> float:
        """Limit for the slowest member's step, and for the bring-up without this member."""
        return 2 * self.limits.collective_s + self.limits.bring_up_s

    def _boundary_overdue(self, change: PlannedChange) -> ShoalError:
        if change.stop_at is not None:
            # No coordinator reports the others' next generation.
            return drained(self.identity, "no report that the others' next generation runs")
        return DeadlineExceeded(
            "the members did not agree on a step to stop at", seen=self.waiting_for
        )

    def next_generation(
        self, above: int, since_s: float, now_s: float, limit_s: float | None = None
    ) -> ev.BringUpGeneration | ev.WaitUntil | ev.RaiseError:
        """The next committed record above `above` that includes this member. `limit_s` None: the
        join limit plus ADMISSION_S, on the `WaitClock`.
        """
        if self.failure is not None:
            return ev.RaiseError(error=self.failure)
        record = self.track.enter(above)
        if record is not None:
            return ev.BringUpGeneration(record=record)
        if limit_s is None:
            limit_s = self.limits.join_s + ADMISSION_S
            give_up_s = self.clock.give_up_s(since_s, limit_s, now_s)
        else:
            give_up_s = since_s + limit_s
        if now_s < give_up_s:
            return ev.WaitUntil(until_s=give_up_s)
        what = f"no generation above {above} within {limit_s:g} s"
        return ev.RaiseError(error=DeadlineExceeded(what, seen=self.waiting_for))

    def others_done(
        self, generation: int, give_up_s: float, away_limit_s: float, now_s: float
    ) -> ev.GenerationOver | ev.WaitUntil:
        """Decide if this member is still needed with its work done."""
        is_over = self.is_over(generation) or self.track.is_closing
        return self.clock.work_done(give_up_s, away_limit_s, now_s, is_over=is_over)

    def judge_break(
        self, generation: int, since_s: float, limit_s: float, now_s: float
    ) -> ev.GenerationOver | ev.WaitUntil:
        """Decide if a generation with a failed collective, or the membership, is over. `limit_s`
        runs on the `WaitClock`.
        """
        if self.track.is_broken(generation) or self.failure is not None:
            return ev.GenerationOver(over=True)
        give_up_s = self.clock.give_up_s(since_s, limit_s, now_s)
        return (
            ev.WaitUntil(until_s=give_up_s) if now_s < give_up_s else ev.GenerationOver(over=False)
        )
