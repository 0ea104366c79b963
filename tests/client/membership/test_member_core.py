"""Transcripts of the member's core: its inputs and their effects."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from shoal_client.connection.admission import ADMISSION_S
from shoal_client.connection.certificate_wait import DEFAULT_WAIT_S
from shoal_client.membership import member_events as ev
from shoal_client.membership.identity import Identity
from shoal_client.membership.member_core import MemberCore
from shoal_proto.errors import (
    CertificateRefused,
    DeadlineExceeded,
    Fenced,
    JobFinished,
    JobQuarantined,
    MemberDrained,
    ProposalConflict,
    ShoalError,
    Unavailable,
)
from shoal_proto.rosters import roster_digest
from shoal_proto.v1 import membership_pb2 as pb

LIMITS = pb.Limits(
    heartbeat_s=1, lease_s=4, prepare_s=8, bring_up_s=30, collective_s=10, join_s=60, drain_s=20
)
NOBODY = Unavailable("nobody is there")


def roster(generation: int, *names: str, planned: bool = False, synchronous: bool = True) -> Any:
    entries = [
        pb.RosterEntry(member_id=name, public_id=f"p-{name}", rank=rank)
        for rank, name in enumerate(names)
    ]
    return pb.Roster(
        generation=generation, entries=entries, planned=planned, synchronous=synchronous
    )


def committed(generation: int, *names: str, planned: bool = False) -> pb.Notice:
    record = pb.GenerationRecord(
        roster=roster(generation, *names, planned=planned), verdict=pb.VERDICT_COMMITTED
    )
    return pb.Notice(reason="all accepted", outcome=record)


def aborted(generation: int, *names: str) -> pb.Notice:
    record = pb.GenerationRecord(
        roster=roster(generation, *names), verdict=pb.VERDICT_ABORTED, reason="b was lost"
    )
    return pb.Notice(outcome=record)


def stop_at(generation: int, step: int) -> pb.Notice:
    return pb.Notice(stop_at=pb.StopAt(generation=generation, step=step))


def broken(generation: int) -> pb.Notice:
    notice = pb.Notice(reason="b was lost")
    getattr(notice, "break").generation = generation
    return notice


ADMITTED = pb.Notice(reason="admitted", admitted=pb.Admitted(limits=LIMITS))


@dataclass
class Member:
    """Steps the core, and keeps the time."""

    core: MemberCore = field(
        default_factory=lambda: MemberCore(
            Identity(
                spec=pb.JobSpec(job="j"),
                member_id="a",
                incarnation="i-a",
                public_id="p-a",
                info=pb.MemberInfo(host="h"),
            )
        )
    )
    now_s: float = 0.0

    def receive(self, *notices: pb.Notice) -> list[str]:
        """Receive notices, and return the effects as text."""
        return [
            effect for notice in notices for effect in self.does(ev.NoticeReceived(notice=notice))
        ]

    def does(self, event: ev.Event) -> list[str]:
        return [described(effect) for effect in self.core.step(event, self.now_s)]

    def begins(self, step: int, **options: bool) -> object:
        decision = self.core.begin_step(step, self.now_s, **options)
        return (
            decision.record.roster.generation
            if isinstance(decision, ev.BringUpGeneration)
            else decision
        )

    def enters(self, above: int) -> int:
        decision = self.core.next_generation(above, self.now_s, self.now_s)
        assert isinstance(decision, ev.BringUpGeneration)
        return decision.record.roster.generation


def described(effect: ev.Effect) -> str:
    match effect:
        case ev.CallLeader(request=request):
            return f"{type(request).__name__.removesuffix('Request')}{_numbers(request)}"
        case ev.BreakGeneration():
            return f"Break {effect.generation}"
        case ev.RaiseError() | ev.ReportEnding() | ev.FindLeader():
            return f"{type(effect).__name__} {type(effect.error).__name__}"
        case ev.LogMessage():
            return effect.event
        case _:
            return type(effect).__name__


def _numbers(request: ev.Request) -> str:
    match request:
        case pb.OfferRequest():
            return f" {request.next_step} for {request.generation}"
        case pb.SettleRequest():
            return f" {request.step} after {request.token.generation}"
        case pb.ReadyRequest():
            return f" {request.token.generation}"
    return ""


def proposal(step: int = 0) -> ev.ProposalMade:
    return ev.ProposalMade(proposal=pb.Proposal(synchronous=True, step=step, has_state=step > 0))


def a_member() -> Member:
    """An admitted member that has proposed."""
    member = Member()
    assert member.does(ev.JoinWanted()) == ["OpenStream"]
    assert member.receive(ADMITTED) == ["ClaimBeats"]
    assert member.does(proposal()) == ["Propose"]
    return member


def training(generation: int = 1) -> Member:
    """A member that trains with b, and has begun step 7."""
    member = a_member()
    member.receive(committed(generation, "a", "b"))
    assert member.enters(above=0) == generation
    record = pb.GenerationRecord(roster=roster(generation, "a", "b"))
    assert member.does(ev.GenerationBroughtUp(record=record)) == [f"Ready {generation}"]
    assert member.begins(7) == ev.BEGUN
    return member


def ended(call: ev.CallLeader, error: ShoalError | None = None) -> ev.CallEnded:
    return ev.CallEnded(call=call, error=error)


def the_call(effects: list[ev.Effect]) -> ev.CallLeader:
    (call,) = [effect for effect in effects if isinstance(effect, ev.CallLeader)]
    return call


# --- generations ---


def test_the_answer_to_a_roster_is_its_digest() -> None:
    member, shown = a_member(), roster(1, "a", "b")
    (judge,) = member.core.step(
        ev.NoticeReceived(notice=pb.Notice(prepare=pb.Prepare(roster=shown))), 0
    )
    assert isinstance(judge, ev.ValidateRoster)
    assert judge.digest == roster_digest(shown)
    judged = ev.RosterValidated(generation=1, digest=judge.digest, unreachable={"b": "refused"})
    answer = the_call(member.core.step(judged, 0)).request
    assert isinstance(answer, pb.AnswerRequest)
    assert (answer.generation, answer.digest) == (1, judge.digest)
    assert [peer.member_id for peer in answer.unreachable] == ["b"]


def test_no_step_beyond_an_offer_begins_before_the_boundary_is_agreed() -> None:
    member = training()
    assert member.receive(committed(2, "a", "b", "c", planned=True)) == ["Offer 8 for 2"]
    assert member.begins(7) == ev.BEGUN
    assert member.begins(8) == ev.WaitUntil(until_s=2 * 10 + 30)
    assert member.receive(stop_at(2, 9)) == []
    assert member.begins(8) == ev.BEGUN
    assert member.begins(9) == 2
    assert member.core.token.generation == 2


def test_a_repeated_offer_is_the_same() -> None:
    """A new leader collects the offers again, whatever steps have begun since."""
    member = training()
    change = committed(2, "a", "b", "c", planned=True)
    assert member.receive(change, change) == ["Offer 8 for 2"] * 2
    member.receive(stop_at(2, 9))
    assert member.begins(8) == ev.BEGUN
    assert member.receive(change) == ["Offer 8 for 2"]
    assert member.begins(9) == 2
    assert member.receive(change) == ["Offer 9 for 2"]


def test_an_aborted_change_holds_up_no_member() -> None:
    member = training()
    member.receive(committed(2, "a", "b", "c", planned=True))
    assert member.receive(aborted(2, "a", "b", "c")) == []
    assert member.begins(8) == ev.BEGUN
    assert not member.core.track.is_broken(1)


def test_the_limit_for_a_boundary_is_paused_without_a_coordinator() -> None:
    member = training()
    member.receive(committed(2, "a", "b", "c", planned=True))
    assert member.begins(8) == ev.WaitUntil(until_s=50)
    member.does(ev.StreamEnded(error=NOBODY))
    member.now_s = 1000.0
    assert member.begins(8) == ev.WaitUntil(until_s=float("inf"))
    member.receive(ADMITTED)
    assert member.begins(8) == ev.WaitUntil(until_s=1050)
    member.now_s = 1050.0
    decision = member.begins(8)
    assert isinstance(decision, ev.RaiseError)
    assert isinstance(decision.error, DeadlineExceeded)


def test_a_break_is_reported_once_and_covers_earlier_generations() -> None:
    member = training()
    assert member.receive(broken(1)) == ["generation_broken", "Break 1"]
    assert member.receive(broken(1)) == []
    assert member.core.judge_break(1, 0, 10, 0) == ev.GenerationOver(over=True)
    member = training()
    assert member.receive(broken(2)) == ["generation_broken", "Break 2"]
    assert member.core.track.is_broken(1)


def test_no_broken_generation_is_entered_and_none_is_entered_twice() -> None:
    member = training()
    assert isinstance(member.core.next_generation(1, 0, 0), ev.WaitUntil)
    member.receive(broken(1))
    member.does(ev.TrainerStopped(step=7, has_state=True))
    member.receive(committed(2, "a"), aborted(2, "a"))
    assert isinstance(member.core.next_generation(1, 0, 0), ev.WaitUntil)
    member.receive(committed(3, "a"))
    assert member.enters(above=1) == 3


def test_a_member_that_missed_a_generation_settles_at_its_earlier_step() -> None:
    member = a_member()
    assert member.receive(committed(1, "a", "b"), aborted(1, "a", "b")) == [
        "generation_broken",
        "Break 1",
        "Settle 0 after 0",
    ]


# --- a new leader ---


def test_a_new_leader_gets_the_report_of_a_ready_generation() -> None:
    member = training()
    member.does(ev.StreamEnded(error=NOBODY))
    assert member.receive(ADMITTED) == ["ClaimBeats", "Propose", "Ready 1"]


def test_a_new_leader_gets_the_step_of_a_waiting_trainer() -> None:
    member = training()
    member.receive(broken(1))
    assert member.does(ev.TrainerStopped(step=7, has_state=True)) == ["Settle 7 after 1"]
    member.does(ev.StreamEnded(error=NOBODY))
    assert member.receive(ADMITTED) == ["ClaimBeats", "Propose", "Settle 7 after 1"]
    assert member.receive(broken(1)) == ["Settle 7 after 1"]


def test_a_new_leader_gets_the_report_of_a_failed_collective() -> None:
    """The old leader may have died between its decision and the notice of it."""
    member = training()
    assert member.does(ev.CollectiveFailed(error="reset")) == ["ReportBroken"]
    member.does(ev.StreamEnded(error=NOBODY))
    assert member.receive(ADMITTED) == ["ClaimBeats", "Propose", "ReportBroken"]
    member.receive(broken(1))
    member.does(ev.StreamEnded(error=NOBODY))
    assert member.receive(ADMITTED) == ["ClaimBeats", "Propose", "Ready 1"]


def test_an_unplanned_generation_ends_the_one_before() -> None:
    """Processes that could report that end may all be dead."""
    member = training()
    assert member.receive(committed(3, "a", "b")) == ["generation_broken", "Break 1"]
    assert member.core.judge_break(1, 0, 10, 0) == ev.GenerationOver(over=True)
    assert member.enters(above=1) == 3


def test_a_new_leader_gets_the_report_of_a_pause_with_its_length() -> None:
    member = training()
    assert member.does(ev.PauseBegun(reason="validation", limit_s=60)) == ["Pause"]
    member.does(ev.StreamEnded(error=NOBODY))
    member.now_s = 12.0
    effects = member.core.step(ev.NoticeReceived(notice=ADMITTED), member.now_s)
    (pause,) = [
        effect.request
        for effect in effects
        if isinstance(effect, ev.CallLeader) and isinstance(effect.request, pb.PauseRequest)
    ]
    assert (pause.paused, pause.elapsed_s) == (True, 12.0)


def test_a_new_leader_gets_the_drain_request_again() -> None:
    member = training()
    assert member.does(ev.DrainWanted(reason="SIGTERM")) == ["Drain"]
    member.does(ev.StreamEnded(error=NOBODY))
    assert member.receive(ADMITTED) == ["ClaimBeats", "AskForDrain", "Propose", "Ready 1"]


def test_pauses_between_attempts_to_attend_grow_and_are_reset() -> None:
    member, pauses = training(), []
    for _ in range(3):
        find, opening = member.core.step(ev.StreamEnded(error=NOBODY), 0)
        assert isinstance(find, ev.FindLeader)
        assert isinstance(opening, ev.OpenStream)
        pauses.append(opening.after_s)
    assert pauses == [0.02, 0.04, 0.08]
    member.receive(ADMITTED)
    _, opening = member.core.step(ev.StreamEnded(error=NOBODY), 0)
    assert isinstance(opening, ev.OpenStream)
    assert opening.after_s == 0.02
    assert opening.request.token.generation == 1


def test_a_member_without_admission_logs_its_wait_once() -> None:
    """The line has what it waits for, how long, and why. A mere change of leaders gives no line."""
    member = Member()
    assert member.does(ev.JoinWanted(within_s=600.0)) == ["OpenStream"]
    told_at = {}
    for at_s in (0.02, 0.5, 1.5, 3.0):
        effects = member.core.step(ev.StreamEnded(error=NOBODY), at_s)
        told_at[at_s] = [effect for effect in effects if isinstance(effect, ev.LogMessage)]
    assert [len(each) for each in told_at.values()] == [0, 0, 1, 0]
    (line,) = told_at[1.5]
    assert line.event == "coordinator_disconnected" and line.is_warning
    assert line.fields == {"waits_for": "admission", "waits_s": 600, "reason": str(NOBODY)}
    assert member.receive(ADMITTED) == ["ClaimBeats", "coordinator_reconnected"]


# --- calls ---


def test_a_trainers_report_is_repeated_until_it_is_answered() -> None:
    member = training()
    call = the_call(member.core.step(ev.CollectiveFailed(error="reset"), 0))
    effects = [described(effect) for effect in member.core.step(ended(call, NOBODY), 60)]
    assert effects == ["coordinator_disconnected", "ReportBroken"]
    for failure in range(5):
        call = the_call(member.core.step(ended(call, NOBODY), 100.0 * failure))
    assert call.after_s > 0
    assert [described(effect) for effect in member.core.step(ended(call), 1000)] == [
        "coordinator_reconnected"
    ]


def test_a_report_ends_with_the_membership() -> None:
    """A call without an answer is given up; the notice that the member leaves is still sent."""
    member = training()
    report = the_call(member.core.step(ev.CollectiveFailed(error="reset"), 0))
    assert not member.core.is_idle(report)
    member.core.step(ev.HeartbeatRefused(error=Fenced("lost")), 0)
    assert member.core.is_idle(report)
    drained = training()
    drained.receive(pb.Notice(drain=pb.Drain(now=True)))
    leaving = drained.core.step(ev.LeaveWanted(completed=False, reason="", timeout_s=3.0), 0)
    assert not drained.core.is_idle(the_call(leaving))


@pytest.mark.parametrize("over", [ev.SessionClosed(), ev.HeartbeatRefused(error=Fenced("lost"))])
def test_an_unanswered_call_ends_once_the_membership_is_over(over: ev.Event) -> None:
    member = training()
    call = the_call(member.core.step(ev.CollectiveFailed(error="reset"), 0))
    member.does(over)
    assert member.does(ended(call, NOBODY))[0].startswith("RaiseError ")


def test_an_undelivered_answer_does_not_end_the_membership() -> None:
    member = training()
    change = ev.NoticeReceived(notice=committed(2, "a", "b", planned=True))
    call = the_call(member.core.step(change, 0))
    assert member.does(ended(call, NOBODY)) == ["RaiseError Unavailable"]
    assert member.core.failure is None


EXPIRED = CertificateRefused("no TLS connection", seen="it expired")


def test_an_admitted_member_waits_for_an_accepted_certificate() -> None:
    """An admitted member whose certificate is refused logs this once, tries every coordinator, and
    ends when its own time limit is over."""
    member = a_member()
    effects = member.does(ev.StreamEnded(error=EXPIRED))
    assert effects == ["certificate_refused", "FindLeader CertificateRefused", "OpenStream"]
    assert "it expired" in member.core.waiting_for
    member.now_s = 599.0
    effects = member.does(ev.StreamEnded(error=EXPIRED))
    assert effects == ["FindLeader CertificateRefused", "OpenStream"]
    call = the_call(member.core.step(proposal(), member.now_s))
    assert "OpenStream" not in member.does(ended(call, EXPIRED))
    assert member.core.failure is None
    member.now_s = 600.0
    assert member.does(ev.StreamEnded(error=EXPIRED)) == ["ReportEnding CertificateRefused"]
    assert "for 600 s" in str(member.core.failure)


def test_each_certificate_has_the_full_time() -> None:
    """The time counts from the first refusal after the last successful connection."""
    member = a_member()
    member.receive(ADMITTED)
    member.does(ev.StreamEnded(error=EXPIRED))
    member.now_s = 500.0
    member.receive(ADMITTED)
    member.now_s = 700.0
    assert "certificate_refused" in member.does(ev.StreamEnded(error=EXPIRED))
    assert member.core.failure is None


def test_an_answered_call_ends_the_wait_for_a_certificate() -> None:
    """The coordinator may have no notice to send for longer than the time limit."""
    member = a_member()
    call = the_call(member.core.step(proposal(), member.now_s))
    again = the_call(member.core.step(ended(call, EXPIRED), member.now_s))
    member.does(ended(again))
    member.now_s = 700.0
    call = the_call(member.core.step(proposal(), member.now_s))
    assert "ReportEnding CertificateRefused" not in member.does(ended(call, EXPIRED))
    assert member.core.failure is None


def test_a_refused_certificate_fails_a_new_member_at_once() -> None:
    member = Member()
    assert member.does(ev.StreamEnded(error=EXPIRED)) == ["ReportEnding CertificateRefused"]
    assert member.core.failure is EXPIRED


def test_a_refused_report_ends_the_membership() -> None:
    """The generation's collectives are cut, and the launcher learns of the end."""
    member = training()
    call = the_call(member.core.step(ev.TrainerStopped(step=7, has_state=True), 0))
    assert member.does(ended(call, JobFinished("the job is over"))) == [
        "ReportEnding JobFinished",
        "Break 1",
        "RaiseError JobFinished",
    ]
    assert member.does(ev.StreamEnded(error=NOBODY)) == []
    assert isinstance(member.begins(8), ev.RaiseError)


