"""Errors over gRPC: `to_status` on the serving side, `from_rpc_error` on the calling side.

The metadata entry `shoal-error-bin` carries the error, shortened to 4 KiB; the text of the status
takes at most 1 KiB.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from shoal_proto.errors import (
    AccessDenied,
    CertificateRefused,
    CorruptError,
    DeadlineExceeded,
    InternalError,
    MalformedMessage,
    NotLeader,
    Overloaded,
    RejoinError,
    RetryError,
    ShoalError,
    Unavailable,
    UnknownGeneration,
    UnknownJob,
    UnknownMember,
    UnknownShard,
    UnknownSnapshot,
)
from shoal_proto.short_lists import sendable
from shoal_proto.v1.identity_pb2 import ErrorDetail

ERROR_METADATA_KEY = "shoal-error-bin"

# The first match wins, so subclasses come before their parents.
_CODES: tuple[tuple[type[ShoalError], grpc.StatusCode], ...] = (
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (NotLeader, grpc.StatusCode.UNAVAILABLE),
    (RetryError, grpc.StatusCode.UNAVAILABLE),
    (RejoinError, grpc.StatusCode.FAILED_PRECONDITION),
    (UnknownJob, grpc.StatusCode.NOT_FOUND),
    (UnknownMember, grpc.StatusCode.NOT_FOUND),
    (UnknownGeneration, grpc.StatusCode.NOT_FOUND),
    (UnknownShard, grpc.StatusCode.NOT_FOUND),
    (UnknownSnapshot, grpc.StatusCode.NOT_FOUND),
    (CertificateRefused, grpc.StatusCode.UNAUTHENTICATED),
    (AccessDenied, grpc.StatusCode.PERMISSION_DENIED),
    (InternalError, grpc.StatusCode.INTERNAL),
    (CorruptError, grpc.StatusCode.DATA_LOSS),
    (ShoalError, grpc.StatusCode.INVALID_ARGUMENT),
)


def to_detail(error: ShoalError) -> ErrorDetail:
    """Return the error as a message."""
    return ErrorDetail(
        kind=type(error).__name__,
        what=sendable(error.what),
        seen=sendable(error.seen),
        expected=sendable(error.expected),
        fix=sendable(error.fix),
        details={key: sendable(value) for key, value in error.details.items()},
    )


def from_detail(detail: ErrorDetail) -> ShoalError:
    """Return the error of a message; InternalError if this release does not know its class."""
    kind = ShoalError.kinds.get(detail.kind, InternalError)
    return kind(
        detail.what,
        seen=detail.seen,
        expected=detail.expected,
        fix=detail.fix,
        details=dict(detail.details),
    )


def to_status(error: ShoalError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Return the status code, text and trailing metadata that report the error to a client."""
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    # Metadata and text count towards HTTP/2's header limit (8 KiB by default).
    detail = to_detail(error)
    if detail.ByteSize() > _MAX_DETAIL_BYTES:
        detail = _shortened(detail)
    text = _status_text(sendable(str(error)))
    return code, text, ((ERROR_METADATA_KEY, detail.SerializeToString()),)


_MAX_DETAIL_BYTES = 4096
_MAX_TEXT_BYTES = 1024


def _status_text(text: str) -> str:
    """Cut the text to fit into the header. gRPC encodes each byte that is not printable ASCII, and
    the percent sign, as three characters."""
    num_bytes = 0
    for at, character in enumerate(text):
        is_plain = " " <= character <= "~" and character != "%"
        num_bytes += 1 if is_plain else 3 * len(character.encode())
        if num_bytes > _MAX_TEXT_BYTES:
            return text[:at]
    return text


def _cut(text: str, max_bytes: int) -> str:
    return text.encode()[:max_bytes].decode(errors="ignore")


def _shortened(detail: ErrorDetail) -> ErrorDetail:
    short = ErrorDetail(
        kind=detail.kind,
        what=_cut(detail.what, 1000),
        seen=_cut(detail.seen, 500),
        expected=_cut(detail.expected, 500),
        fix=_cut(detail.fix, 500),
    )
    for key in sorted(detail.details):
        name = _cut(key, 100)
        short.details[name] = _cut(detail.details[key], 200)
        if short.ByteSize() > _MAX_DETAIL_BYTES:
            del short.details[name]
            break
    return short


def from_rpc_error(error: grpc.RpcError, target: str) -> ShoalError:
    """Return the ShoalError of a failed call to `target` (host:port, for the message)."""
    for key, value in _trailing_metadata(error):
        if key == ERROR_METADATA_KEY:
            # gRPC gives entries with a key in -bin as bytes.
            assert isinstance(value, bytes)
            try:
                return from_detail(ErrorDetail.FromString(value))
            except DecodeError as malformed:
                return MalformedMessage(f"the error of {target} is malformed", seen=str(malformed))
    return _unexplained(error.code(), error.details() or "", target)


def is_explained(error: grpc.RpcError) -> bool:
    """True if a Shoal server, not gRPC alone, gave the reason of the failure."""
    return any(key == ERROR_METADATA_KEY for key, _ in _trailing_metadata(error))


def _unexplained(code: grpc.StatusCode, text: str, target: str) -> ShoalError:
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unavailable(
            f"no answer from {target}",
            seen=text,
            expected="a Shoal server listening there",
            fix="Check the address, and that the server runs.",
        )
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
        return MalformedMessage(
            f"{target} did not understand the call",
            seen=f"{code.name}: {text}",
            expected="a Shoal server of the same protocol version",
        )
    if code in _NAMED:
        kind, what = _NAMED[code]
        return kind(what.format(target), seen=text)
    return InternalError(f"call to {target} failed", seen=f"{code.name}: {text}")


_NAMED: Mapping[grpc.StatusCode, tuple[type[ShoalError], str]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: (DeadlineExceeded, "no answer from {} in time"),
    grpc.StatusCode.CANCELLED: (Unavailable, "the call to {} was cancelled"),
    grpc.StatusCode.UNAUTHENTICATED: (CertificateRefused, "{} refused the call"),
    grpc.StatusCode.PERMISSION_DENIED: (AccessDenied, "{} refused the call"),
}


def _trailing_metadata(error: grpc.RpcError) -> Iterable[tuple[str, str | bytes]]:
    # The pairs of grpc.aio and grpc have no common base type.
    metadata: Any = error.trailing_metadata()
    return metadata or ()
