"""A cluster with TLS, its certificates, and certificates of another authority."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import grpc

from shoal_client.certificates.authority import CertificateHolder
from shoal_client.certificates.folder import CertificateFolder
from shoal_client.local.cluster import LocalCluster, LocalClusterConfig
from shoal_proto.tls.files import TlsFiles
from shoal_proto.tls.identity import in_folder
from shoal_proto.tls.names import Caller, CertificateRole

HOUR = timedelta(hours=1)
PAST = timedelta(minutes=-1)


@dataclass(frozen=True)
class TlsWorld:
    cluster: LocalCluster
    certificates: Path
    strangers: Path
    """Certificates of another authority."""

    def files(self, role: CertificateRole) -> TlsFiles:
        return in_folder(self.certificates, role)

    def strange_files(self, role: CertificateRole) -> TlsFiles:
        """Files of a role whose certificate another authority signed; they trust the cluster's."""
        found = in_folder(self.strangers, role)
        return TlsFiles(ca=self.certificates / "ca.crt", cert=found.cert, key=found.key)

    def issued(self, caller: Caller, valid: timedelta = HOUR) -> TlsFiles:
        """Issue one more certificate of the cluster's authority, at the first call for the name."""
        folder = CertificateFolder(self.certificates)
        path = self.certificates / f"{caller.name}.crt"
        if not path.exists():
            folder.issue(CertificateHolder(caller=caller, valid=valid))
        return TlsFiles(ca=self.certificates / "ca.crt", cert=path, key=path.with_suffix(".key"))


def credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        files.ca.read_bytes(), files.key.read_bytes(), files.cert.read_bytes()
    )


@contextmanager
def tls_world(directory: Path, num_parameter_servers: int = 1) -> Iterator[TlsWorld]:
    certificates, strangers = directory / "certs", directory / "strangers"
    for folder in (certificates, strangers):
        CertificateFolder(folder).init()
    config = LocalClusterConfig(
        directory=directory / "cluster",
        num_parameter_servers=num_parameter_servers,
        certificates=certificates,
    )
    with LocalCluster(config) as cluster:
        yield TlsWorld(cluster, certificates, strangers)