def test_a_failed_report_of_a_pause_does_not_end_the_membership() -> None:
    member = training()
    call = the_call(member.core.step(ev.PauseBegun(reason="validation", limit_s=60), 0))
    assert member.does(ended(call, Fenced("lost"))) == ["pause_not_reported"]
    assert member.core.failure is None


def test_the_report_of_a_pause_is_repeated_with_heartbeats_until_it_is_answered() -> None:
    """Without the report of its end, the pause would hold up joins, and exceed its limit."""
    member, due = training(), ev.HeartbeatDue(has_recent_beat=True)
    member.does(ev.PauseBegun(reason="validation", limit_s=60))
    member.now_s = 5.0
    call = the_call(member.core.step(ev.PauseEnded(), member.now_s))
    assert member.does(due) == [], "the first call may be answered yet"
    assert member.does(ended(call, NOBODY)) == ["pause_not_reported"]
    for _ in range(2):
        member.now_s += 1.0
        call = the_call(member.core.step(due, member.now_s))
        assert isinstance(call.request, pb.PauseRequest)
        assert (call.request.paused, call.request.pause_number) == (False, 1)
        assert member.does(ended(call, NOBODY)) == []
    assert member.does(ev.HeartbeatDue()) == ["Heartbeat", "Pause"]
    assert member.does(ended(call)) == ["coordinator_reconnected"]
    assert member.does(due) == []


