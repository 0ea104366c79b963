"""Decisions about the membership of a job, case by case."""

import pytest
from support.members.job_world import FIELDS, World, training

from shoal_proto.incarnation import new_incarnation
from shoal_server.core.generations.roster import (
    Generation,
    JobSpec,
    MemberInfo,
    StateAction,
    Step,
    Verdict,
)
from shoal_server.core.limits import Limits
from shoal_server.core.membership import events
from shoal_server.core.membership.events import RefusalKind
from shoal_server.core.membership.phases import (
    TRANSITIONS,
    IllegalTransition,
    Phase,
    Trigger,
    next_phase,
)


def world(*, desired: int = 3, low: int = 1, high: int = 8) -> World:
    spec = JobSpec(job="j", min_members=low, max_members=high, desired_members=desired)
    return World(spec)


def test_the_first_generation_forms_once_the_desired_number_has_proposed() -> None:
    """A job with fewer members waits for more."""
    w = world(desired=3)
    w.join("a")
    w.join("b")
    w.run(5.0)
    assert w.job.phase is Phase.COLLECT
    w.join("c")
    w.run(5.1)
    assert w.is_running()
    assert w.roster() == ["a", "b", "c"]
    assert w.written[1][0].verdict is Verdict.COMMITTED


def test_the_first_generation_forms_with_the_minimum_after_the_last_call() -> None:
    """The members that have proposed by then form it."""
    w = world(desired=3, low=2)
    w.join("a")
    w.join("b")
    w.run(w.job.limits.last_call_s - 0.1)
    assert w.job.phase is Phase.COLLECT
    w.run(w.job.limits.last_call_s + 0.1)
    assert w.roster() == ["a", "b"]


def test_too_few_members_are_refused_after_the_join_limit() -> None:
    """The refusal has the number of members and the minimum."""
    w = world(desired=3, low=2)
    alone = w.join("a")
    w.run(w.job.limits.join_s + 1)
    assert alone.refused is not None
    assert alone.refused.kind == RefusalKind.TIMEOUT
    assert "1 of at least 2" in alone.refused.what
    assert not w.job.members


@pytest.mark.parametrize("by_launcher", [True, False])
def test_survivors_of_a_loss_form_the_next_generation_at_once(by_launcher: bool) -> None:
    """The break, the reports of steps and the agreement wait for no time limit. Without a launcher,
    the lost member has a moment to come back."""
    w = training("a", "b", "c")
    w.train(7)
    w.kill("b", seen_by_launcher=by_launcher)
    w.run(1.001 + (0.0 if by_launcher else w.job.limits.halt_s))
    assert w.is_running()
    assert w.job.last_generation == 2
    assert w.roster() == ["a", "c"]


def test_members_whose_connections_all_broke_stay_members() -> None:
    """A firewall forgot all connections: a member reports the failed collective while the others
    reconnect, or before their streams break."""
    w = training("a", "b", "c", "d")
    w.train(10)
    for name in "abc":
        w.deliver(events.StreamDisconnected(**w.process_of(w.members[name])))
    for number, name in enumerate("abc", start=1):
        w.later(lambda it=name: w.attend_again(it), 0.02 * number)
        w.later(lambda it=name: w.report_broken(w.members[it]), 0.02 * number + 0.002)
    w.later(lambda: w.deliver(events.StreamDisconnected(**w.process_of(w.members["d"]))), 0.03)
    w.later(lambda: w.attend_again("d"), 0.09)
    w.later(lambda: w.report_broken(w.members["d"]), 0.1)
    w.run(10.0)
    assert w.is_running()
    assert w.roster() == ["a", "b", "c", "d"]
    assert w.gone == []


def test_a_survivor_keeps_its_rank_if_it_still_exists() -> None:
    """b keeps rank 1; c, whose rank 2 does not exist in a world of two, takes the free rank 0."""
    w = training("a", "b", "c")
    w.kill("a", seen_by_launcher=True)
    w.run(2.0)
    assert w.roster() == ["c", "b"]


def test_the_survivor_with_the_highest_step_is_the_source() -> None:
    """The other survivor receives its state."""
    w = training("a", "b", "c")
    w.train(5)
    w.members["c"].begun = 6
    w.kill("b", seen_by_launcher=True)
    w.run(2.0)
    assert w.job.running is not None
    assert w.job.running.source_member_id == "c"
    assert w.job.running.step == 6
    states = {e.member_id: e.state for e in w.job.running.entries}
    assert states == {"a": StateAction.RECEIVE, "c": StateAction.KEEP}


