"""What one durable write of a job holds, and what is gathered for the next one."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal_server.core.generations.progress import Progress
from shoal_server.core.generations.roster import Generation, JobSpec, Record
from shoal_server.core.job.job import Job
from shoal_server.core.membership.member import Member


@dataclass(frozen=True, kw_only=True)
class StateRecord:
    """What is kept of a job beside its members and its generations."""

    spec: JobSpec
    last_generation: Generation
    finished: bool
    reason: str
    progress: Progress | None = None
    """None: written by a release that did not keep it."""
    lost: str | None = None
    """Of a job whose state is lost: where it was looked for."""

    @classmethod
    def of(cls, job: Job, *, finished: bool) -> "StateRecord":
        """The job as it is now."""
        return cls(
            spec=job.spec,
            last_generation=job.last_generation,
            finished=finished,
            reason=job.reason,
            progress=replace(job.progress),
            lost=job.lost.seen if job.lost is not None else None,
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
        self._finished = False

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
