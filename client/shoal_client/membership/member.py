"""A member's configuration and callbacks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal_client.connection.admission import ADMISSION_S
from shoal_client.liveness.beat_board import BeatSlot, MembershipEnding
from shoal_client.membership import member_events as ev
from shoal_client.membership.identity import Identity
from shoal_proto.errors import JobFinished, ShoalError
from shoal_proto.incarnation import public_id
from shoal_proto.v1 import membership_pb2 as pb


@dataclass(frozen=True, kw_only=True)
class Member:
    """Configuration of a member."""

    coordinators: Sequence[str]
    """host:port of each."""
    spec: pb.JobSpec
    member_id: str
    incarnation: str = field(repr=False)
    """Secret UUID of the process."""
    info: pb.MemberInfo
    beat_slot: BeatSlot | None = None
    """Slot for heartbeats by the launcher; None: the member sends its own."""

    launcher_job: str = ""
    """Job of this host's launcher; empty: none, or unknown."""
    job_secret: str = field(default="", repr=False)
    """See `shoal_proto.secrets`; empty: the job has none."""
    shared_directory: Path | None = None
    """Directory that the members of this host share; None: each member fetches its rosters."""
    admission_s: float = ADMISSION_S

    @property
    def identity(self) -> Identity:
        """The member's identity."""
        return Identity(
            spec=self.spec,
            member_id=self.member_id,
            incarnation=self.incarnation,
            public_id=public_id(self.incarnation),
            info=self.info,
            job_secret=self.job_secret,
        )


@dataclass(frozen=True, kw_only=True)
class MemberHooks:
    """Callbacks of a session to its owner, on the thread that reads the notices; `on_break` may run
    on any thread of the session, the trainer's included."""

    validate: Callable[[pb.Prepare], Sequence[pb.Rejection]] = lambda prepare: ()
    find_unreachable: Callable[[pb.Prepare], Mapping[str, str]] = lambda prepare: {}
    """Peers that this member cannot reach, with the error."""
    find_checkpoints: Callable[[], Sequence[int]] = lambda: ()
    """Steps of the complete checkpoints that this member sees; asked for if no member of the roster
    has the job's state."""
    on_break: Callable[[int, str], None] = lambda generation, reason: None
    """Called when a generation breaks, or when the membership ends with an error. A planned change
    is not a break."""

    def validate_roster(self, effect: ev.ValidateRoster) -> ev.RosterValidated:
        """The member's answer to a roster."""
        prepare = effect.prepare
        rejections = self.validate(prepare)
        return ev.RosterValidated(
            generation=prepare.roster.generation,
            digest=effect.digest,
            rejections=rejections,
            # The network need not be checked for a rejected roster.
            unreachable={} if rejections else self.find_unreachable(prepare),
            checkpoint_steps=self.find_checkpoints()
            if effect.from_checkpoint and not rejections
            else (),
        )


_completed: set[tuple[str, str]] = set()
"""(job, member_id) of jobs that this process has trained to their end."""


class OwnJob:
    """A member's job among those that its process joins one after another."""

    def __init__(self, member: Member) -> None:
        self._key = (member.spec.job, member.member_id)
        self._differs_from_launcher = member.launcher_job not in ("", member.spec.job)

    @property
    def is_launchers(self) -> bool:
        """True if the process's launcher was started for this job, or no launcher is known."""
        return not self._differs_from_launcher

    def completed(self) -> None:
        """Record that the process has trained the job to its end."""
        _completed.add(self._key)

    def ending(self, error: ShoalError, *, admitted: bool) -> MembershipEnding:
        """Ending to report to the launcher. A job that was finished before the admission is usually
        not a failure. In a script with several jobs it is one: otherwise a job could be skipped
        without notice."""
        ending = MembershipEnding.of(error)
        several = self._differs_from_launcher or self._key in _completed
        return (
            MembershipEnding.REFUSED
            if ending is MembershipEnding.FINISHED and several and not admitted
            else ending
        )

    def explain(self, failure: ShoalError) -> ShoalError:
        """The error of a join, with advice for scripts with several jobs."""
        again = self._key in _completed
        if not isinstance(failure, JobFinished) or not (again or self._differs_from_launcher):
            return failure
        finished = f"job {self._key[0]} is finished"
        if failure.what != finished:
            # Another refusal, for example because the job was started over.
            return failure
        by = "by an earlier session of this process" if again else "by others"
        fix = "Give each a name, as in shoal.join(f'fold-{k}')" if again else "Catch JobFinished"
        return JobFinished(
            f"{finished}, {by}",
            seen=failure.seen,
            expected="another job for each session of a script"
            if again
            else "a job that still has work to do, or a script that goes on with its next job",
            fix=f'{fix}: see "Several jobs in one script" in docs/run.md. `shoal run --fresh` and'
            " `shoal rm` let a job start over.",
        )
