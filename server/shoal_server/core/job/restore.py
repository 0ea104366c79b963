"""Restoring a job from the records that a new leader finds."""

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal_server.core.generations.agreement import Agreement
from shoal_server.core.generations.progress import JobProgress, LifetimeFigures
from shoal_server.core.generations.roster import (
    Generation,
    GenerationRecord,
    GenerationRoster,
    JobSpec,
)
from shoal_server.core.job.job import Job
from shoal_server.core.job.job_state import JobState
from shoal_server.core.limits import Limits
from shoal_server.core.membership import refusals
from shoal_server.core.membership.member import MemberState
from shoal_server.core.membership.phases import Phase

GRACE_LEASES = 3


@dataclass(frozen=True, kw_only=True)
class SavedJob:
    """Stored state of a job."""

    last_generation: Generation
    record: GenerationRecord | None
    before: GenerationRecord | None
    """Committed record before `record`, if any. Members may still train in it."""
    members: tuple[MemberState, ...]
    finished: bool
    reason: str
    progress: JobProgress = field(default_factory=JobProgress)
    lost: str | None = None
    """The `seen` of the refusal for a lost state; None without one."""
    stopping: str = ""
    """Reason why the job was or is being stopped; empty if neither."""
    failed: bool = False
    tally: LifetimeFigures = field(default_factory=LifetimeFigures)
    ended_s: float = 0.0
    """0: unknown."""
    done: tuple[str, ...] = ()
    """Members that have done their work."""
    completing: bool = False
    """True if the job was not over and admitted no further members."""


def restored(
    spec: JobSpec,
    saved: SavedJob,
    *,
    limits: Limits,
    digest_of: Callable[[GenerationRoster], str],
    size_problem: Callable[[GenerationRoster], str] = lambda roster: "",
    now_s: float,
) -> Job:
    """Make the job from its durable state.

    Members report if the newest generation already ran. They get `GRACE_LEASES` times `lease_s` to
    attend, since the coordinator that they ask first may hang.
    """
    job = Job(
        spec=spec,
        limits=limits,
        digest_of=digest_of,
        size_problem=size_problem,
        phase_since_s=now_s,
    )
    job.last_generation, job.reason = saved.last_generation, "a new leader took over"
    job.progress = saved.progress
    job.progress.tally = saved.tally
    finished = saved.finished or (saved.completing and not saved.members)
    if finished:
        # A leader's clock may have been wrong.
        job.phase_since_s = min(saved.ended_s or now_s, now_s)
    if saved.lost is not None:
        job.end.lost = refusals.state_lost(spec.job, saved.progress, saved.lost)
        job.end.completing = True
        job.phase, job.reason = Phase.LOST, job.end.lost.what
        return job
    job.end.stopping = saved.stopping
    job.end.completing = saved.completing
    if finished:
        job.phase, job.reason = Phase.FINISHED, saved.reason
        if saved.stopping or saved.failed:
            job.phase = Phase.STOPPED if saved.stopping else Phase.FAILED
        job.end.completing = job.phase is Phase.FINISHED
        return job
    for member in saved.members:
        job.table.admit(member)
        if member.member_id not in saved.done:
            job.table.unproposed.add(member.member_id)
        job.table.disconnect(member, now_s + GRACE_LEASES * limits.lease_s)
        if saved.stopping:
            job.table.drain(member, saved.stopping, now_s)
    job.table.finished.update(saved.done)
    if saved.record is not None:
        _continue_generation(job, saved, saved.record, now_s)
    elif saved.members and saved.progress.has_trained:
        # Without a readable record, members report their step.
        job.table.settle(saved.members, settled=False)
        job.deadlines.broken_since_s = now_s
    _continue_idle(job, now_s)
    return job


def _continue_idle(job: JobState, now_s: float) -> None:
    """Continue the time without a running generation. The record of the job's state is written
    with each removed member, but not when a generation begins to run."""
    tally, record = job.tally, job.record
    if record is not None and record.decided_s >= (tally.idle_since_s or 0.0):
        tally.end_idle(record.decided_s)
    trains = bool(job.members) and record is not None and not record.roster.synchronous
    if not trains and job.agreement is None and job.running is None:
        tally.begin_idle(now_s)


def _continue_generation(
    job: JobState, saved: SavedJob, record: GenerationRecord, now_s: float
) -> None:
    roster, before = record.roster, saved.before
    job.record, job.previous = record, roster
    job.tries.changes.before = roster
    if job.progress.has_trained and roster.synchronous:
        # This generation most likely ran: the store records only the first one that did.
        job.progress.trained_in = max(job.progress.trained_in, roster.generation)
    present = job.members_of(roster)
    job.table.settle(present, settled=not roster.synchronous)
    if job.is_completing:
        job.reason = saved.reason
        # Its members finish by themselves.
        job.running, job.phase = roster, Phase.RUNNING
        return
    done = job.table.finished
    if {m.member_id for m in present} | done >= set(roster.member_ids):
        old = before.roster if before is not None and roster.planned else None
        if old is not None and len(job.members_of(old)) == len(old.entries):
            # Members may still train in the old generation, up to the boundary.
            job.running = old
            job.table.settle(job.members_of(old), settled=not old.synchronous)
        stopping = set(job.running.member_ids if job.running is not None else ()) - done
        job.phase = Phase.COMMITTED
        job.agreement = Agreement.begin(roster, record.digest, stopping=stopping, inherited=True)
        for name in done:
            job.agreement.forget(name)
        job.deadlines.deadline_s = now_s + job.limits.collective_s + job.limits.bring_up_s
        job.deadlines.bring_up_over_s = now_s + job.limits.longest_bring_up_s
    elif roster.synchronous and present:
        # A loss without a leader: survivors are notified when they attend.
        job.deadlines.broken_since_s = now_s
        job.tries.changes.record_break("", now_s)