def test_the_newest_pause_is_reported_in_place_of_an_earlier_one() -> None:
    """A late report of an earlier pause would be ignored."""
    member = training()
    first = the_call(member.core.step(ev.PauseBegun(reason="validation", limit_s=60), 0))
    member.does(ended(first, NOBODY))
    member.does(ev.PauseEnded())
    member.does(ev.PauseBegun(reason="export", limit_s=90))
    call = the_call(member.core.step(ev.HeartbeatDue(has_recent_beat=True), 2.0))
    assert isinstance(call.request, pb.PauseRequest)
    assert (call.request.reason, call.request.pause_number) == ("export", 2)


# --- heartbeats ---


def test_heartbeats_of_the_launcher_replace_those_of_the_member() -> None:
    member = training()
    assert member.does(ev.HeartbeatDue(has_recent_beat=True)) == []
    beat = the_call(member.core.step(ev.HeartbeatDue(moved=3, waits=True), 0)).request
    assert isinstance(beat, pb.HeartbeatRequest)
    assert (beat.beats[0].moved, beat.beats[0].waits) == (3, True)


def test_an_outage_of_heartbeats_is_logged_once() -> None:
    member = training()
    call = the_call(member.core.step(ev.HeartbeatDue(), 0))
    assert member.does(ended(call, NOBODY)) == ["heartbeat_failed"]
    assert member.does(ended(call, NOBODY)) == []
    assert member.does(ended(call)) == []
    assert member.does(ended(call, NOBODY)) == ["heartbeat_failed"]


