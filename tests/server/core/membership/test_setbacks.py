"""Members that cannot bring up a generation are left out, and the others train on."""

import pytest
from support.members.job_world import SimMember, World

from shoal_server.core.generations.roster import Generation, JobSpec
from shoal_server.core.membership import events
from shoal_server.core.membership.events import RefusalKind
from shoal_server.core.membership.phases import Phase
from shoal_server.core.membership.setbacks import MAX_PAUSE_S, MAX_TRIES, REMEMBERED_S, Setbacks

ERROR = "OutOfMemoryError: CUDA out of memory"


class Clumsy(World):
    """World in which some members fail in each bring-up, or never end it."""

    def __init__(self, spec: JobSpec) -> None:
        super().__init__(spec)
        self.failing: set[str] = set()
        self.hanging: set[str] = set()
        self.fits = 0
        """Size of a generation up to which no member fails."""

    def bring_up(self, member: SimMember, generation: Generation) -> None:
        attempt = self.job.attempt
        many = attempt is None or len(attempt.entries) > self.fits
        if member.name in self.failing and many:
            self.fail(member, generation, own=True)
        elif member.name not in self.hanging:
            super().bring_up(member, generation)

    def fail(self, member: SimMember, generation: Generation, *, own: bool) -> None:
        who = self.process_of(member)
        self.send(member, events.BreakReported(**who, generation=generation, error=ERROR, own=own))


def clumsy(*names: str, desired: int = 0, low: int = 1) -> Clumsy:
    num = desired or len(names)
    w = Clumsy(JobSpec(job="j", min_members=low, max_members=8, desired_members=num))
    for name in names:
        w.join(name)
    return w


def running(*names: str) -> Clumsy:
    w = clumsy(*names)
    w.run(1.0)
    assert w.is_running()
    w.train(5)
    return w


def test_a_joiner_that_fails_three_times_is_left_out() -> None:
    """The refusal of the joiner has its own error; the others train between the attempts and
    afterwards."""
    w = running("a", "b")
    w.failing.add("c")
    c = w.join("c")
    w.run(1.5)
    assert w.roster() == ["a", "b"]
    assert "1 of 3" in w.job.members["c"].waiting_for
    assert ERROR in w.job.members["c"].waiting_for
    w.run(30.0)
    assert w.roster() == ["a", "b"]
    assert c.refused is not None
    assert c.refused.kind == RefusalKind.BRING_UP
    assert c.refused.seen == ERROR
    assert "c could not bring up" in c.refused.what
    assert sum("bring_up_failed: c" in line for line in w.log) == MAX_TRIES
    number = w.job.last_generation
    w.run(300.0)
    assert w.job.last_generation == number


def test_the_name_of_a_refused_member_is_left_out_for_a_time() -> None:
    """The next process that its launcher starts would fail in the same way."""
    w = running("a")
    w.failing.add("c")
    w.join("c")
    w.run(30.0)
    again = w.join("c")
    w.run(31.0)
    assert again.refused is not None
    assert again.refused.kind == RefusalKind.BRING_UP
    assert w.roster() == ["a"]
    w.failing.clear()
    w.run(32.0 + REMEMBERED_S)
    w.join("c")
    w.run(34.0 + REMEMBERED_S)
    assert w.roster() == ["a", "c"]


def test_failures_are_counted_over_restarts_of_a_member() -> None:
    """A restart by the launcher does not reset the count."""
    w = running("a")
    w.failing.add("c")
    w.join("c")
    w.run(1.6)
    w.join("c")
    w.run(4.0)
    again = w.join("c")
    w.run(30.0)
    assert again.refused is not None
    assert sum("bring_up_failed: c" in line for line in w.log) == MAX_TRIES


def test_a_bring_up_that_succeeds_resets_the_count() -> None:
    """The joiner fails twice before."""
    w = running("a", "b")
    w.failing.add("c")
    w.join("c")
    w.run(2.5)
    assert sum("bring_up_failed: c" in line for line in w.log) == 2
    w.failing.clear()
    w.run(10.0)
    assert w.roster() == ["a", "b", "c"]
    assert w.job.setbacks.num_own_failures("c") == 0


def test_a_joiner_beside_a_failing_one_enters() -> None:
    """The next attempt leaves out only the member that failed."""
    w = running("a")
    w.failing.add("c")
    w.join("c")
    w.join("d")
    w.run(1.5)
    assert w.roster() == ["a", "d"]


def test_the_first_generation_forms_without_a_member_that_fails() -> None:
    """The other members are enough for the minimum."""
    w = clumsy("a", "b", "c", low=2)
    w.failing.add("c")
    w.run(0.5)
    assert w.roster() == ["a", "b"]


def test_too_few_members_are_refused_with_the_error_of_the_failing_one() -> None:
    """The refusal names the member that was left out, and that member's error."""
    w = clumsy("a", "b", low=2)
    w.failing.add("b")
    a = w.members["a"]
    w.run(200.0)
    assert a.refused is not None
    assert "1 of at least 2 members were ready" in a.refused.what
    assert f"b was left out: {ERROR}" in a.refused.what


