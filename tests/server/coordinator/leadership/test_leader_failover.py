"""Leader failover: when another coordinator ends the term, and when it waits for the lease."""

import asyncio
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.clusters.coordinator_processes import CoordinatorProcess
from support.clusters.coordinator_world import FIELDS
from support.clusters.etcd_fixture import running_etcd
from support.clusters.memory_store import MemoryStore
from support.network import http
from support.network.etcd_gate import open_gate
from support.processes.served_process import awaited

from shoal_client.local.process import Supervisor
from shoal_client.membership.member import Member
from shoal_client.membership.member_session import MemberSession
from shoal_proto.incarnation import new_incarnation
from shoal_proto.v1 import membership_pb2 as pb
from shoal_server.coordinator.leadership.health import LEADER, HealthService
from shoal_server.coordinator.leadership.leader_failover import (
    answered_until_broken,
    end_term_when_gone,
    refuses,
)
from shoal_server.etcd import keys
from shoal_server.etcd.api import KeyValue
from shoal_server.etcd.election import Election
from shoal_server.etcd.leader_key import Leader, LeaderCandidate, read
from shoal_server.etcd.remote.client import EtcdClient
from shoal_server.etcd.remote.config import EtcdConfig
from shoal_server.serving.rpc import Context, bind, new_server

DEADLINE_S = 60.0
LONG_LEASE_S = 600
"""Longer than any of these tests could wait."""


def started(
    supervisor: Supervisor, directory: Path, etcd: str, lease_s: int, listen: str = "127.0.0.1:0"
) -> CoordinatorProcess:
    """Start one more coordinator, and wait until it serves."""
    name = f"coordinator-{len(list(directory.glob('*.log')))}"
    process = CoordinatorProcess(supervisor, directory, name, etcd, lease_s=lease_s, listen=listen)
    return process.ready()


def health(process: CoordinatorProcess, service: str) -> int:
    with grpc.insecure_channel(process.grpc) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return int(health_pb2_grpc.HealthStub(channel).Check(request, timeout=30).status)


@pytest.mark.long
def test_a_killed_leader_is_succeeded_long_before_its_lease_ends(tmp_path: Path) -> None:
    """The port of a dead process refuses connections. Health probes report which one leads."""
    serving = health_pb2.HealthCheckResponse.SERVING
    with running_etcd(tmp_path) as etcd, Supervisor() as supervisor:
        first = started(supervisor, tmp_path, etcd, LONG_LEASE_S)
        second = started(supervisor, tmp_path, etcd, LONG_LEASE_S)
        third = started(supervisor, tmp_path, etcd, LONG_LEASE_S)
        awaited(first.leads, DEADLINE_S, "the first leads")
        assert [health(each, LEADER) == serving for each in (first, second)] == [True, False]
        assert health(second, "") == serving
        awaited(
            lambda: second.follows(first.grpc) and third.follows(first.grpc),
            DEADLINE_S,
            "both follow",
        )
        first.process.kill()
        awaited(lambda: second.leads() or third.leads(), DEADLINE_S, "one succeeds the first")
        successor, other = (second, third) if second.leads() else (third, second)
        awaited(
            lambda: other.follows(successor.grpc), DEADLINE_S, "the other follows the successor"
        )
        awaited(lambda: health(successor, LEADER) == serving, DEADLINE_S, "probes report it")
        successor.process.kill()
        awaited(other.leads, DEADLINE_S, "the last succeeds the successor")


@pytest.mark.long
def test_a_restarted_coordinator_does_not_wait_for_its_old_lease(tmp_path: Path) -> None:
    """The new process listens at the address in the leader's key, so the old one is dead."""
    with running_etcd(tmp_path) as etcd, Supervisor() as supervisor:
        first = started(supervisor, tmp_path, etcd, LONG_LEASE_S)
        first.process.kill()
        first.process.wait()
        again = started(supervisor, tmp_path, etcd, LONG_LEASE_S, listen=first.grpc)
        awaited(again.leads, DEADLINE_S, "the restarted coordinator leads")


async def test_a_starting_coordinator_ends_only_a_term_at_its_address(tmp_path: Path) -> None:
    """An equal address on another host is not its own."""
    store = MemoryStore()
    await _make_leader(store, "127.0.0.1:1")
    for candidate in (
        LeaderCandidate(address="127.0.0.1:2"),
        LeaderCandidate(address="127.0.0.1:1", host="another"),
    ):
        await Election(store, candidate).end_predecessor()
        assert await read(store) is not None
    await Election(store, LeaderCandidate(address="127.0.0.1:1")).end_predecessor()
    assert await read(store) is None
    await store.close()


