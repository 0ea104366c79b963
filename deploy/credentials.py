#!/usr/bin/env python3
"""Makes the certificates and tokens of a cluster, gives each part its own, and renews them.

    shoal-credentials files --to DIR       a folder for each part; mount each into its part alone
    shoal-credentials secrets              a Kubernetes Secret for each part

There are two authorities: one for Shoal's processes, one for etcd, so that etcd does not accept a
worker's certificate. Their keys stay in `authority`. The parts get these files:

    coordinator   its certificate, a client certificate for etcd, the hashes of the HTTP tokens
    server        a parameter server's certificate, a client certificate for etcd
    worker        a worker's certificate, a viewer's token for its health check
    operator      an operator's certificate and token
    viewer        a viewer's certificate and token, for Prometheus
    reader        the certificate of a reader of published weights
    etcd          the certificate of etcd, for its clients and its peers

With `--every-h`, certificates are renewed after that many hours, and after the clock was set back;
tokens and authorities are kept.
Processes read changed files without a restart.
"""

import argparse
import base64
import json
import os
import signal
import ssl
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from shoal_client.certificates.authority import CertificateHolder
from shoal_client.certificates.folder import (
    CA_KEY_FILE,
    CertificateFolder,
    keep_renewed,
    role_holders,
)
from shoal_proto.errors import ShoalError
from shoal_proto.tls.identity import CA_FILE
from shoal_proto.tls.names import Caller, CertificateRole
from shoal_server.status.access import tokens
from shoal_server.status.access.tokens import HttpRole

AUTHORITY = "authority"
TOKENS = "tokens"
TOKEN = "token"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
ANSWER_WITHIN_S = 30

TOKEN_ROLES = {
    "worker": HttpRole.VIEWER,
    "viewer": HttpRole.VIEWER,
    "operator": HttpRole.OPERATOR,
}
PARTS: Mapping[str, Mapping[str, str]] = {
    **{
        role.value: {
            CA_FILE: f"shoal/{CA_FILE}",
            f"{role.value}.crt": f"shoal/{role.value}.crt",
            f"{role.value}.key": f"shoal/{role.value}.key",
        }
        for role in CertificateRole
    },
    "etcd": {CA_FILE: f"etcd/{CA_FILE}", "etcd.crt": "etcd/etcd.crt", "etcd.key": "etcd/etcd.key"},
}
"""Files of each part: name in the part's folder, and path in the authority's folder."""
ETCD_CLIENT = {
    "etcd-ca.crt": f"etcd/{CA_FILE}",
    "etcd-client.crt": "etcd/etcd-client.crt",
    "etcd-client.key": "etcd/etcd-client.key",
}


def parts() -> dict[str, dict[str, str]]:
    """Files of each part, tokens included: name, and path in the authority's folder."""
    found = {part: dict(files) for part, files in PARTS.items()}
    for part in ("coordinator", "server"):
        found[part] |= ETCD_CLIENT
    for part in TOKEN_ROLES:
        found[part][TOKEN] = f"{part}.{TOKEN}"
    found["coordinator"][TOKENS] = TOKENS
    return found


def make(
    authority: Path, valid: timedelta, hosts: Sequence[str], etcd_hosts: Sequence[str]
) -> None:
    """Make all files in the authority's folder; certificates are new. Raises ShoalError or
    OSError."""
    authority.mkdir(mode=0o700, exist_ok=True, parents=True)
    wanted = {
        "shoal": role_holders(valid, hosts),
        # etcd ignores the roles: it accepts every certificate of its own authority.
        "etcd": [
            CertificateHolder(
                caller=Caller(CertificateRole.SERVER, "etcd"), hosts=etcd_hosts, valid=valid
            ),
            CertificateHolder(caller=Caller(CertificateRole.OPERATOR, "etcd-client"), valid=valid),
        ],
    }
    for name, holders in wanted.items():
        folder = CertificateFolder(authority / name)
        if not folder.has_authority:
            folder.init(roles=())
        for holder in holders:
            for kind in ("crt", "key"):
                (folder.path / f"{holder.caller.name}.{kind}").unlink(missing_ok=True)
            folder.issue(holder)
    for name, role in TOKEN_ROLES.items():
        token_file = authority / f"{name}.{TOKEN}"
        if not token_file.exists():
            forget(authority / TOKENS, name)
            write(token_file, tokens.add(authority / TOKENS, name, role).encode())


def forget(path: Path, name: str) -> None:
    """Remove a token from the list `tokens`. Its own file may be missing, if an earlier run ended
    between the two writes."""
    if path.exists():
        lines = path.read_text().splitlines(keepends=True)
        write(path, "".join(line for line in lines if line.split()[0] != name).encode())


