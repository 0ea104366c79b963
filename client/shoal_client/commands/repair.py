"""`shoal repair`: shows the records that keep a job quarantined, and moves them aside."""

import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter

from shoal_client.connection.addresses import UsualCoordinators, usual_coordinators
from shoal_client.connection.coordinators import Coordinators
from shoal_client.connection.job_secret import JobSecretFile, secret_in
from shoal_client.host.reports import check_reachable
from shoal_proto.errors import InvalidSpec
from shoal_proto.names import check_name
from shoal_proto.terminal import printable
from shoal_proto.tls.options import TlsOption, TlsOptions
from shoal_proto.v1 import repair_pb2 as pb
from shoal_proto.v1.repair_pb2_grpc import RepairsStub

ANSWER_WITHIN_S = 30.0
BROKEN = 1
"""Exit code while the job is quarantined."""


@dataclass(frozen=True, kw_only=True)
class RepairConfig:
    """Shows why a job is quarantined: which record in etcd cannot be read, its contents, and what
    can be done. With --apply, moves such records to keys under /shoal/v1/quarantine/ and lets the
    job continue from the rest; nothing is destroyed, and the coordinator is not restarted. Exits
    with 1 while the job is quarantined."""

    job: str = field(kw_only=False)
    """Name of the job."""
    apply: bool = False
    """Apply the repair. Without it, nothing changes."""
    min_members: Annotated[int, Parameter(name="--min")] = 0
    """The job's --min. Needed if the record that contains it cannot be read, and the job has
    members."""
    max_members: Annotated[int, Parameter(name="--max")] = 0
    """The job's --max; needed like --min."""
    desired_members: Annotated[int, Parameter(name="--desired")] = 0
    """The job's --desired; needed like --min."""
    job_secret: Annotated[
        JobSecretFile,
        Parameter(
            help="File with the job's secret. If the record of the secret cannot be read, the job"
            " has this one from then on; without it, none."
        ),
    ] = None
    coordinators: UsualCoordinators = ()
    tls: TlsOption = field(default_factory=TlsOptions)

    def __post_init__(self) -> None:
        check_name(self.job, "job")
        object.__setattr__(self, "coordinators", self.coordinators or usual_coordinators())
        bounds = (self.min_members, self.max_members, self.desired_members)
        if any(not 0 <= each < 2**31 for each in bounds):
            raise InvalidSpec("bad bounds of a job", seen=str(bounds), expected="0 to 2147483647")


def repair(config: RepairConfig) -> int:
    """Show the broken records, or repair the job. Raises UnknownJob, JobQuarantined if the job
    still cannot continue, and InvalidSpec if --min, --max and --desired are needed."""
    check_reachable(config.coordinators, ANSWER_WITHIN_S)
    request = pb.RepairRequest(
        job=config.job,
        apply=config.apply,
        min_members=config.min_members,
        max_members=config.max_members,
        desired_members=config.desired_members,
        job_secret=secret_in(config.job_secret),
    )
    with closing(Coordinators(config.coordinators)) as coordinators:
        reply = coordinators.call(
            lambda channel: RepairsStub(channel).Repair, request, timeout_s=ANSWER_WITHIN_S
        )
    for line in report_lines(config.job, reply):
        print(printable(line))
    return 0 if reply.goes_on else BROKEN


def report_lines(job: str, reply: pb.RepairReply) -> list[str]:
    """Lines that show the answer."""
    lines = []
    if reply.quarantined:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(reply.since_unix_s))
        was = "was quarantined" if reply.goes_on else "is quarantined"
        lines += [f"job {job} {was} since {since}", f"  {reply.reason}"]
    else:
        lines.append(f"job {job} is not quarantined ({reply.phase or 'no phase'})")
    for record in reply.records:
        lines += [
            f"{record.key}: {record.kind}, {record.num_bytes} bytes",
            f"  holds:     {record.excerpt}",
            f"  seen:      {record.seen}",
            f"  expected:  {record.expected}",
            f"  moved to:  {record.moved_to}"
            if record.moved_to
            else f"  {'--apply' if record.mendable else 'remedy'}:   {record.remedy}",
        ]
    if reply.quarantined and reply.goes_on:
        lines.append(f"job {job} goes on ({reply.phase or 'it has no records left'})")
    elif reply.quarantined and not reply.records:
        lines.append("All its records can be read: --apply lets it continue from them.")
    return lines
