"""Jobs by their names: how one stands, and beginning it anew; `shoal rm`."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from shoal_client.connection.addresses import DEFAULT_COORDINATORS, CoordinatorAddresses
from shoal_client.connection.coordinators import Coordinators, Method
from shoal_client.host.reports import check_reachable
from shoal_proto.errors import (
    InvalidSpec,
    JobFinished,
    MalformedMessage,
    StateLost,
    UnknownJob,
)
from shoal_proto.names import NAME_RULE, is_name
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.membership_pb2_grpc import MembershipStub

ANSWER_WITHIN_S = 30.0


@dataclass(frozen=True, kw_only=True)
class RemoveConfig:
    """Removes all that the cluster keeps of a job: its records, its samples, and what parameter
    servers hold of it. Snapshots and checkpoints stay. The next run of that name starts from
    nothing. Refused while the job has members."""

    job: str = field(kw_only=False)
    """Name of the job."""
    coordinators: CoordinatorAddresses = DEFAULT_COORDINATORS

    def __post_init__(self) -> None:
        if not is_name(self.job):
            raise InvalidSpec("bad name of a job", seen=repr(self.job), expected=NAME_RULE)


def remove(config: RemoveConfig) -> int:
    """Remove the job. Raises UnknownJob, JobInUse."""
    check_reachable(config.coordinators, ANSWER_WITHIN_S)
    if not reset_job(config.coordinators, config.job):
        raise UnknownJob(f"there is no job {config.job!r}", fix="`shoal status` lists the jobs.")
    print(f"job {config.job} is removed")
    return 0


def reset_job(addresses: Sequence[str], job: str) -> bool:
    """Have the job begin from nothing; whether there was anything of it.

    Raises JobInUse while it has members, Unavailable if no coordinator answers.
    """
    coordinators = Coordinators(addresses)
    try:
        request = pb.ResetJobRequest(job=job)
        return coordinators.call(_reset, request, timeout_s=ANSWER_WITHIN_S).existed
    finally:
        coordinators.close()


def check_not_finished(addresses: Sequence[str], job: str) -> None:
    """Raise JobFinished or StateLost, with what to do, for a job that nobody can join any more."""
    coordinators = Coordinators(addresses)
    try:
        request = pb.GetJobRequest(job=job)
        standing = coordinators.call(_get, request, timeout_s=ANSWER_WITHIN_S)
    except UnknownJob:
        return
    except MalformedMessage:
        return  # an older coordinator, which cannot be asked: its workers are told by themselves
    finally:
        coordinators.close()
    if standing.phase == "lost":
        raise StateLost(
            standing.reason,
            fix="Run it again with --fresh: from the newest checkpoint, if its script has"
            " checkpoints=shoal.Checkpoints(...) in distribute(), else from step 0.",
        )
    if standing.finished:
        raise JobFinished(
            f"job {job} is finished ({standing.reason}): run it again with --fresh, or give"
            " another --job"
        )


def _reset(channel: grpc.Channel) -> Method[pb.ResetJobReply]:
    return MembershipStub(channel).ResetJob


def _get(channel: grpc.Channel) -> Method[pb.JobStanding]:
    return MembershipStub(channel).GetJob