def test_a_fenced_member_stops_training() -> None:
    member = training()
    effects = member.does(ev.HeartbeatRefused(error=Fenced("lost")))
    assert effects == ["ReportEnding Fenced", "Break 1", "RaiseError Fenced"]
    assert isinstance(member.begins(8), ev.RaiseError)


# --- joining and leaving ---


def test_a_refusal_on_the_stream_ends_the_membership() -> None:
    member = a_member()
    notice = pb.Notice(reason="members differ")
    notice.refused.SetInParent()
    event = ev.NoticeReceived(notice=notice, refusal=ProposalConflict("members differ"))
    assert member.does(event) == ["ReportEnding ProposalConflict"]
    decision = member.core.next_generation(0, 0, 0)
    assert isinstance(decision, ev.RaiseError)
    assert isinstance(decision.error, ProposalConflict)


def test_a_wait_for_a_generation_ends_with_the_coordinators_reason() -> None:
    member = a_member()
    member.receive(pb.Notice(reason="2 of 3 members are there"))
    limit_s = LIMITS.join_s + ADMISSION_S
    assert member.core.next_generation(0, 0, 1) == ev.WaitUntil(until_s=limit_s)
    decision = member.core.next_generation(0, 0, limit_s)
    assert isinstance(decision, ev.RaiseError)
    assert isinstance(decision.error, DeadlineExceeded)
    assert decision.error.seen == "2 of 3 members are there"


