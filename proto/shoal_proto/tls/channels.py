"""gRPC channels and ports that go by the certificate of this process, where it has one."""

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from shoal_proto.tls import identity
from shoal_proto.tls.files import Material, TlsIdentity

Options = Sequence[tuple[str, int | str]]


def open_channel(address: str, name: str, options: Options) -> grpc.Channel:
    """A channel to who serves under `name` (COORDINATOR_NAME or SERVER_NAME) at host:port."""
    own = identity.own()
    if own is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, _credentials(own), options=[*options, *_expecting(name)])


def open_aio_channel(address: str, name: str, options: Options) -> grpc.aio.Channel:
    """As `open_channel`, for an event loop."""
    own = identity.own()
    if own is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(
        address, _credentials(own), options=[*options, *_expecting(name)]
    )


def add_port(server: grpc.aio.Server, address: str) -> int:
    """Have the server listen at host:port; the port. With a certificate, only to callers that have
    one too. Raises RuntimeError, or answers 0, for an address that cannot be listened at."""
    own = identity.own()
    if own is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, _ServerCertificate(own).credentials())


def material() -> Material | None:
    """What channels are made of now: one that was made of something else knows a certificate that
    has been renewed since."""
    own = identity.own()
    return None if own is None else own.material


def _credentials(own: TlsIdentity) -> grpc.ChannelCredentials:
    found = own.material
    return grpc.ssl_channel_credentials(found.ca, found.key, found.cert)


def _expecting(name: str) -> Options:
    return (("grpc.ssl_target_name_override", name), ("grpc.default_authority", name))


class _ServerCertificate:
    """Asked by gRPC before each handshake whether there is another certificate by now."""

    def __init__(self, own: TlsIdentity) -> None:
        self._own = own
        self._told = own.material

    def credentials(self) -> grpc.ServerCredentials:
        # It takes None for no change, which its types do not say.
        fetch: Any = self._fetch
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._told), fetch, require_client_authentication=True
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        now = self._own.material
        if now is self._told:
            return None
        self._told = now
        return _configuration(now)


def _configuration(found: Material) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(found.key, found.cert)], found.ca)
