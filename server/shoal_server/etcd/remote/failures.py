"""Classification of failed calls to etcd.

Several different errors are UNAVAILABLE, so `classify` looks at the text and the code. The texts
are stable since etcd 3.2; for an unknown one the code decides.
"""

from dataclasses import dataclass
from enum import Enum, auto

import grpc

from shoal_proto.errors import (
    AccessDenied,
    CorruptError,
    DeadlineExceeded,
    LeaseExpired,
    Overloaded,
    RefusedError,
    ShoalError,
    Unavailable,
)
from shoal_server.etcd import keys


class Remedy(Enum):
    ELSEWHERE = auto()
    """The call may succeed at another endpoint, or a little later."""
    LOGIN = auto()
    NONE = auto()
    """The call would fail again."""


@dataclass(frozen=True, slots=True)
class Failure:
    remedy: Remedy
    untouched: bool
    """True if etcd certainly did not carry out the request."""
    error: ShoalError


Code = grpc.StatusCode

_ELSEWHERE_UNTOUCHED = ("no leader", "too many requests", "not capable", "memberlearner")
LOGIN_REFUSED = "authentication failed"
_LOGIN = ("invalid auth token", "revision of auth store is old", "user name is empty")
_CHECK_LOGIN = "Check --etcd-user and --etcd-password-file."
_RETRY_CODES = (
    Code.UNAVAILABLE,
    Code.DEADLINE_EXCEEDED,
    Code.CANCELLED,
    Code.ABORTED,
    Code.INTERNAL,
    Code.UNKNOWN,
)


def classify(error: grpc.RpcError, address: str, prefix: str) -> Failure:
    """Classify a failed call. `prefix`: what all keys begin with, before `keys.ROOT`."""
    code, text = error.code(), error.details() or ""
    if code is Code.UNAUTHENTICATED or any(known in text for known in _LOGIN):
        return Failure(Remedy.LOGIN, True, _denied(address, text, prefix))
    if LOGIN_REFUSED in text or code is Code.PERMISSION_DENIED:
        return Failure(Remedy.NONE, True, _denied(address, text, prefix))
    if any(known in text for known in _ELSEWHERE_UNTOUCHED):
        return Failure(
            Remedy.ELSEWHERE, True, Unavailable(f"a call to etcd at {address} failed", seen=text)
        )
    if code is Code.DEADLINE_EXCEEDED:
        late = DeadlineExceeded(f"no answer from etcd at {address} in time", seen=text)
        return Failure(Remedy.ELSEWHERE, False, late)
    if code in _RETRY_CODES:
        return Failure(
            Remedy.ELSEWHERE, False, Unavailable(f"a call to etcd at {address} failed", seen=text)
        )
    return Failure(Remedy.NONE, True, _refusal(code, text, address))


def _denied(address: str, text: str, prefix: str) -> AccessDenied:
    under = prefix + keys.ROOT
    return AccessDenied(
        f"etcd at {address} denies access",
        seen=text,
        expected=f"a user and password that etcd knows, with a role for the keys under {under}",
        fix=_CHECK_LOGIN,
    )


def _refusal(code: grpc.StatusCode, text: str, address: str) -> ShoalError:
    if "lease not found" in text:
        return LeaseExpired(
            "the lease has run out", seen=text, fix="Take a new lease and write again."
        )
    if "database space exceeded" in text:
        return Overloaded(
            f"etcd at {address} is full",
            seen=text,
            fix="Compact and defragment it, then disarm its NOSPACE alarm.",
        )
    if "larger than max" in text or "too large" in text:
        return RefusedError(
            f"a request to etcd at {address}, or its answer, is too large",
            seen=text,
            expected="values within etcd's --max-request-bytes (1.5 MiB by default)",
        )
    if code is Code.RESOURCE_EXHAUSTED:
        return Overloaded(f"etcd at {address} is overloaded", seen=text)
    if code is Code.DATA_LOSS:
        return CorruptError(f"etcd at {address} reports lost data", seen=text)
    return RefusedError(
        f"etcd at {address} refused the request",
        seen=f"{code.name}: {text}",
        expected="an etcd of version 3.4 or later, and a request within its limits",
    )


def unreachable(seen: dict[str, str], *, tls: bool, timeout_s: float) -> Unavailable:
    """The error if no endpoint answered. `seen`: the last failure of each."""
    texts = "; ".join(f"{address}: {text}" for address, text in seen.items())
    lowered = texts.lower()
    fix = "Check the address and that etcd runs there."
    # "handshake" alone would match "tcp handshaker shutdown", gRPC's text for a killed etcd.
    if tls and any(word in lowered for word in ("ssl", "tls", "certificate", "handshake read")):
        fix = (
            "The TLS handshake failed: check that etcd runs and serves TLS, that the CA of"
            " --etcd-ca signed its certificate, that its certificate names this host, and that etcd"
            " accepts this client's certificate."
        )
    elif LOGIN_REFUSED in lowered:
        fix = _CHECK_LOGIN
    elif not tls and any(word in lowered for word in ("socket closed", "reset", "broken pipe")):
        fix = "It closed the connection at once. If it expects TLS, give --etcd-ca, the CA file."
    return Unavailable(
        "no etcd answered",
        seen=texts,
        expected=f"an answer within {timeout_s:g} s",
        fix=fix,
    )
