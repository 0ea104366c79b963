"""Commands on one job by its name: wait, stop, retry, remove."""

import math
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Annotated

import grpc
from cyclopts import Parameter

from shoal_client.connection.addresses import UsualCoordinators, usual_coordinators
from shoal_client.connection.coordinators import Coordinators, Method
from shoal_client.connection.job_secret import JobSecretFile, secret_in
from shoal_client.host.reports import check_reachable
from shoal_proto.errors import (
    InvalidSpec,
    JobFinished,
    JobQuarantined,
    JobStopped,
    RetryError,
    StateLost,
    UnknownJob,
)
from shoal_proto.names import SHOWN_PHASES, check_name
from shoal_proto.short_lists import sendable
from shoal_proto.terminal import printable
from shoal_proto.tls.options import TlsOption, TlsOptions
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.membership_pb2_grpc import MembershipStub

ANSWER_WITHIN_S = 30.0


OVER = ("finished", "failed", "stopped", "lost")
ASK_AGAIN_S = 0.2
MAX_WAIT_S = 86400.0
MAX_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class RemoveConfig:
    """Removes everything that the cluster keeps of a job: its records, its sample ledger and its
    parameters on servers. Snapshots and checkpoints stay. The next run of that name starts from
    scratch. Refused while the job has members."""

    job: str = field(kw_only=False)
    """Name of the job."""
    coordinators: UsualCoordinators = ()
    job_secret: JobSecretFile = None
    tls: TlsOption = field(default_factory=TlsOptions)

    def __post_init__(self) -> None:
        check_name(self.job, "job")
        object.__setattr__(self, "coordinators", self.coordinators or usual_coordinators())


def remove(config: RemoveConfig) -> int:
    """Remove the job. Raises UnknownJob, JobInUse."""
    check_reachable(config.coordinators, ANSWER_WITHIN_S)
    if not reset_job(config.coordinators, config.job, secret_in(config.job_secret)):
        raise UnknownJob(f"there is no job {config.job!r}", fix="`shoal status` lists the jobs.")
    print(f"job {config.job} is removed")
    return 0


@dataclass(frozen=True, kw_only=True)
class StopConfig:
    """Stops a job: its members stop at their next step boundary, and no worker can join it. Its
    workers exit with 143, and so does `shoal run`. Its state is kept: `shoal retry` lets workers
    join it again."""

    job: str = field(kw_only=False)
    """Name of the job."""
    reason: Annotated[str, Parameter(metavar="TEXT")] = "an operator stopped it"
    """Reason that the log and the page show."""
    wait_s: Annotated[float, Parameter(metavar="SECONDS")] = 60.0
    """Seconds to wait for the last member to leave. 0: do not wait."""
    coordinators: UsualCoordinators = ()
    job_secret: JobSecretFile = None
    tls: TlsOption = field(default_factory=TlsOptions)

    def __post_init__(self) -> None:
        check_name(self.job, "job")
        object.__setattr__(self, "coordinators", self.coordinators or usual_coordinators())
        if not 0 <= self.wait_s <= MAX_WAIT_S:
            raise InvalidSpec(
                "bad --wait-s", seen=f"{self.wait_s:g}", expected=f"0 to {MAX_WAIT_S:g}"
            )


@dataclass(frozen=True, kw_only=True)
class WaitConfig:
    """Waits for the end of a job; the exit code is its outcome. 0: it is finished. 1: it failed,
    was stopped, its state is lost, or there is no such job. 75: it was not over when the time was
    up, or no coordinator answered."""

    job: str = field(kw_only=False)
    """Name of the job."""
    wait_s: Annotated[float, Parameter(metavar="SECONDS")] = math.inf
    """Seconds to wait. 0: do not wait. By default without a limit."""
    coordinators: UsualCoordinators = ()
    tls: TlsOption = field(default_factory=TlsOptions)

    def __post_init__(self) -> None:
        check_name(self.job, "job")
        object.__setattr__(self, "coordinators", self.coordinators or usual_coordinators())
        if not self.wait_s >= 0:
            raise InvalidSpec("bad --wait-s", seen=f"{self.wait_s:g}", expected="0 or more")


@dataclass(frozen=True, kw_only=True)
class RetryConfig:
    """Lets workers join a job again that failed, was stopped, or whose state is lost. The job
    continues from its state on the parameter servers, or from the newest checkpoint. If there is
    neither, the job is lost again, unless you give --from-scratch. With --from-scratch, you can
    also retry an interrupted job."""

    job: str = field(kw_only=False)
    """Name of the job."""
    from_scratch: Annotated[bool, Parameter(negative=())] = False
    """Start at step 0 if no member has the job's state. Refused for a job with parameters on
    servers or a sample ledger: `shoal run --fresh` starts such a job over."""
    coordinators: UsualCoordinators = ()
    job_secret: JobSecretFile = None
    tls: TlsOption = field(default_factory=TlsOptions)

    def __post_init__(self) -> None:
        check_name(self.job, "job")
        object.__setattr__(self, "coordinators", self.coordinators or usual_coordinators())


