"""Members that are asked to leave: the others go on without a break, and state is handed over."""

import pytest
from support.members.job_world import World

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


def running(*names: str, low: int = 1, high: int = 8, max_delay_s: float = 0.0) -> World:
    spec = JobSpec(job="j", min_members=low, max_members=high, desired_members=len(names))
    w = World(spec, max_delay_s=max_delay_s)
    for name in names:
        w.join(name)
    w.run(1.0)
    assert w.is_running()
    w.train(5)
    return w


def test_the_others_go_on_without_a_break() -> None:
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


def test_the_leaver_goes_only_when_the_others_run() -> None:
    """The leaver stays until the others' first collective has passed: its state may be needed."""
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


def test_a_leaver_whose_own_call_is_faster_than_the_notice_hears_that_it_has_left() -> None:
    """A refusal as lost would be wrong: its launcher would start it again."""
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
    """Two members that are drained at once stop the others only once."""
    w = running("a", "b", "c", "d")
    w.drain("b")
    w.drain("d")
    w.run(1.5)
    assert w.roster() == ["a", "c"]
    assert w.job.last_generation <= 3


def test_the_last_member_leaves_at_once() -> None:
    """The leaver's state cannot go to another member, so it need not wait."""
    w = running("a")
    leaver = w.members["a"]
    w.drain("a")
    w.run(1.1)
    assert leaver.drained
    assert not w.job.members


def test_below_the_minimum_it_leaves_and_the_rest_wait_for_another() -> None:
    """Machines go away whether or not enough members are left."""
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


def test_all_who_train_hand_over_to_newcomers() -> None:
    """The newcomers take over the state before the last of the old members leave."""
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


def test_a_drain_asked_twice_is_one_drain() -> None:
    """A repeated request only notifies the member again."""
    w = running("a", "b", "c")
    w.drain("b")
    w.drain("b")
    w.run(1.5)
    assert w.roster() == ["a", "c"]
    assert w.job.last_generation == 2


def test_who_waits_for_a_generation_leaves_at_once() -> None:
    """Members that train in no generation have nothing to hand over."""
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
        who = w._who(w.members[effect_name])
        proposal = w.members[effect_name].proposal
        w.send(w.members[effect_name], events.TrainingProposed(**who, proposal=proposal))
    w.run(1.0)
    assert w.is_running()
    leaver = w.members["b"]
    w.drain("b")
    w.run(1.5)
    assert leaver.drained
    assert w.roster() == ["a"]


def test_a_leaver_that_dies_on_the_way_is_a_loss() -> None:
    """Survivors recover as from any other loss."""
    w = running("a", "b", "c")
    w.members["b"].paused = True  # will not offer a step to stop at
    w.drain("b")
    w.run(1.2)
    w.kill("b", seen_by_launcher=True)
    w.run(2.0)
    assert w.roster() == ["a", "c"]


def test_a_drain_that_gets_nowhere_ends_within_its_limit() -> None:
    """The successor has joined and never proposes: the leaver goes after the drain limit."""
    w = running("a")
    spec, info = w.job.spec, w.job.members["a"].info
    w._handle(events.MemberJoined(member_id="late", incarnation="late-1", spec=spec, info=info))
    leaver = w.members["a"]
    w.drain("a")
    w.run(1.0 + w.job.limits.drain_s - 0.1)
    assert not leaver.drained
    w.run(1.0 + w.job.limits.drain_s + 0.1)
    assert leaver.drained


def test_who_trains_again_after_an_aborted_change_still_leaves() -> None:
    """A change that fails before the boundary is tried again."""
    w = running("a", "b", "c")
    w.members["c"].paused = True  # does not accept in time: it is expelled, a loss
    w.drain("b")
    w.run(1.0 + w.job.limits.prepare_s + 1.0)
    assert w.is_running()
    assert w.roster() == ["a"]


def test_the_leaver_hears_of_the_record_and_the_boundary() -> None:
    """The leaver is not in the roster, but must offer a step, and know where to stop."""
    w = running("a", "b")
    notices: list[events.Notice] = []
    take = w._take

    def spy(member: object, notice: events.Notice) -> None:
        if getattr(member, "name", "") == "b":
            notices.append(notice)
        take(member, notice)  # type: ignore[arg-type]

    w._take = spy  # type: ignore[method-assign, assignment]
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
    """Collect the drain notices that each member gets from now on."""
    notices: dict[str, list[events.DrainNotice]] = {name: [] for name in w.members}
    take = w._take

    def spy(member: object, notice: events.Notice) -> None:
        if isinstance(notice, events.DrainNotice):
            notices[getattr(member, "name", "")].append(notice)
        take(member, notice)  # type: ignore[arg-type]

    w._take = spy  # type: ignore[method-assign, assignment]
    return notices


def test_members_that_are_all_told_to_end_leave_together() -> None:
    """Signals arrive one after the other; no generation of some of the members forms in between."""
    w = running("a", "b", "c")
    notices = drain_notices(w)
    for name in "abc":
        w.drain(name)
        w.run(w.now_s + 0.05)
    w.run(w.now_s + 1.0)
    for name in "abc":
        assert notices[name][-1].now, name
        assert notices[name][-1].unreplaced, name
    assert list(w.written) == [1], "no further generation"


def test_a_member_that_leaves_others_behind_is_not_told_that_all_leave() -> None:
    """Members that stay have the state: nothing is written to disk because of the leaver."""
    w = running("a", "b", "c")
    received = drain_notices(w)
    w.drain("b")
    w.run(1.5)
    assert received["b"][-1].now
    assert not any(notice.unreplaced for notices in received.values() for notice in notices)


def test_all_that_are_told_to_end_amid_a_change_carry_it_out_first() -> None:
    """The change for the first member is agreed when the others are asked to leave: it takes place,
    and the members left over leave together."""
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
    assert not notices["b"][-1].unreplaced
    assert w.written[2][0].roster.member_ids == ("a", "c")
    for name in "ac":
        assert notices[name][-1].now, name
        assert notices[name][-1].unreplaced, name


@pytest.mark.parametrize("step", [3, 9])
def test_the_boundary_counts_the_leavers_offer(step: int) -> None:
    """The leaver trains the steps below the boundary like all others."""
    w = running("a", "b")
    w.members["b"].begun = step
    w.drain("b")
    w.run(1.5)
    assert any(f"stops at step {max(step, 5) + 1}" in line for line in w.log)
    assert w.roster() == ["a"]