@pytest.mark.long
def test_a_halted_leader_that_continues_is_deposed_and_changes_nothing(tmp_path: Path) -> None:
    """The halted leader's port accepts connections, so its term ends with its lease."""
    with running_etcd(tmp_path) as etcd, Supervisor() as supervisor:
        first = started(supervisor, tmp_path, etcd, 2)
        second = started(supervisor, tmp_path, etcd, 2)
        one = _member([first.grpc, second.grpc])
        try:
            one.join()
            one.propose(FIELDS, synchronous=True, step=0, has_state=False)
            one.ready(one.await_generation(0, DEADLINE_S))
            first.process.send_signal(signal.SIGSTOP)
            awaited(second.leads, DEADLINE_S, "the other leads")
            awaited(lambda: _runs(second), DEADLINE_S, "the member attends the other")
            before = asyncio.run(_jobs_in(etcd))
            first.process.send_signal(signal.SIGCONT)
            awaited(lambda: first.follows(second.grpc), DEADLINE_S, "the old leader follows")
            assert asyncio.run(_jobs_in(etcd)) == before
            assert second.leads()
            assert not one.is_broken(1)
        finally:
            one.close()


def _member(coordinators: list[str]) -> MemberSession:
    spec = pb.JobSpec(job="j", min_members=1, max_members=1, desired_members=1)
    info = pb.MemberInfo(host="h", pid=1, address="127.0.0.1")
    return MemberSession(
        Member(
            coordinators=coordinators,
            spec=spec,
            member_id="a",
            incarnation=new_incarnation(),
            info=info,
        )
    )


def _runs(replica: CoordinatorProcess) -> bool:
    answer = http.get(f"{replica.http}/api/v1/jobs/j", timeout=DEADLINE_S)
    return answer.status_code == 200 and answer.json()["summary"]["phase"] == "running"


async def _jobs_in(etcd: str) -> tuple[KeyValue, ...]:
    async with EtcdClient(EtcdConfig(endpoints=(etcd,))) as store:
        return (await store.range(keys.JOBS)).items


class CountingHealth(HealthService):
    """Health service whose event is set once a watcher has received a reply."""

    def __init__(self) -> None:
        super().__init__()
        self.came = asyncio.Event()

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        async for reply in super().Watch(request, context):
            yield reply
            # The watcher has received the reply once it requests another.
            self.came.set()


@asynccontextmanager
async def _coordinator(port: int = 0) -> AsyncIterator[tuple[CountingHealth, str]]:
    server, health = new_server(), CountingHealth()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    address = f"127.0.0.1:{bind(server, f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield health, address
    finally:
        health.end()
        await server.stop(None)


async def _make_leader(store: MemoryStore, address: str) -> Leader:
    await store.put(keys.LEADER, LeaderCandidate(address=address).put(await store.grant(600)).value)
    leader = await read(store)
    assert leader is not None
    return leader


async def test_a_leader_is_not_deposed_when_a_connection_to_it_breaks() -> None:
    """The term ends once the leader's address refuses connections."""
    store = MemoryStore()
    async with asyncio.timeout(DEADLINE_S), _coordinator() as (health, address):
        async with open_gate(address) as gate:
            leader = await _make_leader(store, gate.endpoint)
            watching = asyncio.create_task(end_term_when_gone(store, leader))
            for break_off in (gate.cut, gate.silence):
                await health.came.wait()
                health.came.clear()
                break_off()
                assert not await refuses(gate.endpoint)
                gate.restore()
            # The watcher has connected again after each break, and has not ended the term.
            await health.came.wait()
            assert not watching.done()
            assert await read(store) == leader
        await watching
        assert await read(store) is None
    await store.close()


async def test_a_refusal_counts_only_after_the_leader_has_answered_once() -> None:
    """A firewall may refuse from the start; a leader that answers and then refuses is gone."""
    store = MemoryStore()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        leader = await _make_leader(store, f"127.0.0.1:{port}")
        async with asyncio.timeout(DEADLINE_S):
            watching = asyncio.create_task(end_term_when_gone(store, leader))
            # The port is bound without a listener, so that it refuses. The test makes the watcher's
            # own calls: after a few of them, the watcher has made its calls as well.
            for _ in range(5):
                assert not await answered_until_broken(leader.address)
                assert await refuses(leader.address)
    async with asyncio.timeout(DEADLINE_S):
        async with _coordinator(port) as (health, _):
            await health.came.wait()
            assert await read(store) == leader
        await watching
    assert await read(store) is None
    await store.close()


async def test_the_end_of_a_term_leaves_the_successors_term() -> None:
    """A coordinator that finds a leader gone ends only that leader's term."""
    store = MemoryStore()
    async with asyncio.timeout(DEADLINE_S):
        async with _coordinator() as (health, address):
            leader = await _make_leader(store, address)
            watching = asyncio.create_task(end_term_when_gone(store, leader))
            await health.came.wait()
            await store.delete(keys.LEADER)
            successor = await _make_leader(store, "127.0.0.1:1")
        await watching
    assert await read(store) == successor
    await store.close()
