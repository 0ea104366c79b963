"""Options of every serving process, and markers of fields that are not plain options."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from cyclopts import Parameter

from shoal_proto.errors import InvalidSpec
from shoal_proto.tls.names import CertificateRole
from shoal_proto.tls.options import TlsOptions
from shoal_server.serving.listening import LOOPBACK, exposed_addresses

INTERNAL = Parameter(parse=False)
"""Marks a config field that is set in code and is not a command-line option."""

FLAT = Parameter(name="*")
"""Marks a field that is itself a config: its fields become options beside those of the outer
config."""

BindAddress = Annotated[
    str,
    Parameter(
        name="--bind",
        metavar="ADDRESS",
        help="Address of the ports that are given without a host, except --metrics; 0.0.0.0: all"
        " addresses of this machine. An address that other machines can reach needs --tls, or"
        " --insecure.",
    ),
]
ListenAddress = Annotated[
    str,
    Parameter(
        name="--listen",
        metavar="[HOST:]PORT",
        help="Where to serve gRPC. PORT alone: at the address of --bind.",
    ),
]
HttpClients = Literal["certificate", "token", "user"]
"""Proof required of callers of the status page: see `shoal coordinator --http-clients`."""
AdvertisedAddress = Annotated[
    str,
    Parameter(
        name="--advertise",
        metavar="HOST[:PORT]",
        help="Address that others connect to. By default the address of --listen, or this machine's"
        " name if the process listens on all addresses.",
    ),
]
MetricsAddress = Annotated[
    str,
    Parameter(
        name="--metrics",
        metavar="[HOST:]PORT",
        help="Serve metrics for Prometheus there, without TLS and without a token. PORT alone: at"
        " 127.0.0.1. By default none are served.",
    ),
]
ReadyFile = Annotated[
    Path | None,
    Parameter(
        name="--ready-file",
        metavar="FILE",
        help="File to which the process writes its addresses, as JSON, once it serves. It is"
        " removed at the start.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class ServingOptions(TlsOptions):
    """Address and certificate with which a process serves. Without a certificate only this machine
    can reach it, unless `--insecure` is given."""

    bind: BindAddress = LOOPBACK
    insecure: Annotated[bool, Parameter(name="--insecure")] = False
    """Serve without TLS on an address that other machines can reach. Every caller that reaches it
    can read parameters and end jobs."""

    def check(self, listens: Mapping[str, str]) -> None:
        """Raise InvalidSpec if other machines reach an address without TLS and `--insecure` is not
        given, or if both TLS and `--insecure` are given. `listens`: host:port of each service."""
        tls = self.files is not None
        if tls and self.insecure:
            raise InvalidSpec(
                "--insecure contradicts TLS",
                seen="both --insecure and a certificate",
                expected="one of them",
            )
        if not tls and not self.insecure and (found := exposed_addresses(listens)):
            raise InvalidSpec(
                "an address that other machines can reach would be served without TLS",
                seen=", ".join(f"{name} at {address}" for name, address in found.items()),
                expected="loopback, or a certificate: --tls DIRECTORY, made by `shoal certs init`",
                fix="Or give --insecure, if every process that reaches it may read parameters"
                " and end jobs.",
            )


class CoordinatorServing(ServingOptions):
    """Serving options of a coordinator."""

    roles: ClassVar[tuple[CertificateRole, ...]] = (CertificateRole.COORDINATOR,)


class ParameterServerServing(ServingOptions):
    """Serving options of a parameter server."""

    roles: ClassVar[tuple[CertificateRole, ...]] = (CertificateRole.SERVER,)
