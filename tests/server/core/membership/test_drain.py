"""Drains: the other members continue without a break, and state is handed over."""

from functools import partial

import pytest
from support.members.job_world import World, training

from shoal_server.core.generations.roster import (
    Generation,
    JobSpec,
    Proposal,
    StateAction,
    Step,
    Verdict,
)
from shoal_server.core.membership import events
from shoal_server.core.membership.phases import Phase

running = partial(training, step=5)


def test_the_others_continue_without_a_break() -> None:
    """Member b is left out by a planned change, and leaves once the others train."""
    w = running("a", "b", "c")
    leaver = w.members["b"]
    w.drain("b")
    w.run(1.5)
    assert w.is_running()
    assert w.roster() == ["a", "c"]
    assert leaver.drained
    assert leaver.refused is None
    record = w.written[2][0]
    assert record.roster.planned
    assert {e.state for e in record.roster.entries} == {StateAction.KEEP}
    assert any("stops at step 6" in line for line in w.log)
    assert not w.members["a"].broken
    assert not w.members["c"].broken


def test_a_drained_member_leaves_once_the_others_train() -> None:
    """A draining member is released only when the others train: until then its state may be
    needed."""
    w = running("a", "b", "c")
    leaver = w.members["b"]

    def check() -> None:
        if leaver.drained:
            assert w.job.running is not None
            assert w.job.running.member_ids == ("a", "c")

    w.check = check
    w.drain("b")
    w.run(1.5)
    assert leaver.drained


def test_a_call_of_a_drained_member_is_refused_as_drained() -> None:
    """A call that arrives before the member has received its notice is refused as DRAINED. If it
    were refused as FENCED, the launcher would start the member again."""
    w = running("a", "b", "c")
    leaver = w.members["b"]
    w.drain("b")
    w.run(1.5)
    assert leaver.drained
    late = events.StepReported(
        member_id="b",
        incarnation=leaver.incarnation,
        step=Step(6),
        has_state=True,
        left=Generation(1),
    )
    with pytest.raises(events.EventRefused) as refused:
        w.job.handle(late, w.now_s)
    assert refused.value.refusal.kind == events.RefusalKind.DRAINED
    assert refused.value.refusal.seen == "spot notice"


def test_several_leave_in_one_change() -> None:
    """Drains of two members at once need at most two more generations."""
    w = running("a", "b", "c", "d")
    w.drain("b")
    w.drain("d")
    w.run(1.5)
    assert w.roster() == ["a", "c"]
    assert w.job.last_generation <= 3


def test_the_last_member_leaves_at_once() -> None:
    """No other member could take over its state."""
    w = running("a")
    leaver = w.members["a"]
    w.drain("a")
    w.run(1.1)
    assert leaver.drained
    assert not w.job.members


def test_a_drain_below_the_minimum_continues_and_the_others_wait() -> None:
    """The member leaves; the others wait for another member, and keep the state."""
    w = running("a", "b", low=2)
    leaver = w.members["b"]
    w.drain("b")
    w.run(1.5)
    assert leaver.drained
    assert w.job.phase is Phase.COLLECT
    w.join("c")
    w.run(2.0)
    assert w.roster() == ["a", "c"]
    assert w.written[w.job.last_generation][0].roster.source_member_id == "a"


def test_members_that_all_drain_hand_over_to_a_joiner() -> None:
    """The joiner receives the state from one of them."""
    w = running("a", "b")
    w.join("x")
    w.drain("a")
    w.drain("b")
    w.run(4.0)
    assert w.is_running()
    assert w.roster() == ["x"]
    handed_over = [r[0].roster for r in w.written.values() if "x" in r[0].roster.member_ids]
    states = {e.member_id: e.state for e in handed_over[0].entries}
    assert states["x"] is StateAction.RECEIVE
    assert handed_over[0].source_member_id in ("a", "b")


def test_a_repeated_drain_is_one_drain() -> None:
    """The repetition leads to no further generation."""
    w = running("a", "b", "c")
    w.drain("b")
    w.drain("b")
    w.run(1.5)
    assert w.roster() == ["a", "c"]
    assert w.job.last_generation == 2


def test_a_member_in_no_generation_leaves_at_once() -> None:
    """The member has nothing to hand over."""
    spec = JobSpec(job="j", min_members=2, max_members=4, desired_members=2)
    w = World(spec)
    waiting = w.join("a")
    w.run(0.1)
    w.drain("a")
    w.run(0.2)
    assert waiting.drained
    assert w.job.phase is Phase.COLLECT


def test_an_asynchronous_member_leaves_at_once() -> None:
    """Other members of an asynchronous job never stop, so there is no boundary to wait for."""
    w = World(JobSpec(job="j", desired_members=2))
    for name in ("a", "b"):
        member = w.join(name)
        member.proposal = Proposal(fields=member.proposal.fields, synchronous=False)
    for effect_name in ("a", "b"):
        who = w.process_of(w.members[effect_name])
        proposal = w.members[effect_name].proposal
        w.send(w.members[effect_name], events.TrainingProposed(**who, proposal=proposal))
    w.run(1.0)
    assert w.is_running()
    leaver = w.members["b"]
    w.drain("b")
    w.run(1.5)
    assert leaver.drained
    assert w.roster() == ["a"]


