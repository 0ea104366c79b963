"""gRPC channels and ports that go by the certificate of this process, where it has one.

Every channel between parts of Shoal, and to its etcd, is made here: none goes through a proxy that
the environment names (http_proxy, https_proxy, grpc_proxy), which are for the internet.
"""

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from shoal_proto.tls import identity
from shoal_proto.tls.files import TlsIdentity, TlsMaterial

Options = Sequence[tuple[str, int | str]]


def open_channel(address: str, name: str, options: Options) -> grpc.Channel:
    """Channel to the part that serves under `name` (COORDINATOR_NAME or SERVER_NAME) at
    host:port."""
    return direct_channel(address, *_secured(name, options))


def open_aio_channel(address: str, name: str, options: Options) -> grpc.aio.Channel:
    """Same as `open_channel`, for an event loop."""
    return direct_aio_channel(address, *_secured(name, options))


def direct_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: Options
) -> grpc.Channel:
    """Channel to host:port without a proxy: with these credentials, or in plain text."""
    channel: grpc.Channel = _channel(grpc, address, credentials, options)
    return channel


def direct_aio_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: Options
) -> grpc.aio.Channel:
    """Same as `direct_channel`, for an event loop."""
    channel: grpc.aio.Channel = _channel(grpc.aio, address, credentials, options)
    return channel


def _channel(
    kind: Any, address: str, credentials: grpc.ChannelCredentials | None, options: Options
) -> Any:
    """Channel of `kind`, which is the module grpc or grpc.aio."""
    options = [*options, ("grpc.enable_http_proxy", 0)]
    if credentials is None:
        return kind.insecure_channel(address, options=options)
    return kind.secure_channel(address, credentials, options=options)


def _secured(name: str, options: Options) -> tuple[grpc.ChannelCredentials | None, Options]:
    own = identity.own()
    if own is None:
        return None, options
    return _credentials(own), [*options, *_expecting(name)]


def add_port(server: grpc.aio.Server | grpc.Server, address: str) -> int:
    """Have the server listen at host:port; the port. With a certificate, only to callers that have
    one too. Raises RuntimeError, or answers 0, for an address that cannot be listened at."""
    own = identity.own()
    if own is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, _ServerCertificate(own).credentials())


def material() -> TlsMaterial | None:
    """Material for new channels. A channel made from other material holds a certificate that has
    been renewed since."""
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


def _configuration(found: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(found.key, found.cert)], found.ca)
