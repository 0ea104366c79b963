"""The certificate of this process, which all its connections go by.

A process has one, as it has one user: it is set where the process starts (the command line, or
`from_environment` for a script), and read wherever a connection is made or taken. None: no TLS.
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
    """The certificate of this process; None where it speaks without TLS."""
    return _own


def use(files: TlsFiles | None) -> None:
    """Have the connections that are made from now on go by these files. Raises InvalidSpec."""
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
    """The three files where they are given, or the first role's in the folder that are there; None
    if nothing was given. Raises InvalidSpec for a part of them, or a folder without them."""
    if ca is not None and cert is not None and key is not None:
        return TlsFiles(ca=ca, cert=cert, key=key)
    if ca is not None or cert is not None or key is not None:
        given = {"--tls-ca": ca, "--tls-cert": cert, "--tls-key": key}
        raise InvalidSpec(
            "TLS is half set up",
            seen=" ".join(f"{name} {path}" for name, path in given.items() if path is not None),
            expected="--tls-ca, --tls-cert and --tls-key together, or none of them",
        )
    return None if folder is None else in_folder(folder, *roles)


def in_folder(folder: Path, *roles: CertificateRole) -> TlsFiles:
    """The files of the first of the roles that has some there. Raises InvalidSpec."""
    for role in roles:
        cert, key = folder / f"{role.value}.crt", folder / f"{role.value}.key"
        if cert.exists() and key.exists():
            return TlsFiles(ca=folder / CA_FILE, cert=cert, key=key)
    wanted = " or ".join(role.value for role in roles)
    raise InvalidSpec(
        f"no certificate for the role {wanted}",
        seen=f"no {roles[0].value}.crt with {roles[0].value}.key in {folder}",
        expected="a folder as `shoal certs init` makes it",
        fix=f"Run: shoal certs issue {roles[0].value} --dir {folder}",
    )


def files_at(addresses: Iterable[str], *roles: CertificateRole) -> TlsFiles | None:
    """The files for a cluster of this user on this machine that serves at one of these addresses,
    of the first of the roles that has some; None where there is no such cluster, or it speaks plain
    text. Raises InvalidSpec."""
    found = local_clusters.find(addresses)
    return None if found is None else in_folder(found.certificates, *roles)


def from_environment(
    environment: Mapping[str, str] | None = None, addresses: Iterable[str] = ()
) -> TlsFiles | None:
    """A worker's files: SHOAL_TLS_CA, SHOAL_TLS_CERT and SHOAL_TLS_KEY, or the folder SHOAL_TLS;
    where none of them is set, those for a local cluster at one of the addresses of coordinators.
    None without all of these. Raises InvalidSpec."""
    variables = os.environ if environment is None else environment
    ca, cert, key = (Path(text) if (text := variables.get(name)) else None for name in VARIABLES)
    folder = variables.get(FOLDER_VARIABLE)
    given = chosen(Path(folder) if folder else None, ca, cert, key, CertificateRole.WORKER)
    return given or files_at(addresses, CertificateRole.WORKER)


def without_tls(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for processes that speak without it."""
    names = {*VARIABLES, FOLDER_VARIABLE}
    return {name: value for name, value in environment.items() if name not in names}
