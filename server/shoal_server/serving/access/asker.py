"""Who asks for what may be done to a job, or a member, by who knows its name."""

from dataclasses import dataclass, field

from shoal_proto.tls.names import Caller, Role


@dataclass(frozen=True, kw_only=True)
class Asker:
    """What a caller has shown beside the name."""

    is_known: bool = False
    """It is an operator, by a certificate or a token, or the very member that it speaks of."""
    job_secret: str = field(default="", repr=False)


def asker(caller: Caller | None, job_secret: str, *, is_itself: bool = False) -> Asker:
    """Who makes a gRPC call. `caller`: None without TLS. `is_itself`: by its incarnation."""
    is_operator = caller is not None and caller.role is Role.OPERATOR
    return Asker(is_known=is_operator or is_itself, job_secret=job_secret)