def test_a_joiner_enters_after_the_highest_step_offered() -> None:
    """All members of the old generation stop before the same step; then the new one begins."""
    w = training("a", "b")
    w.train(10)
    w.members["b"].begun = 11
    w.join("c")
    w.run(2.0)
    assert w.is_running()
    assert w.roster() == ["a", "b", "c"]
    assert any("stops at step 12" in line for line in w.log)
    assert w.job.running is not None
    assert w.job.running.planned
    states = {e.member_id: e.state for e in w.job.running.entries}
    assert states["c"] is not StateAction.KEEP


def test_a_conflicting_joiner_is_refused_and_the_generation_runs_on() -> None:
    """The refusal names the field that differs; no generation is attempted."""
    w = training("a", "b")
    odd = w.join("odd", {**FIELDS, "schema": "s2"})
    w.run(2.0)
    assert odd.refused is not None
    assert odd.refused.kind == RefusalKind.CONFLICT
    assert "schema" in odd.refused.seen
    assert "'s2' in odd" in odd.refused.seen
    assert w.is_running()
    assert w.job.last_generation == 1


def test_an_optional_field_is_compared_among_the_members_that_state_it() -> None:
    """Members that do not state the field train with all others."""
    w = world(desired=2)
    w.join("a", optional_fields={"dataset_content": "d1"})
    w.join("old")
    w.run(1.0)
    assert w.is_running()
    w.join("b", optional_fields={"dataset_content": "d1"})
    w.join("older")
    w.run(2.0)
    assert sorted(w.roster()) == ["a", "b", "old", "older"]
    odd = w.join("odd", optional_fields={"dataset_content": "d2"})
    w.run(3.0)
    assert odd.refused is not None and odd.refused.kind == RefusalKind.CONFLICT
    assert odd.refused.seen == "dataset_content: 'd1' in a, b but 'd2' in odd"
    assert "The data sets differ" in odd.refused.fix and "random_state=0" in odd.refused.fix
    assert sorted(w.roster()) == ["a", "b", "old", "older"]


def test_different_data_at_the_start_refuse_all_members() -> None:
    """The first generation is aborted, and each refusal names both contents."""
    w = world(desired=3)
    contents = {"a": "d1", "b": "d2", "c": "d1"}
    members = [w.join(name, optional_fields={"dataset_content": contents[name]}) for name in "abc"]
    w.run(1.0)
    assert w.written[1][0].verdict is Verdict.ABORTED
    assert all(
        m.refused and m.refused.seen == "dataset_content: 'd1' in a, c but 'd2' in b"
        for m in members
    )


def test_a_conflicting_joiner_does_not_disturb_survivors_of_a_break() -> None:
    """A joiner that comes between two generations is compared with the members that trained, and it
    alone is refused."""
    w = training("a", "b", "c")
    w.members["a"].paused = True  # does not report its step yet
    w.kill("c", seen_by_launcher=True)
    w.run(1.1)
    assert w.job.phase is Phase.COLLECT
    odd = w.join("odd", {**FIELDS, "schema": "s2"})
    w.run(1.2)
    assert odd.refused is not None
    a = w.members["a"]
    w.send(
        a,
        events.StepReported(
            member_id="a",
            incarnation=a.incarnation,
            step=Step(0),
            has_state=False,
            left=Generation(1),
        ),
    )
    a.paused = False
    w.run(1.3)
    assert w.roster() == ["a", "b"]


def test_a_conflict_at_the_start_refuses_all_members_with_one_record() -> None:
    """The majority does not decide: all members get the same refusal, which names the field."""
    w = world(desired=3)
    members = [w.join("a"), w.join("b"), w.join("c", {**FIELDS, "strategy": "fsdp"})]
    w.run(1.0)
    record = w.written[1][0]
    assert record.verdict is Verdict.ABORTED
    assert [c.field for c in record.conflicts] == ["strategy"]
    refusals = {m.refused.seen for m in members if m.refused}
    assert len(refusals) == 1
    assert all(m.refused for m in members)


