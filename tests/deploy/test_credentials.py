"""The program that makes the certificates and tokens of a deployment, and gives each part its
own."""

import base64
import json
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trustme
from cryptography import x509
from deploy.scripts import credentials

from shoal_client.certificates import folder
from shoal_server.status.access.tokens import Tokens


def give(folder: Path, *arguments: str) -> int:
    code: int = credentials.main(["files", f"--to={folder}", *arguments])
    return code


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_no_part_has_keys_of_another(tmp_path: Path) -> None:
    """Keys belong to one part each, except etcd's client key, which both its clients have."""
    assert give(tmp_path, "--etcd-host=etcd-0.etcd") == 0
    holders: dict[bytes, set[str]] = {}
    for part, files in credentials.parts().items():
        for name in files:
            if name.endswith((".key", "token", "tokens")):
                holders.setdefault((tmp_path / part / name).read_bytes(), set()).add(part)
    shared = [parts for parts in holders.values() if len(parts) > 1]
    assert shared == [{"coordinator", "server"}]
    authority = tmp_path / credentials.AUTHORITY
    for name in ("shoal", "etcd"):
        assert (authority / name / "ca.key").read_bytes() not in holders
    assert len({(tmp_path / part / "ca.crt").read_bytes() for part in credentials.PARTS}) == 2


def test_etcd_accepts_no_certificate_of_a_worker(tmp_path: Path) -> None:
    """Certificates of etcd are signed by an authority of its own, and have its name."""
    assert give(tmp_path, "--etcd-host=etcd-0.etcd") == 0
    etcd = x509.load_pem_x509_certificate((tmp_path / "etcd" / "etcd.crt").read_bytes())
    names = etcd.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "etcd-0.etcd" in names.get_values_for_type(x509.DNSName)
    own = x509.load_pem_x509_certificate((tmp_path / "etcd" / "ca.crt").read_bytes())
    client = (tmp_path / "coordinator" / "etcd-client.crt").read_bytes()
    for signed in (etcd, x509.load_pem_x509_certificate(client)):
        signed.verify_directly_issued_by(own)
    worker = x509.load_pem_x509_certificate((tmp_path / "worker" / "worker.crt").read_bytes())
    with pytest.raises(ValueError, match="does not match certificate issuer"):
        worker.verify_directly_issued_by(own)


def test_a_second_run_renews_certificates_and_keeps_all_other_files(tmp_path: Path) -> None:
    assert give(tmp_path) == 0
    before = contents(tmp_path)
    assert give(tmp_path, "--valid-h=1") == 0
    after = contents(tmp_path)
    assert set(after) == set(before)
    changed = {path for path in after if after[path] != before[path]}
    kept = {path for path in after if path.split("/")[-1].startswith(("ca.", "etcd-ca."))}
    kept |= {path for path in after if path.endswith(("token", "tokens"))}
    assert changed == set(after) - kept


def test_tokens_are_known_to_the_coordinator(tmp_path: Path) -> None:
    """A token is made again if the program was interrupted after it wrote the token's hash."""
    assert give(tmp_path) == 0
    (tmp_path / credentials.AUTHORITY / "operator.token").unlink()
    assert give(tmp_path) == 0
    known = Tokens(tmp_path / "coordinator" / "tokens")
    for part, role in credentials.TOKEN_ROLES.items():
        holder = known.holder((tmp_path / part / "token").read_text())
        assert holder is not None and (holder.name, holder.role) == (part, role)
    acting = {part for part, role in credentials.TOKEN_ROLES.items() if role.may_act()}
    assert acting == {"operator"}


def test_a_renewal_that_comes_too_late_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert give(tmp_path, "--valid-h=24", "--every-h=13") == 2
    assert "half" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    with pytest.raises(SystemExit):
        give(tmp_path, "--valid-h=0")