def test_a_standby_member_waits_without_a_limit() -> None:
    member = a_member()
    member.receive(pb.Notice(reason="2 members are enough", standby=pb.Standby(position=0)))
    member.receive(pb.Notice(pauses=pb.Pauses(member_ids=["b"])))
    member.receive(pb.Notice(pauses=pb.Pauses()))
    assert member.core.next_generation(0, 0, 1e6) == ev.WaitUntil(until_s=math.inf)
    member.now_s = 1e6
    member.receive(aborted(1, "a", "b"))
    until_s = 1e6 + LIMITS.join_s + ADMISSION_S
    assert member.core.next_generation(0, 0, 1e6) == ev.WaitUntil(until_s=until_s)


def test_limits_are_extended_while_a_member_is_paused() -> None:
    member = training()
    member.receive(pb.Notice(pauses=pb.Pauses(member_ids=["b"])))
    assert member.core.judge_break(1, 0, 10, 300) == ev.WaitUntil(until_s=310)
    member.now_s = 400.0
    member.receive(pb.Notice(pauses=pb.Pauses()))
    assert member.core.judge_break(1, 0, 10, 409) == ev.WaitUntil(until_s=410)
    assert member.core.judge_break(1, 0, 10, 410) == ev.GenerationOver(over=False)


def test_a_drained_member_hands_over_once_and_leaves_when_the_others_run() -> None:
    member = training()
    assert member.does(ev.DrainWanted(reason="SIGTERM")) == ["Drain"]
    member.receive(committed(2, "b", planned=True), stop_at(2, 8))
    assert member.begins(8, handed_over=False) == ev.HAND_OVER
    assert isinstance(member.begins(8), ev.WaitUntil)
    now = pb.Notice(reason="SIGTERM", drain=pb.Drain(now=True))
    assert member.receive(now) == ["drain_noticed", "ReportEnding MemberDrained"]
    decision = member.begins(8)
    assert isinstance(decision, ev.RaiseError)
    assert isinstance(decision.error, MemberDrained)
    leave = ev.LeaveWanted(completed=False, reason="drained", timeout_s=3)
    assert member.does(leave) == ["UnclaimBeats", "Leave"]


