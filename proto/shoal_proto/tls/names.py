"""Identity of a certificate's holder: a role, a name, and for some a job or a series.

The identity is a SPIFFE URI: `spiffe://shoal/worker/NAME`, followed by `/job/JOB` or
`/series/JOB/SERIES` if the holder is bound to one. The certificate of a serving process also has
the DNS name of its role, which callers check: a worker's certificate is not accepted as a server's.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from shoal_proto.names import is_name, is_series

COORDINATOR_NAME = "coordinator.shoal"
SERVER_NAME = "server.shoal"
READER_NAME = "reader.shoal"
URI_START = "spiffe://shoal/"


class CertificateRole(Enum):
    """Role of a certificate's holder, which limits its calls."""

    OPERATOR = "operator"
    VIEWER = "viewer"
    WORKER = "worker"
    SERVER = "server"
    COORDINATOR = "coordinator"
    READER = "reader"


SERVES_AS = {
    CertificateRole.COORDINATOR: COORDINATOR_NAME,
    CertificateRole.SERVER: SERVER_NAME,
    # A relay serves other readers of its series.
    CertificateRole.READER: READER_NAME,
}
"""DNS name in the certificates of each serving role."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Identity in the certificate of a connection's other end."""

    role: CertificateRole
    name: str
    job: str = ""
    """The only job in which the caller may act; empty: any."""
    series: str = ""
    """The only series that a reader may read, as JOB/NAME; empty: any."""

    def __str__(self) -> str:
        bound = f" of job {self.job}" if self.job else ""
        bound += f" of series {self.series}" if self.series else ""
        return f"{self.role.value} {self.name}{bound}"

    @property
    def uri(self) -> str:
        """URI in the certificate."""
        bound = f"/job/{self.job}" if self.job else ""
        bound += f"/series/{self.series}" if self.series else ""
        return f"{URI_START}{self.role.value}/{self.name}{bound}"


def caller_among(names: Iterable[bytes]) -> Caller | None:
    """Return the holder of a certificate with these names; None unless exactly one is a valid URI
    of Shoal."""
    found = [name for name in names if name.startswith(URI_START.encode())]
    return _read(found[0]) if len(found) == 1 else None


@lru_cache(maxsize=4096)
def _read(uri: bytes) -> Caller | None:
    try:
        parts = uri.decode("ascii").removeprefix(URI_START).split("/")
        role = CertificateRole(parts[0])
    except ValueError:
        return None
    match parts[1:]:
        case [name] if is_name(name):
            return Caller(role, name)
        case [name, "job", job] if (
            is_name(name) and is_name(job) and role is not CertificateRole.READER
        ):
            return Caller(role, name, job)
        case [name, "series", *series] if is_name(name) and is_series("/".join(series)):
            return (
                Caller(role, name, series="/".join(series))
                if role is CertificateRole.READER
                else None
            )
    return None
