"""What one durable write of a job holds, and what is gathered for the next one."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shoal_server.core.generations.progress import Progress, Tally
from shoal_server.core.generations.roster import Generation, JobSpec, Record
from shoal_server.core.job.job import Job
from shoal_server.core.membership.member import Member
from shoal_server.core.membership.phases import OVER, Phase


@dataclass(frozen=True, kw_only=True)
class StateRecord:
    """What is kept of a job beside its members and its generations."""

    spec: JobSpec
    last_generation: Generation
    finished: bool
    reason: str
    progress: Progress = field(default_factory=Progress)
    lost: str | None = None
    """Of a job whose state is lost: where it was looked for."""
    stopping: str = ""
    """Of a job that was stopped, or is to be: why."""
    failed: bool = False
    """Of a job that is over: all its members were gone, and none came back."""
    tally: Tally = field(default_factory=Tally)
    ended_s: float = 0.0
    """When it was over; 0: it is not, or that is not known."""
    done: tuple[str, ...] = ()
    """Members that have done their work, while others have not."""
    more: Mapping[str, object] = field(default_factory=dict, compare=False)
    """What a later release has written beside it."""
    revision: int = field(default=0, compare=False)
    """As of which revision of the store it was read; 0: it was not."""

    @property
    def may_go_on(self) -> bool:
        """Whether its members may still want what is kept of it: one that failed, was stopped or is
        lost may be joined again."""
        if self.tally.is_cleared:
            return False
        return not self.finished or self.failed or bool(self.stopping) or self.lost is not None

    @classmethod
    def of(cls, job: Job, *, finished: bool) -> "StateRecord":
        """The job as it is now."""
        return cls(
            spec=job.spec,
            last_generation=job.last_generation,
            finished=finished and job.phase in OVER,
            reason=job.reason,
            progress=replace(job.progress),
            lost=job.lost.seen if job.lost is not None else None,
            # What was to be stopped may have come to its end before.
            stopping="" if job.phase in (Phase.FINISHED, Phase.LOST) else job.stopping,
            failed=job.phase is Phase.FAILED,
            tally=replace(job.tally),
            ended_s=job.state.stage.since_s if job.phase in OVER else 0.0,
            done=tuple(sorted(job.table.finished)),
        )


@dataclass(frozen=True, kw_only=True)
class JobWrite:
    """One durable write. The record is written only once all that stands before it is."""

    job: str
    members: Mapping[str, Member | None]
    """By id, those that changed; None: it is no member any more."""
    state: StateRecord | None
    """None: nothing of it changed."""
    record: Record | None
    """The decided record of a generation."""


class PendingWrite:
    """A job's changes on their way to the store: gathered, then written together."""

    def __init__(self, job: Job) -> None:
        self._job = job
        # By id: of several changes to one the last is the one that counts.
        self._members: dict[str, Member | None] = {}
        self._state_changed = False
        self._finished = job.phase in OVER

    def admit(self, member: Member) -> None:
        """The member's key, which comes with the job's own."""
        self._members[member.member_id] = member
        self._state_changed = True

    def expel(self, member_id: str) -> None:
        self._members[member_id] = None

    def save(self) -> None:
        """The job's own key."""
        self._state_changed = True

    def finish(self) -> None:
        self._finished = self._state_changed = True

    def take(self, record: Record | None = None) -> JobWrite | None:
        """The write of what was gathered, with the record behind it; None: there is nothing."""
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
