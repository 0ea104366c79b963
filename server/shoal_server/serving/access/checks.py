"""Checks that a caller may make a call, and for which job."""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, cast

import grpc.aio
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest

from shoal_proto.errors import AccessDenied, CertificateRefused
from shoal_proto.tls import identity
from shoal_proto.tls.names import URI_START, Caller, CertificateRole, caller_among
from shoal_proto.v1.membership_pb2 import DrainRequest
from shoal_proto.v1.weights_pb2 import PutSegmentRequest
from shoal_server.serving.access.roles import MAY_CALL

MAX_DEPTH = 3
"""Maximum depth at which a request names a job: header, token, job."""

_RESUMED = b"true"

Path = tuple[str, ...]


def caller_of(context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
    """Caller of a call over TLS. Raises CertificateRefused for a resumed session, or unless the
    certificate names exactly one role."""
    found = context.auth_context()
    # gRPC accepts session tickets for two days without checking the certificate, which may have
    # expired.
    if _RESUMED in found.get("ssl_session_reused", ()):
        raise CertificateRefused(
            "the connection resumes an earlier TLS session",
            seen="a session ticket in place of a certificate",
            expected="a full handshake for each connection",
            fix="Turn the client's TLS session cache off.",
        )
    names = [*found.get("x509_subject_alternative_name", ())]
    caller = caller_among(names)
    if caller is None:
        raise CertificateRefused(
            "the caller's certificate names no role",
            seen=", ".join(repr(name.decode("utf-8", "replace")) for name in names)[:500],
            expected=f"one URI {URI_START}ROLE/NAME among its alternative names",
            fix="Issue certificates with `shoal certs issue ROLE`.",
        )
    return caller


def check_role(caller: Caller, method: str) -> None:
    """Raise AccessDenied if the caller's role is not allowed to make the call."""
    allowed = MAY_CALL.get(method, frozenset())
    if caller.role not in allowed:
        raise AccessDenied(
            f"{method} is not for a {caller.role.value}",
            seen=f"the certificate of {caller}",
            expected=f"the role {' or '.join(sorted(r.value for r in allowed)) or 'of nobody'}",
            fix="docs/security.md has the table of roles and calls.",
        )


def check_request(caller: Caller, message: Message) -> None:
    """Raise AccessDenied if the caller's certificate does not permit the request.

    A certificate may be bound to one job or series; a request about all jobs is then refused too. A
    worker may drain only itself. A reader may only read a series, or check health.
    """
    if isinstance(message, DrainRequest) and caller.role is CertificateRole.WORKER:
        _check_own_drain(caller, message)
    if caller.role is CertificateRole.READER:
        _check_reads(caller, message)
    if not caller.job:
        return
    for job in _jobs_of(message):
        if job != caller.job:
            raise AccessDenied(
                f"the certificate is for {'another' if job else 'one'} job",
                seen=f"{f'job {job}' if job else 'no job, which means all'}, by {caller}",
                expected=f"job {caller.job}",
                fix="Issue a certificate for that job: shoal certs issue worker --job JOB.",
            )


def _check_reads(caller: Caller, message: Message) -> None:
    """Check a reader's request. The table of calls (roles.py) does not have the requests on bulk
    connections."""
    if isinstance(message, HealthCheckRequest):
        return
    series = getattr(message, "series", None)
    if not isinstance(series, str) or isinstance(message, PutSegmentRequest):
        raise AccessDenied(
            "a reader reads published weights, and nothing else",
            seen=f"{type(message).__name__}, by {caller}",
            expected="a request to read a series",
        )
    if caller.series and series != caller.series:
        raise AccessDenied(
            "the certificate is for another series",
            seen=f"series {series}, by {caller}",
            expected=f"series {caller.series}",
            fix="Issue a certificate for that series: shoal certs issue reader --series SERIES.",
        )


def _check_own_drain(caller: Caller, request: DrainRequest) -> None:
    if request.public_id or not request.incarnation:
        raise AccessDenied(
            "a worker may drain only itself",
            seen=f"a drain of {request.member_id} without its incarnation, by {caller}",
            expected="the incarnation of the member, or an operator's certificate",
        )


def _jobs_of(message: Message) -> Iterator[str]:
    """Jobs that a message names, directly or in the name of a series; an empty text for each such
    field that is empty."""
    descriptor = cast("Descriptor", message.DESCRIPTOR)  # upb has a type of its own for it
    for path in _paths(descriptor):
        for found in _at(message, path):
            yield found.partition("/")[0] if path[-1] == "series" else found


def _at(message: Any, path: Path) -> Iterator[str]:
    name, rest = path[0], path[1:]
    value = getattr(message, name)
    if not rest:
        yield value
    elif isinstance(value, Message):
        if message.HasField(name):
            yield from _at(value, rest)
    else:
        for each in value:
            yield from _at(each, rest)


@lru_cache(maxsize=256)
def _paths(descriptor: Descriptor, depth: int = MAX_DEPTH) -> tuple[Path, ...]:
    found: list[Path] = []
    for field in descriptor.fields:
        if field.name in ("job", "series") and field.type == FieldDescriptor.TYPE_STRING:
            found.append((field.name,))
        elif (inner := field.message_type) is not None and depth > 1 and not _is_map(inner):
            found += [(field.name, *path) for path in _paths(inner, depth - 1)]
    return tuple(found)


def _is_map(descriptor: Descriptor) -> bool:
    return bool(descriptor.GetOptions().map_entry)


def known_caller(context: grpc.aio.ServicerContext[Any, Any]) -> Caller | None:
    """Caller of a call; None if this process serves without TLS. Raises what `caller_of` raises."""
    return None if identity.own() is None else caller_of(context)


Admit = Callable[[Any], Caller | None]


def admission(method: str) -> Admit:
    """Return the check of a method's calls: from a call's context to the caller. It raises
    AccessDenied for other roles, and what `caller_of` raises."""

    def admit(context: Any) -> Caller:
        caller = caller_of(context)
        check_role(caller, method)
        return caller

    return admit
