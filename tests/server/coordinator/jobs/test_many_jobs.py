"""New leaders serve soon, however many jobs are in etcd, and declare no member lost."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import pytest
from support.clusters.coordinator_world import Served, served
from support.clusters.etcd_fixture import running_etcd
from support.network.etcd_gate import open_gate
from support.processes.load import unhurried

from shoal_client.connection.coordinators import Coordinators
from shoal_proto.v1.membership_pb2 import GetJobRequest
from shoal_proto.v1.membership_pb2_grpc import MembershipStub
from shoal_server.coordinator.persistence import codec
from shoal_server.coordinator.persistence.stored_generations import record_to_json
from shoal_server.coordinator.persistence.stored_json import state_to_json
from shoal_server.core.driver.job_write import StateRecord
from shoal_server.core.generations.progress import JobProgress
from shoal_server.core.generations.roster import (
    Generation,
    GenerationRecord,
    GenerationRoster,
    JobSpec,
    RosterEntry,
    Step,
    Verdict,
)
from shoal_server.core.limits import Limits
from shoal_server.core.membership.phases import Phase
from shoal_server.etcd import keys
from shoal_server.etcd.api import Operation, Put
from shoal_server.etcd.remote.client import EtcdClient
from shoal_server.etcd.remote.config import EtcdConfig

NUM_JOBS = 1000
NUM_GENERATIONS = 3
TO_ETCD_AND_BACK_S = 0.002
SERVES_WITHIN_S = 3.0
LIMITS = Limits(heartbeat_s=0.2, join_s=10.0)
"""A member is lost after at most 2.8 s of silence, if time without a leader counted."""


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_etcd(tmp_path_factory.mktemp("etcd")) as endpoint:
        yield endpoint


@pytest.fixture
async def store(endpoint: str) -> AsyncIterator[EtcdClient]:
    async with EtcdClient(EtcdConfig(endpoints=(endpoint,))) as store:
        yield store
        await store.delete(keys.ROOT, prefix=True)


def old_job(name: str, *, finished: bool) -> list[Operation]:
    """Return the content of etcd for a job that went through some generations."""
    newest = Generation(NUM_GENERATIONS)
    state = StateRecord(
        spec=JobSpec(job=name, max_members=8),
        last_generation=newest,
        finished=finished,
        reason="w0 completed its work",
        progress=JobProgress(trained_in=newest),
    )
    operations: list[Operation] = [Put(keys.job_state(name), state_to_json(state))]
    for number in range(1, NUM_GENERATIONS + 1):
        entry = RosterEntry(member_id="w0", incarnation=f"{name}-{number}", rank=0)
        roster = GenerationRoster(
            generation=Generation(number),
            entries=(entry,),
            source_member_id="w0",
            step=Step(0),
            planned=False,
            synchronous=True,
            fields={"strategy": "ddp"},
        )
        record = GenerationRecord(
            job=name,
            roster=roster,
            verdict=Verdict.COMMITTED,
            reason="all 1 members accepted",
            digest=codec.digest_of(roster),
            decided_s=1.0,
        )
        value = record_to_json(record)
        operations.append(Put(keys.generation(name, number), value))
    return operations


async def written(store: EtcdClient, operations: list[Operation]) -> None:
    for start in range(0, len(operations), 100):
        await store.transact((), operations[start : start + 100])


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Answers of the second coordinator about other jobs."""

    generations: dict[str, int]
    """Number of each job's newest generation."""
    reasons: dict[str, str]


async def takes_over(
    store: EtcdClient, endpoint: str, old_jobs: list[Operation], *, visits: Sequence[str] = ()
) -> Seen:
    """Replace the coordinator; check that the second serves soon, and that members train on."""
    async with served(store, LIMITS) as first:
        members = await first.training("a", "b")
        await first.coordinator.step_down()
        await first.server.stop(None)
        await written(store, old_jobs)
        async with open_gate(endpoint, delay_s=TO_ETCD_AND_BACK_S / 2) as gate:
            config = EtcdConfig(endpoints=(gate.endpoint,))
            async with EtcdClient(config) as slow:
                await slow.get(keys.LEADER)
                began_s = time.monotonic()
                async with served(slow, LIMITS, address=first.address) as second:
                    took_s = time.monotonic() - began_s
                    print(f"served after {took_s:.2f} s")
                    second.clients += members
                    assert took_s < unhurried(SERVES_WITHIN_S)
                    await all_are_back(second)
                    return await visited(second, visits)


async def visited(world: Served, jobs: Sequence[str]) -> Seen:
    """Ask the coordinator about these jobs with the usual client."""
    coordinators = Coordinators([world.address])
    generations, reasons = {}, {}
    for job in jobs:
        await asyncio.to_thread(
            coordinators.call,
            lambda channel: MembershipStub(channel).GetJob,
            GetJobRequest(job=job),
            timeout_s=10.0,
        )
        generations[job] = (await world.coordinator.view.generations(job))[0].generation
        reasons[job] = world.coordinator.registry.find(job).job.reason
    coordinators.close()
    return Seen(generations=generations, reasons=reasons)


async def all_are_back(world: Served) -> None:
    """Check that the members train on in their generation, and that none was lost."""
    board = world.coordinator.board
    job = world.coordinator.registry.find("j").job
    async with asyncio.timeout(10.0):
        while job.phase is not Phase.RUNNING:  # noqa: ASYNC110 - the work of another thread
            await asyncio.sleep(LIMITS.heartbeat_s / 4)
    kinds = [event.kind for event in board.events("j", limit=1000)]
    assert "member_removed" not in kinds
    assert (job.last_generation, sorted(job.members)) == (1, ["a", "b"])


@pytest.mark.long
async def test_finished_jobs_do_not_delay_a_new_leader(store: EtcdClient, endpoint: str) -> None:
    old = [op for i in range(NUM_JOBS) for op in old_job(f"old-{i}", finished=True)]
    await takes_over(store, endpoint, old)


@pytest.mark.long
async def test_a_new_leader_serves_before_it_has_read_all_interrupted_jobs(
    store: EtcdClient, endpoint: str
) -> None:
    """The client repeats a call about such a job until the job's records are read."""
    old = [op for i in range(300) for op in old_job(f"old-{i}", finished=False)]
    seen = await takes_over(store, endpoint, old, visits=["old-299"])
    assert seen.generations == {"old-299": NUM_GENERATIONS}


async def test_a_new_leader_knows_finished_jobs(store: EtcdClient, endpoint: str) -> None:
    """Records of a finished job are read at the first call that needs them."""
    old = old_job("old", finished=True)
    seen = await takes_over(store, endpoint, old, visits=["old"])
    assert seen.generations == {"old": NUM_GENERATIONS}
    assert seen.reasons == {"old": "w0 completed its work"}


async def test_keys_of_members_without_a_job_are_deleted(store: EtcdClient, endpoint: str) -> None:
    """A member whose admission ended halfway is in no job, so that no job removes its key."""
    stray, foreign = keys.member("gone", "w0"), keys.MEMBERS + "no job/w0"
    await takes_over(store, endpoint, [Put(stray, b"{}"), Put(foreign, b"{}")])
    assert await store.get(stray) is None
    assert await store.get(foreign) is not None, "it is not Shoal's"
