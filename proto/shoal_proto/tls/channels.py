"""gRPC channels and ports that use the certificate of this process, if it has one.

Every channel between parts of Shoal, and to its etcd, is made here. No channel uses a proxy, since
proxies are for the internet.
"""

from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from shoal_proto.tls import identity
from shoal_proto.tls.files import TlsIdentity, TlsMaterial

Options = Sequence[tuple[str, int | str]]


def open_channel(address: str, name: str, options: Options) -> grpc.Channel:
    """Open a channel to host:port, where a process serves as `name` (COORDINATOR_NAME, SERVER_NAME
    or READER_NAME)."""
    return direct_channel(address, *_secured(name, options))


def open_aio_channel(address: str, name: str, options: Options) -> grpc.aio.Channel:
    """Open a channel as `open_channel` does, for an event loop."""
    return direct_aio_channel(address, *_secured(name, options))


def direct_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: Options
) -> grpc.Channel:
    """Open a channel to host:port without a proxy. `credentials`: None for plain text."""
    channel: grpc.Channel = _channel(grpc, address, credentials, options)
    return channel


def direct_aio_channel(
    address: str, credentials: grpc.ChannelCredentials | None, options: Options
) -> grpc.aio.Channel:
    """Open a channel as `direct_channel` does, for an event loop."""
    channel: grpc.aio.Channel = _channel(grpc.aio, address, credentials, options)
    return channel


def _channel(
    kind: Any, address: str, credentials: grpc.ChannelCredentials | None, options: Options
) -> Any:
    options = [
        *options,
        ("grpc.enable_http_proxy", 0),
        # gRPC looks a name up at most every 30 s by default, too late for a replaced pod.
        ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ]
    if credentials is None:
        return kind.insecure_channel(address, options=options)
    return kind.secure_channel(address, credentials, options=options)


def _secured(name: str, options: Options) -> tuple[grpc.ChannelCredentials | None, Options]:
    own = identity.own()
    if own is None:
        return None, options
    return _credentials(own), [*options, *_expecting(name)]


def add_port(server: grpc.aio.Server | grpc.Server, address: str) -> int:
    """Make the server listen at host:port, and return the port. If this process has a certificate,
    callers need one. Raises RuntimeError, or returns 0, if it cannot listen."""
    own = identity.own()
    if own is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, _ServerCertificate(own).credentials())


def material() -> TlsMaterial | None:
    """Return the material for new channels; None without TLS."""
    own = identity.own()
    return None if own is None else own.material


def _credentials(own: TlsIdentity) -> grpc.ChannelCredentials:
    found = own.material
    return grpc.ssl_channel_credentials(found.ca, found.key, found.cert)


def _expecting(name: str) -> Options:
    return (("grpc.ssl_target_name_override", name), ("grpc.default_authority", name))


class _ServerCertificate:
    def __init__(self, own: TlsIdentity) -> None:
        self._own = own
        self._material = own.material

    def credentials(self) -> grpc.ServerCredentials:
        # `_fetch` returns None if nothing has changed, which gRPC's types do not allow.
        fetch: Any = self._fetch
        return grpc.dynamic_ssl_server_credentials(
            _configuration(self._material), fetch, require_client_authentication=True
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        now = self._own.material
        if now is self._material:
            return None
        self._material = now
        return _configuration(now)


def _configuration(found: TlsMaterial) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(found.key, found.cert)], found.ca)
