"""The state of a member, as the page and the metrics show it."""

from support.members.job_world import World, digest_of

from shoal_server.core.generations.progress import JobProgress
from shoal_server.core.generations.roster import Generation, JobSpec
from shoal_server.core.job.restore import SavedJob, restored
from shoal_server.core.limits import Limits
from shoal_server.status.from_core import JobReader


def states(w: World) -> dict[str, str]:
    entries = JobReader(job=w.job).detail().members
    return {entry.member.member_id: entry.member.state for entry in entries}


def test_members_on_standby_are_shown_as_such_whatever_they_wait_for() -> None:
    """A member is beyond the maximum of the job; later the job has too few members."""
    w = World(JobSpec(job="j", min_members=2, max_members=2, desired_members=2))
    for name in ("a", "b"):
        w.join(name)
    w.run(1.0)
    w.train(7)
    w.join("c")
    w.run(2.0)
    assert states(w) == {"a": "training", "b": "training", "c": "standby"}
    for name in ("b", "c"):
        w.kill(name, seen_by_launcher=True)
    w.run(3.0)
    assert w.job.members["a"].waiting_for == "1 more member, no limit"
    assert states(w) == {"a": "standby"}


def test_a_job_whose_members_left_while_nobody_led_is_interrupted() -> None:
    """The record says that the first generation ran; no step was reported before."""
    first = Generation(1)
    saved = SavedJob(
        last_generation=first,
        record=None,
        before=None,
        members=(),
        finished=False,
        reason="",
        progress=JobProgress(trained_in=first),
        lost=None,
    )
    job = restored(JobSpec(job="j"), saved, limits=Limits(), digest_of=digest_of, now_s=0.0)
    assert JobReader(job=job).detail().summary.state == "interrupted"
