"""Members that come and go at the same time, surplus members, and one whose proposal differs."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.clusters.fault_world import Cast, is_outcome

from shoal_proto.errors import ProposalConflict

OTHER_FIELDS = {"strategy": "ddp", "schema": "s2"}


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("attempt", range(3))
def test_two_joins_and_a_leave_may_come_in_any_order(cast: Cast, attempt: int) -> None:
    """All remaining members train together, with one record of each generation."""
    _, _, c = cast.training("a", "b", "c")
    acts = [lambda: cast.joins("d", desired=3), lambda: cast.joins("e", desired=3), c.leave]
    with ThreadPoolExecutor(len(acts)) as threads:
        # Each attempt begins with another action.
        for running in [threads.submit(act) for act in acts[attempt:] + acts[:attempt]]:
            running.result()
    names = ("a", "b", "d", "e")
    (generation,) = {cast[name].await_training_with(*names) for name in names}
    cast.await_running(generation)
    cast.check_agreement()


def test_a_surplus_member_stands_by_and_takes_a_free_place(cast: Cast) -> None:
    """A member beyond the maximum gets no error and disturbs no other member. Once a member leaves,
    it trains without a further call."""
    a, b = cast.training("a", "b", high=2)
    c = cast.joins("c", high=2)
    assert c.await_notice("standby").standby.position == 1
    assert (cast.record()["generation"], a.breaks(), b.breaks()) == (1, [], [])
    b.leave()
    (generation,) = {member.await_training_with("a", "c") for member in (a, c)}
    cast.await_running(generation)
    cast.check_agreement()


def test_one_different_proposal_fails_the_attempt_for_all(cast: Cast) -> None:
    """A majority does not win: the three members have one aborted record, with the field and its
    values."""
    fitting = [cast.joins(name, desired=3) for name in ("a", "b")]
    odd = cast.joins("c", desired=3, fields=OTHER_FIELDS)
    members = [*fitting, odd]
    for member in members:
        error = member.failed()
        assert isinstance(error, ProposalConflict)
        assert error.details["schema"] == "schema: 's1' in a, b but 's2' in c"
    record = cast.record(1)
    assert record["verdict"] == "aborted"
    (conflict,) = record["conflicts"]
    assert conflict["field"] == "schema"
    # A member that is refused in answer to a call may end before the notice arrives.
    outcomes = [
        notice.outcome for member in members for k, notice in member.notices if k == "outcome"
    ]
    assert outcomes
    assert all(is_outcome(outcome, record) for outcome in outcomes)


def test_a_joiner_with_another_proposal_disturbs_no_member(cast: Cast) -> None:
    """The joiner is refused with the field's name and values; training members get no notice."""
    a, b = cast.training("a", "b")
    odd = cast.joins("c", fields=OTHER_FIELDS)
    assert isinstance(odd.failed(), ProposalConflict)
    assert [kind for kind, _ in a.notices] == [kind for kind, _ in b.notices]
    assert a.notices[-1][0] == "running"
    assert cast.record()["generation"] == 1
    cast.await_running(1)