def stop(config: StopConfig) -> int:
    """Stop the job. Returns 1 if members are left after `wait_s` seconds, unless `wait_s` is 0."""
    check_reachable(config.coordinators, ANSWER_WITHIN_S)
    with closing(Coordinators(config.coordinators)) as coordinators:
        request = pb.StopJobRequest(
            job=config.job, reason=sendable(config.reason), job_secret=secret_in(config.job_secret)
        )
        standing = coordinators.call(
            lambda channel: MembershipStub(channel).StopJob, request, timeout_s=ANSWER_WITHIN_S
        )
        if standing.phase not in OVER:
            num = len(standing.member_ids)
            members_end = "1 member ends at its" if num == 1 else f"{num} members end at their"
            print(f"job {config.job}: {members_end} next step boundary", flush=True)
        deadline_s = time.monotonic() + config.wait_s
        while standing.phase not in OVER and time.monotonic() < deadline_s:
            # Commands are not notified of a job's end.
            time.sleep(ASK_AGAIN_S)
            asked = pb.GetJobRequest(job=config.job)
            standing = coordinators.call(_get, asked, timeout_s=ANSWER_WITHIN_S)
    if standing.phase not in OVER:
        left = ", ".join(standing.member_ids[:MAX_SHOWN])
        print(f"job {config.job} is being stopped; still there: {left or 'nobody'}")
        return 0 if config.wait_s == 0 else 1
    what = "is stopped" if standing.phase == "stopped" else f"was over already: {standing.phase}"
    print(f"job {config.job} {what} ({printable(standing.reason)})")
    return 0


def wait(config: WaitConfig) -> int:
    """Wait for the job's end. Raises UnknownJob."""
    deadline_s = time.monotonic() + config.wait_s
    asked, phase, reason = pb.GetJobRequest(job=config.job), "not known", ""
    with closing(Coordinators(config.coordinators)) as coordinators:
        while True:
            try:
                if phase == "not known":
                    # Fails at once if nothing listens; a call tries again for a while.
                    check_reachable(config.coordinators, ANSWER_WITHIN_S)
                standing = coordinators.call(_get, asked, timeout_s=ANSWER_WITHIN_S)
                phase, reason = standing.phase, standing.reason
            except (RetryError, JobQuarantined) as error:
                # A quarantined job is not over: it continues once it is repaired.
                if not reason:
                    print(f"shoal wait: {printable(str(error))}", file=sys.stderr, flush=True)
                reason = str(error)
            if phase in OVER or time.monotonic() >= deadline_s:
                break
            time.sleep(ASK_AGAIN_S)
    if phase in OVER:
        print(f"job {config.job} is {phase} ({printable(reason)})")
        return 0 if phase == "finished" else 1
    state = SHOWN_PHASES.get(phase, phase)
    print(f"job {config.job} is not over: {state}{f' ({printable(reason)})' if reason else ''}")
    return os.EX_TEMPFAIL


def retry(config: RetryConfig) -> int:
    """Let workers join the job again. Raises UnknownJob, JobFinished, or InvalidSpec if the job has
    members, if `--from-scratch` cannot begin at step 0, or is needed and was not given.
    """
    check_reachable(config.coordinators, ANSWER_WITHIN_S)
    with closing(Coordinators(config.coordinators)) as coordinators:
        request = pb.RetryJobRequest(
            job=config.job,
            from_scratch=config.from_scratch,
            job_secret=secret_in(config.job_secret),
        )
        coordinators.call(
            lambda channel: MembershipStub(channel).RetryJob, request, timeout_s=ANSWER_WITHIN_S
        )
    print(f"job {config.job} can be joined again: shoal run --job {config.job} ...")
    return 0


def reset_job(addresses: Sequence[str], job: str, job_secret: str = "") -> bool:
    """Remove all data of a job; True if there was any, or if it was removed seconds ago, as by an
    earlier attempt of this call. Raises JobInUse while the job has members, Unavailable without a
    coordinator.
    """
    with closing(Coordinators(addresses)) as coordinators:
        request = pb.ResetJobRequest(job=job, job_secret=job_secret)
        reply = coordinators.call(
            lambda channel: MembershipStub(channel).ResetJob, request, timeout_s=ANSWER_WITHIN_S
        )
    return reply.existed


def phase_of(addresses: Sequence[str], job: str, timeout_s: float = ANSWER_WITHIN_S) -> str:
    """Return the job's phase; empty: no such job. Raises Unavailable without a coordinator."""
    standing = _standing_of(addresses, job, timeout_s)
    return standing.phase if standing is not None else ""


def check_not_finished(addresses: Sequence[str], job: str) -> None:
    """Raise JobFinished, StateLost or JobStopped if the job cannot be joined."""
    standing = _standing_of(addresses, job)
    if standing is None:
        return
    if standing.phase == "lost":
        raise StateLost(
            standing.reason,
            fix="Run it again with --fresh: from the newest checkpoint, if its script has"
            " checkpoints=shoal.Checkpoints(...) in distribute(), otherwise from step 0.",
        )
    if standing.phase in ("stopped", "failed"):
        was = "was stopped" if standing.phase == "stopped" else "has failed"
        raise JobStopped(
            f"job {job} {was} ({printable(standing.reason)})",
            fix=f"`shoal retry {job}` lets workers join it again, and it continues from its state;"
            " --fresh starts it over.",
        )
    if standing.finished:
        raise JobFinished(
            f"job {job} is finished ({standing.reason}): run it again with --fresh, or give"
            " another --job"
        )


def _standing_of(
    addresses: Sequence[str], job: str, timeout_s: float = ANSWER_WITHIN_S
) -> pb.JobStanding | None:
    with suppress(UnknownJob), closing(Coordinators(addresses)) as coordinators:
        return coordinators.call(_get, pb.GetJobRequest(job=job), timeout_s=timeout_s)
    return None


def _get(channel: grpc.Channel) -> Method[pb.JobStanding]:
    return MembershipStub(channel).GetJob
