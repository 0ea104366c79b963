"""The reader of shards for the status page, with many jobs at a time."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio
import pytest
from support.clusters.memory_store import MemoryStore

from shoal_proto.v1.parameters_pb2 import DescribeReply, DescribeRequest, ShardState
from shoal_proto.v1.parameters_pb2_grpc import (
    ParametersServicer,
    add_ParametersServicer_to_server,
)
from shoal_proto.v1.shards_pb2 import Shard, ShardMap
from shoal_server.etcd import keys
from shoal_server.etcd.api import RangeResult
from shoal_server.etcd.records import shard_map
from shoal_server.status import shards
from shoal_server.status.shards import MAX_JOBS, ShardReader

SLOW = "slow-job"


class Servers(ParametersServicer):
    """Parameter servers, one for each job, each at an address of its own."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self.port = 0
        self.is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        """Set once the server of the slow job may answer."""

    async def Describe(
        self, request: DescribeRequest, context: grpc.aio.ServicerContext
    ) -> DescribeReply:
        if request.job == SLOW:
            self.is_asked.set()
            await self.may_answer.wait()
        state = ShardState(shard_id=0, version=1, num_bytes=4000)
        return DescribeReply(server_id=request.job, shards=[state])

    async def add(self, job: str, number: int, *others: Shard) -> None:
        """Register a server, and place the first shard of a job on it."""
        address = f"127.0.0.{number}:{self.port}"
        record = json.dumps({"incarnation": "one", "address": address})
        await self._store.put(f"{keys.SERVERS}{job}", record.encode())
        shard = Shard(shard_id=0, epoch=1, server_id=job, address=address)
        layout = shard_map.stored(ShardMap(job=job, shards=[shard, *others]))
        await self._store.transact([], [layout.head, *layout.chunks])


@asynccontextmanager
async def serving(store: MemoryStore) -> AsyncIterator[Servers]:
    server, servers = grpc.aio.server(), Servers(store)
    add_ParametersServicer_to_server(servers, server)
    servers.port = server.add_insecure_port("0.0.0.0:0")
    await server.start()
    try:
        yield servers
    finally:
        await server.stop(None)


async def test_reading_one_job_does_not_disturb_the_reading_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More servers are in use than channels are kept to servers that are gone."""
    monkeypatch.setattr(shards, "ANSWER_WITHIN_S", 60.0)
    store = MemoryStore()
    async with serving(store) as servers:
        reader = ShardReader(store)
        await servers.add(SLOW, 1)
        slow = asyncio.create_task(reader.read(SLOW))
        await servers.is_asked.wait()
        for number in range(2, MAX_JOBS + 4):
            await servers.add(f"job-{number}", number)
            view = await reader.read(f"job-{number}")
            assert view is not None and view.servers[0].state == "serving"
        servers.may_answer.set()
        await asyncio.wait([slow])
        assert not slow.cancelled()
        assert slow.result() is not None
        await reader.close()


class RemoteStore(MemoryStore):
    """A store that does not answer at once."""

    async def range(self, prefix: str) -> RangeResult:
        await asyncio.sleep(0)
        return await super().range(prefix)


async def test_any_number_of_jobs_is_read_at_a_time() -> None:
    """Several pages read each of them."""
    reader = ShardReader(RemoteStore())
    jobs = [f"job-{number}" for number in range(3 * MAX_JOBS)]
    views = await asyncio.gather(*(reader.read(job) for job in jobs for _ in range(3)))
    assert views == [None] * len(views)


async def test_the_bytes_of_a_silent_server_are_not_taken_for_none() -> None:
    """The job's bytes would look uneven over its servers."""
    store = MemoryStore()
    async with serving(store) as servers:
        gone = Shard(shard_id=1, epoch=1, server_id="gone", address="127.0.0.2:9")
        await servers.add("j", 1, gone)
        reader = ShardReader(store)
        view = await reader.read("j")
        await reader.close()
        assert view is not None and {each.state for each in view.servers} == {"serving", "gone"}
        assert view.skew == 1.0
