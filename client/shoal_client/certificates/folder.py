"""An authority and its certificates, as files that only their owner can read."""

import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509

from shoal_client.certificates.authority import (
    CLOCK_SKEW,
    Authority,
    CertificateHolder,
    IssuedCertificate,
    holder_of,
    read,
)
from shoal_proto.errors import InvalidSpec
from shoal_proto.tls.identity import CA_FILE
from shoal_proto.tls.names import Caller, CertificateRole

CA_KEY_FILE = "ca.key"
DEFAULT_VALID = timedelta(hours=24)
LOOK_EVERY_S = 60.0
"""Certificates expire by the wall clock, which runs on while the machine sleeps: check it this
often. Also the pause after a renewal that failed."""


@dataclass(frozen=True, kw_only=True)
class ListedCertificate:
    """Certificate of the folder."""

    path: Path
    caller: Caller
    hosts: Sequence[str]
    not_after: datetime


class CertificateFolder:
    """A folder with `ca.crt` and `ca.key`, and with NAME.crt and NAME.key for each holder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def can_issue(self) -> bool:
        """True if the folder has the authority's key."""
        return (self.path / CA_KEY_FILE).exists()

    @property
    def has_authority(self) -> bool:
        """True if the folder has certificates. A lone key of an authority is that of an `init` that
        was cut off."""
        return any(_has_contents(path) for path in self.path.glob("*.crt"))

    def init(
        self,
        valid: timedelta = DEFAULT_VALID,
        hosts: Sequence[str] = (),
        roles: Iterable[CertificateRole] = CertificateRole,
    ) -> None:
        """Make the authority, and a certificate for each role. `hosts`: names and addresses of the
        coordinator. Raises InvalidSpec, and makes no authority, if a certificate exists, if the
        folder cannot be made, if other users have access to the folder, or as `Authority.issue`
        does."""
        if self.has_authority:
            raise InvalidSpec(
                "there is an authority already",
                seen=str(self.path / CA_FILE),
                expected="a folder without one",
                fix="`shoal certs issue` and `renew` use it. A new authority would make all of its"
                " certificates worthless. To replace it nevertheless, remove the folder first.",
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise InvalidSpec(
                "the folder for certificates cannot be made", seen=str(error), expected="a folder"
            ) from error
        self._check_private()
        authority, own = Authority.new(f"shoal {secrets.token_hex(4)}")
        # Issue before any file is written, so that a refused `init` can be repeated.
        issued = {
            self._new_path(holder): authority.issue(holder)
            for holder in role_holders(valid, hosts, roles)
        }
        for path, data in ((self.path / CA_KEY_FILE, own.key), (self.path / CA_FILE, own.cert)):
            path.unlink(missing_ok=True)
            _write_new(path, data)
        for path, certificate in issued.items():
            _write_new_pair(path, certificate)

    def complete(self, holders: Iterable[CertificateHolder]) -> None:
        """Issue those certificates that an `init` which was cut off did not write. Raises
        InvalidSpec."""
        for holder in holders:
            path = self.path / f"{holder.caller.name}.crt"
            if not _has_contents(path):
                for each in (path, path.with_suffix(".key")):
                    each.unlink(missing_ok=True)
                self.issue(holder)

    def issue(self, holder: CertificateHolder) -> Path:
        """Issue a further certificate; return its file. Raises InvalidSpec, for example for a name
        that is in use."""
        self._check_private()
        authority, path = self._authority(), self._new_path(holder)
        _write_new_pair(path, authority.issue(holder))
        return path

    def issue_for_another_machine(self, holder: CertificateHolder) -> IssuedCertificate:
        """Issue a certificate without a file in this folder. Raises InvalidSpec."""
        self._check_private()
        return self._authority().issue(holder)

    def renew(self, valid: timedelta | None = None, hosts: Sequence[str] = ()) -> list[Path]:
        """Issue every certificate again, with a new key and the same duration; return the files.
        Certificates of `init` get its `valid` and `hosts`, if given. Raises InvalidSpec; a pair
        that cannot be written stays as it is."""
        self._check_private()
        authority, done = self._authority(), []
        for path, renewed in self._holders():
            holder, role = renewed, renewed.caller.role
            if renewed.caller == Caller(role, role.value):
                named = hosts if role is CertificateRole.COORDINATOR else ()
                holder = replace(
                    renewed, valid=valid or renewed.valid, hosts=named or renewed.hosts
                )
            _write_pair(path, authority.issue(holder))
            done.append(path)
        return done

    def list_certificates(self) -> list[ListedCertificate]:
        """The certificates, sorted by file name. Raises InvalidSpec."""
        return [
            ListedCertificate(
                path=path,
                caller=holder.caller,
                hosts=holder.hosts,
                not_after=_certificate(path).not_valid_after_utc,
            )
            for path, holder in self._holders()
        ]

    def _holders(self) -> Iterator[tuple[Path, CertificateHolder]]:
        for path in sorted(self.path.glob("*.crt")):
            if path.name == CA_FILE:
                continue
            holder = holder_of(_certificate(path))
            if holder is not None:
                yield path, holder

    def _authority(self) -> Authority:
        return Authority(_bytes_of(self.path / CA_FILE), _bytes_of(self.path / CA_KEY_FILE))

    def _new_path(self, holder: CertificateHolder) -> Path:
        path = self.path / f"{holder.caller.name}.crt"
        for each in (path, path.with_suffix(".key")):
            if each.exists():
                raise InvalidSpec(
                    "there is a certificate of this name already",
                    seen=str(each),
                    expected="another --name",
                    fix="`shoal certs renew` issues the existing ones again.",
                )
        return path

    def _check_private(self) -> None:
        try:
            mode = self.path.stat().st_mode
        except OSError as error:
            raise _unreadable(error) from error
        if mode & 0o077:
            raise InvalidSpec(
                "other users may read the folder with the authority's key",
                seen=f"{self.path} with mode {mode & 0o777:o}",
                expected="mode 700",
                fix=f"Run: chmod 700 {self.path}",
            )


def role_holders(
    valid: timedelta = DEFAULT_VALID,
    hosts: Sequence[str] = (),
    roles: Iterable[CertificateRole] = CertificateRole,
) -> Sequence[CertificateHolder]:
    """Return a holder for each role. `hosts`: names and addresses of the coordinator."""
    return [
        CertificateHolder(
            caller=Caller(role, role.value),
            hosts=hosts if role is CertificateRole.COORDINATOR else (),
            valid=valid,
        )
        for role in roles
    ]


def _has_contents(path: Path) -> bool:
    """True if the file exists and is not empty, as after a power failure."""
    return path.exists() and path.stat().st_size > 0


def _certificate(path: Path) -> x509.Certificate:
    data = _bytes_of(path)
    try:
        return read(data)
    except InvalidSpec as error:
        raise InvalidSpec(
            error.what, seen=f"{path}: {error.seen}", expected=error.expected
        ) from error


def _bytes_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise _unreadable(error) from error


def _unreadable(error: OSError) -> InvalidSpec:
    return InvalidSpec(
        "the folder of certificates, or a file in it, cannot be read",
        seen=str(error),
        expected="a folder that `shoal certs init` made, with --dir",
    )


def _write_new(path: Path, data: bytes) -> None:
    """Write a file as a whole or not at all. Raises InvalidSpec if it exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise _not_written(error) from error
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except OSError as error:
        path.unlink()
        raise _not_written(error) from error


def _not_written(error: OSError) -> InvalidSpec:
    return InvalidSpec(
        "a certificate's file cannot be written", seen=str(error), expected="a new file"
    )


def _write_new_pair(path: Path, issued: IssuedCertificate) -> None:
    """Write both files. Raises InvalidSpec, also if another process has issued this name first."""
    key = path.with_suffix(".key")
    _write_new(key, b"")  # reserves the name
    try:
        _write_pair(path, issued)
    except InvalidSpec:
        key.unlink()
        raise


def _write_pair(path: Path, issued: IssuedCertificate) -> None:
    """Write or replace both files. Raises InvalidSpec."""
    new = {path.with_suffix(".key"): issued.key, path: issued.cert}
    parts = {file: file.with_name(f"{file.name}.{secrets.token_hex(4)}.part") for file in new}
    try:
        # Write both before one is replaced: on a full disk the earlier pair stays.
        for file, data in new.items():
            _write_new(parts[file], data)
        # After the first replacement, key and certificate do not match: readers try again.
        for file, part in parts.items():
            part.replace(file)
    except OSError as error:
        raise _not_written(error) from error
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def keep_renewed(
    renew: Callable[[], object],
    every: timedelta,
    *,
    wait: Callable[[float], object],
    say: Callable[[str], None],
) -> None:
    """Call `renew` after each `every`, and if the clock was set back, until `wait` returns True. If
    it fails, `say` why, and call it again after a minute."""
    look_every_s = min(LOOK_EVERY_S, every.total_seconds())
    renewed_unix_s = time.time()
    while not wait(look_every_s):
        # The newest certificates are not valid yet if the clock was set back behind their begin.
        begin_unix_s = renewed_unix_s - CLOCK_SKEW.total_seconds()
        if begin_unix_s <= time.time() < renewed_unix_s + every.total_seconds():
            continue
        try:
            renew()
        except (InvalidSpec, OSError) as error:
            with suppress(OSError):  # the disk of the messages may be full as well
                say(f"the certificates could not be renewed, and will be tried again: {error}")
            continue
        renewed_unix_s = time.time()
