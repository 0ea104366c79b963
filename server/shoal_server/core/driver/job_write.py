"""Durable writes of a job, and the gathered changes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shoal_server.core.generations.progress import JobProgress, LifetimeFigures
from shoal_server.core.generations.roster import Generation, GenerationRecord, JobSpec
from shoal_server.core.job.job import Job
from shoal_server.core.membership.member import MemberState
from shoal_server.core.membership.phases import OVER, Phase


@dataclass(frozen=True, kw_only=True)
class StateRecord:
    """The job's own record, without members and generations."""

    spec: JobSpec
    last_generation: Generation
    finished: bool
    reason: str
    progress: JobProgress = field(default_factory=JobProgress)
    lost: str | None = None
    """The `seen` of the refusal for a lost state; None without one."""
    stopping: str = ""
    """Reason why the job was or is being stopped; empty if neither."""
    failed: bool = False
    """True if all members were gone for good."""
    tally: LifetimeFigures = field(default_factory=LifetimeFigures)
    ended_s: float = 0.0
    """Time of the job's end; 0: not over, or unknown."""
    done: tuple[str, ...] = ()
    """Members that have done their work."""
    completing: bool = False
    """True if the job is not over and admits no further members."""
    more: Mapping[str, object] = field(default_factory=dict, compare=False)
    """Fields of a later release."""
    revision: int = field(default=0, compare=False)
    """Store's revision of the record; 0 for a new one."""

    @property
    def may_go_on(self) -> bool:
        """True if the job is not over, or may be joined again."""
        if self.tally.is_cleared:
            return False
        return not self.finished or self.failed or bool(self.stopping) or self.lost is not None

    @classmethod
    def of(cls, job: Job, *, finished: bool) -> "StateRecord":
        """Make the record of the current job."""
        return cls(
            spec=job.spec,
            last_generation=job.last_generation,
            finished=finished and job.phase in OVER,
            reason=job.reason,
            progress=replace(job.progress),
            lost=job.loss_refusal.seen if job.loss_refusal is not None else None,
            # The job may have finished before its stop.
            stopping="" if job.phase in (Phase.FINISHED, Phase.LOST) else job.stop_reason,
            failed=job.phase is Phase.FAILED,
            tally=replace(job.tally),
            ended_s=job.phase_since_s if job.phase in OVER else 0.0,
            done=tuple(sorted(job.table.finished)),
            completing=job.is_completing and job.phase not in OVER,
        )


@dataclass(frozen=True, kw_only=True)
class JobWrite:
    """Durable write of a job, with the generation's record last."""

    job: str
    members: Mapping[str, MemberState | None]
    """Changed members by id; None: no longer a member."""
    state: StateRecord | None
    """None: unchanged."""
    record: GenerationRecord | None


class PendingWrite:
    """Changes of a job, gathered for one write."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._members: dict[str, MemberState | None] = {}
        self._state_changed = False
        self._finished = job.phase in OVER

    def admit(self, member: MemberState) -> None:
        """Add the member's and the job's own key to the write."""
        self._members[member.member_id] = member
        self._state_changed = True

    def expel(self, member_id: str) -> None:
        """Remove the member's key in the write, and add the job's own: a generation may be over."""
        self._members[member_id] = None
        self._state_changed = True

    def save(self) -> None:
        """Add the job's own key to the write."""
        self._state_changed = True

    def finish(self) -> None:
        self._finished = self._state_changed = True

    def take(self, record: GenerationRecord | None = None) -> JobWrite | None:
        """Return the changes and the record as one write; None if there are none."""
        state_changed = self._state_changed or record is not None
        if not self._members and not state_changed:
            return None
        write = JobWrite(
            job=self._job.spec.job,
            members=self._members,
            state=StateRecord.of(self._job, finished=self._finished) if state_changed else None,
            record=record,
        )
        self._members, self._state_changed = {}, False
        return write
