"""Certificates in the form that `shoal_proto.tls` reads: a URI names holder and role.

They are valid from five minutes before their issue, for peers with slow clocks, and authorities
from ten years before. They name no hosts, except for clients such as browsers: Shoal's processes
check the role.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from shoal_proto.errors import InvalidSpec
from shoal_proto.tls.names import SERVES_AS, Caller, caller_among

CLOCK_SKEW = timedelta(minutes=5)
MAX_VALID = timedelta(days=3650)
CA_VALID = MAX_VALID + timedelta(days=1)
"""Exceeds MAX_VALID: the first certificates are issued after their authority, which they do not
outlive."""


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """A certificate and its key, as PEM."""

    cert: bytes
    key: bytes


@dataclass(frozen=True, kw_only=True)
class CertificateHolder:
    """Holder and duration of a certificate."""

    caller: Caller
    hosts: Sequence[str] = ()
    """Names for clients that do not know Shoal's roles, such as browsers."""
    valid: timedelta


class Authority:
    """A certificate authority and its key."""

    def __init__(self, cert: bytes, key: bytes) -> None:
        """Raises InvalidSpec if `cert` or `key` is not PEM, or if the key does not belong to the
        certificate."""
        self._cert = read(cert)
        try:
            found = serialization.load_pem_private_key(key, password=None)
        except (ValueError, TypeError) as error:
            raise InvalidSpec(
                "the authority's key cannot be read", seen=str(error), expected="PEM"
            ) from error
        if not isinstance(found, ec.EllipticCurvePrivateKey) or (
            found.public_key() != self._cert.public_key()
        ):
            raise InvalidSpec(
                "the authority's key does not belong to its certificate",
                seen=type(found).__name__,
                expected="the two files that `shoal certs init` made",
            )
        self._key = found

    @classmethod
    def new(cls, name: str, valid: timedelta = CA_VALID) -> tuple["Authority", IssuedCertificate]:
        """A self-signed authority, with its certificate and key to store. It is valid from long
        ago: it is never renewed, also not after the clock was set back."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        built = (
            _builder(subject, subject, key, valid, before=CA_VALID)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .sign(key, hashes.SHA256())
        )
        issued = _pem(built, key)
        return cls(issued.cert, issued.key), issued

    def issue(self, holder: CertificateHolder) -> IssuedCertificate:
        """A certificate with a new key, valid for as long as the authority at most. Raises
        InvalidSpec after the authority's end, or for a host that no certificate can name."""
        end = self._cert.not_valid_after_utc
        left = end - datetime.now(UTC)
        if left <= timedelta():
            raise InvalidSpec(
                "the authority has expired",
                seen=f"valid until {end:%Y-%m-%d %H:%M} UTC",
                expected="a valid one",
                fix="Make a new one: shoal certs init with another --dir.",
            )
        caller = holder.caller
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name(
            [
                x509.NameAttribute(NameOID.COMMON_NAME, caller.name[:64]),
                x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, caller.role.value),
            ]
        )
        serves = SERVES_AS.get(caller.role)
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH]
        if serves:
            purposes.append(ExtendedKeyUsageOID.SERVER_AUTH)
        names = [x509.UniformResourceIdentifier(caller.uri), *_general([serves] if serves else [])]
        names += _general(holder.hosts)
        signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        built = (
            _builder(subject, self._cert.subject, key, min(holder.valid, left))
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(signer, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return _pem(built, key)


def read(cert: bytes) -> x509.Certificate:
    """The first certificate of a PEM file. Raises InvalidSpec."""
    try:
        return x509.load_pem_x509_certificate(cert)
    except ValueError as error:
        raise InvalidSpec(
            "a certificate cannot be read", seen=str(error), expected="PEM"
        ) from error


def holder_of(cert: x509.Certificate) -> CertificateHolder | None:
    """Holder and duration of a certificate; None if the certificate is not of Shoal's form."""
    try:
        found = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    uris = found.get_values_for_type(x509.UniformResourceIdentifier)
    caller = caller_among(uri.encode() for uri in uris)
    if caller is None:
        return None
    names = [*found.get_values_for_type(x509.DNSName)]
    names += [str(each) for each in found.get_values_for_type(x509.IPAddress)]
    hosts = [name for name in names if name != SERVES_AS.get(caller.role)]
    valid = cert.not_valid_after_utc - cert.not_valid_before_utc - CLOCK_SKEW
    return CertificateHolder(caller=caller, hosts=hosts, valid=valid)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    valid: timedelta,
    before: timedelta = CLOCK_SKEW,
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - before)
        .not_valid_after(now + valid)
    )


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _general(hosts: Iterable[str]) -> list[x509.GeneralName]:
    found: list[x509.GeneralName] = []
    for host in hosts:
        try:
            found.append(x509.IPAddress(ip_address(host)))
        except ValueError:
            found.append(_dns_name(host))
    return found


def _dns_name(host: str) -> x509.DNSName:
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise InvalidSpec(
            "a host's name cannot be in a certificate",
            seen=repr(host),
            expected="ASCII; a name with other letters in its form xn--...",
        ) from error


def _pem(cert: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> IssuedCertificate:
    return IssuedCertificate(
        cert=cert.public_bytes(serialization.Encoding.PEM),
        key=key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )
