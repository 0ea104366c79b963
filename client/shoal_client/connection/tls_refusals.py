"""Diagnosis of a connection that failed because a certificate was refused, or only one side speaks
TLS. gRPC reports `UNAVAILABLE`, as for a server that does not run. So this module makes a TLS
handshake itself, which shows the error and the side that refused."""

import socket
import ssl
from datetime import UTC, datetime
from functools import partial

import structlog

from shoal_proto.addresses import split_address
from shoal_proto.errors import CertificateRefused, ShoalError, Unavailable
from shoal_proto.forks.openssl import NO_FORK, secured_client, until_done
from shoal_proto.tls import identity

log = structlog.get_logger(__name__)

ANSWER_WITHIN_S = 0.5
MAX_ANSWERED = 1024
ATTEMPTS = 2
_SIGNS = ("handshake", "closed", "reset", "eof", "hang", "broken pipe")
"""Words in gRPC's description of a refused handshake, but not of a port without a listener."""
answered_plainly: set[str] = set()
"""Addresses that have answered without TLS. Failures there are not diagnosed."""


def note_answer(address: str) -> None:
    """Record that the server has answered, if this process uses no TLS."""
    if address not in answered_plainly and identity.own() is None:
        if len(answered_plainly) >= MAX_ANSWERED:
            answered_plainly.clear()
        answered_plainly.add(address)


def explained(error: ShoalError, address: str, name: str) -> ShoalError:
    """Replace an Unavailable by a CertificateRefused if a handshake shows that cause. `name`: the
    name that the server's certificate must have, such as COORDINATOR_NAME. Blocks as `why_refused`
    does."""
    if type(error) is not Unavailable or not any(s in error.seen.lower() for s in _SIGNS):
        return error
    if identity.own() is None and address in answered_plainly:
        # Do no handshake: it would wait for a server that hangs, while another may lead by now.
        return error
    return why_refused(address, name) or error


def why_refused(address: str, name: str) -> CertificateRefused | None:
    """Reason why this process and the server cannot connect over TLS; None: no such reason, or no
    answer. Blocks for at most 3 s if the host is an IP address."""
    try:
        if identity.own() is None:
            return _needs_tls(address) if _speaks_tls(address) else None
        return _own_refusal(address, name)
    except OSError as error:
        log.debug("no_tls_handshake", address=address, reason=repr(error))
        return None


def _own_refusal(address: str, name: str) -> CertificateRefused | None:
    """Raises OSError without an answer."""
    context = _grpc_context()
    for _ in range(ATTEMPTS):
        with _connected(address) as plain:
            try:
                with secured_client(plain, context, name, ANSWER_WITHIN_S) as connected:
                    # The server refuses a certificate only after the handshake. If it accepts the
                    # certificate, its first bytes are HTTP/2's settings.
                    if until_done(connected, partial(connected.recv, 1), ANSWER_WITHIN_S):
                        return None
            except ssl.SSLCertVerificationError as error:
                seen = f"this process does not accept its certificate: {error.verify_message}"
                return _refused(address, seen)
            except (ssl.SSLEOFError, ConnectionError) as error:
                log.debug("tls_connection_ended", address=address, reason=repr(error))
            except ssl.SSLError as error:
                return _refused(address, _in_words(error))
    # gRPC closes the connection without an alert. So does a server that ends, but then the next
    # attempt finds no listener.
    return _refused(address, "it closes the connection once it has this process' certificate")


def _grpc_context() -> ssl.SSLContext:
    """TLS context that offers HTTP/2, without which gRPC closes the connection."""
    own = identity.own()
    assert own is not None
    with NO_FORK:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.set_alpn_protocols(["h2"])
        context.load_verify_locations(own.files.ca)
        context.load_cert_chain(own.files.cert, own.files.key)
    return context


def _speaks_tls(address: str) -> bool:
    """Raises OSError without an answer."""
    with NO_FORK:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    with _connected(address) as plain:
        try:
            secured_client(plain, context, "any", ANSWER_WITHIN_S).close()
        except ssl.SSLError as error:
            return "ALERT" in (error.reason or "")
    return True


def _connected(address: str) -> socket.socket:
    return socket.create_connection(split_address(address), ANSWER_WITHIN_S)


def _in_words(error: ssl.SSLError) -> str:
    reason = (error.reason or str(error)).replace("_", " ").lower()
    if "alert" in reason:
        alert = reason.partition("alert")[2].strip()
        return f"it does not accept this process' certificate: {alert}"
    return f"it does not speak TLS: {reason}"


def _refused(address: str, seen: str) -> CertificateRefused:
    own = identity.own()
    assert own is not None
    return CertificateRefused(
        f"no TLS connection to {address}",
        seen=seen,
        expected=f"certificates of one authority, valid now, on both sides; this process has"
        f" {own.files.cert}, {_validity(own.material.cert)}, and trusts {own.files.ca}",
        fix="`shoal certs show` shows the certificates; `shoal certs renew` makes new ones.",
    )


def _validity(cert: bytes) -> str:
    # The import takes 30 ms, which other processes need not spend.
    from cryptography.x509 import load_pem_x509_certificate  # noqa: PLC0415

    until = load_pem_x509_certificate(cert).not_valid_after_utc
    state = "expired at" if until < datetime.now(UTC) else "valid until"
    return f"{state} {until:%Y-%m-%d %H:%M} UTC"


def _needs_tls(address: str) -> CertificateRefused:
    return CertificateRefused(
        f"{address} speaks TLS, and this process has no certificate",
        seen="a TLS handshake",
        expected="--tls DIRECTORY, or --tls-ca, --tls-cert and --tls-key",
        fix="Set SHOAL_TLS to the folder of certificates that `shoal up` prints, or to one made by"
        " `shoal certs`. The user who runs `shoal up` need not set it on that machine.",
    )
