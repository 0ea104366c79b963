"""A coordinator that steps down while clients call it."""

import asyncio
from types import NoneType

import grpc.aio
import pytest
from support.clusters.coordinator_world import served
from support.clusters.hooked_store import HookedStore, Transaction
from support.clusters.memory_store import MemoryStore

from shoal_proto.errors import JobQuarantined, NotLeader, RefusedError, ShoalError
from shoal_proto.incarnation import new_incarnation
from shoal_proto.status import from_rpc_error
from shoal_proto.v1.weights_pb2 import WatchSeriesRequest
from shoal_proto.v1.weights_pb2_grpc import WeightSeriesStub
from shoal_server.core.generations.roster import JobSpec, MemberInfo
from shoal_server.core.membership.events import MemberJoined
from shoal_server.etcd import keys


class FailingAtTheEnd(HookedStore):
    """Store whose write of job `first` is never answered; once it is cancelled, the write of job
    `second` is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.num_writes = 0
        self._fails = asyncio.Event()

    async def before(self, transaction: Transaction) -> None:
        written = {each.key for each in transaction.then}
        if keys.job_state("first") in written:
            self.num_writes += 1
            try:
                await asyncio.Event().wait()
            finally:
                self._fails.set()
                for _ in range(10):
                    await asyncio.sleep(0)  # the other job is quarantined
        if keys.job_state("second") in written:
            self.num_writes += 1
            await self._fails.wait()
            raise RefusedError("etcd refused the request")


async def test_a_job_whose_write_fails_during_the_step_down_does_not_interrupt_it() -> None:
    """The other jobs end as well, and so does the term."""
    store = FailingAtTheEnd()

    async def joins(job: str) -> None:
        spec = JobSpec(job=job, max_members=1)
        event = MemberJoined(
            member_id="a",
            incarnation=new_incarnation(),
            spec=spec,
            info=MemberInfo(host="h", address="127.0.0.1"),
        )
        await world.coordinator.registry.find_or_create(spec).submit(event)

    async with served(store) as world:
        joining = [asyncio.create_task(joins(job)) for job in ("first", "second", "third")]
        while store.num_writes < 2 or not joining[2].done():  # noqa: ASYNC110 - the store's own
            await asyncio.sleep(0)
    refused = await asyncio.gather(*joining, return_exceptions=True)
    assert [type(each) for each in refused] == [NotLeader, JobQuarantined, NoneType]
    with pytest.raises(NotLeader):
        world.coordinator.term.conditions()


async def test_a_watch_that_begins_during_the_step_down_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The series of the term have ended at that time. If the coordinator leads again, it reads them
    anew, and would never notify a watch that began in between."""
    refusals: list[ShoalError] = []
    async with served(MemoryStore()) as world:
        registry = world.coordinator.registry
        step_down = registry.step_down

        async def watched() -> None:
            async with grpc.aio.insecure_channel(world.address) as channel:
                request = WatchSeriesRequest(series="script/policy")
                try:
                    await WeightSeriesStub(channel).Watch(request, timeout=10.0).read()
                except grpc.aio.AioRpcError as error:
                    refusals.append(from_rpc_error(error, world.address))
            await step_down()

        monkeypatch.setattr(registry, "step_down", watched)
    assert [type(each) for each in refusals] == [NotLeader]
