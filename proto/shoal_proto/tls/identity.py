"""The certificate of this process, which all its later connections use.

A process has at most one; without one, it does not use TLS. Commands and scripts call `use` when
they start.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from shoal_proto.errors import InvalidSpec
from shoal_proto.tls import local_clusters
from shoal_proto.tls.files import TlsFiles, TlsIdentity
from shoal_proto.tls.names import CertificateRole

CA_FILE = "ca.crt"
VARIABLES = ("SHOAL_TLS_CA", "SHOAL_TLS_CERT", "SHOAL_TLS_KEY")
FOLDER_VARIABLE = "SHOAL_TLS"

_own: TlsIdentity | None = None


def own() -> TlsIdentity | None:
    """Return the certificate of this process; None if it does not use TLS."""
    return _own


def use(files: TlsFiles | None) -> None:
    """Use these files for all later connections; None: no TLS. Raises InvalidSpec."""
    global _own  # noqa: PLW0603 - one for the process, as a user id is
    if files is None:
        _own = None
    elif _own is None or _own.files != files:
        _own = TlsIdentity(files)


@contextmanager
def using(files: TlsFiles | None) -> Iterator[None]:
    """Use the files within the block, as `use` does."""
    global _own  # noqa: PLW0603
    before = _own
    use(files)
    try:
        yield
    finally:
        _own = before


def chosen(
    folder: Path | None,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    *roles: CertificateRole,
) -> TlsFiles | None:
    """Return the three given files, or those in the folder; None if nothing is given. Raises
    InvalidSpec if only some files are given, or the folder lacks them."""
    if ca is not None and cert is not None and key is not None:
        return TlsFiles(ca=ca, cert=cert, key=key)
    if ca is not None or cert is not None or key is not None:
        given = {"--tls-ca": ca, "--tls-cert": cert, "--tls-key": key}
        raise InvalidSpec(
            "only some of the three files for TLS are given",
            seen=" ".join(f"{name} {path}" for name, path in given.items() if path is not None),
            expected="--tls-ca, --tls-cert and --tls-key together, or none of them",
        )
    return None if folder is None else in_folder(folder, *roles)


def in_folder(folder: Path, *roles: CertificateRole) -> TlsFiles:
    """Return the files of the first role with a certificate and key in the folder. Raises
    InvalidSpec."""
    for role in roles:
        cert, key = folder / f"{role.value}.crt", folder / f"{role.value}.key"
        try:
            is_there = cert.exists() and key.exists()
        except OSError as error:
            raise InvalidSpec(
                "the folder of the certificates cannot be read",
                seen=str(error),
                expected="a folder made by `shoal certs init` that this user may read",
            ) from error
        if is_there:
            return TlsFiles(ca=folder / CA_FILE, cert=cert, key=key)
    wanted = " or ".join(role.value for role in roles)
    raise InvalidSpec(
        f"no certificate for the role {wanted}",
        seen=f"no {roles[0].value}.crt with {roles[0].value}.key in {folder}",
        expected="a folder made by `shoal certs init`",
        fix=f"Run: shoal certs issue {roles[0].value} --dir {folder}",
    )


def files_at(addresses: Iterable[str], *roles: CertificateRole) -> TlsFiles | None:
    """Return the files for this user's cluster at one of the addresses; None if there is no such
    cluster, or it does not use TLS. Raises InvalidSpec."""
    found = local_clusters.find(addresses)
    folder = None if found is None else found.certificates
    return None if folder is None else in_folder(folder, *roles)


def from_environment(
    environment: Mapping[str, str] | None = None, addresses: Iterable[str] = ()
) -> TlsFiles | None:
    """Return a worker's files: SHOAL_TLS_CA, SHOAL_TLS_CERT and SHOAL_TLS_KEY, or those in the
    folder SHOAL_TLS.

    Without these variables, returns the files of a local cluster at one of the addresses, if there
    is one with TLS, else None. Raises InvalidSpec.
    """
    variables = os.environ if environment is None else environment
    ca, cert, key = (Path(text) if (text := variables.get(name)) else None for name in VARIABLES)
    folder = variables.get(FOLDER_VARIABLE)
    given = chosen(Path(folder) if folder else None, ca, cert, key, CertificateRole.WORKER)
    return given or files_at(addresses, CertificateRole.WORKER)


def without_tls(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables of TLS."""
    names = {*VARIABLES, FOLDER_VARIABLE}
    return {name: value for name, value in environment.items() if name not in names}
