"""Jobs that are stopped, abandoned and retried."""

import pytest
from support.members.job_world import World, digest_of, training

from shoal_server.core.generations.roster import Generation, JobSpec
from shoal_server.core.job.restore import SavedJob, restored
from shoal_server.core.limits import Limits
from shoal_server.core.membership import events
from shoal_server.core.membership.events import EventRefused, RefusalKind
from shoal_server.core.membership.phases import OVER, Phase


def stopped(*names: str) -> World:
    w = training(*names)
    w.train(7)
    w.stop("enough")
    w.run(5.0)
    return w


@pytest.mark.parametrize("names", [("a",), ("a", "b", "c")])
def test_members_of_a_stopped_job_leave_and_joiners_are_refused(names: tuple[str, ...]) -> None:
    """The phase is STOPPED once the members have left; the refusal names `shoal retry`."""
    w = stopped(*names)
    assert w.job.phase is Phase.STOPPED
    assert (w.job.reason, w.job.members) == ("enough", {})
    late = w.join("late")
    w.run(6.0)
    assert late.refused is not None
    assert late.refused.kind == RefusalKind.STOPPED
    assert "shoal retry j" in late.refused.fix
    assert w.job.tally.num_breaks == 0, "it was not interrupted"


def test_a_joiner_is_refused_while_the_job_stops() -> None:
    """A launcher that replaces a worker must not continue the job."""
    w = training("a")
    w.job.stop("enough", w.now_s)  # not sent to its member yet
    late = w.join("late")
    w.run(1.5)
    assert w.job.phase not in OVER
    assert late.refused is not None
    assert late.refused.kind == RefusalKind.STOPPED


def test_a_job_without_members_stops_at_once() -> None:
    w = training("a")
    w.kill("a", seen_by_launcher=True)
    w.run(2.0)
    w.stop("enough")
    assert w.job.phase is Phase.STOPPED


@pytest.mark.parametrize("end", ["kill", "drain"])
def test_the_end_of_a_job_is_no_restart(end: str) -> None:
    """A loss counts once the job trains on."""
    w = training("a", "b", "c")
    w.kill("c", seen_by_launcher=True)
    w.run(5.0)
    assert w.is_running() and w.job.tally.num_breaks == 1
    for name in ("a", "b"):
        getattr(w, end)(name)
    w.run(30.0)
    assert not w.is_running()
    assert w.job.tally.num_breaks == 1


def test_a_drain_during_a_reconnect_reaches_the_member() -> None:
    """The operator has an answer: the member must not train on."""
    w = training("a", "b")
    a = w.members["a"]
    w.deliver(events.StreamDisconnected(**w.process_of(a)))
    drained = events.DrainRequested(**w.process_of(a), reason="spot notice")
    w.job.handle(drained, w.now_s)  # its notice has no stream
    w.attend_again("a")
    w.run(10.0)
    assert list(w.job.members) == ["b"]
    assert w.roster() == ["b"]


@pytest.mark.parametrize("is_new_leader", [False, True])
def test_a_member_of_a_completing_job_keeps_its_time_if_it_reconnects(is_new_leader: bool) -> None:
    """The member saves a model, say, while the other one has left with its work done. A new process
    is refused."""
    w = training("a", "b")
    w.train(10)
    w.complete("a")
    w.run(2.0)
    b = w.members["b"]
    if is_new_leader:
        w.change_leader()
    else:
        w.deliver(events.StreamDisconnected(**w.process_of(b)))
        w.attend_again("b")
    w.run(20.0)
    late = w.join("c")
    w.run(100.0)
    assert late.refused is not None
    assert late.refused.kind == RefusalKind.FINISHED
    assert b.refused is None and list(w.job.members) == ["b"]
    w.complete("b")
    w.run(101.0)
    assert w.job.phase is Phase.FINISHED


def test_a_process_may_replace_a_dead_one_that_started_by_a_faster_clock() -> None:
    """The host's clock was set back between the two starts."""
    w = training("a", "b")
    w.kill("b")
    w.run(1.1)
    w.next_start = 0
    again = w.join("b")
    w.run(5.0)
    assert again.refused is None
    assert w.roster() == ["a", "b"]