def test_certificates_are_renewed_until_the_program_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They expire by the clock, also while the machine sleeps. A renewal that fails is repeated."""
    options = credentials.build_parser().parse_args(
        ["files", f"--to={tmp_path}", "--valid-h=2", "--every-h=0.5"]
    )
    clock_s = time.time()
    monkeypatch.setattr(folder, "time", SimpleNamespace(time=lambda: clock_s))
    steps_s = iter([1800.0, 60.0, 60.0, 9000.0])
    certificates: list[bytes] = []
    authority, away = tmp_path / credentials.AUTHORITY, tmp_path / "away"

    def wait(wait_s: float) -> bool:
        nonlocal clock_s
        assert wait_s == 60.0
        certificates.append((tmp_path / "worker" / "worker.crt").read_bytes())
        if len(certificates) == 4:
            authority.rename(away)
            authority.write_bytes(b"")
        elif len(certificates) == 5:
            authority.unlink()
            away.rename(authority)
        step_s = next(steps_s, None)
        clock_s += step_s or 0.0
        return step_s is None and len(certificates) > 5

    assert credentials.run(options, wait) == 0
    first, *renewed = certificates
    assert len(set(renewed[:3])) == 1 and renewed[0] != first
    assert renewed[3] == renewed[2] and renewed[4] != renewed[3]
    assert capsys.readouterr().err.count("could not be renewed") == 1


# --- Secrets ---


class Api:
    """The part of the Kubernetes API that concerns existing Secrets: GET, and PATCH by RFC 7386,
    refused if the version differs. It has no admission and no roles."""

    def __init__(self) -> None:
        parts = (credentials.AUTHORITY, *credentials.parts())
        self.secrets: dict[str, dict[str, Any]] = {
            f"shoal-{part}": {"metadata": {"resourceVersion": "1"}} for part in parts
        }
        self.calls: list[tuple[str, str]] = []
        self.meanwhile = False
        """True if another client writes after each GET."""

    def handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                secret = self._secret()
                self._answer(200, secret)
                if api.meanwhile:
                    secret["metadata"]["resourceVersion"] += "0"

            def do_PATCH(self) -> None:
                secret = self._secret()
                assert self.headers["Content-Type"] == "application/merge-patch+json"
                patch = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                version = patch["metadata"].get("resourceVersion")
                if version not in (None, secret["metadata"]["resourceVersion"]):
                    self._answer(409, {"message": "the object has been modified"})
                    return
                secret.setdefault("data", {}).update(patch["data"])
                secret["metadata"]["resourceVersion"] += "0"
                self._answer(200, secret)

            def _secret(self) -> dict[str, Any]:
                assert self.headers["Authorization"] == "Bearer of-the-pod"
                start, _, name = self.path.rpartition("/")
                assert start == "/api/v1/namespaces/training/secrets"
                api.calls.append((self.command, name))
                return api.secrets[name]

            def _answer(self, status: int, body: object) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        return Handler


@contextmanager
def kubernetes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Api, Path]]:
    """An API, and the folder of a pod's service account in the namespace `training`."""
    api, authority = Api(), trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.crt")
    (folder / "namespace").write_text("training")
    (folder / "token").write_text("of-the-pod\n")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    with ThreadingHTTPServer(("127.0.0.1", 0), api.handler()) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
        monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server_address[1]))
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield api, folder
        server.shutdown()
        thread.join()


def decoded(secret: dict[str, Any]) -> dict[str, bytes]:
    return {name: base64.b64decode(text) for name, text in secret["data"].items()}


def test_secrets_are_filled_and_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets get the files of their parts; a restarted pod continues with the same authorities."""
    with kubernetes(tmp_path, monkeypatch) as (api, account):
        command = ["secrets", f"--account={account}"]
        assert credentials.main(command) == 0
        first = {name: decoded(secret) for name, secret in api.secrets.items()}
        for part, files in credentials.parts().items():
            assert set(first[f"shoal-{part}"]) == set(files)
        for secret in first.values():
            assert all("/" not in name for name in secret)
        # Only the authority's Secret is read, and it is written before anything that it signed is
        # used.
        assert api.calls[:2] == [("GET", "shoal-authority"), ("PATCH", "shoal-authority")]
        assert not [call for call in api.calls[2:] if call[0] == "GET"]

        assert credentials.main(command) == 0
        second = {name: decoded(secret) for name, secret in api.secrets.items()}
        assert second["shoal-authority"] == first["shoal-authority"]
        for part in credentials.parts():
            now, before = second[f"shoal-{part}"], first[f"shoal-{part}"]
            assert now["ca.crt"] == before["ca.crt"]
            assert {n for n in now if n.endswith(".crt") and now[n] != before[n]} == {
                n for n in now if n.endswith(".crt") and "ca.crt" not in n
            }


def test_one_of_two_makers_ends_without_giving_out_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A maker that finds another authority written meanwhile ends, and has given out nothing."""
    with kubernetes(tmp_path, monkeypatch) as (api, account):
        api.meanwhile = True
        assert credentials.main(["secrets", f"--account={account}"]) == 1
        assert "409" in capsys.readouterr().err
        assert not [name for name, secret in api.secrets.items() if "data" in secret]
