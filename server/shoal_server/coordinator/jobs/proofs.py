"""Checks of callers' secrets."""

from shoal_proto.errors import AccessDenied
from shoal_proto.secrets import JOB_VARIABLE, matches_digest
from shoal_proto.tls.names import Caller, CertificateRole
from shoal_proto.v1.membership_pb2 import ReportExitRequest, ReportHaltRequest
from shoal_server.core.generations.roster import JobSpec
from shoal_server.core.membership.member import MemberState
from shoal_server.serving.access.caller_proof import CallerProof


def check_member(spec: JobSpec, secret: str, *, has_members: bool) -> None:
    """Raise AccessDenied if the member lacks the job's secret, or has a secret for a job that has
    members and no secret."""
    if not spec.secret_digest and secret and has_members:
        raise AccessDenied(
            f"job {spec.job} was begun without a secret",
            seen="a member with a secret",
            expected="the same secret for all members, or none",
            fix=f"Set {JOB_VARIABLE} for all workers of a job, from the first worker on.",
        )
    if spec.secret_digest and not matches_digest(secret, spec.secret_digest):
        raise AccessDenied(
            f"job {spec.job} has a secret",
            seen="another secret" if secret else "no secret",
            expected="the secret of its first member",
            fix=f"Set {JOB_VARIABLE} to the file that the job was begun with.",
        )


def check_asker(job: str, secret_digest: str, who: CallerProof) -> None:
    """Raise AccessDenied if the caller has neither the job's secret nor another proof."""
    if secret_digest and not (who.is_known or matches_digest(who.job_secret, secret_digest)):
        raise AccessDenied(
            f"job {job} has a secret",
            seen="another secret" if who.job_secret else "no secret",
            expected="the job's secret; or an operator's certificate, or over HTTP a token",
            fix=f"Set {JOB_VARIABLE} to the file that the job was begun with.",
        )


def check_launcher(
    spec: JobSpec,
    member: MemberState,
    report: ReportExitRequest | ReportHaltRequest,
    caller: Caller | None,
) -> None:
    """Raise AccessDenied if the caller did not start the process. For a process without a launcher,
    an operator is accepted; without TLS any caller is, unless the job has a secret."""
    digest = member.info.launch_digest
    if digest:
        is_accepted = matches_digest(report.launch_secret, digest)
    elif caller is None:
        is_accepted = not spec.secret_digest
    else:
        is_accepted = caller.role is CertificateRole.OPERATOR
    if not is_accepted:
        raise AccessDenied(
            f"a report on {member.member_id} is not accepted from this caller",
            seen="another launcher's secret" if report.launch_secret else "no launcher's secret",
            expected="the secret that its launcher gave to the process"
            if digest
            else "an operator's certificate, since no launcher of Shoal started this member",
        )
