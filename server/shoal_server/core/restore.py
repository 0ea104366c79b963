"""A job as a new leader finds it in the store."""

from collections.abc import Callable
from dataclasses import dataclass

from shoal_server.core.job import Job
from shoal_server.core.limits import Limits
from shoal_server.core.member import Member
from shoal_server.core.phases import Phase
from shoal_server.core.roster import Generation, JobSpec, Record, Roster


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What the store holds of a job."""

    last_generation: Generation
    record: Record | None
    """The newest committed record."""
    members: tuple[Member, ...]
    finished: bool
    reason: str


def restored(
    spec: JobSpec,
    saved: Saved,
    *,
    limits: Limits,
    digest_of: Callable[[Roster], str],
    now_s: float,
) -> Job:
    """The job with what was durable of it.

    Whether the newest generation already ran is not recorded: its members say so again when they
    attend. They get the time of a lease for that before they count as disconnected.
    """
    job = Job(spec=spec, limits=limits, digest_of=digest_of, phase_since_s=now_s)
    job.last_generation, job.reason = saved.last_generation, "a new leader took over"
    if saved.finished:
        job.phase, job.completing, job.reason = Phase.FINISHED, True, saved.reason
        return job
    for member in saved.members:
        member.disconnected_s = now_s + limits.lease_s
        job.members[member.member_id] = member
    if saved.record is not None:
        _continue_generation(job, saved.record, now_s)
    return job


def _continue_generation(job: Job, record: Record, now_s: float) -> None:
    roster = record.roster
    job.record, job.previous = record, roster
    present = job.members_of(roster)
    for member in present:
        member.settled = not roster.synchronous
    if len(present) == len(roster.entries):
        job.phase, job.attempt = Phase.COMMITTED, roster
        job.deadline_s = now_s + job.limits.collective_s + job.limits.bring_up_s
    elif roster.synchronous and present:
        # One of them was lost while nobody led: those who are left hear of it when they attend.
        job.broken_since_s = now_s
