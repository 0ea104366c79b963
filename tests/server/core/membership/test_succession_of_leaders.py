"""New leaders, and calls that arrive late: a generation that trains continues."""

import pytest
from support.members.job_world import digest_of, training

from shoal_proto.incarnation import new_incarnation
from shoal_server.core.generations.roster import (
    Candidate,
    Generation,
    GenerationRecord,
    GenerationRoster,
    JobSpec,
    MemberInfo,
    Proposal,
    StateAction,
    Step,
    Verdict,
    build_roster,
)
from shoal_server.core.job.job import Job
from shoal_server.core.job.restore import SavedJob, restored
from shoal_server.core.limits import Limits
from shoal_server.core.membership import events
from shoal_server.core.membership.member import MemberState
from shoal_server.core.membership.phases import OVER, Phase

SPEC = JobSpec(job="j", max_members=8)
FIELDS = {"schema": "s1"}
NAMES = {name: new_incarnation(position) for position, name in enumerate("abcx", start=1)}


def who(name: str) -> dict[str, str]:
    return {"member_id": name, "incarnation": NAMES[name]}


def proposal(step: int) -> Proposal:
    return Proposal(fields=FIELDS, step=Step(step), has_state=step > 0)


def candidate(name: str, step: int) -> Candidate:
    return Candidate(
        member_id=name, incarnation=NAMES[name], info=MemberInfo(), proposal=proposal(step)
    )


def roster(
    generation: int, names: str, running: GenerationRoster | None = None, step: int = 5
) -> GenerationRoster:
    candidates = [candidate(name, step) for name in names]
    return build_roster(Generation(generation), candidates, previous=running, running=running)


def record(of: GenerationRoster) -> GenerationRecord:
    return GenerationRecord(
        job="j",
        roster=of,
        verdict=Verdict.COMMITTED,
        reason="all accepted",
        digest=digest_of(of),
        decided_s=0.0,
    )


def new_leader(
    present: str,
    newest: GenerationRoster,
    before: GenerationRoster | None = None,
    last_generation: int = 0,
) -> Job:
    members = tuple(
        MemberState(member_id=name, incarnation=NAMES[name], info=MemberInfo(), joined_s=0.0)
        for name in present
    )
    saved = SavedJob(
        last_generation=Generation(max(newest.generation, last_generation)),
        record=record(newest),
        before=record(before) if before is not None else None,
        members=members,
        finished=False,
        reason="",
    )
    return restored(SPEC, saved, limits=Limits(), digest_of=digest_of, now_s=0.0)


def attend(
    job: Job, name: str, now_s: float, step: int = 5, generation: int = 0
) -> list[events.Effect]:
    newest = Generation(generation)
    joined = events.MemberJoined(**who(name), spec=SPEC, info=MemberInfo(), generation=newest)
    effects = job.handle(joined, now_s)
    return effects + job.handle(
        events.TrainingProposed(**who(name), proposal=proposal(step)), now_s
    )


def test_a_joiner_with_a_checkpoint_receives_the_state_of_the_running_generation() -> None:
    """The joiner's step may be the higher one: others have continued since their report."""
    trains = roster(1, "ab", step=5)
    grown = build_roster(
        Generation(2),
        [candidate("a", 5), candidate("b", 5), candidate("x", 50)],
        previous=trains,
        running=trains,
    )
    assert grown.source_member_id in ("a", "b")
    actions = {entry.member_id: entry.state for entry in grown.entries}
    assert actions == {
        "a": StateAction.KEEP,
        "b": StateAction.KEEP,
        "x": StateAction.RECEIVE,
    }


def test_a_new_leader_admits_no_joiner_before_all_members_have_proposed_again() -> None:
    """A joiner admitted earlier would replace the members that train."""
    old = roster(1, "ab")
    job = new_leader("abc", roster(2, "abc", running=old), before=old)
    for name in "ab":
        job.handle(events.MemberJoined(**who(name), spec=SPEC, info=MemberInfo()), 0.1)
    job.handle(events.MemberLeft(**who("c"), completed=False, reason="drained"), 0.2)
    job.tick(0.3)
    attend(job, "x", 0.4, step=0)
    job.tick(10.0)
    assert job.attempt is None
    for name, at_s in (("a", 10.1), ("b", 11.1)):
        assert job.attempt is None
        job.handle(events.TrainingProposed(**who(name), proposal=proposal(5)), at_s)
        stand = events.StepReported(**who(name), step=Step(5), has_state=True, left=Generation(1))
        job.handle(stand, at_s)
        job.tick(at_s + 0.9)
    assert job.attempt is not None
    assert sorted(job.attempt.member_ids) == ["a", "b", "x"]


def test_a_broken_stream_has_its_own_limit_under_a_new_leader() -> None:
    """A new leader waits for members that have not come longer than for one whose stream broke."""
    job = new_leader("abc", roster(1, "abc"))
    attend(job, "b", 1.0)
    job.handle(events.StreamDisconnected(**who("b")), 2.0)
    assert min(job.table.deadlines()) == 2.0 + Limits().reconnect_s


