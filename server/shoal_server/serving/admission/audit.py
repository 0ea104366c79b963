"""Audit log of the gRPC calls by which an operator changes jobs and series of published weights."""

from typing import Any

import structlog

log = structlog.get_logger(__name__)

AUDITED = frozenset(
    {
        "/shoal.v1.Membership/Drain",
        "/shoal.v1.Membership/StopJob",
        "/shoal.v1.Membership/RetryJob",
        "/shoal.v1.Membership/ResetJob",
        "/shoal.v1.Repairs/Repair",
        "/shoal.v1.Shards/AcceptLoss",
        "/shoal.v1.Snapshots/Take",
        "/shoal.v1.Snapshots/Restore",
        "/shoal.v1.WeightSeries/Pin",
        "/shoal.v1.WeightSeries/Rollback",
    }
)


def note(method: str, request: object, context: Any, outcome: str) -> None:
    """Log a call if its method is audited. `outcome`: as in `rpc.call_durations`; a "cancelled"
    call may have taken effect."""
    if method not in AUDITED:
        return
    names = (context.auth_context() or {}).get("x509_common_name", ())
    log.info(
        "operator_call",
        call=method,
        job=str(getattr(request, "job", ""))[:128],
        series=str(getattr(request, "series", ""))[:128],
        by=names[0].decode(errors="replace") if names else "",
        peer=context.peer(),
        outcome=outcome,
    )