def write(path: Path, data: bytes) -> None:
    """Write a file as a whole or not at all. Only its owner may read it."""
    part = path.with_name(f".{path.name}.part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    part.replace(path)


# --- into folders ---


def to_folders(options: argparse.Namespace) -> None:
    """Write each part's files into the part's own folder."""
    authority = options.to / AUTHORITY
    make(authority, options.valid, options.host, options.etcd_host)
    for part, files in parts().items():
        folder = options.to / part
        folder.mkdir(mode=0o700, exist_ok=True)
        # The certificate last: it shows that all files exist. The health check of the service
        # `certs` in docker-compose.yml looks for it.
        for name, source in sorted(files.items(), key=lambda item: item[0].endswith(".crt")):
            data = (authority / source).read_bytes()
            target = folder / name
            if not target.exists() or target.read_bytes() != data:
                write(target, data)


# --- into Secrets ---


class Cluster:
    """The Kubernetes API, with the rights of the pod's service account."""

    def __init__(self, account: Path, server: str) -> None:
        self._namespace = (account / "namespace").read_text().strip()
        self._token = account / "token"
        self._server = server
        self._tls = ssl.create_default_context(cafile=str(account / "ca.crt"))

    def get(self, name: str) -> Mapping[str, object]:
        """A Secret. Raises OSError."""
        return self._ask("GET", name)

    def fill(self, name: str, files: Mapping[str, bytes], version: str = "") -> None:
        """Put the files into an existing Secret. `version`: raise OSError if the Secret has another
        version, because it was changed meanwhile."""
        data = {key: base64.b64encode(value).decode() for key, value in files.items()}
        metadata = {"resourceVersion": version} if version else {}
        self._ask("PATCH", name, {"metadata": metadata, "data": data})

    def _ask(self, method: str, name: str, body: object = None) -> Mapping[str, object]:
        request = urllib.request.Request(
            f"{self._server}/api/v1/namespaces/{self._namespace}/secrets/{name}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": f"Bearer {self._token.read_text().strip()}",
                "Content-Type": "application/merge-patch+json",
            },
        )
        try:
            with urllib.request.urlopen(
                request, timeout=ANSWER_WITHIN_S, context=self._tls
            ) as answer:
                found: Mapping[str, object] = json.load(answer)
        except urllib.error.HTTPError as error:
            problem = error.read(2000).decode(errors="replace")
            raise OSError(f"{method} secret {name}: {error.code} {problem}") from error
        return found


def to_secrets(options: argparse.Namespace) -> None:
    """Write each part's files into the Secret PREFIX-PART. The authority's Secret is read first."""
    host = os.environ["KUBERNETES_SERVICE_HOST"]
    address = f"[{host}]" if ":" in host else host
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    cluster = Cluster(options.account, f"https://{address}:{port}")
    secret = cluster.get(f"{options.prefix}-{AUTHORITY}")
    with tempfile.TemporaryDirectory() as folder:
        authority = Path(folder) / AUTHORITY
        unpack(secret.get("data") or {}, authority)
        make(authority, options.valid, options.host, options.etcd_host)
        version = secret["metadata"]["resourceVersion"]  # type: ignore[index]
        cluster.fill(f"{options.prefix}-{AUTHORITY}", kept(authority), version)
        for part, files in parts().items():
            contents = {name: (authority / source).read_bytes() for name, source in files.items()}
            cluster.fill(f"{options.prefix}-{part}", contents)


def kept(authority: Path) -> dict[str, bytes]:
    """Files from which the same authority is made again. Keys of a Secret have no slash."""
    names = [f"{name}/{file}" for name in ("shoal", "etcd") for file in (CA_FILE, CA_KEY_FILE)]
    names += [TOKENS, *(f"{part}.{TOKEN}" for part in TOKEN_ROLES)]
    return {name.replace("/", "-"): (authority / name).read_bytes() for name in names}


def unpack(data: Mapping[str, str], authority: Path) -> None:
    """Write the files that `kept` returned; none from an empty Secret."""
    for key, text in data.items():
        name, _, file = key.partition("-")
        path = authority / name / file if name in ("shoal", "etcd") else authority / key
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write(path, base64.b64decode(text))


# --- the command ---


def hours(text: str) -> timedelta:
    found = timedelta(hours=float(text))
    if found <= timedelta():
        raise argparse.ArgumentTypeError(f"{text}: expected hours above 0")
    return found


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shoal-credentials", allow_abbrev=False)
    kinds = parser.add_subparsers(required=True)
    files = kinds.add_parser("files", help="a folder for each part")
    files.add_argument("--to", type=Path, required=True, metavar="DIR")
    files.set_defaults(give=to_folders)
    secrets = kinds.add_parser("secrets", help="a Kubernetes Secret for each part")
    secrets.add_argument("--prefix", default="shoal", help="names of Secrets are PREFIX-PART")
    secrets.add_argument("--account", type=Path, default=SERVICE_ACCOUNT, metavar="DIR")
    secrets.set_defaults(give=to_secrets)
    for each in (files, secrets):
        each.add_argument("--valid-h", dest="valid", type=hours, default=timedelta(hours=24))
        each.add_argument("--every-h", dest="every", type=hours, help="renew after this time")
        each.add_argument(
            "--host", action="append", default=[], help="host name of the status page"
        )
        each.add_argument("--etcd-host", action="append", default=[], help="host name of an etcd")
    return parser


def run(options: argparse.Namespace, wait: Callable[[float], bool]) -> int:
    """Write the files, and with --every-h renew them. `wait` returns True to end the process."""
    if options.every and options.every * 2 > options.valid:
        print("shoal-credentials: --every-h must be half of --valid-h at most", file=sys.stderr)
        return 2

    def give() -> None:
        options.give(options)
        # A message that cannot be printed is no failed renewal.
        with suppress(OSError):
            print(f"shoal-credentials: files are written, valid for {options.valid}", flush=True)

    try:
        give()
    except (OSError, ShoalError) as error:
        # Kubernetes and compose restart this process, after pauses that grow.
        report(str(error))
        return 1
    if options.every:
        keep_renewed(give, options.every, wait=wait, say=report)
    return 0


def report(text: str) -> None:
    print(f"shoal-credentials: {text}", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    stop = threading.Event()
    if options.every:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stop.set())
    return run(options, stop.wait)


if __name__ == "__main__":
    sys.exit(main())