def test_a_planned_change_of_the_last_leader_that_fails_ends_both_generations() -> None:
    """The new leader cannot know if members have passed the boundary: if only one of the two
    generations ended, a member might train alone."""
    old = roster(1, "ab")
    job = new_leader("abc", roster(2, "abc", running=old), before=old)
    for name in "abc":
        job.handle(events.MemberJoined(**who(name), spec=SPEC, info=MemberInfo()), 0.1)
    error = events.BreakReported(**who("c"), generation=Generation(2), error="no memory", own=True)
    notices = [e for e in job.handle(error, 0.2) if isinstance(e, events.SendNotice)]
    broken = {
        (e.member_id, e.notice.generation)
        for e in notices
        if isinstance(e.notice, events.BreakNotice)
    }
    assert {("a", 1), ("b", 1), ("a", 2), ("b", 2), ("c", 2)} <= broken
    assert job.running is None


def test_the_time_limit_of_a_break_ends_with_the_next_generation() -> None:
    """A member in a bring-up is not removed for the break before it."""
    limits = Limits()
    job = new_leader("ab", roster(1, "abc"))
    for name in "ab":
        attend(job, name, 0.1)
        stand = events.StepReported(**who(name), step=Step(5), has_state=True, left=Generation(1))
        if name == "a":
            job.handle(stand, 0.2)
    job.handle(events.MemberLeft(**who("b"), completed=False, reason="drained"), 0.3)
    assert job.phase is Phase.PREPARE
    attempt = job.attempt
    assert attempt is not None
    answer = events.RosterAnswered(**who("a"), generation=Generation(2), digest=digest_of(attempt))
    job.handle(answer, 0.4)
    assert job.phase is Phase.COMMITTED
    job.tick(limits.collective_s + 0.1)
    assert "a" in job.members


def test_a_step_report_of_an_earlier_generation_is_ignored() -> None:
    """A late or repeated call does not count as the report after the current break."""
    job = new_leader("ab", roster(1, "ab"))
    for name in "ab":
        attend(job, name, 0.1)
        job.handle(events.ReadinessReported(**who(name), generation=Generation(1)), 0.2)
    assert job.phase is Phase.RUNNING
    job.handle(events.MemberLost(**who("b"), reason="its launcher saw it exit"), 0.3)
    late = events.StepReported(**who("a"), step=Step(2), has_state=True, left=Generation(0))
    job.handle(late, 0.4)
    assert not job.table.all_settled
    a = job.members["a"]
    assert a.proposal is not None
    assert a.proposal.step == 5


def test_a_late_proposal_does_not_lower_the_step() -> None:
    """The member with the highest reported step is the source of the state."""
    job = new_leader("ab", roster(1, "ab"))
    attend(job, "a", 0.1, step=7)
    job.handle(events.TrainingProposed(**who("a"), proposal=proposal(0)), 0.2)
    a = job.members["a"]
    assert a.proposal is not None
    assert (a.proposal.step, a.proposal.has_state) == (7, True)


def test_the_break_of_the_old_generation_is_sent_before_the_abort() -> None:
    """Members that wait at the boundary would train on after the abort alone."""
    old = roster(1, "ab")
    job = new_leader("abc", roster(2, "abc", running=old), before=old)
    for name in "abc":
        attend(job, name, 0.1)
    for name in "ab":
        offer = events.NextStepReached(**who(name), generation=Generation(2), next_step=Step(9))
        job.handle(offer, 0.2)
    effects = job.handle(events.MemberLost(**who("c"), reason="exit"), 0.3)
    notices = [e.notice for e in effects if isinstance(e, events.SendNotice) and e.member_id == "a"]
    kinds = [type(notice) for notice in notices]
    assert kinds.index(events.BreakNotice) < kinds.index(events.OutcomeNotice)


def test_a_report_of_a_generation_that_is_over_is_answered_with_its_break() -> None:
    """The leader that ended it may be gone, and its notices with it."""
    job = new_leader("ab", roster(3, "ab"))
    attend(job, "a", 0.1)
    effects = job.handle(
        events.BreakReported(**who("a"), generation=Generation(2), error="reset"), 0.2
    )
    notices = [e.notice for e in effects if isinstance(e, events.SendNotice)]
    assert [n.generation for n in notices if isinstance(n, events.BreakNotice)] == [2]


def test_a_joiner_that_may_have_trained_is_waited_for() -> None:
    """A new leader does not know if the planned change took place: the joiner has to report."""
    old = roster(1, "ab")
    job = new_leader("abx", roster(2, "abx", running=old), before=old)
    for name in "abx":
        attend(job, name, 0.1)
    job.handle(events.MemberLost(**who("b"), reason="exit"), 0.3)
    assert {m.member_id for m in job.table.unsettled()} == {"a", "x"}


