"""Roles that may make each gRPC call: the one table from which servers with TLS decide.

A server refuses a call that is not in the table. `docs/security.md` shows the table.
"""

from collections.abc import Mapping

from shoal_proto.tls.names import CertificateRole

OPERATOR, VIEWER, WORKER = CertificateRole.OPERATOR, CertificateRole.VIEWER, CertificateRole.WORKER
SERVER, COORDINATOR = CertificateRole.SERVER, CertificateRole.COORDINATOR
READER = CertificateRole.READER

Roles = frozenset[CertificateRole]

_READ: Roles = frozenset({OPERATOR, VIEWER, WORKER})
_MEMBER: Roles = frozenset({WORKER})
_LAUNCHER: Roles = frozenset({OPERATOR, WORKER})
"""`shoal run` reports on its workers with an operator's certificate, or with that of the
workers."""
_WEIGHTS_READER: Roles = frozenset({READER, WORKER, OPERATOR})
"""A worker that is bound to a job reads that job's series."""
_COMMAND: Roles = frozenset({OPERATOR})
_LISTING: Roles = frozenset({OPERATOR, VIEWER})
_ANY: Roles = frozenset(CertificateRole)

_BY_SERVICE: Mapping[str, Mapping[str, Roles]] = {
    "shoal.v1.Membership": {
        "Attend": _MEMBER,
        "Propose": _MEMBER,
        "Answer": _MEMBER,
        "Settle": _MEMBER,
        "Offer": _MEMBER,
        "Ready": _MEMBER,
        "ReportBroken": _MEMBER,
        "Pause": _MEMBER,
        "Leave": _MEMBER,
        "GetRoster": _MEMBER,
        "Heartbeat": _LAUNCHER,
        "ReportExit": _LAUNCHER,
        "ReportHalt": _LAUNCHER,
        # A worker drains only itself: its incarnation proves that.
        "Drain": _LAUNCHER,
        "GetCluster": _READ,
        "GetJob": _READ,
        "ResetJob": _COMMAND,
        "StopJob": _COMMAND,
        "RetryJob": _COMMAND,
    },
    "shoal.v1.Rendezvous": dict.fromkeys(
        ("Set", "Get", "Add", "CompareSet", "Delete", "Count"), _MEMBER
    ),
    "shoal.v1.Samples": {"Lease": _MEMBER},
    "shoal.v1.Clocks": {"Advance": _MEMBER, "Rest": _MEMBER},
    "shoal.v1.Shards": {"Place": _MEMBER, "GetMap": _MEMBER, "AcceptLoss": _COMMAND},
    "shoal.v1.Snapshots": {"Take": _COMMAND, "Restore": _COMMAND, "List": _LISTING},
    "shoal.v1.Repairs": {"Repair": _COMMAND},
    "shoal.v1.Outputs": dict.fromkeys(("Serve", "Give", "Keep"), _LAUNCHER),
    "shoal.v1.Parameters": {
        "Create": _MEMBER,
        "Pull": _MEMBER,
        "Lookup": _MEMBER,
        "Push": _MEMBER,
        "OpenBulk": _MEMBER,
        # Drops only shards of the caller's job.
        "Drop": _MEMBER,
        "Describe": _READ | {COORDINATOR},
    },
    "shoal.v1.Replication": {
        "Follow": frozenset({SERVER}),
        "OpenBulk": frozenset({SERVER}),
        "Identify": frozenset({SERVER, COORDINATOR}),
    },
    "shoal.v1.ShardSnapshots": dict.fromkeys(
        ("Close", "Freeze", "Write", "Publish", "Abort", "Load"), frozenset({COORDINATOR})
    ),
    "shoal.v1.WeightSeries": {
        "Begin": _MEMBER,
        "Contribute": _MEMBER,
        "CutTables": _MEMBER,
        "Watch": _WEIGHTS_READER | _LISTING,
        "Report": _WEIGHTS_READER,
        "GetLayout": _WEIGHTS_READER,
        "List": _READ,
        "Pin": _COMMAND,
        "Rollback": _COMMAND,
    },
    "shoal.v1.WeightStore": {
        # Readers and servers fetch segments; members also send segments.
        "OpenBulk": _WEIGHTS_READER | {SERVER},
        "Holds": _MEMBER | {SERVER, COORDINATOR},
        "Copy": frozenset({SERVER, COORDINATOR}),
        "Difference": _WEIGHTS_READER,
    },
    "grpc.health.v1.Health": {"Check": _ANY, "Watch": _ANY},
}

MAY_CALL: Mapping[str, Roles] = {
    f"/{service}/{method}": roles
    for service, methods in _BY_SERVICE.items()
    for method, roles in methods.items()
}

READS_STATUS: Roles = _ANY - {READER}
"""Roles that may read over HTTP, if certificates decide."""
READS_OUTPUT: Roles = _LISTING
