"""Tensors are sent to other machines over TLS, and only to callers with a certificate for the
job."""

import asyncio
import socket
import ssl
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from support.clusters.tls_world import TlsWorld
from support.members.scripted_member import Script, ScriptedMember

from shoal_client.certificates.folder import CertificateFolder
from shoal_client.parameters.dense import ParameterClient
from shoal_proto import bulk
from shoal_proto.bulk import FrameKind
from shoal_proto.errors import AccessDenied
from shoal_proto.tls import identity
from shoal_proto.tls.files import TlsIdentity
from shoal_proto.tls.identity import in_folder
from shoal_proto.tls.names import SERVER_NAME, Caller, CertificateRole
from shoal_proto.tls.sockets import secured
from shoal_proto.v1.optimizer_pb2 import HyperParameters, OptimizerSpec
from shoal_proto.v1.shards_pb2 import ParameterSpec
from shoal_server.parameters.bulk.encryption import encrypted
from shoal_server.parameters.bulk.wire import FrameConnection, PeerHungUp

SIZE = 3_000_001
SCHEMA = [ParameterSpec(name="w", shape=[SIZE], dtype="float32")]
SGD = OptimizerSpec(kind="sgd", groups=[HyperParameters(lr=0.5)])


def buffer(value: float) -> dict[str, memoryview]:
    return {"w": memoryview(np.full(SIZE, value, dtype=np.float32)).cast("B")}


@pytest.mark.long
@pytest.mark.sampled()
@pytest.mark.parametrize("transport", ["tcp", "auto", "grpc"])
def test_pushes_and_pulls_work_over_each_transport(
    world: TlsWorld, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client itself encrypts the socket of the transport for other machines, and no other."""
    reached: list[socket.socket] = []

    def noted(connected: socket.socket) -> socket.socket:
        reached.append(secured(connected))
        return reached[-1]

    monkeypatch.setattr("shoal_client.bulk.bulk_transport.secured", noted)
    address = world.cluster.coordinator
    with identity.using(world.files(CertificateRole.WORKER)):
        script = Script(job=f"by-{transport}", member_id="a", desired=1)
        with closing(ScriptedMember([address], script)) as member:
            member.start().await_training_with("a")
            client = ParameterClient([address], member.token, timeout_s=30.0, transport=transport)
            with closing(client):
                client.place(SCHEMA)
                client.create(SGD, buffer(1.0))
                values = buffer(0.0)
                client.pull(values)
                for _ in range(3):
                    client.push(buffer(2.0), into=values)
        assert set(values["w"].cast("f")) == {1.0 - 3.0}
    kinds = {isinstance(each, ssl.SSLSocket) for each in reached}
    assert kinds == {"tcp": {True}, "auto": {False}, "grpc": set()}[transport]


@pytest.mark.parametrize("transport", ["tcp", "auto", "grpc"])
def test_a_worker_of_another_job_is_refused(
    world: TlsWorld, member: ScriptedMember, transport: str
) -> None:
    """The token of a member is not enough without a certificate for its job."""
    other = world.issued(Caller(CertificateRole.WORKER, "reads-others", "other"))
    with identity.using(other):
        client = ParameterClient(
            [world.cluster.coordinator], member.token, timeout_s=30.0, transport=transport
        )
        with closing(client), pytest.raises(AccessDenied, match="another job"):
            client.place(SCHEMA)


def test_a_plain_connection_to_the_bulk_port_gets_no_frame(world: TlsWorld) -> None:
    port = _bulk_port(world)
    with socket.create_connection(("127.0.0.1", port), 5.0) as plain:
        plain.sendall(bulk.message(FrameKind.HELLO, b"k" * bulk.KEY_BYTES))
        plain.settimeout(10.0)
        # At most an alert of TLS, which is shorter than a frame.
        assert len(_rest_of(plain)) < bulk.HEADER_BYTES


def _rest_of(connected: socket.socket) -> bytes:
    """Return the bytes that the server sends until it closes the connection."""
    received = b""
    try:
        while data := connected.recv(4096):
            received += data
    except ConnectionResetError:
        return received
    return received


def _bulk_port(world: TlsWorld) -> int:
    """Return the parameter server's port that is not that of gRPC."""
    pid = world.cluster.processes["ps-0"].pid
    inodes = {
        str(each.readlink())[8:-1]
        for each in Path(f"/proc/{pid}/fd").iterdir()
        if str(each.readlink()).startswith("socket:[")
    }
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]
    ports = {
        int(line.split()[1].partition(":")[2], 16)
        for line in lines
        if line.split()[3] == "0A" and line.split()[9] in inodes
    }
    grpc_port = int(world.cluster.parameter_servers[0].rpartition(":")[2])
    (port,) = ports - {grpc_port}
    return port


async def test_encrypted_frames_arrive_in_both_directions_at_once(tmp_path: Path) -> None:
    """Frames are larger than socket buffers, so that each side has to read while it sends."""
    folder = CertificateFolder(tmp_path / "certs")
    folder.init()
    calling = TlsIdentity(in_folder(folder.path, CertificateRole.SERVER)).material.client
    listener = socket.create_server(("127.0.0.1", 0))
    large = np.random.default_rng(1).bytes(4 * 1024 * 1024)
    with listener, identity.using(in_folder(folder.path, CertificateRole.SERVER)):
        address = listener.getsockname()

        def call() -> ssl.SSLSocket:
            return calling.wrap_socket(
                socket.create_connection(address), server_hostname=SERVER_NAME
            )

        called = asyncio.get_running_loop().run_in_executor(None, call)
        plain, _ = listener.accept()
        plain.setblocking(False)
        theirs = await encrypted(plain)
        ours = await called
        ours.setblocking(False)
        ends = FrameConnection(ours), FrameConnection(theirs)

        async def send(end: FrameConnection) -> None:
            for _ in range(3):
                await end.send(bulk.message(FrameKind.MESSAGE, large))
                if not end.send_now(bulk.header(FrameKind.BEAT)):
                    await end.send(bulk.header(FrameKind.BEAT))
            await end.send(bulk.header(FrameKind.END))

        async def receive(end: FrameConnection) -> list[tuple[FrameKind, int]]:
            got = []
            while (frame := await end.next_frame()).kind is not FrameKind.END:
                assert frame.kind is FrameKind.BEAT or bytes(frame.body) == large
                got.append((frame.kind, len(frame.body)))
            return got

        results = await asyncio.gather(*(f(end) for end in ends for f in (send, receive)))
        for got in (results[1], results[3]):
            assert got == [(FrameKind.MESSAGE, len(large)), (FrameKind.BEAT, 0)] * 3
        ours.close()
        with pytest.raises(PeerHungUp):
            await ends[1].next_frame()
        theirs.close()
