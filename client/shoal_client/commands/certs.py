"""`shoal certs`: the certificates of a cluster."""

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from shoal_client.certificates.authority import MAX_VALID, CertificateHolder, read
from shoal_client.certificates.folder import (
    DEFAULT_VALID,
    CertificateFolder,
    keep_renewed,
    role_holders,
)
from shoal_proto.errors import InvalidSpec
from shoal_proto.names import NAME_RULE, SERIES_RULE, is_name, is_series
from shoal_proto.tls.names import Caller, CertificateRole

DEFAULT_FOLDER = Path("shoal-certs")
MAX_VALID_H = MAX_VALID.total_seconds() / 3600
_ROLES = ", ".join(role.value for role in CertificateRole)


@dataclass(frozen=True, kw_only=True)
class CertsConfig:
    """Makes the certificates with which the processes of a cluster authenticate each other.

    init: makes an authority, and a certificate for each role. issue ROLE: makes a further
    certificate. renew: issues all certificates of the folder again; running processes use the new
    ones without a restart. show: lists the certificates.
    """

    action: Annotated[Literal["init", "issue", "renew", "show"], Parameter(show_default=False)] = (
        field(kw_only=False)
    )
    """Action to take."""
    role: Annotated[str, Parameter(show_default=False)] = field(default="", kw_only=False)
    """issue: operator, viewer, worker, server (a parameter server), coordinator, or reader (of
    published weights)."""
    folder: Annotated[Path, Parameter(name="--dir", metavar="DIRECTORY", env_var="SHOAL_TLS")] = (
        DEFAULT_FOLDER
    )
    """Folder of the certificates and keys; only you may have access to it. Keep ca.key, the
    authority's key, away from machines that only use certificates."""
    name: Annotated[str, Parameter(metavar="NAME")] = ""
    """issue: name of the holder and of the file. By default the role."""
    job: Annotated[str, Parameter(metavar="NAME")] = ""
    """issue worker: the only job that the holder may act in. By default any."""
    series: Annotated[str, Parameter(metavar="JOB/NAME")] = ""
    """issue reader: the only series that the holder may read. By default any."""
    hosts: Annotated[
        Sequence[str], Parameter(name="--host", metavar="NAME", allow_repeating=True)
    ] = ()
    """issue, init: names and addresses at which browsers reach the coordinator. Shoal's own
    processes need none. Can be repeated."""
    valid_h: Annotated[float | None, Parameter(metavar="HOURS")] = None
    """issue, init: hours for which certificates are valid, by default 24. Renewed certificates are
    valid for the same time."""
    if_absent: bool = False
    """init: if there is an authority already, renew its certificates instead of refusing. Those
    that init makes get --host and --valid-h, if given."""
    every_h: Annotated[float, Parameter(metavar="HOURS")] = 0.0
    """renew: keep running, and renew again after this many hours; a minute later if that failed. 0:
    renew once."""

    def __post_init__(self) -> None:
        if (self.action == "issue") != bool(self.role):
            raise InvalidSpec(
                "only issue takes a role",
                seen=f"{self.action} {self.role}".rstrip(),
                expected=f"shoal certs issue ROLE, with one of {_ROLES}",
            )
        self._check_action()
        if self.role and self.role not in {role.value for role in CertificateRole}:
            raise InvalidSpec("no such role", seen=repr(self.role), expected=f"one of {_ROLES}")
        if self.job and self.role != CertificateRole.WORKER.value:
            raise InvalidSpec(
                "only a worker is bound to a job",
                seen=f"--job with {self.role or self.action}",
                expected="shoal certs issue worker --job NAME",
            )
        if self.series and self.role != CertificateRole.READER.value:
            raise InvalidSpec(
                "only a reader is bound to a series",
                seen=f"--series with {self.role or self.action}",
                expected="shoal certs issue reader --series JOB/NAME",
            )
        if self.series and not is_series(self.series):
            raise InvalidSpec("bad --series", seen=repr(self.series), expected=SERIES_RULE)
        for option, name in (("--name", self.name), ("--job", self.job)):
            if name and not is_name(name):
                raise InvalidSpec(f"bad {option}", seen=repr(name), expected=NAME_RULE)
        for host in self.hosts:
            if not host or any(each.isspace() for each in host):
                expected = "a name or an address, without spaces"
                raise InvalidSpec("bad --host", seen=repr(host), expected=expected)
        if self.valid_h is not None and not 0 < self.valid_h <= MAX_VALID_H:
            raise InvalidSpec(
                "bad --valid-h",
                seen=f"{self.valid_h:g}",
                expected=f"above 0, {MAX_VALID_H:g} at most",
            )
        if not 0 <= self.every_h <= MAX_VALID_H:
            raise InvalidSpec(
                "bad --every-h",
                seen=f"{self.every_h:g}",
                expected=f"0 or more, {MAX_VALID_H:g} at most",
            )

    def _check_action(self) -> None:
        given = {
            "--name": (bool(self.name), ("issue",)),
            "--host": (bool(self.hosts), ("issue", "init")),
            "--valid-h": (self.valid_h is not None, ("issue", "init")),
            "--if-absent": (self.if_absent, ("init",)),
            "--every-h": (bool(self.every_h), ("renew",)),
        }
        for option, (is_given, actions) in given.items():
            if is_given and self.action not in actions:
                raise InvalidSpec(
                    f"{option} is only for {' and '.join(actions)}",
                    seen=f"shoal certs {self.action} {option}",
                    expected=f"shoal certs {self.action} without it",
                )