def test_a_drain_is_logged_once() -> None:
    """The member gets two notices: to stop at the others' step, and that they run without it."""
    member = training()
    levels = []
    for now in (False, True):
        notice = pb.Notice(reason="SIGTERM", drain=pb.Drain(now=now))
        effects = member.core.step(ev.NoticeReceived(notice=notice), 0)
        levels += [each.is_detail for each in effects if isinstance(each, ev.LogMessage)]
    assert levels == [False, True]


def test_a_refused_call_may_precede_the_notice_of_a_finished_drain() -> None:
    """The member is not lost: its collectives are not cut, and it sends no notice that it
    leaves."""
    member = training()
    member.does(ev.DrainWanted(reason="SIGTERM"))
    member.receive(committed(2, "b", planned=True), stop_at(2, 8))
    call = the_call(member.core.step(ev.TrainerStopped(step=8, has_state=True), 0))
    drained = MemberDrained("a has left job j", seen="SIGTERM")
    assert member.does(ended(call, drained)) == [
        "drain_noticed",
        "ReportEnding MemberDrained",
        "RaiseError MemberDrained",
    ]
    leave = ev.LeaveWanted(completed=False, reason="drained", timeout_s=3)
    call = the_call(member.core.step(leave, 0))
    assert member.does(ended(call, drained)) == []
    assert member.core.leaving.is_acknowledged