@pytest.mark.parametrize("end", ["stop", "abandon"])
def test_the_wait_before_and_after_a_jobs_end_counts_as_idle_time(end: str) -> None:
    """The time from the end to a retry counts, too; the time after a last end does not."""
    w = training("a")
    w.run(10.0)
    before_s = w.job.tally.idle_until_s(10.0)
    w.kill("a", seen_by_launcher=True)
    w.run(100.0)
    getattr(w, end)("no member for an hour")
    assert w.job.phase in OVER
    for now_s in (100.0, 500.0):
        assert w.job.tally.idle_until_s(now_s) - before_s == pytest.approx(90.0, abs=1.0)
    w.run(300.0)
    w.retry()
    assert w.job.tally.idle_until_s(300.0) - before_s == pytest.approx(290.0, abs=1.0)


@pytest.mark.parametrize("num_leaders", [1, 2])
def test_a_new_leader_knows_since_when_no_generation_runs(num_leaders: int) -> None:
    w = training("a")
    w.run(10.0)
    before_s = w.job.tally.idle_until_s(10.0)
    w.kill("a", seen_by_launcher=True)
    for _ in range(num_leaders):
        w.run(w.now_s + 45.0)
        w.change_leader()
    w.run(200.0)
    assert w.job.tally.idle_until_s(200.0) - before_s == pytest.approx(190.0, abs=1.0)


def test_a_generation_that_runs_on_under_a_new_leader_is_not_idle() -> None:
    w = training("a", "b")
    w.run(10.0)
    before_s = w.job.tally.idle_until_s(10.0)
    w.change_leader()
    w.run(50.0)
    assert w.is_running()
    assert w.job.tally.idle_until_s(50.0) == before_s


def test_an_abandoned_job_without_members_fails() -> None:
    """A job that has members does not."""
    w = training("a")
    w.abandon("no member for an hour")
    assert w.job.phase is Phase.RUNNING
    w.kill("a", seen_by_launcher=True)
    w.run(2.0)
    w.abandon("no member for an hour")
    assert (w.job.phase, w.job.reason) == (Phase.FAILED, "no member for an hour")
    late = w.join("b")
    w.run(3.0)
    assert late.refused is not None
    assert late.refused.kind == RefusalKind.STOPPED


def test_a_retried_job_is_lost_without_its_state_and_may_begin_from_scratch() -> None:
    """The job had trained, and no member has the state."""
    w = stopped("a")
    w.retry()
    assert w.job.phase is Phase.COLLECT
    w.join("b")
    w.run(8.0)
    assert w.job.phase is Phase.LOST
    w.retry(from_scratch=True)
    w.join("c")
    w.run(12.0)
    assert w.is_running()
    assert w.roster() == ["c"]


@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_job_without_members_may_be_retried_repeatedly(is_stopped: bool) -> None:
    """A retry may be repeated, as after a lost answer. If one of them is from scratch, the job
    begins at step 0."""
    w = training("a")
    w.train(7)
    if is_stopped:
        w.stop("enough")
    else:
        w.kill("a", seen_by_launcher=True)
    w.run(5.0)
    w.retry()
    w.retry()
    w.retry(from_scratch=True)
    w.retry()
    w.join("b")
    w.run(9.0)
    assert w.is_running()
    assert w.roster() == ["b"]


def test_a_running_or_finished_job_is_not_retried() -> None:
    w = training("a")
    with pytest.raises(EventRefused, match="not over"):
        w.retry()
    w.complete("a")
    w.run(2.0)
    with pytest.raises(EventRefused, match="finished"):
        w.retry()
    w.stop("enough")
    assert w.job.phase is Phase.FINISHED


@pytest.mark.parametrize(
    ("stopping", "failed", "phase"), [("enough", False, Phase.STOPPED), ("", True, Phase.FAILED)]
)
def test_a_new_leader_restores_an_ended_job(stopping: str, failed: bool, phase: Phase) -> None:
    spec = JobSpec(job="j", min_members=1, max_members=1, desired_members=1)
    saved = SavedJob(
        last_generation=Generation(3),
        record=None,
        before=None,
        members=(),
        finished=True,
        reason="why",
        stopping=stopping,
        failed=failed,
        ended_s=17.0,
    )
    job = restored(spec, saved, limits=Limits(), digest_of=digest_of, now_s=99.0)
    assert (job.phase, job.phase_since_s) == (phase, 17.0)
    assert not job.is_completing