def test_one_rejection_aborts_and_the_reason_has_its_field() -> None:
    """The other member has accepted."""
    w = world(desired=2)
    w.join("a")
    w.join("b").paused = True
    w.run(0.5)
    assert w.job.phase is Phase.PREPARE
    b = w.members["b"]
    rejection = events.Rejection(field="disk", seen="1 GB", expected="at least 10 GB")
    w.send(
        b,
        events.RosterAnswered(
            member_id="b",
            incarnation=b.incarnation,
            generation=Generation(1),
            digest="",
            rejections=(rejection,),
        ),
    )
    w.run(0.6)
    assert w.written[1][0].verdict is Verdict.ABORTED
    assert "disk" in w.written[1][0].reason


def test_accepting_another_digest_aborts() -> None:
    """The member accepts a roster that the coordinator did not send."""
    w = world(desired=2)
    w.join("a")
    w.join("b").paused = True
    w.run(0.5)
    b = w.members["b"]
    w.send(
        b,
        events.RosterAnswered(
            member_id="b", incarnation=b.incarnation, generation=Generation(1), digest="other"
        ),
    )
    w.run(0.5)
    assert w.written[1][0].verdict is Verdict.ABORTED


def test_only_members_that_do_not_answer_a_roster_are_removed() -> None:
    """The other members form the next generation."""
    w = world(desired=3)
    w.join("a")
    w.join("b")
    w.join("c").paused = True
    w.run(w.job.limits.prepare_s + w.job.limits.last_call_s + 1)
    assert w.roster() == ["a", "b"]
    assert "c did not accept" in w.written[1][0].reason


def test_a_joiner_beyond_the_maximum_is_a_standby_and_replaces_a_lost_member() -> None:
    """The joiner takes the rank of the lost member."""
    w = training("a", "b", high=2)
    w.join("c")
    w.run(2.0)
    assert w.roster() == ["a", "b"]
    assert w.job.members["c"].waiting_for.startswith("standing by")
    w.kill("a", seen_by_launcher=True)
    w.run(3.0)
    assert w.roster() == ["c", "b"]


def test_a_stale_incarnation_changes_nothing() -> None:
    """A process that continues after its replacement joined is refused."""
    w = training("a", "b")
    old = w.members["b"]
    w.join("b")
    w.run(2.0)
    assert w.is_running()
    before = (w.job.last_generation, w.job.phase)
    with pytest.raises(events.EventRefused) as refused:
        w.job.handle(
            events.StepReported(
                member_id="b", incarnation=old.incarnation, step=Step(3), has_state=True
            ),
            w.now_s,
        )
    assert refused.value.refusal.kind == RefusalKind.FENCED
    assert (w.job.last_generation, w.job.phase) == before


def test_a_replaced_process_cannot_replace_its_successor() -> None:
    """A join of an older incarnation is refused, whether it had joined before or not."""
    w = training("a", "b")
    old = w.members["b"]
    w.join("b")
    w.run(2.0)
    never_seen_before = new_incarnation(0)
    for incarnation in (old.incarnation, never_seen_before):
        with pytest.raises(events.EventRefused) as refused:
            w.job.handle(
                events.MemberJoined(
                    member_id="b", incarnation=incarnation, spec=w.job.spec, info=MemberInfo()
                ),
                w.now_s,
            )
        assert refused.value.refusal.kind == RefusalKind.FENCED
    assert w.roster() == ["a", "b"]


def test_a_joiner_with_other_bounds_is_refused() -> None:
    """The refusal has the bounds that differ."""
    w = training("a", "b")
    with pytest.raises(events.EventRefused) as refused:
        w.job.handle(
            events.MemberJoined(
                member_id="c",
                incarnation="c1",
                spec=JobSpec(job="j", min_members=2, max_members=4, desired_members=2),
                info=MemberInfo(),
            ),
            w.now_s,
        )
    assert "min=2" in refused.value.refusal.seen


def test_a_joiner_may_desire_another_number_of_members() -> None:
    """A deployment that is scaled gives its new members another number; the first member's
    number counts."""
    w = world(desired=2)
    w.join("a")
    w.run(1.0)
    w.job.handle(
        events.MemberJoined(
            member_id="c",
            incarnation="c1",
            spec=JobSpec(job="j", min_members=1, max_members=8, desired_members=5),
            info=MemberInfo(),
        ),
        w.now_s,
    )
    assert "c" in w.job.members
    assert w.job.spec.desired_members == 2


