"""Authentication among the parts of a local cluster. etcd has an authority of its own, so that it
does not accept a worker's certificate.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from shoal_client.certificates.authority import CertificateHolder
from shoal_client.certificates.folder import (
    DEFAULT_VALID,
    CertificateFolder,
    keep_renewed,
    role_holders,
)
from shoal_client.local.etcd import HOST, EtcdOptions, EtcdTls
from shoal_proto.errors import InvalidSpec
from shoal_proto.tls import local_clusters
from shoal_proto.tls.identity import CA_FILE, FOLDER_VARIABLE, without_tls
from shoal_proto.tls.local_clusters import Announcement, LocalClusterRecord
from shoal_proto.tls.names import Caller, CertificateRole

CERTIFICATES = "certs"
ETCD_CERTIFICATES = "etcd"
RENEW_EVERY = DEFAULT_VALID / 3


@dataclass(frozen=True, kw_only=True)
class LocalTls:
    """Mutual TLS between all parts, with certificates in `certs` in the cluster's directory. The
    status page is HTTP, for this user and root."""

    http_tokens: Path | None = None
    """Tokens with which other users access the status page."""


class LocalAccess:
    """Access to a local cluster. The folder `given` has certificates for all parts, for etcd only
    with `has_etcd`. `make` fills the folder `made`. Without a folder no part uses TLS. This user's
    commands find the cluster, unless a folder is given."""

    def __init__(
        self,
        environment: Mapping[str, str],
        *,
        given: Path | None = None,
        has_etcd: bool = False,
        made: Path | None = None,
        http_tokens: Path | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.certificates = given or made
        self._is_found = given is None
        self._made = made
        self._with_etcd = given if has_etcd else made
        self._http_tokens = http_tokens
        self._say = say
        self.environment = without_tls(environment)
        if self.certificates is not None:
            self.environment[FOLDER_VARIABLE] = str(self.certificates.resolve())
        self._announcement: Announcement | None = None
        self._closed = threading.Event()
        self._renewing: threading.Thread | None = None

    def make(self) -> None:
        """Make or renew the certificates; keep them and the announcement renewed until `close`.
        Raises InvalidSpec."""
        if not self._is_found:
            return
        if self._made is not None:
            _make(CertificateFolder(self._made), role_holders())
            _make(CertificateFolder(self._made / ETCD_CERTIFICATES), etcd_holders())
        self._renewing = threading.Thread(
            target=keep_renewed,
            args=(self._renew, RENEW_EVERY),
            kwargs={"wait": self._closed.wait, "say": self._say},
            name="shoal-certs",
            daemon=True,
        )
        self._renewing.start()

    def announce(self, addresses: Sequence[str], pages: Sequence[str], etcd: Sequence[str]) -> None:
        """Let this user's commands find the cluster and its certificates. Raises InvalidSpec or
        OSError if that fails and the cluster has certificates. A cluster without certificates can
        still be used by its addresses."""
        if not self._is_found:
            return
        record = LocalClusterRecord(
            addresses=[*addresses, *pages], pages=pages, etcd=etcd, certificates=self._made
        )
        try:
            self._announcement = Announcement(record)
        except (InvalidSpec, OSError) as error:
            if self._made is not None:
                raise
            self._say(f"commands find this cluster only by its addresses: {error}")

    @property
    def etcd_options(self) -> EtcdOptions:
        """Options of an etcd that is started for the cluster."""
        if self._with_etcd is None:
            return EtcdOptions()
        return EtcdOptions(tls=_etcd_tls(self._with_etcd))

    def etcd_arguments(self, existing: str) -> Sequence[str]:
        """Arguments for access to etcd. `existing`: addresses of an etcd that another local cluster
        of this user started; empty: the cluster's own."""
        folder = self._with_etcd
        if existing:
            found = local_clusters.find(existing.split(","))
            folder = None if found is None else found.certificates
        return () if folder is None else _etcd_tls(folder).client_arguments

    @property
    def coordinator_arguments(self) -> Sequence[str]:
        """Arguments of a coordinator. Browsers need no certificate: the kernel names a connection's
        user."""
        if self._made is None:
            return ()
        tokens = () if self._http_tokens is None else ("--http-tokens", str(self._http_tokens))
        return ("--http-clients", "user", *tokens)

    def close(self) -> None:
        """Stop renewing the certificates, and withdraw the announcement."""
        self._closed.set()
        if self._renewing is not None:
            self._renewing.join()
        if self._announcement is not None:
            self._announcement.close()
            self._announcement = None

    def _renew(self) -> None:
        if self._made is not None:
            for folder in (self._made, self._made / ETCD_CERTIFICATES):
                CertificateFolder(folder).renew()
        if self._announcement is not None:
            self._announcement.touch()


def _make(folder: CertificateFolder, holders: Sequence[CertificateHolder]) -> None:
    if not folder.has_authority:
        folder.init(roles=())
        folder.complete(holders)
        return
    # An earlier start may have been cut off.
    folder.complete(holders)
    folder.renew()


def etcd_holders(
    hosts: Sequence[str] = (HOST, "localhost"), valid: timedelta = DEFAULT_VALID
) -> Sequence[CertificateHolder]:
    """Return the holders of etcd's certificates: its members at these hosts, and its clients."""
    # etcd ignores the roles: it accepts every certificate of its own authority.
    return [
        CertificateHolder(caller=Caller(CertificateRole.SERVER, "etcd"), hosts=hosts, valid=valid),
        CertificateHolder(caller=Caller(CertificateRole.OPERATOR, "etcd-client"), valid=valid),
    ]


def _etcd_tls(certificates: Path) -> EtcdTls:
    folder = certificates.resolve() / ETCD_CERTIFICATES
    return EtcdTls(
        ca=folder / CA_FILE,
        cert=folder / "etcd.crt",
        key=folder / "etcd.key",
        client_cert=folder / "etcd-client.crt",
        client_key=folder / "etcd-client.key",
    )
