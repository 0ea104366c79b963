"""Thousands of shards on a real etcd at its usual limits: placed, failed over and moved."""

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.clusters.etcd_fixture import running_etcd
from support.clusters.record_keepers import (
    CountedClient,
    holds_nothing,
    is_whole,
    leads_nothing,
    record_keepers,
)
from support.models.large_jobs import hundred_tables, num_bytes, transformer_of_a_terabyte
from support.processes.load import unhurried

from shoal_proto.v1.identity_pb2 import Token
from shoal_proto.v1.shards_pb2 import GetMapRequest, PlaceRequest
from shoal_server.coordinator.shards.controller import ShardController
from shoal_server.coordinator.shards.service import ShardsService
from shoal_server.core.processes import Holder
from shoal_server.etcd.remote.config import EtcdConfig
from shoal_server.serving.rpc import Context

MAX_OPERATIONS = 128
MAX_REQUEST_BYTES = 1024 * 1024
"""Bound on a request; etcd takes 1.5 MiB."""
LIMIT_S = 120.0
CONTEXT: Context = None  # type: ignore[assignment]


async def any_caller(token: Token) -> None:
    """Accept every caller."""


async def all_servers(addresses: Mapping[Holder, str]) -> Mapping[Holder, str]:
    """Choose all servers, without a connection to their addresses."""
    return addresses


async def live(tmp_path: Path, request: PlaceRequest, num_servers: int, num_shards: int) -> None:
    """Place a job, kill one server and drain another, within etcd's limits of a request."""
    job, limit_s = request.token.job, unhurried(LIMIT_S)
    async with AsyncExitStack() as stack:
        endpoint = stack.enter_context(running_etcd(tmp_path))
        config = EtcdConfig(endpoints=(endpoint,))
        cluster = await stack.enter_async_context(
            record_keepers(lambda: CountedClient(config), num_servers)
        )
        service = ShardsService(cluster.store, any_caller, choose=all_servers)
        placed = await service.Place(request, CONTEXT)
        assert len(placed.shards) >= num_shards
        await stack.enter_async_context(ShardController(cluster.store).working())
        await cluster.until(job, is_whole, limit_s)

        lost, leaving = cluster.servers[1], cluster.servers[0]
        cluster.tally.clear()
        await cluster.kill(lost)
        await cluster.until(job, leads_nothing(lost.me), limit_s)
        # Fewer transactions than one for each shard of the job.
        assert cluster.tally.num_transactions < len(placed.shards)
        # Shards still move for balance meanwhile.
        await leaving.register(leaving=True)
        await cluster.until(job, holds_nothing(leaving.me), limit_s)
        is_rid = holds_nothing(lost.me)
        await cluster.until(job, lambda held: is_whole(held) and is_rid(held), limit_s)

        found = await service.GetMap(GetMapRequest(token=request.token), CONTEXT)
        assert [shard.shard_id for shard in found.shards] == list(range(len(placed.shards)))
        gone = {lost.me.server_id, leaving.me.server_id}
        assert not gone & {shard.server_id for shard in found.shards}
        assert cluster.tally.most_operations <= MAX_OPERATIONS
        assert cluster.tally.largest_request_bytes <= MAX_REQUEST_BYTES


async def test_many_tables_are_placed_failed_over_and_moved(tmp_path: Path) -> None:
    """The leaving server's shards are moved while others still balance their loads."""
    request = hundred_tables("job")
    del request.tables[6:]
    await live(tmp_path, request, num_servers=5, num_shards=384)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("asked", "num_shards"), [(transformer_of_a_terabyte, 3000), (hundred_tables, 6400)]
)
async def test_the_largest_jobs_are_placed_and_failed_over_on_a_hundred_servers(
    tmp_path: Path, asked: Callable[[str], PlaceRequest], num_shards: int
) -> None:
    """The jobs have 1 TB of parameters, or 100 tables of 64 shards."""
    request = asked("job")
    assert request.tables or num_bytes(request) >= 1e12
    await live(tmp_path, request, num_servers=100, num_shards=num_shards)