@pytest.mark.parametrize("lost", ["", "a", "ab"])
def test_a_joiner_that_leaves_as_completed_does_not_end_the_job(lost: str) -> None:
    """A joiner cannot have completed the work: the members of the newest generation may have, also
    after its break."""
    job = new_leader("ab", roster(1, "ab"))
    for name in "ab":
        attend(job, name, 0.1)
        job.handle(events.ReadinessReported(**who(name), generation=Generation(1)), 0.2)
    attend(job, "x", 0.3, step=50)
    for name in lost:
        job.handle(events.MemberLost(**who(name), reason="exit"), 0.35)
    assert (job.running is None) == bool(lost)
    job.handle(events.MemberLeft(**who("x"), completed=True, reason="done"), 0.4)
    assert not job.is_completing
    assert job.phase not in OVER


def test_a_failed_collective_does_not_remove_members_that_have_yet_to_rejoin() -> None:
    """A new leader gives all members time to join again."""
    old = roster(1, "abc")
    job = new_leader("abcx", roster(2, "abcx", running=old), before=old)
    attend(job, "a", 0.1)
    broke = events.BreakReported(**who("a"), generation=Generation(1), error="connection reset")
    job.handle(broke, 0.2)
    assert sorted(job.members) == ["a", "b", "c", "x"]


def test_members_that_left_an_aborted_generation_have_left_those_before_it() -> None:
    """A new leader attempts the next one at once, and does not wait for further reports."""
    job = new_leader("ab", roster(2, "ab"))
    job.last_generation = Generation(3)  # aborted, and no member was notified
    for name in "ab":
        attend(job, name, 0.1)
        stand = events.StepReported(**who(name), step=Step(5), has_state=True, left=Generation(3))
        job.handle(stand, 0.2)
    job.tick(1.0)
    assert job.attempt is not None
    assert job.attempt.generation == 4


@pytest.mark.parametrize("name", "abc")
def test_a_member_that_reports_an_aborted_generation_gets_its_break(name: str) -> None:
    """The leader died before it could notify a member of the abort. Without the break, the member,
    which brings the generation up, would wait for its peers until a time limit.

    Otherwise the member, which brings it up, would wait until a time limit for its peers.
    """
    old = roster(2, "ab", running=roster(1, "ab"))
    job = new_leader("abc", old, before=roster(1, "ab"), last_generation=3)
    effects = attend(job, name, 0.1, generation=3)
    broken = [
        each.notice.generation
        for each in effects
        if isinstance(each, events.SendNotice) and isinstance(each.notice, events.BreakNotice)
    ]
    assert broken == [3]
    stand = events.StepReported(**who(name), step=Step(5), has_state=True, left=Generation(3))
    job.handle(stand, 0.2)
    # The older generation is over once a member of it has left it.
    assert (job.running is None and job.attempt is None) == (name in "ab")


def test_a_member_that_rejoins_a_current_generation_gets_no_break() -> None:
    """The current generations are the one that runs and the one that is brought up."""
    old = roster(1, "ab")
    for generation in (1, 2):
        job = new_leader("abc", roster(2, "abc", running=old), before=old)
        effects = attend(job, "a", 0.1, generation=generation)
        notices = [each.notice for each in effects if isinstance(each, events.SendNotice)]
        assert notices
        assert not any(isinstance(notice, events.BreakNotice) for notice in notices)


def test_a_member_outside_the_newest_roster_gets_the_break_of_its_generation() -> None:
    """The next generation was formed without it, from members that rejoined first."""
    job = new_leader("abx", roster(4, "ab"), last_generation=4)
    effects = attend(job, "x", 0.1, generation=3)
    broken = [
        each.notice.generation
        for each in effects
        if isinstance(each, events.SendNotice) and isinstance(each.notice, events.BreakNotice)
    ]
    assert broken == [3]


def test_members_of_a_generation_that_a_restored_etcd_does_not_have_go_on() -> None:
    """The backup is of generation 1: members stop, report their step, and form a generation above
    the one that they were in."""
    w = training("a", "b", "c")
    saved_members = tuple(
        MemberState(**w.process_of(each), info=MemberInfo(host="h"), joined_s=0.0)
        for each in w.members.values()
    )
    w.kill("c", seen_by_launcher=True)
    w.run(2.0)
    assert w.job.last_generation == 2
    w.train(9)
    limits = w.job.limits
    saved = SavedJob(
        last_generation=Generation(1),
        record=w.written[1][0],
        before=None,
        members=saved_members,
        finished=False,
        reason="",
    )
    w.job = restored(w.job.spec, saved, limits=limits, digest_of=digest_of, now_s=w.now_s)
    for name in "ab":
        w.attend_again(name)
    w.run(w.now_s + limits.collective_s + limits.longest_bring_up_s)
    assert sorted(w.members) == ["a", "b"], "a member was refused"
    assert w.is_running(), w.job.reason
    assert w.roster() == ["a", "b"]
    assert w.job.running is not None
    assert (w.job.running.generation, w.job.running.step) == (3, 9)
