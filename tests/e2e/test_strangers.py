"""`shoal up` with its defaults gives other users of its machine no access."""

import base64
import os
import re
import signal
import socket
import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.processes.commands import ANY_PORTS, Shoal, finish, part_pids, read_until

from shoal_client.certificates.folder import CertificateFolder
from shoal_proto.etcd import etcd_pb2, etcd_pb2_grpc
from shoal_proto.tls.files import TlsFiles
from shoal_proto.tls.identity import in_folder
from shoal_proto.tls.names import COORDINATOR_NAME, SERVER_NAME, CertificateRole

ANSWER_S = 10.0
ROOT = Path(__file__).parents[2]
TRAIN = """
import shoal, torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
with shoal.join() as session:
    model, optimizer = session.distribute(model, optimizer, strategy="async-sgd")
    for batch in session.batches(torch.ones(64, 8), global_batch_size=8, epochs=100000):
        with session.step():
            session.backward(model(batch.inputs).square().mean())
        if batch.step == 3:
            print("trains", flush=True)
"""


def addresses_in(welcome: Sequence[str], what: str) -> list[str]:
    """The addresses in the line of `shoal up` that begins with this text."""
    (line,) = [each for each in welcome if each.startswith(what)]
    return line.removeprefix(what).replace(",", " ").split()


def credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    ca, key, cert = (each.read_bytes() for each in (files.ca, files.key, files.cert))
    return grpc.ssl_channel_credentials(ca, key, cert)


def opened(address: str, name: str, shown: grpc.ChannelCredentials | None) -> grpc.Channel:
    if shown is None:
        return grpc.insecure_channel(address)
    options = (("grpc.ssl_target_name_override", name),) if name else ()
    return grpc.secure_channel(address, shown, options)


def answers(address: str, name: str, shown: grpc.ChannelCredentials | None) -> bool:
    """True if the server at this address answers a caller with these credentials."""
    with opened(address, name, shown) as channel:
        try:
            if name:
                request = health_pb2.HealthCheckRequest()
                health_pb2_grpc.HealthStub(channel).Check(request, timeout=ANSWER_S)
            else:
                every = etcd_pb2.RangeRequest(key=b"/", range_end=b"0", limit=1)
                etcd_pb2_grpc.KVStub(channel).Range(every, timeout=ANSWER_S)
        except grpc.RpcError as error:
            # A parameter server does not implement this service, and its answer says so.
            has_answered = error.code() is grpc.StatusCode.UNIMPLEMENTED
            assert has_answered or error.code() is grpc.StatusCode.UNAVAILABLE, error
            return has_answered
    return True


def strangers(certs: Path, directory: Path) -> Iterator[tuple[str, grpc.ChannelCredentials | None]]:
    """Credentials of callers without a certificate of the cluster."""
    CertificateFolder(directory / "theirs").init()
    ca = (certs / "ca.crt").read_bytes()
    yield "in plain text", None
    yield "without a certificate", grpc.ssl_channel_credentials(ca)
    found = in_folder(directory / "theirs", CertificateRole.OPERATOR)
    theirs = TlsFiles(ca=certs / "ca.crt", cert=found.cert, key=found.key)
    yield "with another authority's", credentials(theirs)


@pytest.mark.long
def test_a_stranger_has_access_to_no_part(shoal_command: Shoal, tmp_path: Path) -> None:
    """Parts are the coordinator, a parameter server, and etcd for clients and for peers. A worker's
    certificate does not open etcd either."""
    up = shoal_command.start("up", "--ps", "1", "--dir", str(tmp_path / "up"), *ANY_PORTS)
    welcome = read_until(up, "Ctrl-C stops the cluster")
    certs = tmp_path / "up" / "certs"
    (coordinator,), (server,), (etcd,) = (
        addresses_in(welcome, each) for each in ("coordinator", "parameter servers", "etcd")
    )
    ports = [(coordinator, COORDINATOR_NAME), (server, SERVER_NAME), (etcd, "")]
    for how, shown in strangers(certs, tmp_path):
        for address, name in ports:
            assert not answers(address, name, shown), f"{name or 'etcd'} {how}"
    operator = credentials(in_folder(certs, CertificateRole.OPERATOR))
    for address, name in ports[:2]:
        assert answers(address, name, operator)
    worker = in_folder(certs, CertificateRole.WORKER)
    of_etcd = certs / "etcd"
    assert not answers(
        etcd, "", credentials(TlsFiles(ca=of_etcd / "ca.crt", cert=worker.cert, key=worker.key))
    )
    client = TlsFiles(
        ca=of_etcd / "ca.crt", cert=of_etcd / "etcd-client.crt", key=of_etcd / "etcd-client.key"
    )
    assert answers(etcd, "", credentials(client))

    # Another cluster of the same user on this etcd finds the certificates by itself.
    second = shoal_command.start(
        *("up", "--ps", "0", "--etcd", etcd, "--prefix", "/second", *ANY_PORTS)
    )
    read_until(second, "Ctrl-C stops the cluster")
    second.send_signal(signal.SIGINT)
    assert finish(second)[0] == 0

    command = Path(f"/proc/{part_pids(shoal_command)['etcd']}/cmdline").read_text()
    (peers,) = re.findall(r"--listen-peer-urls\0https://([0-9.:]+)\0", command)
    host, _, port = peers.rpartition(":")
    context = ssl.create_default_context(cafile=of_etcd / "ca.crt")
    with pytest.raises((ssl.SSLError, ConnectionError)):
        _read_from(context, host, int(port))
    context.load_cert_chain(client.cert, client.key)
    assert _read_from(context, host, int(port)).startswith(b"HTTP/1.1 404")
    up.send_signal(signal.SIGINT)
    assert finish(up)[0] == 0


