"""Options of commands for TLS."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from cyclopts import Group, Parameter

from shoal_proto.tls.files import TlsFiles
from shoal_proto.tls.identity import FOLDER_VARIABLE, VARIABLES, chosen
from shoal_proto.tls.names import CertificateRole

_GROUP = Group("TLS")
_CA, _CERT, _KEY = VARIABLES


def _option(name: str, metavar: str, variable: str) -> Parameter:
    return Parameter(name=name, metavar=metavar, env_var=variable, group=_GROUP)


@dataclass(frozen=True, kw_only=True)
class TlsOptions:
    """Certificate of this process. Without these options TLS is not used, except with a cluster
    that this user has started on this machine, whose certificates are found."""

    folder: Annotated[Path | None, _option("--tls", "DIRECTORY", FOLDER_VARIABLE)] = None
    """Use TLS, with this command's certificate from a folder that `shoal certs` made."""
    ca: Annotated[Path | None, _option("--tls-ca", "FILE", _CA)] = None
    """Instead of --tls: PEM file of the authority that signed the other processes' certificates."""
    cert: Annotated[Path | None, _option("--tls-cert", "FILE", _CERT)] = None
    """PEM file of this process' certificate. Read again when it changes."""
    key: Annotated[Path | None, _option("--tls-key", "FILE", _KEY)] = None
    """PEM file of the certificate's key."""

    roles: ClassVar[tuple[CertificateRole, ...]] = (
        CertificateRole.OPERATOR,
        CertificateRole.VIEWER,
    )
    """Roles to look for in the folder, the preferred one first."""

    @property
    def files(self) -> TlsFiles | None:
        """The given files, or those in the folder; None without TLS. Raises InvalidSpec."""
        return self.files_of(*self.roles)

    @property
    def addresses(self) -> Sequence[str]:
        """Addresses of the cluster; empty if these options do not name any."""
        return ()

    def files_of(self, *roles: CertificateRole) -> TlsFiles | None:
        """Return `files` for these roles."""
        return chosen(self.folder, self.ca, self.cert, self.key, *roles)


class LauncherTls(TlsOptions):
    """TLS options of `shoal run`, whose workers get the certificate of a worker."""

    roles: ClassVar[tuple[CertificateRole, ...]] = (
        CertificateRole.OPERATOR,
        CertificateRole.WORKER,
    )


_FLAT = Parameter(name="*")
TlsOption = Annotated[TlsOptions, _FLAT]
LauncherTlsOption = Annotated[LauncherTls, _FLAT]
