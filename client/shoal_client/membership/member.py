"""A member that joins a job, and what its membership asks of its owner."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal_client.connection.admission import ADMISSION_S
from shoal_client.liveness.beat_board import BeatSlot
from shoal_client.membership import member_events as ev
from shoal_client.membership.identity import Identity
from shoal_proto.incarnation import public_id
from shoal_proto.v1 import membership_pb2 as pb


@dataclass(frozen=True, kw_only=True)
class Member:
    """Who joins what, and where the coordinators are."""

    coordinators: Sequence[str]
    """host:port of every coordinator replica."""
    spec: pb.JobSpec
    member_id: str
    incarnation: str
    info: pb.MemberInfo
    beat_slot: BeatSlot | None = None
    """Where this host's launcher looks for whom to beat. Without it the member beats by itself."""

    launcher_job: str = ""
    """The job that this host's launcher runs workers for; empty: without a launcher, or unknown."""
    job_secret: str = field(default="", repr=False)
    """See `shoal_proto.secrets`; empty: the job has none."""
    shared_directory: Path | None = None
    """Where the members of this host keep what they have in common. Without it each fetches it."""
    admission_s: float = ADMISSION_S
    """How long a coordinator may take to admit it: a wrong address is told of by then."""

    @property
    def identity(self) -> Identity:
        """Who it is to the coordinator."""
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
    """What a session asks of its owner, on the thread that holds the stream."""

    judge: Callable[[pb.Prepare], Sequence[pb.Rejection]] = lambda prepare: ()
    find_unreachable: Callable[[pb.Prepare], Mapping[str, str]] = lambda prepare: {}
    """The peers that this member cannot reach, each with what was seen."""
    find_checkpoints: Callable[[], Sequence[int]] = lambda: ()
    """The steps of the complete checkpoints that it sees, asked where nobody in the roster holds
    the job's state."""
    on_break: Callable[[int, str], None] = lambda generation, reason: None
    """A generation is over, and why."""

    def judged(self, effect: ev.Judge) -> ev.Judged:
        """The member's answer to a roster."""
        prepare = effect.prepare
        rejections = self.judge(prepare)
        return ev.Judged(
            generation=prepare.roster.generation,
            digest=effect.digest,
            rejections=rejections,
            # What is rejected anyway needs no network.
            unreachable={} if rejections else self.find_unreachable(prepare),
            checkpoint_steps=self.find_checkpoints()
            if effect.from_checkpoint and not rejections
            else (),
        )