def test_a_draining_member_that_dies_is_lost() -> None:
    """The survivors recover as from any other loss."""
    w = running("a", "b", "c")
    w.members["b"].paused = True  # offers no step for the boundary
    w.drain("b")
    w.run(1.2)
    w.kill("b", seen_by_launcher=True)
    w.run(2.0)
    assert w.roster() == ["a", "c"]


def test_a_drain_that_makes_no_progress_ends_at_its_limit() -> None:
    """The successor never proposes: the member leaves after the drain limit, with a last
    checkpoint."""
    w = running("a")
    notices = drain_notices(w)
    spec, info = w.job.spec, w.job.members["a"].info
    w.deliver(events.MemberJoined(member_id="late", incarnation="late-1", spec=spec, info=info))
    leaver = w.members["a"]
    w.drain("a")
    w.run(1.0 + w.job.limits.drain_s - 0.1)
    assert not leaver.drained
    w.run(1.0 + w.job.limits.drain_s + 0.1)
    assert leaver.drained
    assert notices["a"][-1].no_generation_follows


def test_a_draining_member_that_offers_no_boundary_is_removed_alone() -> None:
    """The member's trainer hangs, and its launcher keeps its stream open."""
    w = running("a", "b", "c")
    w.members["a"].paused = True
    w.drain("a")
    w.run(100.0)
    assert sorted(w.roster()) == ["b", "c"]
    assert any("a did not bring the generation up in time" in line for line in w.log)
    assert not any(w.members[name].refused for name in ("b", "c"))


def test_a_drain_is_carried_out_after_an_aborted_change() -> None:
    """The change is aborted by the loss of another member; the drain is not forgotten."""
    w = running("a", "b", "c")
    w.members["c"].paused = True  # does not accept in time: it is expelled, a loss
    w.drain("b")
    w.run(1.0 + w.job.limits.prepare_s + 1.0)
    assert w.is_running()
    assert w.roster() == ["a"]


def test_a_draining_member_gets_the_outcome_and_the_boundary() -> None:
    """A draining member is not in the next roster, but must offer a step and stop at the
    boundary."""
    w = running("a", "b")
    notices: list[events.Notice] = []
    take = w.receive

    def spy(member: object, notice: events.Notice) -> None:
        if getattr(member, "name", "") == "b":
            notices.append(notice)
        take(member, notice)  # type: ignore[arg-type]

    w.receive = spy  # type: ignore[method-assign, assignment]
    w.drain("b")
    w.run(1.5)
    kinds = [type(n) for n in notices]
    assert kinds == [
        events.DrainNotice,
        events.OutcomeNotice,
        events.StopAtNotice,
        events.DrainNotice,
    ]
    outcome = notices[1]
    assert isinstance(outcome, events.OutcomeNotice)
    assert outcome.record.verdict is Verdict.COMMITTED
    last = notices[-1]
    assert isinstance(last, events.DrainNotice)
    assert last.now


def drain_notices(w: World) -> dict[str, list[events.DrainNotice]]:
    """Return, by member, the lists to which its drain notices are added from now on."""
    notices: dict[str, list[events.DrainNotice]] = {name: [] for name in w.members}
    take = w.receive

    def spy(member: object, notice: events.Notice) -> None:
        if isinstance(notice, events.DrainNotice):
            notices[getattr(member, "name", "")].append(notice)
        take(member, notice)  # type: ignore[arg-type]

    w.receive = spy  # type: ignore[method-assign, assignment]
    return notices


def test_members_that_all_drain_leave_together() -> None:
    """The requests arrive one after the other; no generation of some members forms in between."""
    w = running("a", "b", "c")
    notices = drain_notices(w)
    for name in "abc":
        w.drain(name)
        w.run(w.now_s + 0.05)
    w.run(w.now_s + 1.0)
    for name in "abc":
        assert notices[name][-1].now, name
        assert notices[name][-1].no_generation_follows, name
    assert list(w.written) == [1], "no further generation"


def test_a_drain_with_remaining_members_is_followed_by_a_generation() -> None:
    """The members that stay have the state, so that it need not be saved on disk."""
    w = running("a", "b", "c")
    received = drain_notices(w)
    w.drain("b")
    w.run(1.5)
    assert received["b"][-1].now
    assert not any(
        notice.no_generation_follows for notices in received.values() for notice in notices
    )


def test_drains_during_a_planned_change_follow_it() -> None:
    """The first member's change has begun when the other drains are requested. It is completed, and
    the other members then leave together."""
    w = running("a", "b", "c", max_delay_s=0.02)
    notices = drain_notices(w)
    w.drain("b")
    deadline_s = w.now_s + 5.0
    while w.job.attempt is None:
        assert w.now_s < deadline_s
        w.run(w.now_s + 0.01)
    w.drain("a")
    w.drain("c")
    w.run(w.now_s + 1.0)
    assert notices["b"][-1].now
    assert not notices["b"][-1].no_generation_follows
    assert w.written[2][0].roster.member_ids == ("a", "c")
    for name in "ac":
        assert notices[name][-1].now, name
        assert notices[name][-1].no_generation_follows, name


@pytest.mark.parametrize("step", [3, 9])
def test_the_boundary_is_after_the_step_of_a_draining_member(step: int) -> None:
    """The draining member trains the steps below the boundary as well."""
    w = running("a", "b")
    w.members["b"].begun = step
    w.drain("b")
    w.run(1.5)
    assert any(f"stops at step {max(step, 5) + 1}" in line for line in w.log)
    assert w.roster() == ["a"]
