"""Renewed certificates are used for new connections, without a restart."""

import socket
import ssl
import time
from urllib.parse import urlsplit

import pytest
from cryptography.x509 import load_der_x509_certificate
from support.clusters.tls_world import TlsWorld
from support.members.scripted_member import ScriptedMember

from shoal_client.certificates.folder import CertificateFolder
from shoal_client.commands.status import StatusClient
from shoal_proto.tls import identity
from shoal_proto.tls.names import COORDINATOR_NAME, SERVER_NAME, CertificateRole

WITHIN_S = 30.0


def serial(world: TlsWorld, address: str, name: str) -> int:
    """Return the serial number of the certificate at an address, verified with the authority."""
    files = world.files(CertificateRole.OPERATOR)
    context = ssl.create_default_context(cafile=str(files.ca))
    context.load_cert_chain(files.cert, files.key)
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), 5.0) as plain,
        context.wrap_socket(plain, server_hostname=name) as connected,
    ):
        shown = connected.getpeercert(binary_form=True)
    assert shown is not None
    return load_der_x509_certificate(shown).serial_number


def test_each_port_uses_the_renewed_certificate(world: TlsWorld, member: ScriptedMember) -> None:
    """The ports of gRPC and HTTP use the renewed certificate for new connections; existing ones
    stay."""
    cluster = world.cluster
    ports = {
        cluster.coordinator: COORDINATOR_NAME,
        urlsplit(cluster.http_url).netloc: COORDINATOR_NAME,
        cluster.parameter_servers[0]: SERVER_NAME,
    }
    before = {address: serial(world, address, name) for address, name in ports.items()}
    generation = member.generation
    CertificateFolder(world.certificates).renew()
    give_up_s = time.monotonic() + WITHIN_S
    stale = dict(ports)
    while stale and time.monotonic() < give_up_s:
        # Each new connection may read the files again, at most once a second.
        stale = {a: n for a, n in stale.items() if serial(world, a, n) == before[a]}
    assert stale == {}
    assert member.generation == generation and member.failure is None


@pytest.mark.long
def test_a_running_command_uses_the_renewed_certificate(
    world: TlsWorld, member: ScriptedMember, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`shoal top`, for example, may run for days."""
    monkeypatch.setattr("shoal_proto.tls.files.LOOK_EVERY_S", 0.0)
    monkeypatch.setattr("shoal_proto.tls.files.LOOK_WITHIN_S", 60.0)
    operator = world.files(CertificateRole.OPERATOR)
    with identity.using(operator), StatusClient(world.cluster.http_url) as status:
        assert "j" in [job["job"] for job in status.jobs()]
        CertificateFolder(world.certificates).renew()
        # The earlier certificate is no longer used.
        before = status._context
        assert "j" in [job["job"] for job in status.jobs()]
        assert status._context is not before