def test_a_drained_member_of_a_quarantined_job_leaves_at_its_limit() -> None:
    """No agreement is possible until the job is repaired; the request is repeated with growing
    pauses."""
    member = training()
    call = the_call(member.core.step(ev.DrainWanted(reason="SIGTERM"), 0))
    quarantined = JobQuarantined("a record cannot be read")
    pauses = []
    for at_s in (0.1, 5.0, 19.9):
        call = the_call(member.core.step(ended(call, quarantined), at_s))
        pauses.append(call.after_s)
    assert pauses == sorted(pauses) and pauses[0] > 0
    effects = member.core.step(ended(call, quarantined), 20.1)
    assert [described(effect) for effect in effects] == [
        "drain_noticed",
        "ReportEnding MemberDrained",
    ]
    assert isinstance(member.core.failure, MemberDrained)


def test_a_drained_member_without_a_coordinator_leaves() -> None:
    member = training()
    call = the_call(member.core.step(ev.DrainWanted(reason="SIGTERM"), 0))
    again = the_call(member.core.step(ended(call, NOBODY), 19))
    assert [described(effect) for effect in member.core.step(ended(again, NOBODY), 20)] == [
        "drain_noticed",
        "ReportEnding MemberDrained",
    ]


def test_a_leave_with_the_work_done_is_repeated_until_it_is_answered() -> None:
    """No coordinator would notice by itself that the work is done. A new leader gets no heartbeats
    of the launcher: they would be refused after the leave."""
    member = training()
    leave = ev.LeaveWanted(completed=True, reason="all is trained", timeout_s=None)
    call = the_call(member.core.step(leave, 0))
    member.does(ev.StreamEnded(error=NOBODY))
    assert member.does(ended(call, NOBODY)) == ["coordinator_disconnected", "Leave"]
    member.now_s = 5000.0
    again = the_call(member.core.step(ended(call, NOBODY), member.now_s))
    assert not member.core.is_idle(again)
    assert "ClaimBeats" not in member.receive(ADMITTED)
    assert member.does(ended(again)) == []
    assert member.core.leaving.is_acknowledged