def _read_from(context: ssl.SSLContext, host: str, port: int) -> bytes:
    with (
        socket.create_connection((host, port), ANSWER_S) as plain,
        context.wrap_socket(plain, server_hostname=host) as connected,
    ):
        connected.sendall(b"GET / HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\n\r\n")
        return connected.recv(64)


@pytest.mark.long
def test_no_secret_is_exposed(shoal_command: Shoal, tmp_path: Path) -> None:
    """Secrets are absent from arguments of processes, logs, ready files and etcd. A worker's own
    environment holds its launch secret, as the docs say."""
    (tmp_path / "train.py").write_text(TRAIN)
    secret = os.urandom(32).hex()
    (tmp_path / "job.secret").write_text(secret)
    (tmp_path / "job.secret").chmod(0o600)
    up = shoal_command.start(
        *("up", "--ps", "1", "--verbose", "--dir", str(tmp_path / "up"), *ANY_PORTS)
    )
    welcome = read_until(up, "Ctrl-C stops the cluster")
    environment = {
        "SHOAL_COORDINATOR": addresses_in(welcome, "coordinator")[0],
        "SHOAL_JOB_SECRET_FILE": str(tmp_path / "job.secret"),
        "SHOAL_LOG_DIR": str(tmp_path / "logs"),
    }
    run = shoal_command.start(
        *("run", "-n", "2", "--job", "secret", "-v", "train.py"), environment=environment
    )
    text = read_until(run, "trains", count=2)
    secrets_ = {secret: "the job's secret"}
    for key in (tmp_path / "up" / "certs").rglob("*.key"):
        body = key.read_text().splitlines()[1]
        assert base64.b64decode(body)
        secrets_[body] = str(key)
    found = shoal_command.processes()
    workers = {pid for pid, command in found.items() if command.endswith("-u train.py")}
    assert len(workers) == 2 and len(found) >= 7
    environments = {pid: environment_of(pid) for pid in found}
    for pid in workers:
        launch = environments[pid].pop("SHOAL_LAUNCH_SECRET")
        secrets_[launch] = f"the launch secret of {pid}"
        names = {name for name in environments[pid] if name.startswith("SHOAL_")}
        assert names - {"SHOAL_TEST_MARK"} <= documented() - {"SHOAL_LAUNCH_SECRET"}
    assert len(secrets_) == 1 + 2 + 10
    for pid, command in found.items():
        held = " ".join(environments[pid].values())
        for each, what in secrets_.items():
            assert each not in command, f"{what} in the arguments of {command}"
            assert each not in held, f"{what} in the environment of {command}"
    run.send_signal(signal.SIGINT)
    code, output = finish(run, text)
    assert code == 128 + signal.SIGINT, output
    up.send_signal(signal.SIGINT)
    code, printed_by_up = finish(up, welcome)
    assert code == 0, printed_by_up
    for each, what in secrets_.items():
        assert each not in output + printed_by_up, what
        for path in (*(tmp_path / "up").rglob("*"), *(tmp_path / "logs").rglob("*")):
            if path.is_file() and path.suffix != ".key":
                assert each.encode() not in path.read_bytes(), f"{what} in {path}"


def environment_of(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/environ").read_bytes().decode()
    return dict(each.partition("=")[::2] for each in text.split("\0") if each)


def documented() -> set[str]:
    """The variables of a worker, as docs/security.md lists them."""
    text = (ROOT / "docs" / "security.md").read_text()
    (section,) = re.findall(r"## What a process shows\n(.*?)\n## ", text, re.DOTALL)
    return set(re.findall(r"`(SHOAL_[A-Z_]+)`", section))


@pytest.mark.long
def test_insecure_gives_access_without_tls(shoal_command: Shoal, tmp_path: Path) -> None:
    """A process without a certificate has access under `--insecure`, as the command warns, and not
    under `--tls`. One directory serves with both in turn."""
    for how in ("--insecure", "--tls"):
        up = shoal_command.start(
            *("up", how, "--ps", "0", "--dir", str(tmp_path / "up"), *ANY_PORTS)
        )
        welcome = read_until(up, "Ctrl-C stops the cluster")
        (coordinator,), (etcd,) = (addresses_in(welcome, each) for each in ("coordinator", "etcd"))
        assert answers(coordinator, COORDINATOR_NAME, None) == (how == "--insecure")
        assert answers(etcd, "", None) == (how == "--insecure")
        assert ("every user of this machine has access" in "\n".join(welcome)) == (
            how == "--insecure"
        )
        status = shoal_command.start("status", "--coordinator", coordinator)
        code, output = finish(status)
        assert code == 0, output
        up.send_signal(signal.SIGINT)
        assert finish(up)[0] == 0
    code, output = finish(shoal_command.start("up", "--insecure", "--tls"))
    assert code == 2 and "--insecure contradicts --tls" in output