def certs(config: CertsConfig) -> int:
    """Make, renew or show certificates. Raises InvalidSpec."""
    folder = CertificateFolder(config.folder)
    given = None if config.valid_h is None else timedelta(hours=config.valid_h)
    valid = given or DEFAULT_VALID
    match config.action:
        case "init" if config.if_absent and folder.has_authority:
            folder.complete(role_holders(valid, config.hosts))
            _renew(folder, given, config.hosts)
        case "init":
            folder.init(valid, config.hosts)
            print(
                f"{folder.path}: an authority, and a certificate for each role, valid for {valid}"
            )
            print(
                f"Have the parts of the cluster use them: export SHOAL_TLS={folder.path.resolve()}"
            )
        case "issue":
            name = config.name or config.role
            caller = Caller(CertificateRole(config.role), name, config.job, config.series)
            path = folder.issue(CertificateHolder(caller=caller, hosts=config.hosts, valid=valid))
            until = read(path.read_bytes()).not_valid_after_utc
            print(
                f"{path} and {path.with_suffix('.key')}: {caller}, until {until:%Y-%m-%d %H:%M} UTC"
            )
        case "renew":
            _renew(folder)
            if config.every_h:
                keep_renewed(
                    lambda: _renew(folder),
                    timedelta(hours=config.every_h),
                    wait=time.sleep,
                    say=_report,
                )
        case "show":
            _show(folder)
    return 0


def _renew(
    folder: CertificateFolder, valid: timedelta | None = None, hosts: Sequence[str] = ()
) -> None:
    done = folder.renew(valid, hosts)
    # A message that cannot be printed is no failed renewal: `keep_renewed` would issue all again.
    with suppress(OSError):
        print(f"{folder.path}: renewed {', '.join(path.name for path in done)}", flush=True)


def _report(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(folder: CertificateFolder) -> None:
    now = datetime.now(UTC)
    for each in folder.list_certificates():
        left = each.not_after - now
        until = f"until {each.not_after:%Y-%m-%d %H:%M} UTC"
        state = until if left > timedelta() else f"expired, {until}"
        hosts = f", reached as {', '.join(each.hosts)}" if each.hosts else ""
        print(f"{each.path.name}: {each.caller}{hosts}; {state}")
