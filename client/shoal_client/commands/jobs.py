"""Jobs by their names: how one stands, and beginning it anew; `shoal rm`."""

import argparse
import os
from collections.abc import Sequence

import grpc

from shoal_client.connection.coordinators import Coordinators, Method
from shoal_client.host.reports import check_reachable, parse_coordinators
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

DEFAULT_COORDINATOR = "127.0.0.1:7700"
ANSWER_WITHIN_S = 30.0

_DESCRIPTION = """\
Takes away all that the cluster keeps of a job: its records, its samples, and what parameter
servers hold of it. Snapshots and checkpoints stay. The next run of the name begins from nothing.
Refused while the job has members.
"""


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `shoal rm`."""
    parser = subparsers.add_parser(
        "rm",
        help="take away a job that is over, or whose workers are gone",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument("job", metavar="JOB", help="name of the job")
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT,...",
        default=os.environ.get("SHOAL_COORDINATOR") or DEFAULT_COORDINATOR,
        help=f"default: $SHOAL_COORDINATOR, else {DEFAULT_COORDINATOR}",
    )
    parser.set_defaults(handler=_remove)


def _remove(options: argparse.Namespace) -> int:
    if not is_name(options.job):
        raise InvalidSpec("bad name of a job", seen=repr(options.job), expected=NAME_RULE)
    addresses = parse_coordinators(options.coordinator)
    check_reachable(addresses, ANSWER_WITHIN_S)
    if not reset_job(addresses, options.job):
        raise UnknownJob(f"there is no job {options.job!r}", expected="one of `shoal status`")
    print(f"job {options.job} is gone")
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
