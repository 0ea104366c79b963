"""Commands find the leading coordinator, even if other addresses do not answer."""

import asyncio
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs
from support.clusters.coordinator_world import served
from support.clusters.memory_store import MemoryStore
from support.processes.load import unhurried

from shoal_client.certificates.folder import CertificateFolder
from shoal_client.connection.coordinators import Coordinators, Method
from shoal_client.host.reports import check_reachable
from shoal_proto.errors import CertificateRefused, Unavailable
from shoal_proto.tls.identity import in_folder
from shoal_proto.tls.names import CertificateRole
from shoal_proto.v1 import membership_pb2 as pb
from shoal_proto.v1.membership_pb2_grpc import MembershipStub
from shoal_server.core.limits import Limits

ANSWER_WITHIN_S = 300.0


def stop_job(channel: grpc.Channel) -> Method[pb.JobStanding]:
    return MembershipStub(channel).StopJob


@pytest.fixture
def silent() -> Iterator[str]:
    """Yield an address whose kernel accepts connections, while no process answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def refusing() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"127.0.0.1:{port}"


@pytest.fixture
def encrypted(tmp_path: Path) -> Iterator[str]:
    """Yield the address of a replica that speaks TLS. This process does not."""
    CertificateFolder(tmp_path).init()
    files = in_folder(tmp_path, CertificateRole.COORDINATOR)
    server = grpc.server(ThreadPoolExecutor(1))
    pair = files.key.read_bytes(), files.cert.read_bytes()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


async def test_addresses_that_do_not_answer_delay_no_call(silent: str, refusing: str) -> None:
    """The search for a leader and the call after it do not wait for such addresses."""
    async with served(MemoryStore()) as world:
        await world.joined("a")
        addresses = [silent, refusing, world.address]
        begun_s = time.monotonic()
        await asyncio.to_thread(check_reachable, addresses, ANSWER_WITHIN_S)
        coordinators = Coordinators(addresses)
        try:
            request = pb.StopJobRequest(job="j", reason="tested")
            standing = await asyncio.to_thread(
                coordinators.call, stop_job, request, timeout_s=ANSWER_WITHIN_S
            )
        finally:
            coordinators.close()
        took_s = time.monotonic() - begun_s
        assert standing.member_ids == ["a"]
        assert took_s < unhurried(3.0)


async def test_the_search_is_no_call_that_a_coordinator_refuses() -> None:
    """The coordinator would log each refusal, as if a user had mistyped a job's name."""
    async with served(MemoryStore()) as world:
        with capture_logs() as lines:
            await asyncio.to_thread(check_reachable, [world.address], ANSWER_WITHIN_S)
    assert "call_refused" not in {line["event"] for line in lines}


async def test_a_replica_with_which_tls_fails_hides_no_leader(encrypted: str) -> None:
    """A follower may have a certificate that has expired."""
    async with served(MemoryStore()) as world:
        await world.joined("a")
        addresses = [encrypted, world.address]
        await asyncio.to_thread(check_reachable, addresses, ANSWER_WITHIN_S)
        with closing(Coordinators(addresses)) as coordinators:
            standing = await asyncio.to_thread(
                coordinators.call,
                stop_job,
                pb.StopJobRequest(job="j", reason="tested"),
                timeout_s=ANSWER_WITHIN_S,
            )
        assert standing.member_ids == ["a"]


def test_a_call_fails_at_once_if_tls_fails_with_every_replica(encrypted: str) -> None:
    with closing(Coordinators([encrypted, encrypted])) as coordinators:
        with pytest.raises(CertificateRefused, match="speaks TLS"):
            coordinators.call(stop_job, pb.StopJobRequest(), timeout_s=ANSWER_WITHIN_S)
        with pytest.raises(CertificateRefused, match="speaks TLS"):
            check_reachable([encrypted], ANSWER_WITHIN_S)


async def test_the_search_continues_until_a_coordinator_leads(silent: str) -> None:
    """A silent address does not delay it."""
    async with served(MemoryStore(), Limits()) as world:
        await world.coordinator.step_down()
        asking = asyncio.create_task(
            asyncio.to_thread(check_reachable, [silent, world.address], ANSWER_WITHIN_S)
        )
        await asyncio.wait([asking], timeout=1.0)
        assert not asking.done()
        await world.coordinator.lead(())
        async with asyncio.timeout(unhurried(5.0)):
            await asking


def test_the_error_of_the_search_has_every_address(silent: str, refusing: str) -> None:
    with pytest.raises(Unavailable, match="refused") as raised:
        check_reachable([silent, refusing], 1.0)
    assert silent in raised.value.seen
    assert refusing in raised.value.seen
