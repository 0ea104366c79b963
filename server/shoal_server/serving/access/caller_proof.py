"""Proofs that a caller must give for an operation on a job or member."""

from dataclasses import dataclass, field

from shoal_proto.tls.names import Caller, CertificateRole


@dataclass(frozen=True, kw_only=True)
class CallerProof:
    """Proofs that a caller has given."""

    is_known: bool = False
    """True if the caller needs no job secret: an operator, the member itself, or a reader of
    output."""
    job_secret: str = field(default="", repr=False)


def proof_of_caller(
    caller: Caller | None, job_secret: str, *, is_itself: bool = False
) -> CallerProof:
    """Proof of the caller of a gRPC call. `caller`: None without TLS. `is_itself`: the caller gave
    the member's incarnation."""
    is_operator = caller is not None and caller.role is CertificateRole.OPERATOR
    return CallerProof(is_known=is_operator or is_itself, job_secret=job_secret)