def test_a_job_that_a_member_completed_refuses_joiners() -> None:
    """The job is finished once the last member has left."""
    w = training("a", "b")
    w.send(
        w.members["a"],
        events.MemberLeft(
            member_id="a", incarnation=w.members["a"].incarnation, completed=True, reason="done"
        ),
    )
    w.run(1.5)
    late = w.join("c")
    w.run(2.0)
    assert late.refused is not None
    assert late.refused.kind == RefusalKind.FINISHED
    assert w.job.phase is Phase.RUNNING
    b = w.members["b"]
    w.send(
        b,
        events.MemberLeft(member_id="b", incarnation=b.incarnation, completed=True, reason="done"),
    )
    w.run(3.0)
    assert w.job.phase is Phase.FINISHED


@pytest.mark.parametrize(("last_failed", "phase"), [(True, Phase.FAILED), (False, Phase.COLLECT)])
def test_a_job_fails_with_its_last_member(last_failed: bool, phase: Phase) -> None:
    """A new member would find nothing left to train on, and finish the job. While another member
    trains, a failure decides nothing: that member may still finish the job."""
    w = training("a", "b")
    for name, failed in (("a", True), ("b", last_failed)):
        assert w.job.phase is not Phase.FAILED
        member = w.members[name]
        w.send(
            member,
            events.MemberLeft(
                member_id=name,
                incarnation=member.incarnation,
                completed=False,
                reason="TrainingFailed: the loss is not finite",
                failed=failed,
            ),
        )
        w.run(w.now_s + 1.0)
    assert w.job.phase is phase
    assert w.job.reason == "b: left: TrainingFailed: the loss is not finite"


def test_a_member_in_reserve_does_not_keep_a_job_whose_trainers_failed() -> None:
    """The reserve would find nothing left to train on, and finish the job."""
    w = training("a", "b", high=2)
    reserve = w.join("c")
    w.run(2.0)
    assert w.roster() == ["a", "b"]
    for name in ("a", "b"):
        member = w.members[name]
        w.send(
            member,
            events.MemberLeft(
                **w.process_of(member),
                completed=False,
                reason="TrainingFailed: the loss is not finite",
                failed=True,
            ),
        )
    w.run(3.0)
    assert w.job.phase is Phase.FAILED
    assert w.job.reason == "b: left: TrainingFailed: the loss is not finite"
    assert reserve.refused is not None
    assert reserve.refused.what == "job j has failed"


def test_a_member_in_no_generation_may_complete_the_job() -> None:
    """An asynchronous job may be forming its next generation then."""
    w = world(desired=3)
    alone = w.join("a")
    w.run(0.1)
    assert w.job.phase is Phase.COLLECT
    w.send(
        alone,
        events.MemberLeft(
            member_id="a", incarnation=alone.incarnation, completed=True, reason="all done"
        ),
    )
    w.run(0.2)
    assert w.job.phase is Phase.FINISHED


def test_completion_cancels_a_planned_change_with_a_joiner() -> None:
    """The generation runs on without the joiner, which is refused as FINISHED."""
    w = training("a", "b")
    w.members["b"].paused = True  # does not answer the roster
    joiner = w.join("c")
    w.run(2.0)
    assert w.job.phase is Phase.PREPARE
    a = w.members["a"]
    w.send(
        a,
        events.MemberLeft(member_id="a", incarnation=a.incarnation, completed=True, reason="done"),
    )
    w.run(3.0)
    assert joiner.refused is not None
    assert joiner.refused.kind == RefusalKind.FINISHED
    assert w.job.phase is Phase.RUNNING


def test_loss_of_a_joiner_before_the_boundary_keeps_the_old_generation() -> None:
    """The new generation is committed, but not all members have stopped: it is aborted."""
    w = training("a", "b")
    w.members["b"].paused = True
    w.join("c")
    w.run(2.0)
    w.members["b"].paused = False
    b = w.members["b"]
    answer = events.RosterAnswered(
        member_id="b",
        incarnation=b.incarnation,
        generation=Generation(2),
        digest=w.job.agreement.digest if w.job.agreement else "",
    )
    b.paused = True
    w.send(b, answer)
    w.run(2.1)
    assert w.job.phase is Phase.COMMITTED
    w.kill("c", seen_by_launcher=True)
    w.run(2.2)
    assert w.job.phase is Phase.RUNNING
    assert w.job.running is not None
    assert w.job.running.generation == 1
    assert [r.verdict for r in w.written[2]] == [Verdict.COMMITTED, Verdict.ABORTED]