@pytest.mark.parametrize(
    ("failure", "raised"), [(Fenced("a is no member"), True), (JobFinished("it is"), False)]
)
def test_a_member_that_was_lost_before_it_could_leave_has_not_finished_the_job(
    failure: ShoalError, raised: bool
) -> None:
    """The host was silent while the script saved its model: a new process continues from the newest
    checkpoint, and finishes the job."""
    member = training()
    member.does(ev.StreamEnded(error=failure))
    leave = ev.LeaveWanted(completed=True, reason="all is trained", timeout_s=None)
    errors = [each.error for each in member.core.step(leave, 0) if isinstance(each, ev.RaiseError)]
    assert [type(error) for error in errors] == ([Unavailable] if raised else [])


def completed_leave(member: Member) -> ev.CallLeader:
    leave = ev.LeaveWanted(completed=True, reason="all is trained", timeout_s=None)
    return the_call(member.core.step(leave, 0))


@pytest.mark.parametrize(
    ("answer", "ends", "acknowledged"),
    [
        (JobFinished("job j is finished"), [], True),
        (Fenced("a is no member"), ["ReportEnding Fenced", "leave_not_needed"], False),
    ],
    ids=["finished", "fenced"],
)
@pytest.mark.parametrize("by", ["stream", "heartbeat", "leave"])
def test_a_leave_with_the_work_done_that_an_earlier_leader_recorded_is_no_error(
    by: str, answer: ShoalError, ends: list[str], acknowledged: bool
) -> None:
    """The leader dies between its record and its answer. Its successor tells the member that it is
    none any more, in answer to any call. Regression: the script of a finished job failed."""
    member = training()
    call = completed_leave(member)
    again = the_call(member.core.step(ended(call, NOBODY), 0))
    if by != "leave":
        member.does(
            ev.StreamEnded(error=answer) if by == "stream" else ev.HeartbeatRefused(error=answer)
        )
        assert member.core.is_idle(again)
    assert member.does(ended(again, answer if by == "leave" else NOBODY)) == ends
    assert member.core.leaving.is_acknowledged == acknowledged


def test_a_leave_with_the_work_done_that_is_refused_is_an_error() -> None:
    """The certificate expires in an outage. Regression: the script ended with exit code 0, though
    no coordinator knew that its work was done."""
    member = training()
    call = completed_leave(member)
    again = the_call(member.core.step(ended(call, EXPIRED), 0))
    member.now_s = DEFAULT_WAIT_S + 1
    (refused,) = member.core.step(ended(again, EXPIRED), member.now_s)
    assert isinstance(refused, ev.RaiseError)
    assert isinstance(refused.error, Unavailable)
    assert str(EXPIRED) in str(refused.error)
    assert not member.core.leaving.is_acknowledged


@pytest.mark.parametrize(
    ("completed", "timeout_s"), [(False, None), (True, 3.0)], ids=["incomplete", "limited"]
)
def test_another_leave_is_not_repeated(completed: bool, timeout_s: float | None) -> None:
    member = training()
    leave = ev.LeaveWanted(completed=completed, reason="", timeout_s=timeout_s)
    call = the_call(member.core.step(leave, 0))
    assert call.timeout_s == 3.0
    assert member.does(ended(call, NOBODY)) == ["leave_failed"]


def test_the_end_of_a_leaving_member_is_reported_to_its_launcher_once() -> None:
    member = training()
    leave = ev.LeaveWanted(completed=False, reason="an error", timeout_s=3)
    call = the_call(member.core.step(leave, 0))
    assert member.does(ended(call, Fenced("lost"))) == ["ReportEnding Fenced", "leave_not_needed"]
    assert not member.core.leaving.is_acknowledged
    assert member.does(ev.HeartbeatRefused(error=Fenced("lost"))) == [
        "Break 1",
        "RaiseError Fenced",
    ]