def test_a_member_that_fails_only_with_a_joiner_is_not_left_out() -> None:
    """The joiner waits instead, for ever longer times between the attempts."""
    w = running("a", "b")
    w.failing.add("a")
    w.fits = 2
    c = w.join("c")
    w.run(1.8)
    assert w.roster() == ["a", "b"]
    w.run(100.0)
    assert w.roster() == ["a", "b"]
    assert c.refused is None
    assert 2 < sum("bring_up_failed: a" in line for line in w.log) < 6
    assert w.job.setbacks.num_own_failures("a") == 0
    assert w.job.setbacks.waits("c")
    w.failing.clear()
    w.run(400.0)
    assert w.roster() == ["a", "b", "c"]


def test_the_only_member_with_the_state_is_waited_for() -> None:
    """A temporary failure does not remove the member: the state would be lost with it."""
    w = running("a")
    w.failing.add("a")
    w.join("c")
    w.run(1.3)
    assert w.job.setbacks.num_own_failures("a") == 2
    assert w.job.phase is Phase.COLLECT
    w.failing.clear()
    w.run(10.0)
    assert w.roster() == ["a", "c"]


def test_the_only_member_with_the_state_is_never_left_out_for_a_joiner() -> None:
    """A member that alone has the state fails in every bring-up with a joiner, without which the
    job is below its minimum. The joiner waits for the next attempt, without a limit of attempts."""
    w = clumsy("a", "b", low=2)
    w.run(1.0)
    w.train(5)
    w.kill("b", seen_by_launcher=True)
    a, c = w.members["a"], w.join("c")
    w.failing.add("a")
    w.fits = 1
    w.run(300.0)
    assert (a.refused, c.refused) == (None, None)
    assert sum("bring_up_failed: a" in line for line in w.log) > MAX_TRIES
    assert w.job.setbacks.num_own_failures("a") == 0
    assert w.job.members["a"].waiting_for == "1 more member, no limit"
    assert f"in the last one, a could not bring it up: {ERROR}" in w.job.members["c"].waiting_for
    w.failing.clear()
    w.run(800.0)
    assert w.roster() == ["a", "c"]


def test_the_only_member_with_the_state_is_not_blamed_for_an_own_error() -> None:
    """The joiner, whose connection was closed, reported first."""
    w = running("a")
    w.hanging |= {"a", "c"}
    c = w.join("c")
    w.run(1.3)
    number = w.job.last_generation
    w.fail(c, number, own=False)
    w.fail(w.members["a"], number, own=True)
    w.hanging.clear()
    w.run(1.5)
    assert w.job.setbacks.num_own_failures("a") == 0
    assert w.job.setbacks.waits("c")


def test_a_closed_connection_counts_against_no_member() -> None:
    """The failure does not show which member failed."""
    w = running("a", "b")
    w.hanging.add("c")
    c = w.join("c")
    w.run(1.3)
    w.fail(c, w.job.last_generation, own=False)
    w.run(1.6)
    assert w.roster() == ["a", "b"]
    assert w.job.setbacks.num_own_failures("c") == 0
    assert w.job.setbacks.waits("c")


def test_an_own_error_counts_although_a_closed_connection_was_reported_first() -> None:
    """Peers may notice the closed connection before the member reports its error. A repeated report
    counts once."""
    w = running("a", "b")
    w.hanging.add("c")
    c = w.join("c")
    w.run(1.3)
    number = w.job.last_generation
    w.fail(w.members["a"], number, own=False)
    w.run(1.31)
    w.fail(c, number, own=True)
    w.fail(c, number, own=True)
    w.run(1.4)
    assert w.job.setbacks.num_own_failures("c") == 1


def test_a_member_that_never_becomes_ready_is_refused_alone() -> None:
    """The members that have the state only waited for it."""
    w = running("a", "b")
    w.hanging |= {"a", "b", "c"}
    c = w.join("c")
    limits = w.job.limits
    w.run(1.4)
    assert w.job.phase is Phase.COMMITTED
    w.hanging.clear()
    w.run(2.0 + limits.collective_s + limits.bring_up_s)
    assert c.refused is not None
    assert c.refused.kind == RefusalKind.TIMEOUT
    assert w.job.setbacks.num_own_failures("c") == 1
    assert w.roster() == ["a", "b"]


@pytest.mark.parametrize("count", [1, 2, 50])
def test_the_wait_before_an_attempt_is_bounded(count: int) -> None:
    """The bound holds for any number of failures."""
    setbacks = Setbacks()
    for _ in range(count):
        setbacks.count_shared_failure("c", 0.0)
    (release_s,) = setbacks.next_release_s(["c"])
    assert 0.0 < release_s <= MAX_PAUSE_S
    setbacks.release(release_s)
    assert not setbacks.waits("c")