def test_a_stream_that_reconnects_in_time_is_no_loss() -> None:
    """The generation runs on."""
    w = training("a", "b")
    b = w.members["b"]
    w.send(b, events.StreamDisconnected(member_id="b", incarnation=b.incarnation))
    w.run(1.0 + w.job.limits.reconnect_s / 2)
    w.send(
        b,
        events.MemberJoined(
            member_id="b", incarnation=b.incarnation, spec=w.job.spec, info=MemberInfo()
        ),
    )
    w.run(10.0)
    assert w.is_running()
    assert w.job.last_generation == 1


def test_a_failed_collective_without_a_loss_leads_to_a_generation_of_all() -> None:
    """One member reports it; the next generation begins after the time to reconnect."""
    w = training("a", "b", "c")
    w.train(4)
    a = w.members["a"]
    w.send(
        a,
        events.BreakReported(
            member_id="a", incarnation=a.incarnation, generation=Generation(1), error="reset"
        ),
    )
    w.run(1.0 + w.job.limits.reconnect_s + 0.1)
    assert w.is_running()
    assert w.job.last_generation == 2
    assert w.roster() == ["a", "b", "c"]


def test_if_all_members_report_a_failed_collective_none_waits() -> None:
    """A member that reports the failure is not lost."""
    w = training("a", "b")
    w.train(4)
    for name in ("a", "b"):
        member = w.members[name]
        w.send(
            member,
            events.BreakReported(
                member_id=name,
                incarnation=member.incarnation,
                generation=Generation(1),
                error="reset",
            ),
        )
    w.run(1.001)
    assert w.is_running()
    assert w.job.last_generation == 2


def test_transitions_that_are_not_in_the_table_raise() -> None:
    """Listed pairs of phase and trigger lead to the phase of the table."""
    for phase in Phase:
        for trigger in Trigger:
            if (phase, trigger) in TRANSITIONS:
                assert next_phase(phase, trigger) is TRANSITIONS[phase, trigger]
            else:
                with pytest.raises(IllegalTransition):
                    next_phase(phase, trigger)


@pytest.mark.parametrize(
    ("heartbeat_s", "join_s", "word"),
    [(0.0, 120, "--heartbeat-s"), (10, 120, "lease_s"), (0.5, 1, "lease_s")],
)
def test_limits_out_of_order_are_refused(heartbeat_s: float, join_s: float, word: str) -> None:
    """The message names the limit."""
    with pytest.raises(ValueError, match=word):
        Limits(heartbeat_s=heartbeat_s, join_s=join_s)


def test_time_in_which_no_notice_can_be_sent_does_not_count() -> None:
    """A break that is not durable yet cannot be sent: its time limit is postponed."""
    w = training("a", "b", "c")
    w.members["a"].paused = True  # not notified of the break
    w.kill("c", seen_by_launcher=True)
    w.run(1.1)
    w.job.postpone(100.0)
    w.run(1.0 + w.job.limits.collective_s + 50.0)
    assert "a" in w.job.members
    w.run(1.2 + w.job.limits.collective_s + 100.0)
    assert "a" not in w.job.members
    assert w.roster() == ["b"]


def test_a_late_answer_is_refused_with_the_reason_of_the_abort() -> None:
    """Member a has rejected the roster: b's later calls get this conflict."""
    w = world(desired=2)
    a, b = w.join("a"), w.join("b")
    a.paused = b.paused = True  # the test sends their answers
    w.run(1.0)
    generation = Generation(w.job.last_generation)
    rejection = events.Rejection(field="scratch", seen="1 GiB", expected="10 GiB")
    answer = events.RosterAnswered(
        **w.process_of(a), generation=generation, digest="", rejections=(rejection,)
    )
    w.job.handle(answer, w.now_s)
    late = events.RosterAnswered(**w.process_of(b), generation=generation, digest="whatever")
    for event in (late, events.StepReported(**w.process_of(b), step=Step(0), has_state=False)):
        with pytest.raises(events.EventRefused) as refused:
            w.job.handle(event, w.now_s)
        assert refused.value.refusal.kind == RefusalKind.CONFLICT
        assert "scratch" in refused.value.refusal.seen
